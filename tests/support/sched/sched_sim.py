"""A pretend device for the scheduler: it remembers what was written to every KV slot and notices every wrong read.

The "model" is a hash: the KV of position i is hash(tokens[0..i]), the next token is a function of it. A row may only
run if all earlier slots of its sequence hold exactly the KV of its own prefix, so a page given away too early, reused
too late or published wrongly fails at once; and the tokens a request gets must equal `reference()` of its prompt alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from baton.cache.group_pages import NO_PAGE
from baton.cache.host import CopyRun
from baton.cache.radix import InsertResult
from baton.sched.policies import Policy, PolicyContext
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.events import (
    AbortTransfer,
    EmittedTokens,
    GrantPages,
    OpenTransfer,
    PagesFinal,
    PrefillDone,
    RevokeGrant,
    RowError,
)
from baton.sched.types.plan import INVALID_TOKEN, UNKNOWN_TOKEN, StateCopy, StepPlan, StepResult
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason, Rendezvous, SamplingParams, ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages, RequestTimeline
from baton.sched.types.sequence import Seq
from tests.support.probes import SchedulerProbe

VOCAB = 5
EOS = 0

Rank = tuple[float, float, float, int]

NAN = -3
"""The KV of a position whose computation gave NaN: so are all that follow, and none of them gives a token."""


def chain(state: int, token: int) -> int:
    return NAN if state == NAN else (state * 1000003 + token + 7) & 0xFFFFFFFFFFFF


def next_token(state: int) -> int:
    return INVALID_TOKEN if state == NAN else (state >> 7) % VOCAB


def reference(prompt: array[int], max_new: int, ignore_eos: bool) -> list[int]:
    state = 1
    for token in prompt:
        state = chain(state, token)
    out: list[int] = []
    while len(out) < max_new:
        out.append(next_token(state))
        if out[-1] == EOS and not ignore_eos:
            break
        state = chain(state, out[-1])
    return out


def request(
    handle: int,
    prompt: list[int],
    max_new: int,
    *,
    ignore_eos: bool = False,
    is_length_known: bool = True,
    room: int | None = None,
) -> ValidatedRequest:
    """`ignore_eos` fixes the answer's length; with `is_length_known` False the scheduler estimates it."""
    stop = () if ignore_eos else (EOS,)
    params = SamplingParams(
        max_new_tokens=max_new, stop_token_ids=stop, ignore_eos=ignore_eos and is_length_known
    )
    meet = None if room is None else Rendezvous("p", 1, room)
    return ValidatedRequest(
        handle, f"r{handle}", array("i", prompt), params, arrival=float(handle), rendezvous=meet
    )


@dataclass
class Slot:
    table: list[int] = field(default_factory=list)
    further: list[list[int]] = field(default_factory=list)
    """Page tables of the further groups."""
    position: int = 0
    """Tokens that the running state has seen, for models that have one."""
    state: int = 1
    trail: dict[int, int] = field(default_factory=dict)
    """States of a last row with drafts, by the tokens that they have seen."""
    last: int = UNKNOWN_TOKEN

    def take_back(self, tokens: int) -> None:
        """Let the running state have seen so many tokens, if the last row's drafts went beyond."""
        if tokens in self.trail:
            self.position = tokens
            self.state = self.trail[tokens]
        self.trail = {}


