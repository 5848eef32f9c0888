"""Random scenarios for the scheduler: load, aborts, deadlines, flushes and broken transfers, on a small pool.

`Scenario` is a seed with the settings that matter; `run_scenario` drives one node, or a prefill and a decode node.
Every plan is checked by tests.support.sched.watched, every token by the pretend device, every ending here. Equal
scenarios give equal plans, so the repr of the scenario is all that a failure has to print.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from dataclasses import dataclass, field

from baton.cache.eviction import EVICTION_POLICIES
from baton.cache.group_pages import GroupRule
from baton.config.classes import parse_classes
from baton.config.tenants import TenantRule, TenantRules
from baton.errors import PromptTooLong, QueueFull, TenantQueueFull, WrongState
from baton.sched.fairness.fair_queue import FairnessRules
from baton.sched.policies import POLICIES, PolicyParams
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason, ValidatedRequest
from tests.support.sched.fake_transfer import FakeTransfer
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request
from tests.support.sched.watched import WatchedScheduler

LONGEST_PROMPT, LONGEST_ANSWER = 40, 30
MAX_LIVE_REQUESTS = 12
"""Most requests alive at once."""
TURN_SECS = 0.01
LEASE_TICKS = 300
FAIR = FairnessRules(
    classes=parse_classes("gold:3,iron:1")[0],
    tenants=TenantRules(
        named={
            "small": TenantRule(max_running=1),
            "heavy": TenantRule(weight=3.0, max_kv_tokens=90),
        }
    ),
)


@dataclass(frozen=True)
class Scenario:
    seed: int
    policy: str
    role: str
    """null, or pair: a prefill and a decode node."""
    page: int
    depth: int
    priority: bool
    is_tight: bool = False
    """Short queues, short clips and many or few unfinished prompts at once; priorities change while requests live."""
    groups: tuple[GroupRule, ...] = ()
    """Page groups beside group 0."""

    def limits(self, rng: random.Random, role: str) -> Limits:
        # 100 %: all live requests fit. 1 %: hardly one request does, the longest are refused.
        share = rng.choice([0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
        full = MAX_LIVE_REQUESTS * -(-(LONGEST_PROMPT + LONGEST_ANSWER) // self.page)
        limits = Limits(
            num_pages=max(round(full * share), 2),
            page_size=self.page,
            max_running_requests=rng.choice([1, 2, 4, 8, MAX_LIVE_REQUESTS]),
            max_queued_requests=10_000,
            step_tokens=self.page * rng.choice([1, 2, 3, 8, 40]),
            prefill_max_requests=rng.choice([None, None, 1, 3]),
            num_reserved_decode_tokens=rng.choice([0, 8, 512]),
            role=role,
            policy=self.policy,
            schedule_conservativeness=rng.choice([0.05, 0.3, 1.0]),
            radix_cache=rng.random() < 0.8,
            prefill_first=rng.random() < 0.15,
            policy_params=PolicyParams(
                lpm_aging_tokens_per_s=rng.choice([0.0, 97.31]),
                short_first_aging_tokens_per_s=rng.choice([0.0, 503.77]),
                srpt_aging=rng.choice([0.0, 0.05]),
                default_deadline_secs=rng.choice([0.2, 60.0]),
                demote_hopeless=rng.random() < 0.7,
            ),
            priority=PriorityRule(
                enabled=self.priority,
                low_values_first=rng.random() < 0.3,
                aging_rate=rng.choice([0.0, math.pi]),  # no ties but exact ones
                aging_max=1.5 if self.seed % 3 == 0 else math.inf,
                preemption_threshold=rng.choice([0, 3]),
            ),
            max_partial_prefills=rng.choice([1, 4]),
            admission_skip_ahead=rng.choice([0, 1, 8]),
            preemption_mode=rng.choice(["recompute", "cache", "offload", "auto"]),
            host_pages=rng.choice([0, 0, 4, 60]),
            max_preemptions_per_request=rng.choice([1, 8]),
            preemption_min_remaining_tokens=rng.choice([0, 8]),
            radix_eviction_policy=rng.choice(["lru", "lru", *EVICTION_POLICIES]),
            enable_mixed_chunk=rng.random() < 0.3,
            max_decode_gap_secs=rng.choice([0.0, 0.0, 0.05]),
            enable_dynamic_chunking=rng.random() < 0.1,
            step_target_secs=rng.choice([0.0, 0.0, 0.0, 0.005]),
            watermark=rng.choice([0.0, 0.0, 0.1]),
            queue_timeout_secs=rng.choice([0.0, 0.0, 0.0, 1.0]),
            aborts_missed_deadlines=rng.random() < 0.1,
            fairness=FAIR if rng.random() < 0.25 else FairnessRules(),
        )
        if self.groups:
            # Both pools have as many blocks as without them.
            pages_per_block = 1 + sum(rule.width for rule in self.groups)
            limits = dataclasses.replace(
                limits,
                num_pages=limits.num_pages * pages_per_block,
                host_pages=limits.host_pages * pages_per_block,
                page_groups=self.groups,
            )
        if not self.is_tight:
            return limits
        return dataclasses.replace(
            limits,
            max_queued_requests=rng.choice([3, 6, 10_000]),
            max_queued_tokens=rng.choice([None, None, 60]),
            clip_max_new_tokens=rng.choice([1, 5, 4096]),
            kv_event_batches=rng.choice([0, 4]),
            max_partial_prefills=rng.choice([1, 2, 64]),
        )


def scenarios(first_seed: int, is_tight: bool = False) -> list[Scenario]:
    """Every policy x role x page size x overlap x priority, each with its own seed."""
    combinations = [
        (policy, role, page, depth, priority)
        for policy in POLICIES
        for role in ("null", "pair")
        for page in (1, 4, 16)
        for depth in (1, 2)
        for priority in (False, True)
    ]
    return [Scenario(first_seed + i, *values, is_tight) for i, values in enumerate(combinations)]


@dataclass
class ScenarioLog:
    """Record of one run."""

    steps: int = 0
    digest: str = ""
    checked: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)


class ScenarioRun:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed)
        roles = ("prefill", "decode") if scenario.role == "pair" else ("null",)
        self.nodes = [self._node(scenario.limits(self.rng, role)) for role in roles]
        self.front = self.nodes[-1]
        """The node whose tokens reach the client: the decode node of a pair."""
        break_rate = self.rng.choice([0.0, 0.0, 0.01])
        self.transfer = (
            FakeTransfer(self.nodes[0], self.nodes[1], self.rng, break_rate, LEASE_TICKS)
            if scenario.role == "pair"
            else None
        )
        self.shared_prefixes = [
            [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(2, 30))] for _ in range(3)
        ]
        self.abort_rate = self.rng.choice([0.0, 0.02, 0.1])
        self.suspend_rate = self.rng.choice([0.0, 0.0, 0.05])
        self.has_time_limits = any(
            n.limits.queue_timeout_secs or n.limits.aborts_missed_deadlines for n in self.nodes
        )
        """An error for a request that had no time limit of its own is a proper end."""
        self.turns = 0
        self.expected: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        """Aborted by the client: no further tokens are expected."""
        self.refused: set[int] = set()
        self.may_fail: set[int] = set()
        """One half of the pair was ordered to stop, or there is a deadline: an error is a proper end."""
        self.log = ScenarioLog()

    def _node(self, limits: Limits) -> Node:
        node = Node(limits, self.scenario.depth)
        node.sched = WatchedScheduler(limits)
        return node

    # ------------------------------------------------------------------ the loop

    def run(self, turns: int) -> ScenarioLog:
        for _ in range(turns):
            if len(self.alive()) < MAX_LIVE_REQUESTS and self.rng.random() < 0.5:
                for _ in range(self.rng.choice([1, 1, 1, 4])):
                    self.submit()
            self.turn()
            if self.rng.random() < self.abort_rate:
                self.abort()
            if self.rng.random() < self.suspend_rate:
                self.suspend()
            if self.rng.random() < 0.01:
                self.rng.choice(self.nodes).sched.flush_cache()
            if self.scenario.is_tight:
                self.adjust_priorities()
        for node in self.nodes:
            node.sched.resume(list(self.expected))
        for _ in range(5000):
            if not self.alive() and all(self._rests(node) for node in self.nodes):
                break
            self.turn()
        self.finish()
        return self.log

    def alive(self) -> set[int]:
        return self.expected.keys() - self.front.finished.keys() - self.aborted - self.refused

    @staticmethod
    def _rests(node: Node) -> bool:
        return node.sched.is_idle and not node.flight

    def turn(self) -> None:
        self.turns += 1
        for node in self.nodes:
            assert isinstance(node.sched, WatchedScheduler)
            node.sched.clock = self.turns * TURN_SECS
            node.sched.expire(node.sched.clock)
            node.absorb()
            node.step()
        if self.transfer is not None:
            self.transfer.tick()

    def submit(self) -> None:
        rng = self.rng
        handle = len(self.expected)
        prompt = random_prompt(rng, self.shared_prefixes, LONGEST_PROMPT)
        plain = request(
            handle, prompt, rng.randint(1, LONGEST_ANSWER), ignore_eos=rng.random() < 0.7,
            room=1000 + handle if self.transfer is not None else None,
        )  # fmt: skip
        now = self.turns * TURN_SECS
        req = dataclasses.replace(
            plain,
            arrival=now,
            priority=rng.choice([None, 0, 2, 5, 9]),
            namespace=rng.choice([b"", b"", b"other"]),
            deadline=now + rng.uniform(0.05, 2.0) if rng.random() < 0.1 else None,
            ttft_deadline=now + rng.uniform(0.01, 0.5) if rng.random() < 0.5 else None,
            priority_class=rng.choice(["gold", "iron"]),
            tenant=rng.choice(["small", "heavy", "other"]),
        )
        room = self.front.limits.capacity_tokens - len(prompt)
        self.expected[handle] = reference(
            req.prompt, min(req.params.max_new_tokens, room), req.params.ignore_eos
        )
        if req.deadline is not None or self.has_time_limits:
            self.may_fail.add(handle)
        self._send(req)

    def _send(self, req: ValidatedRequest) -> None:
        """To all nodes, in any order; one refusal ends the request everywhere, as the router would."""
        nodes = self.rng.sample(self.nodes, len(self.nodes))
        for node in nodes:
            longest = node.limits.capacity_tokens
            if self.transfer is not None:
                longest = node.limits.room_capacity_tokens
            fits = len(req.prompt) + 1 <= longest
            try:
                node.sched.add(req)
            except (PromptTooLong, QueueFull, TenantQueueFull) as refusal:
                is_right = self.scenario.is_tight if fits else isinstance(refusal, PromptTooLong)
                assert is_right, (
                    "a request that fits was refused, or one that does not with another error"
                )
                for other in nodes:
                    other.absorb()
                    other.sched.abort(req.handle)
                if req.handle not in self.front.finished:
                    self.refused.add(req.handle)
                return
            assert fits, "a request that cannot fit was accepted"
            if self.rng.random() < 0.3:
                self.turn()

    def abort(self) -> None:
        """Any request of the last ones: waiting, running, in flight, leased, in transfer, or long finished."""
        if not self.expected:
            return
        handle = self.rng.randrange(
            max(len(self.expected) - 2 * MAX_LIVE_REQUESTS, 0), len(self.expected)
        )
        for node in self.nodes:
            node.absorb()
        halves = self.nodes if self.rng.random() < 0.7 else [self.rng.choice(self.nodes)]
        for node in halves:
            seq = node.probe.seqs.get(handle)
            if seq is not None:
                in_flight = " in flight" if seq.inflight_steps else ""
                self.log.checked[f"abort {node.limits.role} {seq.state.value}{in_flight}"] += 1
        if self.front in halves:
            if handle not in self.front.finished:
                self.aborted.add(handle)
        else:
            self.may_fail.add(handle)
        for node in halves:
            node.sched.abort(handle)
            node.sched.ledger()

    def suspend(self) -> None:
        """Some requests of one node may not run for a while; others may again."""
        node = self.rng.choice(self.nodes)
        recent = range(max(len(self.expected) - 2 * MAX_LIVE_REQUESTS, 0), len(self.expected))
        for handle in recent:
            if self.rng.random() < 0.2:
                try:
                    self.log.checked["suspend"] += node.sched.suspend([handle])
                except WrongState:
                    self.log.checked["suspend refused"] += 1
        node.sched.resume([handle for handle in recent if self.rng.random() < 0.5])
        node.sched.ledger()

    def adjust_priorities(self) -> None:
        """As --priority-adjustment-function does, on every node; and the KV events are read."""
        alive = sorted(self.alive())
        if self.scenario.priority and alive and self.rng.random() < 0.2:
            for node in self.nodes:
                chosen = self.rng.sample(alive, min(3, len(alive)))
                node.sched.adjust_priorities(
                    {h: self.rng.choice([None, -5.0, 0.5, 20.0]) for h in chosen}
                )
                self.log.checked["priorities adjusted"] += 1
        for node in self.nodes:
            if node.sched.kv_events is not None:
                node.sched.kv_events.take_batch(0.0)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Every request ended once with the right tokens, and no resource is held."""
        if self.transfer is not None:
            self.log.checked["lease expired"] = self.transfer.expired
        front = self.front
        assert not self.alive(), (
            f"never answered: {sorted(self.alive())}, {[n.sched.report.counts() for n in self.nodes]}"
        )
        for handle, tokens in self.expected.items():
            got = front.outputs.get(handle, [])
            end = front.finished.get(handle)
            if handle in self.refused or handle in self.aborted:
                assert end is None
                assert got == tokens[: len(got)], (
                    f"request {handle}: {got} is no beginning of {tokens}"
                )
            elif end is FinishReason.ERROR:
                room_broke = self.transfer is not None and 1000 + handle in self.transfer.broken
                error = front.errors[handle]
                left_full_queue = (
                    self.scenario.is_tight and self.scenario.priority and "queue_full" in error
                )
                assert handle in self.may_fail or room_broke or left_full_queue, error
                assert got == tokens[: len(got)]
            else:
                assert got == tokens, f"request {handle}: {got} instead of {tokens}"
            self.log.endings[
                end.name if end is not None else "REFUSED" if handle in self.refused else "ABORTED"
            ] += 1
        for node in self.nodes:
            sched = node.sched
            assert isinstance(sched, WatchedScheduler)
            assert sched.is_idle, sched.report.counts()
            sched.ledger().check_idle(node.limits.num_pages)
            sched.flush_cache()
            assert sched.ledger().free == node.limits.num_pages
            self.log.steps += node.steps
            self.log.checked += sched.checked
            self.log.digest += sched.digest


def run_scenario(scenario: Scenario, turns: int) -> ScenarioLog:
    """Run a scenario; raises AssertionError naming it when an invariant is broken."""
    try:
        return ScenarioRun(scenario).run(turns)
    except Exception as err:
        raise AssertionError(f"{scenario}, {turns} turns: {type(err).__name__}: {err}") from err
