"""Fair order of candidates: classes share by weight, tenants of a class by what they got, then the policy.

    candidates ──deal──▶ class ──▶ prompts under way, in the order of the policy
    (policy order)              └▶ tenant ──▶ its requests, in the order of the policy (priority first)

`merge` hands the candidates out one by one: sched.fairness.classes says which class has the turn,
sched.fairness.tenants which of its
tenants has had least. What the planner plans for a candidate is charged before the next one is asked for.

* A tenant at its limit (`max_running`, `max_kv_tokens`) is skipped with everything it has waiting; others pass.
* A candidate for which there are no pages is passed over: other tenants of its class follow, then its own tenant's
  later requests, then other classes. The planner keeps pages for it (planner/reservation.py), so that those
  that pass cannot keep it out for ever. A class whose requests all lack pages has no turn.
* Recomputed tokens (after a retraction or preemption) are charged again: they are work. Tokens found in the cache cost
  a class nothing and a tenant `cached_token_weight` of computed ones. On D, fetched prompt tokens count as computed.
* With one class and no tenants the order is the policy's own.

Cost per step: the policy's order is read up to the requests that are handed out; nothing where fairness is off
(sharing.SharingStrategy).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.config.classes import ClassRules, PriorityClass
from baton.config.tenants import INTERNAL, OTHER, TenantRule, TenantRules
from baton.errors import PromptTooLong, TenantQueueFull
from baton.sched.fairness.classes import DeficitRoundRobin
from baton.sched.fairness.sharing import PrefillView, SharingStrategy
from baton.sched.fairness.tenants import VirtualCounters
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState, is_partial

_NO_LIMITS = TenantRule()
_HOLDING = (SeqState.RUNNING, SeqState.TRANSFER)
MAX_LABELS = 100
"""Tenants with a metric label of their own beside those named in the tenant file; later ones are `other`."""


@dataclass(frozen=True, slots=True)
class FairnessRules:
    """Configured weights and limits (names and defaults: baton.config)."""

    classes: ClassRules = field(default_factory=ClassRules)
    charge_decode: bool = True
    """Generated tokens count against their class."""
    tenants: TenantRules | None = None
    """None: there is one tenant."""
    prompt_token_weight: float = 1.0
    output_token_weight: float = 2.0
    cached_token_weight: float = 0.1
    max_idle_tenants: int = 10_000
    """Tenants without waiting requests whose counters are remembered, per class."""

    @property
    def enabled(self) -> bool:
        return bool(self.classes.classes) or self.tenants is not None

    def place(self, tenant: str, asked: str | None, priority: int | None) -> tuple[int | None, str]:
        """Priority and class of a request: clamped into its tenant's range, and not better than its tenant's class.

        Without a class of its own it has its tenant's, else the one of its priority. `asked` must be a class's name.
        """
        rule = (self.tenants or TenantRules()).of(tenant)
        priority = rule.clamped(priority, self.classes.low_values_first)
        if not self.classes.classes:
            return priority, ""
        if asked is None:
            return priority, rule.priority_class or self.classes.of_priority(priority)
        return priority, asked if rule.priority_class is None else self.classes.no_better(
            asked, rule.priority_class
        )


class _ClassQueue:
    """Candidates of one class in this step. Candidates are taken from the policy's order as far as needed."""

    def __init__(
        self,
        counters: VirtualCounters,
        tenants: Iterable[str],
        pull: Callable[[str], bool],
        most_skipped: int,
    ) -> None:
        """`pull`: look for a tenant's next candidate and put it into its queue; False when it has no more."""
        self.first: deque[Seq] = deque()
        self.tenants = dict.fromkeys(tenants)
        self.queues: dict[str, deque[Seq]] = defaultdict(deque)
        self.ahead = 0
        """Unfinished prompts among those handed out."""
        self.pending = 0
        """Prompts under way in the queues, or still to come into them."""
        self._pull = pull
        self._counters = counters
        self._stopped: set[str] = set()
        """Tenants whose limits keep their first waiting request from starting."""
        self._last: set[str] = set()
        """Tenants whose first waiting request could not start: the class's others go first."""
        self._skips_left = most_skipped
        self._heap: list[tuple[float, int, str]] | None = None

    def skip(self, tenant: str) -> None:
        """A waiting request handed out could not start."""
        self._skips_left -= 1
        self._last.add(tenant)

    def next(self, may_start: Callable[[Seq], bool], has_room: Callable[[Seq], bool]) -> Seq | None:
        """The next candidate: a prompt under way, or a request that may start now."""
        if self.first:
            return self.first.popleft()
        if self._heap is None:
            # Equal counters: who has been waiting longer without a break.
            counters = self._counters.of(self.tenants)
            self._heap = list(zip(counters, range(len(counters)), self.tenants, strict=True))
            heapq.heapify(self._heap)
        while self._heap:
            rank, i, tenant = self._heap[0]
            if rank != self._rank(tenant):
                heapq.heapreplace(self._heap, (self._rank(tenant), i, tenant))
            elif (seq := self._next_of(tenant, may_start, has_room)) is not None:
                return seq
            else:
                heapq.heappop(self._heap)
        return None

    def _rank(self, tenant: str) -> float:
        return math.inf if tenant in self._last else self._counters[tenant]

    def _next_of(
        self, tenant: str, may_start: Callable[[Seq], bool], has_room: Callable[[Seq], bool]
    ) -> Seq | None:
        queue = self.queues[tenant]
        while queue or self._pull(tenant):
            is_closed = tenant in self._stopped or self._skips_left < 0
            if not self.pending and is_closed:
                break
            seq = queue.popleft()
            if seq.state is SeqState.RUNNING:
                self.pending -= 1
                return seq
            if is_closed:
                continue
            if not has_room(seq):
                self._skips_left -= 1
            elif may_start(seq):
                return seq
            else:
                self._stopped.add(tenant)
        return None