class Device:
    """Runs plans in order; `memory[page][offset]` is the KV state last written there, `host[slot]` a page's copy.

    A row of a further group writes the same state to each page of a block, and reads what its rule says. A group of
    snapshots is written at the ends of pages that have one, and read where a row does not continue its slot's state.
    """

    def __init__(self, limits: Limits) -> None:
        self.page_size = limits.page_size
        self.groups = limits.page_groups
        self.memory = [[0] * limits.page_size for _ in range(limits.num_pages)]
        self.host = [[-1] * limits.page_size for _ in range(limits.host_pages)]
        self.left = [list(page) for page in self.host]
        """What each page of `host` was when it left: stands for its checksum."""
        self.damage: Callable[[], bool] | None = None
        """Asked for each page that leaves: whether the host will hold something else than it was. Rows that read such a
        page of a further group compute another state; without it, they fail."""
        self.copied = 0
        self.damaged = 0
        """Pages that came back damaged."""
        self.snapshots_read = 0
        self.states_saved = 0
        """Of prompts for D."""
        self.states_loaded = 0
        """Of prompts from P, and of those that gave up their slot."""
        self.slots = [Slot() for _ in range(limits.max_running_requests)]

    def execute(self, plan: StepPlan) -> StepResult:
        intact = [self._copy(run) for run in plan.copies]
        returned = [page for run in intact for page in run]
        damaged = tuple(place for place, is_intact in enumerate(returned) if not is_intact)
        self.damaged += len(damaged)
        self._park_states(plan)
        for adm in plan.admitted:
            self.slots[adm.slot] = Slot(further=[[] for _ in self.groups])
        for growth in plan.further:
            table = self.slots[growth.slot].further[growth.group]
            table.extend([-1] * (growth.base - len(table)))
            assert len(table) >= growth.base
            assert -1 not in growth.pages or self.groups[growth.group].kind == "state"
            table[growth.base : growth.base + len(growth.pages)] = list(growth.pages)
        self._load_states(plan)
        states: list[int] = []
        tokens: list[int] = []
        runs: list[int] = []
        drafted = [0] * plan.num_decode + [*plan.drafted]
        for row, drafts in itertools.zip_longest(plan.rows, drafted, fillvalue=0):
            slot = self.slots[row.slot]
            assert len(slot.table) >= row.page_base
            slot.table[row.page_base :] = list(row.pages)
            ids = [slot.last if t == UNKNOWN_TOKEN else t for t in row.tokens]
            assert UNKNOWN_TOKEN not in ids
            assert len(ids) == row.n
            self._restore(slot, row.start)
            state = 1 if row.start == 0 else self._read(slot, row.start - 1)
            if self.damage is not None and self._differing(slot, row.start, row.start):
                state ^= 1 << 8
            drawn: list[int] = []
            for i, token in enumerate(ids):
                state = chain(state, token)
                drawn.append(next_token(state))
                page, off = divmod(row.start + i, self.page_size)
                self.memory[slot.table[page]][off] = state
                for index, rule in enumerate(self.groups):
                    if rule.kind == "state":
                        self._advance(slot, index, token, page if off + 1 == self.page_size else -1)
                        if drafts:
                            slot.trail[slot.position] = slot.state
                        continue
                    for copy in self._block(slot, index, page):
                        self.memory[copy][off] = state
            states.append(state)
            if row.sample:
                run = drawn[row.n - 1 - drafts :]
                wrong = [i for i in range(drafts) if run[i] != ids[row.n - drafts + i]]
                run = run[: wrong[0] + 1] if wrong else run
                runs.append(len(run))
                tokens += run
                slot.last = tokens[-1]
        self._save_states(plan)
        self._check(plan, states)
        sizes = tuple(runs) if plan.drafted else ()
        return StepResult(tokens, runs=sizes, damaged_pages=damaged)

    def _restore(self, slot: Slot, start: int) -> None:
        """Bring a running state to where a row begins, from a snapshot if need be."""
        for index, rule in enumerate(self.groups):
            if rule.kind != "state":
                continue
            slot.take_back(start)
            if start == 0:
                slot.state = 1
            elif slot.position != start:
                place, behind = divmod(start, self.page_size)
                assert not behind, "a row begins inside a page, where no snapshot is"
                found = {tuple(self.memory[copy]) for copy in self._block(slot, index, place - 1)}
                ((slot.state, *_),) = found
                self.snapshots_read += 1
            slot.position = start
            assert start == 0 or slot.state == self._read(slot, start - 1), "another state"

    def _advance(self, slot: Slot, group: int, token: int, full_page: int) -> None:
        """Let a running state see a token. Args: `full_page`: the page that it fills; -1: none."""
        slot.state = chain(slot.state, token)
        slot.position += 1
        # A table ends in front of pages that have no snapshots.
        blocks = slot.further[group][:: self.groups[group].width]
        if full_page < 0 or full_page >= len(blocks) or blocks[full_page] == -1:
            return
        for copy in self._block(slot, group, full_page):
            self.memory[copy] = [slot.state] * self.page_size

    def _park_states(self, plan: StepPlan) -> None:
        for copy in plan.states:
            if copy.kind == "park":
                self._keep_state(copy)

    def _save_states(self, plan: StepPlan) -> None:
        for copy in plan.states:
            if copy.kind == "save":
                self._keep_state(copy)
                self.states_saved += 1

    def _keep_state(self, copy: StateCopy) -> None:
        slot = self.slots[copy.slot]
        slot.take_back(copy.tokens)
        assert slot.position == copy.tokens, "a state is kept that has seen other tokens"
        for page in copy.pages:
            self.memory[page] = [slot.state] * self.page_size

    def _load_states(self, plan: StepPlan) -> None:
        for copy in plan.states:
            if copy.kind == "load":
                ((state, *_),) = {tuple(self.memory[page]) for page in copy.pages}
                slot = self.slots[copy.slot]
                slot.state = state
                slot.position = copy.tokens
                self.states_loaded += 1

    def spoil_all(self) -> None:
        """Let every KV slot of the device hold NaN."""
        self.memory = [[NAN] * self.page_size for _ in self.memory]

    def _copy(self, run: CopyRun) -> list[bool]:
        """All at once, as a device may: no copy of a run may need another one's outcome.

        Returns whether each page that comes back is what it was when it left.
        """
        intact = []
        assert len(run.pages) == len(run.slots) > 0
        targets = run.slots if run.to_host else run.pages
        assert len(set(targets)) == len(targets), "two copies of one run go to the same place"
        for page, slot in zip(run.pages, run.slots, strict=True):
            if run.to_host:
                self.left[slot] = list(self.memory[page])
                wrong_bits = int(self.damage is not None and self.damage())
                self.host[slot] = [state ^ wrong_bits for state in self.left[slot]]
            else:
                assert -1 not in self.host[slot], "a slot was read before anything was copied to it"
                self.memory[page] = list(self.host[slot])
                intact.append(self.host[slot] == self.left[slot])
        self.copied += len(run.pages)
        return intact

    def _block(self, slot: Slot, group: int, page: int) -> list[int]:
        """The pages of a further group for a page of tokens."""
        width = self.groups[group].width
        block = slot.further[group][page * width : (page + 1) * width]
        assert len(block) == width
        assert -1 not in block, "a row reads or writes a page that was left behind"
        return block

    def _check_further(self, plan: StepPlan) -> None:
        """What each row sees of a further group is what group 0 has of the same tokens."""
        if self.damage is not None:
            return
        for row in plan.rows:
            differing = self._differing(self.slots[row.slot], row.start, row.start + row.n)
            assert not differing, f"row {row}: a further group has another token at {differing}"

    def _differing(self, slot: Slot, start: int, end: int) -> list[tuple[int, int]]:
        """(further group, position) of what a row that begins at `start` sees before `end` and group 0 has not."""
        found = []
        for index, rule in enumerate(self.groups):
            if rule.kind == "state":
                continue
            for position in range(rule.first_visible(start), end):
                page, off = divmod(position, self.page_size)
                states = {self.memory[copy][off] for copy in self._block(slot, index, page)}
                if states != {self._read(slot, position)}:
                    found.append((index, position))
        return found

    def _read(self, slot: Slot, position: int) -> int:
        page, off = divmod(position, self.page_size)
        return self.memory[slot.table[page]][off]

    def _check(self, plan: StepPlan, states: list[int]) -> None:
        """After the step every row's last slot must hold its own state: no two rows wrote the same slot differently."""
        self._check_further(plan)
        for row, state in zip(plan.rows, states, strict=True):
            assert self._read(self.slots[row.slot], row.start + row.n - 1) == state, (
                f"row {row} was overwritten"
            )


