"""A scheduler that checks itself around every plan: the promises of docs/architecture.md, computed a second time.

Nothing here reuses the planner's arithmetic: orders, needs, holders and gaps are derived from the tables, naively.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from baton.cache.group_pages import NO_PAGE
from baton.cache.radix import RadixNode
from baton.sched.planner.reservation import PageReservation
from baton.sched.policies import ShortFirst
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.hashing import uniform
from baton.sched.types.plan import StepPlan, StepResult
from baton.sched.types.priority import LOWEST_PRIORITY
from baton.sched.types.sequence import Seq, SeqState
from tests.support.probes import GroupPagesProbe

CACHE_AWARE = frozenset({"lpm", "short-first", "srpt-aging", "edf", "hrrn"})
"""Orders that change when the tree does."""


@dataclass
class Fact:
    """One waiting request as the orders see it."""

    seq: Seq
    cached: int
    total: int
    rest: int
    waited: float
    overtaken_work: int
    drawn: float


@dataclass
class Before:
    """The tables as they stood when a plan was asked for."""

    facts: list[Fact]
    ratio: float
    retractions: int
    preemptions: dict[int, int]
    waiting: set[int]
    opening: set[int]
    retained: set[int]
    decoding: set[int]
    evictions: int
    reservation: PageReservation | None


LATER_FIELDS = frozenset(
    (
        "allowed_tokens",
        "bad_words",
        "drafted",
        "further",
        "grammar",
        "logprob_position",
        "logprob_token_ids",
        "prompt_logprobs",
        "prompt_logprobs_start",
        "reasoning",
        "states",
    )
)
"""Fields that older recordings of plans do not have: left out while they have their default."""


def _values(value: object) -> object:
    """Nested lists of plain values: dataclasses by their fields in order, enum members by their place."""
    if dataclasses.is_dataclass(value):
        return [
            _values(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name not in LATER_FIELDS or getattr(value, field.name) != field.default
        ]
    if isinstance(value, enum.Enum):
        return list(type(value)).index(value)
    return [_values(each) for each in value] if isinstance(value, (list, tuple, array)) else value


class WatchedScheduler(Scheduler):
    """`clock` is what plan and commit see as `now`."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.clock = 0.0
        self.checked: Counter[str] = Counter()
        """How often each kind of check had something to look at."""
        self._plans = hashlib.sha256()
        self._gaps: Counter[int] = Counter()
        self._evictions = 0
        cache = self._state.memory.cache
        evict = cache.evict

        evict_branch = cache.evict_branch

        def counting(pages: int, for_good: bool = False) -> int:
            self._evictions += 1
            return evict(pages, for_good)

        def counting_branch(node: RadixNode) -> int:
            self._evictions += 1
            return evict_branch(node)

        cache.evict = counting  # type: ignore[method-assign]
        cache.evict_branch = counting_branch  # type: ignore[method-assign]

    @property
    def digest(self) -> str:
        """Hash of all plans so far by their values, without the names of types and fields."""
        return self._plans.hexdigest()

    def plan(self, now: float = 0.0) -> StepPlan | None:
        before = self._before()
        plan = super().plan(self.clock)
        self.ledger()
        self._check_holders()
        self._check_gaps(before, plan)
        self._check_preemptions(before)
        if plan is None:
            self.checked["idle"] += 1
        else:
            self._plans.update(repr(_values(plan)).encode())
            self._check_shape(plan)
            self._check_rows(before, plan)
            self._check_order(before, plan)
        # Its arithmetic knows one page group.
        if not self.limits.page_groups:
            self._check_work_conserved(before, plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> None:
        super().commit(plan, result, self.clock)
        self.observe(plan, 0.001 + 0.0001 * plan.num_tokens)
        self.ledger()
        self._check_holders()

    # ------------------------------------------------------------------ around a plan

    def _before(self) -> Before:
        state = self._state
        running = list(state.running.values())
        return Before(
            facts=self._facts(),
            ratio=self._state.memory.ratio.value,
            retractions=self._state.retractions,
            preemptions={seq.handle: seq.preemptions for seq in running},
            waiting={seq.handle for seq in state.waiting},
            opening={seq.handle for seq in state.opening},
            retained=set(state.retained),
            decoding={seq.handle for seq in running if _decodes(seq)},
            evictions=self._evictions,
            reservation=copy.copy(self._planner.reservation.current),
        )

    def _facts(self) -> list[Fact]:
        """Facts about the waiting requests that the orders read."""
        state, clip = self._state, self.limits.clip_max_new_tokens

        def cached(seq: Seq) -> int:
            if seq.pages:  # retained: it has these, whether or not the tree has them
                return seq.computed
            return state.memory.cache.probe(
                seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1
            ).num_tokens

        return [
            Fact(
                seq,
                cached=cached(seq),
                total=len(seq.tokens) + seq.inflight,
                rest=min(
                    seq.max_new_tokens - (len(seq.tokens) - seq.prompt_len) - seq.inflight, clip
                ),
                waited=self.clock - seq.req.arrival,
                overtaken_work=state.computed_tokens - seq.tokens_computed_at_arrival,
                drawn=uniform(state.planned_step, seq.handle),
            )
            for seq in state.waiting
        ]

    def _brute_order(self, facts: list[Fact]) -> list[Seq] | None:
        """The waiting queue as its policy is defined; None for orders that have no short definition."""
        try:
            # Rounded, because "now" cancels out of the planner's keys but not of these.
            found = [
                (
                    -round(self._priority(f), 6),
                    round(self._key(f), 6),
                    f.seq.req.arrival,
                    f.seq.handle,
                )
                for f in facts
            ]
        except KeyError:
            return None
        order = {f.seq.handle: f.seq for f in facts}
        return [order[handle] for _, _, _, handle in sorted(found)]

    def _key(self, f: Fact) -> float:
        params = self.limits.policy_params
        policy, cache_key, work = (
            self._state.policy,
            self._state.waiting._order.cache_key,
            f.total - f.cached,
        )
        name = policy.name
        arrival = f.seq.req.arrival
        match name:
            case "fcfs":
                return arrival
            case "lof":
                return -f.seq.req.params.max_new_tokens
            case "lpm":
                return -f.cached - params.lpm_aging_tokens_per_s * f.waited
            case "short-first":
                return work + cache_key * f.rest - params.short_first_aging_tokens_per_s * f.waited  # type: ignore
            case "srpt-aging":
                rate, share = cache_key  # type: ignore[misc]
                return work - params.srpt_aging * rate * share * f.waited
            case "hrrn":
                return -f.overtaken_work / max(work, 1)
            case "random":
                return f.drawn
            case "edf":
                due = f.seq.req.ttft_deadline
                due = arrival + params.default_deadline_secs if due is None else due
                is_lost = params.demote_hopeless and self.clock + work / cache_key > due  # type: ignore[operator]
                return due + params.edf_demotion_secs * is_lost
        raise KeyError(name)

    def _priority(self, f: Fact) -> float:
        return self._importance(f.seq)

    def _importance(self, seq: Seq) -> float:
        rule, given = self.limits.priority, seq.req.priority
        if not rule.enabled:
            return 0.0
        start = LOWEST_PRIORITY if given is None else (-given if rule.low_values_first else given)
        if seq.adjusted_priority is not None:
            start = seq.adjusted_priority
        elif rule.aging_rate and seq.start_priority is not None:
            start = seq.start_priority
        if not rule.aging_rate:
            return start
        if rule.aging_rate * (self.clock - seq.req.arrival) >= rule.aging_max:
            return start + rule.aging_max
        return math.floor(start - rule.aging_rate * seq.req.arrival) + rule.aging_rate * self.clock

    # ------------------------------------------------------------------ the checks

    def _check_shape(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.num_tokens <= max(limits.step_tokens, plan.num_decode + limits.page_size), (
            "over the budget"
        )
        assert len({row.handle for row in plan.rows}) == len(plan.rows), "two rows of one sequence"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two sequences in one slot"
        assert all(row.n >= 1 for row in plan.rows)
        assert all(row.n == 1 and row.sample for row in plan.rows[: plan.num_decode])
        if limits.prefill_max_requests is not None:
            assert len(plan.rows) - plan.num_decode <= limits.prefill_max_requests
        assert len(plan.new_pages) == len(set(plan.new_pages)) or plan.retracted, (
            "a page was given out twice"
        )

    def _check_rows(self, before: Before, plan: StepPlan) -> None:
        """Rows that decode stand by importance, then age; no prompt goes before a more important one."""
        seqs = [self._state.seqs[row.handle] for row in plan.rows]
        # Rounded, because the planner's keys leave out "now" where it cancels out.
        ranks = [(-round(self._importance(seq), 6), seq.req.arrival, seq.handle) for seq in seqs]
        decode, prompts = ranks[: plan.num_decode], [rank[:1] for rank in ranks[plan.num_decode :]]
        assert decode == sorted(decode), "decode rows are not in order"
        self.checked["order of decode rows"] += len(decode) > 1
        if not self.limits.fairness.enabled:
            assert prompts == sorted(prompts), "a prompt went before a more important one"

    def _check_holders(self) -> None:
        """Compare slots, private pages and tree locks with those counted from their holders."""
        state = self._state
        private = array("i")
        locks: Counter[object] = Counter()
        groups = state.memory.cache.groups
        block_locks: list[Counter[int]] = [Counter() for _ in groups]
        pages: dict[object, int] = {}
        of_kind: dict[str, set[int]] = {group.rule.kind: {NO_PAGE} for group in groups}
        slots = list(state.slots)
        for seq in state.seqs.values():
            private.extend(seq.private)
            private.extend(seq.state_pages)
            of_kind.get("state", set()).update(seq.state_pages)
            assert seq.private <= set(seq.pages)
            for group, held, block_counts in zip(groups, seq.further, block_locks, strict=False):
                private.extend(held.private)
                of_kind[group.rule.kind].update(held.pages)
                of_kind[group.rule.kind].update(held.rolling)
                assert held.private.issuperset(held.rolling)
                assert set(held.rolling).isdisjoint(held.pages)
                assert len(held.pages) == len(seq.pages) * group.width
                for place in range(len(seq.pages)):
                    block = list(held.pages[place * group.width : (place + 1) * group.width])
                    if place < held.first:
                        assert set(block) == {NO_PAGE}, "a page left behind is still named"
                    elif group.rule.kind == "state" and set(block) == {NO_PAGE}:
                        continue  # no snapshot is taken here
                    elif block[0] not in held.private:
                        block_counts[block[0]] += 1
                        assert group.owns(block[0])
                    else:
                        assert held.private.issuperset(block)
            if seq.slot >= 0:
                slots.append(seq.slot)
            is_waiting = seq.state in (SeqState.WAITING, SeqState.OPENING, SeqState.SUSPENDED)
            if is_waiting and seq.handle not in state.retained:
                assert not seq.pages, f"request {seq.handle} waits and holds pages"
                assert seq.slot < 0
                assert seq.node is None
            node = seq.node
            while node is not None and node.parent is not None:
                locks[node] += 1
                pages[node] = len(node.pages)
                node = node.parent
        assert len(set(private)) == len(private), "a page in two private tables"
        assert sorted(slots) == list(range(self.limits.max_running_requests)), (
            "a slot was lost or doubled"
        )
        num_locked = sum(pages.values())
        for group, block_counts in zip(groups, block_locks, strict=True):
            assert GroupPagesProbe(group).locks == dict(block_counts), (
                "locks of blocks differ from holders"
            )
            num_locked += len(block_counts) * group.width
        assert num_locked == state.memory.cache.locked_pages
        usage = state.memory.further_usage(state.seqs.values())
        assert {kind: usage[kind].held for kind in usage} == {
            kind: len(held) - 1 for kind, held in of_kind.items()
        }
        for node, count in locks.items():
            assert node.locks == count, "locks differ from holders"  # type: ignore[attr-defined]

    def _check_gaps(self, before: Before, plan: StepPlan | None) -> None:
        """At most one step goes by without a row of a decoding sequence, unless it lost its place or found no page."""
        running = self._state.running
        rows = {row.handle for row in plan.rows} if plan is not None else set()
        for handle in list(self._gaps):
            if handle not in running:
                del self._gaps[handle]
        for handle in before.decoding & running.keys():
            seq = running[handle]
            if handle in rows or not _decodes(seq):
                self._gaps[handle] = 0
                self.checked["gap"] += 1
                continue
            if self._state.memory.available < self._state.memory.pages_per_block:
                self.checked["no page to grow"] += 1
                continue
            assert plan is not None, f"request {handle} could decode and nothing was planned"
            self._gaps[handle] += 1
            by_time = self.limits.prefill_first and self.limits.max_decode_gap_secs
            assert self._gaps[handle] <= 1 or by_time, (
                f"request {handle} waited two steps for its next token"
            )

    def _check_preemptions(self, before: Before) -> None:
        """Only a clearly more important request that waits or opens preempts; no request suffers it too often."""
        state, rule = self._state, self.limits.priority
        for handle, count in before.preemptions.items():
            seq = state.seqs.get(handle)
            if seq is None or seq.preemptions == count:
                continue
            self.checked["preemption"] += 1
            assert seq.preemptions == count + 1
            assert seq.preemptions <= self.limits.max_preemptions_per_request
            alive = (
                state.seqs.get(h) for h in before.waiting | before.opening
            )  # others missed their deadlines
            by = [s for s in alive if s is not None and rule.base(s) > rule.base(seq)]
            assert (
                max(map(rule.base, by), default=LOWEST_PRIORITY) - rule.base(seq)
                > rule.preemption_threshold
            )

    def _check_order(self, before: Before, plan: StepPlan) -> None:
        """Admitted requests are the first of the queue, in the order of the policy's definition."""
        if (
            self._state.retractions != before.retractions
            or self._preempted(before)
            or self.limits.fairness.enabled
        ):
            return
        came = [row.handle for row in plan.rows[plan.num_decode :] if row.handle in before.waiting]
        under_way = len(plan.rows) - plan.num_decode > len(came)
        if self.limits.policy in CACHE_AWARE and (under_way or self._evictions != before.evictions):
            return
        order = self._brute_order(before.facts) if came else None
        if order is not None:
            alive = (
                self._state.seqs
            )  # one whose deadline cannot be met any more may have been ended instead
            queue = [
                s.handle
                for s in order
                if s.handle in came or (s.handle in alive and not s.inflight_steps)
            ]
            self.checked["order"] += 1
            if isinstance(self._state.policy, ShortFirst):
                assert self._state.waiting._order.cache_key == pytest.approx(before.ratio, rel=0.06)
            assert came == [h for h in queue if h in came], (
                f"{self.limits.policy}: {came} were admitted of {queue}"
            )
            # `_need` knows one page group.
            if came and queue[0] != came[0] and not self.limits.page_groups:
                self.checked["passed a request without room"] += 1
                self._check_lacks_room(before, plan, alive[queue[0]], came)

    def _preempted(self, before: Before) -> bool:
        now = {seq.handle: seq.preemptions for seq in self._state.seqs.values()}
        return any(now.get(handle, count) != count for handle, count in before.preemptions.items())

    def _check_lacks_room(
        self, before: Before, plan: StepPlan, first: Seq, came: list[int]
    ) -> None:
        """The first of the queue was passed because it lacks pages even without those that passed it.

        Other reasons: too many unfinished prompts precede it, or it leaves pages to another one.
        """
        if first.pages or self._is_capped(first, plan) or self._leaves_pages(first, before):
            return
        new = [
            h for h in came if h not in before.retained
        ]  # what a retained one will need was kept for it already
        need = self._need(first, before.ratio, without=new)
        available = self._available_to(first) + sum(len(self._state.seqs[h].private) for h in new)
        assert need > available, (
            f"request {first.handle} needs {need} of {available} pages and was passed by {came}"
        )

    def _is_capped(self, seq: Seq, plan: StepPlan | None) -> bool:
        """Too many unfinished prompts precede it, and the tokens left over in this step do not complete it."""
        state, limits = self._state, self.limits
        unfinished = [
            s for s in state.running.values() if _left(s) > 0 and not _decodes(s) and _wants(s)
        ]
        ahead = sum(self._importance(s) >= self._importance(seq) for s in unfinished)
        together = state.policy.reorders_partial_prefills or limits.priority.enabled
        if not together or ahead < limits.max_partial_prefills:
            return False
        cached = state.memory.cache.probe(
            seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1
        ).num_tokens
        return len(seq.tokens) - cached > limits.step_tokens - (
            plan.num_tokens if plan is not None else 0
        )

    def _leaves_pages(self, seq: Seq, before: Before, came_first: Sequence[Seq] = ()) -> bool:
        """Another request waits for pages, and those that passed it hold, with this one, more than the rest.

        `came_first` were admitted in this plan before `seq` was tried: they count as passing, too.
        """
        state, limits = self._state, self.limits
        held = before.reservation or self._planner.reservation.current
        if held is None or held.seq is seq or self._importance(seq) > self._importance(held.seq):
            return False

        def at_end(one: Seq) -> int:
            total = len(one.tokens) + one.inflight + self._rest(one, before.ratio)
            return max(-(-total // limits.page_size), len(one.pages))

        holders = (*state.running.values(), *state.transfer.values())
        passed = sum(at_end(s) for s in holders if s.admitted_step >= held.since)
        given = held.passed_pages + (
            sum(map(at_end, came_first)) if held is before.reservation else 0
        )
        set_aside = min(given, at_end(held.seq)) + int(limits.watermark * limits.num_pages)
        return passed + at_end(seq) > limits.num_pages - set_aside

    def _check_work_conserved(self, before: Before, plan: StepPlan | None) -> None:
        """Budget is left over only when no request could use it."""
        state, memory, limits = self._state, self._state.memory, self.limits
        page = limits.page_size
        if self._state.retractions != before.retractions or self._preempted(before):
            return
        if limits.prefill_first and plan is not None and plan.num_decode:
            return  # its steps hold either prompts or decode rows
        used = plan.num_tokens if plan is not None else 0
        prompts = len(plan.rows) - plan.num_decode if plan is not None else 0
        if limits.prefill_first and plan is not None and plan.num_decode:
            return  # this step is for decode rows alone
        if limits.fairness.enabled or limits.enable_dynamic_chunking or limits.step_target_secs:
            return  # not the token budget decides, but turns, caps or time
        if limits.step_tokens - used < page or prompts == limits.prefill_max_requests:
            return
        rows = {row.handle for row in plan.rows} if plan is not None else set()
        for seq in state.running.values():
            left = _left(seq)
            is_prompt = left > 0 and not _decodes(seq) and _wants(seq)
            if is_prompt and seq.handle not in rows:
                self.checked["unfinished prompt passed over"] += 1
                need = -(-(seq.computed + min(left, limits.step_tokens - used)) // page) - len(
                    seq.pages
                )
                assert memory.available < need, (
                    f"request {seq.handle} had pages and budget for its next chunk"
                )
        if not state.slots:
            return
        if limits.policy in CACHE_AWARE and (prompts or self._evictions != before.evictions):
            return  # the tree has changed since the order was made
        if limits.priority.enabled and any(h not in before.waiting for h in rows - before.decoding):
            return  # a less important prompt, planned after the queue was found blocked, may have published its prefix
        order = self._brute_order(before.facts) or []
        place = next(
            (
                i
                for i, s in enumerate(order)
                if s.state is SeqState.WAITING and not s.inflight_steps
            ),
            None,
        )
        if place is None:
            return
        self.checked["admission refused"] += 1
        head, came_first = order[place], [s for s in order[:place] if s.handle in rows]
        if head.pages:
            return  # retained: it needs no prefix
        if self._is_capped(head, plan) or self._leaves_pages(head, before, came_first):
            return
        need, available = self._need(head, before.ratio), self._available_to(head)
        assert need > available, (
            f"request {head.handle} needed {need} of {available} pages and was not admitted, "
            f"{limits.step_tokens - used} tokens of budget were left: {plan and plan.stopped_by}"
        )
        self.checked["pages kept for a refused request"] += 1
        # Another one had the reservation when this plan began: it may have been admitted since.
        assert before.reservation or self._planner.reservation.current, (
            f"request {head.handle} lacks pages and none are kept for it: others may pass it for ever"
        )

    def _rest(self, one: Seq, ratio: float) -> int:
        left = one.max_new_tokens - (len(one.tokens) - one.prompt_len) - one.inflight
        if one.is_lease:
            return 0
        return (
            left
            if one.req.params.ignore_eos
            else int(min(left, self.limits.clip_max_new_tokens) * ratio)
        )

    def _need(self, seq: Seq, ratio: float, without: Sequence[int] = ()) -> int:
        """Pages that must be available before `seq` is let in: its prompt, its answer, and the growth of the others."""
        state, limits, page = self._state, self.limits, self.limits.page_size

        def rest(one: Seq) -> int:
            return self._rest(one, ratio)

        cached = state.memory.cache.probe(
            seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1
        ).num_tokens
        need = -(-len(seq.tokens) // page) - cached // page
        holding = (*state.running.values(), *state.transfer.values(), *state.retained.values())
        others = [s for s in holding if s is not seq and s.handle not in without]
        if not others and not state.leased:
            return need
        need += -(-rest(seq) // page) + int(limits.watermark * limits.num_pages)
        grown = {
            s.handle: max(-(-(len(s.tokens) + s.inflight + rest(s)) // page) - len(s.pages), 0)
            for s in others
        }
        known = [s for s in others if s.is_decoding and s.req.params.ignore_eos and not s.is_lease]
        unknown = sum(grown.values()) - sum(grown[s.handle] for s in known)
        return need + min(sum(grown.values()), unknown + max(self._peak(seq, known, rest), 0))

    def _peak(self, head: Seq, known: list[Seq], rest: Callable[[Seq], int]) -> int:
        """Most pages that answers of known length need at once, token by token; ends are noticed two steps later.

        What `head` would share with one of them is not given back by its end.
        """
        its_own = set(map(id, self._path(head)))
        page = self.limits.page_size
        most = 0
        for step in range(1, max(map(rest, known), default=0) + 2):
            now = 0
            for seq in known:
                total = len(seq.tokens) + seq.inflight
                if step >= rest(seq) + 2:
                    now -= len(seq.pages) - self._shared(seq, its_own)
                else:
                    now += -(-(total + min(step, rest(seq))) // page) - len(seq.pages)
            most = max(most, now)
        return most

    @staticmethod
    def _shared(seq: Seq, also_locked: set[int]) -> int:
        """Pages of a sequence that others lock too, or that lie in the tree twice."""
        alone, node = len(seq.private), seq.node
        while node is not None and node.parent is not None:
            alone += len(node.pages) if node.locks == 1 and id(node) not in also_locked else 0
            node = node.parent
        return len(seq.pages) - alone

    def _available_to(self, seq: Seq) -> int:
        """Free and evictable pages, less those of its own prefix, which it would lock."""
        own = sum(len(node.pages) for node in self._path(seq) if node.locks == 0)
        return self._state.memory.available - own

    def _path(self, seq: Seq) -> list[RadixNode]:
        """The tree's nodes along a waiting sequence's cached prefix."""
        node = self._state.memory.cache.match(
            seq.tokens.tobytes(), seq.req.namespace, len(seq.tokens) - 1
        ).node
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path


def _left(seq: Seq) -> int:
    return len(seq.tokens) + seq.inflight - seq.computed


def _wants(seq: Seq) -> bool:
    return len(seq.tokens) - seq.prompt_len + seq.inflight < seq.max_new_tokens


def _decodes(seq: Seq) -> bool:
    """Needs exactly its newest token computed to draw the next, and may draw another."""
    known = len(seq.tokens) + seq.inflight
    return (
        seq.state is SeqState.RUNNING
        and known > seq.prompt_len
        and known - seq.computed == 1
        and _wants(seq)
    )