@dataclass(slots=True)
class _Use:
    running: int = 0
    kv_tokens: int = 0


class FairQueue(SharingStrategy):
    """The accounts of one rank. `answer_tokens`: tokens that a request is expected to still generate."""

    orders_requests = True

    def __init__(
        self, rules: FairnessRules, quantum: int, answer_tokens: Callable[[Seq], int]
    ) -> None:
        classes = rules.classes.classes or (PriorityClass(""),)
        self._rules = rules
        self._tenants = rules.tenants or TenantRules()
        self._answer_tokens = answer_tokens
        self._names = [c.name for c in classes]
        self._number = {name: i for i, name in enumerate(self._names)}
        self._middle = (
            self._number[rules.classes.of_tier("default")] if rules.classes.classes else 0
        )
        self._rounds = DeficitRoundRobin([c.weight for c in classes], quantum)
        self._counters = [VirtualCounters(rules.max_idle_tenants) for _ in classes]
        self._waiting: list[Counter[str]] = [Counter() for _ in classes]
        """Per class and tenant; no zeros."""
        self._has_caps = any(
            r.max_running is not None or r.max_kv_tokens is not None for r in self._tenants.all
        )
        self._has_kv_caps = any(r.max_kv_tokens is not None for r in self._tenants.all)
        self._held_back: set[int] = set()
        self._throttled = dict.fromkeys(("queue", "running", "kv"), 0)
        self._class_tokens = [[0, 0] for _ in classes]
        self._tenant_tokens: dict[str, list[int]] = {
            tenant: [0, 0, 0] for tenant in self._tenants.named
        }

    def class_of(self, seq: Seq) -> int:
        return self._number.get(seq.req.priority_class, self._middle)

    def label(self, seq: Seq) -> str:
        """The class's name."""
        return self._names[self.class_of(seq)]

    def tenant_of(self, req: ValidatedRequest) -> str:
        return req.tenant if self._rules.tenants is not None else ""

    def _rule(self, tenant: str) -> TenantRule:
        """Requests without a tenant, such as the node's own health probes, have no limits."""
        return self._tenants.of(tenant) if tenant else _NO_LIMITS

    # ------------------------------------------------------------------ the queue (waiting_queue.WaitingQueue)

    def check(self, req: ValidatedRequest, retry_secs: int = 1) -> None:
        """Raises what keeps a request out of the queue: TenantQueueFull, or PromptTooLong for its tenant's KV limit."""
        tenant = self.tenant_of(req)
        rule = self._rule(tenant)
        if rule.max_kv_tokens is not None and len(req.prompt) + 1 > rule.max_kv_tokens:
            raise PromptTooLong(
                f"prompt has {len(req.prompt)} tokens, tenant {tenant!r} may hold {rule.max_kv_tokens}; shorten it or "
                "raise the tenant's max_kv_tokens"
            )
        waiting = sum(waiting.get(tenant, 0) for waiting in self._waiting)
        if rule.max_queued is not None and waiting >= rule.max_queued:
            self._throttled["queue"] += 1
            raise TenantQueueFull(
                f"{waiting} requests of tenant {tenant!r} are waiting, its limit is {rule.max_queued}; retry after "
                f"{retry_secs} s or raise the tenant's max_queued",
                param="tenant",
                retry_after_secs=retry_secs,
            )

    def entered(self, seq: Seq) -> None:
        c, tenant = self.class_of(seq), self.tenant_of(seq.req)
        self._waiting[c][tenant] += 1
        if self._waiting[c][tenant] == 1:
            self._counters[c].enter(tenant)

    def left(self, seq: Seq) -> None:
        c, tenant = self.class_of(seq), self.tenant_of(seq.req)
        self._held_back.discard(seq.handle)
        self._waiting[c][tenant] -= 1
        if not self._waiting[c][tenant]:
            del self._waiting[c][tenant]
            self._counters[c].leave(tenant)

    # ------------------------------------------------------------------ the order (sharing.SharingStrategy)

    def candidates(self, view: PrefillView) -> Iterator[Seq]:
        """Prompts to compute in this step: the policy orders the requests of each class and tenant."""
        if (first := view.preemptor) is not None:
            yield first
            view.preemptor = None
        order = (
            seq
            for seq in view.order()
            if seq.state is not SeqState.WAITING or not seq.inflight_steps
        )
        yield from self.merge(view, order, view.holders(), view.skip_ahead)
        for seq in view.untried():
            if self._ahead_in_class(seq, view.partial()) < view.max_partial or view.completes(seq):
                yield seq

    def _ahead_in_class(self, seq: Seq, unfinished: Sequence[Seq]) -> int:
        """Unfinished prompts ahead of one that is tried last; 0 if its class has none (as `merge` counts)."""
        own = self.class_of(seq)
        return len(unfinished) if any(self.class_of(other) == own for other in unfinished) else 0

    def openings(
        self, order: Iterable[Seq], holders: Iterable[Seq], skip_ahead: int
    ) -> Iterable[Seq]:
        """D: prompts on their way, in the order in which they should get pages."""
        return self.merge(None, order, holders, skip_ahead)

    def merge(
        self,
        view: PrefillView | None,
        order: Iterable[Seq],
        holders: Iterable[Seq],
        most_skipped: int,
    ) -> Iterator[Seq]:
        """Candidates in the order in which the planner should try them. What it plans must be charged at once.

        Args:
            view: prompts under way, which go before everything else in their class, or (`together`) where `order` has
                them. A request starts only if fewer than its `max_partial` unfinished prompts were handed out before
                it, none of its class, or this step completes it. None: none are under way, nothing limits the others.
            order: those that wait, in the order of the policy.
            holders: every sequence that holds pages now.
            most_skipped: waiting sequences that could not start, per class, after which no further one is handed out.
        """
        class_queues = self._class_queues(view, order, most_skipped)
        ready = {
            c
            for c, class_queue in enumerate(class_queues)
            if class_queue.first or class_queue.tenants
        }
        if not ready:
            self._rounds.settle()
        for idle in set(range(len(class_queues))) - ready:
            self._rounds.leave(idle)
        ahead = 0
        used = self._use(holders)
        is_open = True
        c = 0

        def may_start(seq: Seq) -> bool:
            return is_open and self._fits(seq, used)

        def has_room(seq: Seq) -> bool:
            return (
                view is None
                or ahead < view.max_partial
                or not class_queues[c].ahead
                or view.completes(seq)
            )

        while ready:
            is_open = is_open and (view is None or view.has_slot())
            c = self._rounds.turn(ready) if is_open else self._rounds.least_served(ready)
            seq = None
            if is_open or class_queues[c].first or class_queues[c].pending:
                seq = class_queues[c].next(may_start, has_room)
            if seq is None:
                ready.discard(c)
                if is_open or not self._waiting[c]:
                    self._rounds.leave(c)
                continue
            was = seq.state
            yield seq
            if seq.state is was and was is not SeqState.RUNNING:
                class_queues[c].skip(self.tenant_of(seq.req))  # no pages for it: others may pass
                continue
            if was is not SeqState.RUNNING and seq.state in _HOLDING:
                self._count(seq, used)
            is_ahead = seq.state is SeqState.RUNNING and is_partial(seq)
            ahead += is_ahead
            class_queues[c].ahead += is_ahead

    def heads(self, waiting: Iterable[Seq], holders: Iterable[Seq], count: int) -> Iterator[Seq]:
        """The waiting sequences that should be tried first. Changes nothing, once it is exhausted or closed."""
        saved = self._rounds.saved()
        try:
            yield from itertools.islice(self.merge(None, waiting, holders, count), count)
        finally:
            self._rounds.restore(saved)

    def _class_queues(
        self, view: PrefillView | None, order: Iterable[Seq], most_skipped: int
    ) -> list[_ClassQueue]:
        source = iter(order)
        class_queues: list[_ClassQueue] = []

        def pull(c: int, tenant: str) -> bool:
            for seq in source:
                home, owner = self.class_of(seq), self.tenant_of(seq.req)
                class_queues[home].queues[owner].append(seq)
                if home == c and owner == tenant:
                    return True
            return False

        for c, (counters, waiting) in enumerate(zip(self._counters, self._waiting, strict=True)):
            class_queues.append(
                _ClassQueue(counters, waiting, functools.partial(pull, c), most_skipped)
            )
        for seq in view.unfinished if view is not None else ():
            class_queue = class_queues[self.class_of(seq)]
            if view is not None and view.together:
                class_queue.tenants.setdefault(self.tenant_of(seq.req))
                class_queue.pending += 1
            else:
                class_queue.first.append(seq)
        return class_queues

    def startable(self, seqs: Iterable[Seq], holders: Callable[[], Iterable[Seq]]) -> Iterator[Seq]:
        """Those whose tenants are below their limits."""
        used = self._use(holders())
        return (seq for seq in seqs if self._fits(seq, used))

    def _use(self, holders: Iterable[Seq]) -> dict[str, _Use]:
        used: dict[str, _Use] = {}
        if self._has_caps:
            for seq in holders:
                self._count(seq, used)
        return used

    def _count(self, seq: Seq, used: dict[str, _Use]) -> None:
        use = used.setdefault(self.tenant_of(seq.req), _Use())
        use.running += seq.state in _HOLDING
        if self._has_kv_caps:
            use.kv_tokens += self._kv_tokens(seq)

    def _kv_tokens(self, seq: Seq) -> int:
        """Tokens that a sequence is expected to hold at its end."""
        return len(seq.tokens) + self._answer_tokens(seq)

    def _fits(self, seq: Seq, used: dict[str, _Use]) -> bool:
        """Is its tenant below its limits? One that holds nothing always is: a request may be larger than expected."""
        tenant = self.tenant_of(seq.req)
        use = used.get(tenant)
        if use is None:
            return True
        rule = self._rule(tenant)
        reason = None
        if rule.max_running is not None and use.running >= rule.max_running:
            reason = "running"
        elif (
            rule.max_kv_tokens is not None
            and use.kv_tokens + self._kv_tokens(seq) > rule.max_kv_tokens
        ):
            reason = "kv"
        if reason is not None and seq.handle not in self._held_back:
            self._held_back.add(seq.handle)
            self._throttled[reason] += 1
        return reason is None

    # ------------------------------------------------------------------ the accounts

    def charge_prompt(self, seq: Seq, computed: int, cached: int) -> None:
        """`computed` prompt tokens were planned (D: will be fetched), `cached` were found when the request started."""
        rules, c, tenant = self._rules, self.class_of(seq), self.tenant_of(seq.req)
        self._rounds.charge(c, computed)
        amount = (
            rules.prompt_token_weight * computed
            + rules.cached_token_weight * rules.prompt_token_weight * cached
        )
        self._counters[c].charge(tenant, amount / self._rule(tenant).weight)
        self._class_tokens[c][0] += computed
        tokens = self._tokens_of(tenant)
        tokens[0] += computed
        tokens[1] += cached

    def charge_generated(self, seq: Seq) -> None:
        """Charge one generated token."""
        c, tenant = self.class_of(seq), self.tenant_of(seq.req)
        if self._rules.charge_decode:
            self._rounds.charge(c, 1)
        self._counters[c].charge(
            tenant, self._rules.output_token_weight / self._rule(tenant).weight
        )
        self._class_tokens[c][1] += 1
        self._tokens_of(tenant)[2] += 1

    def _tokens_of(self, tenant: str) -> list[int]:
        known, tenant = self._tenant_tokens, tenant or INTERNAL
        if tenant not in known:
            tenant = tenant if len(known) < MAX_LABELS + len(self._tenants.named) else OTHER
        return known.setdefault(tenant, [0, 0, 0])

    # ------------------------------------------------------------------ reports

    def gauges(self) -> dict[str, float]:
        if not self._rules.classes.classes:
            return {}
        return {
            f'class_waiting{{class="{name}"}}': float(self._waiting[c].total())
            for name, c in self._number.items()
        }

    def counters(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._rules.classes.classes:
            for name, c in self._number.items():
                for kind, tokens in zip(
                    ("prompt", "generated"), self._class_tokens[c], strict=True
                ):
                    values[f'class_tokens_total{{class="{name}",kind="{kind}"}}'] = tokens
        if self._rules.tenants is not None:
            for tenant, counts in self._tenant_tokens.items():
                for kind, tokens in zip(("prompt", "cached", "generated"), counts, strict=True):
                    values[f'tenant_tokens_total{{tenant="{tenant}",kind="{kind}"}}'] = tokens
            for reason, count in self._throttled.items():
                values[f'tenant_throttled_total{{reason="{reason}"}}'] = count
            values["tenants_forgotten_total"] = sum(
                counters.forgotten for counters in self._counters
            )
        return values