class Node:
    """A scheduler with its device, stepping with `depth` plans in flight (1: normal, 2: overlapped)."""

    def __init__(
        self, limits: Limits, depth: int, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.sched = Scheduler(limits)
        self.device = Device(limits)
        self.depth = depth
        self.flight: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, RowError] = {}
        self.final_pages: dict[int, dict[int, tuple[int, list[int]]]] = {}
        self.final_further: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = {}
        """Of further groups, by room and group."""
        self.done: dict[int, PrefillDone] = {}
        self.opened: dict[int, OpenTransfer] = {}
        self.grants: dict[int, GrantPages] = {}
        self.revokes: list[RevokeGrant] = []
        self.aborts: list[AbortTransfer] = []
        self.timelines: list[RequestTimeline] = []
        self.stages: dict[int, FirstTokenStages] = {}
        self.last_row: dict[int, int] = {}
        self.steps = 0
        self._snapshots: list[dict[int, int]] = [{} for _ in range(limits.max_running_requests)]
        """First pages of snapshots by slot and page of tokens, as the runner knows them."""
        self.make_offers: Callable[[Scheduler], list[DraftOffer]] | None = None
        """Drafts for the next plan, before which no step may be in flight."""

    @property
    def probe(self) -> SchedulerProbe:
        return SchedulerProbe(self.sched)

    def absorb(self) -> None:
        for event in self.sched.drain_events():
            if isinstance(event, EmittedTokens):
                assert event.handle not in self.finished, "output after the end"
                self.outputs.setdefault(event.handle, []).extend(event.tokens)
                self.cached[event.handle] = event.cached_tokens
                if event.stages is not None:
                    assert event.handle not in self.stages, "one first token"
                    self.stages[event.handle] = event.stages
                if event.finish is not None:
                    self.finished[event.handle] = event.finish
                if event.error is not None:
                    self.errors[event.handle] = event.error
            elif isinstance(event, PagesFinal):
                assert event.req.rendezvous
                room = event.req.rendezvous.room
                rooms = self.final_pages if not event.group else self.final_further
                key = room if not event.group else (room, event.group - 1)
                book = rooms.setdefault(key, {})  # type: ignore[arg-type,attr-defined]
                for i, page in enumerate(event.pages):
                    assert event.first_page + i not in book, "a page was announced twice"
                    book[event.first_page + i] = (page, list(self.device.memory[page]))
            elif isinstance(event, PrefillDone):
                assert event.req.rendezvous
                self.done[event.req.rendezvous.room] = event
            elif isinstance(event, OpenTransfer):
                assert event.req.rendezvous
                self.opened[event.req.rendezvous.room] = event
            elif isinstance(event, GrantPages):
                assert event.req.rendezvous
                self.grants[event.req.rendezvous.room] = event
            elif isinstance(event, RevokeGrant):
                self.revokes.append(event)
            elif isinstance(event, AbortTransfer):
                self.aborts.append(event)
            elif isinstance(event, RequestTimeline):
                self.timelines.append(event)

    def step(self) -> bool:
        """Plan once, then commit until fewer than `depth` plans fly. False when nothing happened."""
        if self.make_offers is not None:
            offers = self.make_offers(self.sched)
            # Drafts follow the last token of each sequence.
            if offers:
                self._commit_all_but(0)
                self.sched.offer_drafts(self.make_offers(self.sched))
        plan = self.sched.plan(self.clock())
        self.absorb()
        if plan is not None:
            answers = plan.num_tokens - plan.num_prompt_tokens
            budget = max(self.limits.step_tokens, answers + self.limits.page_size)
            assert plan.num_tokens <= budget
            assert len({row.handle for row in plan.rows}) == len(plan.rows)
            assert plan.rows or plan.copies or plan.states, (
                "a plan without rows is made for its copies only"
            )
            self._check_snapshots(plan)
            self.steps += 1
            self.flight.append(plan)
        if plan is None or plan.drafted:
            committed = self._commit_all_but(0)
        else:
            committed = self._commit_all_but(self.depth - 1)
        return plan is not None or committed

    def _check_snapshots(self, plan: StepPlan) -> None:
        """Every snapshot that a row takes goes to pages of its sequence, or of the tree."""
        page_size = self.limits.page_size
        for adm in plan.admitted:
            self._snapshots[adm.slot] = {}
        for growth in plan.further:
            if self.limits.page_groups[growth.group].kind == "state":
                width = self.limits.page_groups[growth.group].width
                for place, block in enumerate(growth.pages[::width], growth.base // width):
                    self._snapshots[growth.slot][place] = block
        for row in plan.rows:
            for index, rule in enumerate(self.limits.page_groups):
                if rule.kind != "state":
                    continue
                held = self.probe.seqs[row.handle].further[index]
                for place in range(row.start // page_size, (row.start + row.n) // page_size):
                    block = self._snapshots[row.slot].get(place, NO_PAGE)
                    of_tree = self.probe.memory.cache.groups[index].owns(block)
                    is_own = block in held.private or of_tree
                    assert block == NO_PAGE or is_own, f"row {row} writes page {block} of another"

    def _commit_all_but(self, left: int) -> bool:
        """Commit the oldest steps; returns whether there was one."""
        committed = False
        while len(self.flight) > left:
            oldest = self.flight.pop(0)
            self.sched.commit(oldest, self.device.execute(oldest), self.clock())
            committed = True
            self.sched.ledger()
            self.absorb()
        return committed

    def run(self, limit: int = 20000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the scheduler did not come to rest")


def random_prompt(rng: random.Random, shared: list[list[int]], longest: int) -> list[int]:
    head = list(rng.choice(shared)) if shared and rng.random() < 0.6 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
    return (head + tail)[:longest]


def add_random_request(
    node: Node, rng: random.Random, handle: int, shared: list[list[int]]
) -> list[int]:
    """Give the node a request of any priority that fits into its pages; return the tokens of its answer.

    Args:
        shared: beginnings that prompts may share.
    """
    prompt = random_prompt(rng, shared, min(24, node.limits.capacity_tokens - 1))
    req = request(handle, prompt, rng.randint(1, 30), ignore_eos=rng.random() < 0.7)
    node.sched.add(dataclasses.replace(req, priority=rng.choice([None, 0, 5, 9])))
    room = node.limits.capacity_tokens - len(prompt)
    limit = min(req.params.max_new_tokens, room)
    return reference(req.prompt, limit, req.params.ignore_eos)


def duplicates(pages: array[int], inserted: InsertResult) -> array[int]:
    """Those of the caller's pages that the tree did not take; the caller frees them."""
    return array(
        "i",
        (
            mine
            for mine, theirs in zip(pages, inserted.existing_pages, strict=False)
            if mine != theirs
        ),
    )


def ranks(
    queue: Sequence[Seq],
    policy: Policy,
    priority: PriorityRule,
    view: PolicyContext,
    cache_key: Hashable,
) -> list[Rank]:
    """The whole sort key of every sequence: (priority, policy, arrival, handle), all different."""
    keys = policy.sort_keys(queue, view, cache_key)
    aged = [priority.key(seq, view.now) for seq in queue]
    return [
        (p, key, seq.req.arrival, seq.handle) for p, key, seq in zip(aged, keys, queue, strict=True)
    ]


def ordered(
    queue: Sequence[Seq], policy: Policy, priority: PriorityRule, view: PolicyContext
) -> list[Seq]:
    """The queue in the order in which the planner should look at it, computed afresh."""
    found = ranks(queue, policy, priority, view, policy.cache_key(len(queue), view))
    entries = sorted(zip(found, queue, strict=True), key=lambda entry: entry[0])
    return [seq for _, seq in entries]
