"""Fair order of candidates: classes by weight, their tenants by tokens got, then the policy.

    candidates ──▶ class ──▶ prompts in progress, in the order of the policy
    (policy order)      └▶ tenant ──▶ its requests, in the order of the policy (priority first)

`_merge` hands the candidates out one by one: sched.fairness.classes says which class has the turn,
sched.fairness.tenants which of its tenants has had least. The planner charges the tokens that it
plans for a candidate before it sends the outcome and gets the next one.

* A tenant at its limit (`max_running`, `max_kv_tokens`) is skipped with everything it has waiting;
  others pass.
* A candidate for which there are no pages is passed over: other tenants of its class follow, then
  its own tenant's later requests, then other classes. The planner keeps pages for it
  (planner/reservation.py), so that those that pass cannot keep it out for ever. A class has no turn
  while all of its requests lack pages.
* Recomputed tokens (after a retraction or preemption) are charged again: they are work. Tokens
  found in the cache cost a class nothing and a tenant `cached_token_weight` of computed ones. On D,
  fetched prompt tokens count as computed.
* With one class and no tenants the order is the policy's own.

Cost per step: the policy's order is read up to the requests that are handed out; nothing where
fairness is off (sharing.SharingStrategy).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from baton.config.classes import ClassRules, PriorityClass
from baton.config.tenants import INTERNAL, OTHER, TenantRules
from baton.errors import PromptTooLong, TenantQueueFull
from baton.sched.fairness.class_queue import CandidatePool, StartRule
from baton.sched.fairness.classes import DeficitRoundRobin
from baton.sched.fairness.sharing import PrefillProgress, SharingStrategy
from baton.sched.fairness.tenant_usage import TenantLimits, TenantUsage
from baton.sched.fairness.tenants import VirtualCounters
from baton.sched.types.candidates import (
    CandidatePlanned,
    CandidateRefused,
    Candidates,
    PrefillContext,
    refuse_each,
)
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState, partial_of

MAX_LABELS = 100
"""Tenants with a metric label of their own, besides those named in the tenant file.

Later ones are `other`.
"""


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

    def place_request(
        self, tenant: str, requested_class: str | None, priority: int | None
    ) -> tuple[int | None, str]:
        """Priority and class of a request, clamped into its tenant's range and class.

        A request that states no class has its tenant's, else the one of its priority.
        `requested_class` must be a class's name.
        """
        tenants = self.tenants or TenantRules()
        rule = tenants.rule_of(tenant)
        priority = rule.clamp_priority(priority, self.classes.low_values_first)
        # Without --priority-classes all requests are in one class, which has no name.
        if not self.classes.classes:
            return priority, ""
        if requested_class is None:
            return priority, rule.priority_class or self.classes.of_priority(priority)
        # A tenant's class is the best its requests may have: stating a better one gains nothing.
        if rule.priority_class is None:
            return priority, requested_class
        return priority, self.classes.no_better(requested_class, rule.priority_class)


class FairQueue(SharingStrategy):
    """The accounts of one rank.

    Args:
        quantum: tokens per turn of the class with the largest weight.
        answer_tokens: tokens that a request is expected to still generate.
        holders: returns every sequence that holds pages now.
    """

    orders_requests = True

    def __init__(
        self,
        rules: FairnessRules,
        quantum: int,
        answer_tokens: Callable[[Seq], int],
        holders: Callable[[], Iterable[Seq]],
    ) -> None:
        classes = rules.classes.classes or (PriorityClass(""),)
        self._rules = rules
        self._limits = TenantLimits(rules.tenants, answer_tokens)
        self._holders = holders
        self._names = [cls.name for cls in classes]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._middle = 0
        """Number of the class of requests that state none."""
        if rules.classes.classes:
            self._middle = self._number[rules.classes.of_tier("default")]
        self._rounds = DeficitRoundRobin([cls.weight for cls in classes], quantum)
        self._counters = [VirtualCounters(rules.max_idle_tenants) for _ in classes]
        self._waiting: list[Counter[str]] = [Counter() for _ in classes]
        """Waiting requests per class and tenant; no zeros."""
        self._class_tokens = [[0, 0] for _ in classes]
        self._tenant_tokens: dict[str, list[int]] = {
            tenant: [0, 0, 0] for tenant in self._limits.rules.named
        }

    def class_of(self, seq: Seq) -> int:
        return self._number.get(seq.req.priority_class, self._middle)

    def label_of(self, seq: Seq) -> str:
        """The class's name."""
        return self._names[self.class_of(seq)]

    def _place_of(self, seq: Seq) -> tuple[int, str]:
        """Class number and tenant."""
        return self.class_of(seq), self._limits.tenant_of(seq.req)

    # ------------------------------------------------------------------ the queue (WaitingQueue)

    def check_request(self, req: ValidatedRequest, retry_secs: int = 1) -> None:
        """Raise an error for a request that may not join the queue.

        Raises:
            TenantQueueFull: its tenant's limit of waiting requests is reached.
            PromptTooLong: it exceeds its tenant's limit of KV tokens.
        """
        tenant = self._limits.tenant_of(req)
        rule = self._limits.rule_of(tenant)
        # In the queue it would wait for ever: its tenant's limit never lets it start.
        if rule.max_kv_tokens is not None and len(req.prompt) + 1 > rule.max_kv_tokens:
            raise PromptTooLong(
                f"prompt has {len(req.prompt)} tokens, "
                f"tenant {tenant!r} may hold {rule.max_kv_tokens}; "
                "shorten it or raise the tenant's max_kv_tokens"
            )
        num_waiting = sum(waiting.get(tenant, 0) for waiting in self._waiting)
        if rule.max_queued is not None and num_waiting >= rule.max_queued:
            self._limits.throttled["queue"] += 1
            raise TenantQueueFull(
                f"{num_waiting} requests of tenant {tenant!r} are waiting, "
                f"its limit is {rule.max_queued}; "
                f"retry after {retry_secs} s or raise the tenant's max_queued",
                param="tenant",
                retry_after_secs=retry_secs,
            )

    def on_queued(self, seq: Seq) -> None:
        number, tenant = self._place_of(seq)
        self._waiting[number][tenant] += 1
        # A tenant that returns starts at the least counter of those that wait: idle time gives no
        # credit.
        if self._waiting[number][tenant] == 1:
            self._counters[number].activate(tenant)

    def on_dequeued(self, seq: Seq) -> None:
        number, tenant = self._place_of(seq)
        self._limits.on_dequeued(seq)
        self._waiting[number][tenant] -= 1
        # Plans visit every tenant with an entry; without requests it would cost them time.
        if not self._waiting[number][tenant]:
            del self._waiting[number][tenant]
            self._counters[number].deactivate(tenant)

    # ------------------------------------------------------------------ the order (SharingStrategy)

    def order_prefill(self, context: PrefillContext) -> Candidates:
        """Prompts to compute in this step; the policy orders those of each class and tenant."""
        progress = PrefillProgress(context)
        # Others were preempted for this one: the turn of another class could use its slot.
        if context.preemptor is not None:
            outcome = yield context.preemptor
            progress.record(context.preemptor, outcome)
        order = (
            seq
            for seq in context.queries.order_candidates(context)
            # A retracted request waits until the row in flight has brought its token.
            if seq.state is not SeqState.WAITING or not seq.inflight_steps
        )
        pool = self._make_pool(order, context.skip_ahead)
        for seq in context.unfinished:
            pool.add_unfinished(seq, is_in_order=context.reorders_unfinished)
        yield from self._merge(pool, progress)
        reserved = progress.untried_reservation()
        # The limits of its tenant hold for the reserved request as well.
        if reserved is None or not any(self.filter_startable([reserved])):
            return
        unfinished = partial_of([*context.unfinished, *progress.admitted])
        num_ahead = self._count_ahead(reserved, unfinished)
        # --max-partial-prefills holds for it, too.
        if progress.may_start(reserved, num_ahead):
            yield reserved

    def _count_ahead(self, seq: Seq, unfinished: list[Seq]) -> int:
        """Unfinished prompts ahead of a request that is tried last.

        0 if its class has none, so that each class has a prompt in progress, as in `_merge`.
        """
        number = self.class_of(seq)
        if any(self.class_of(other) == number for other in unfinished):
            return len(unfinished)
        return 0

    def order_transfers(self, waiting: Iterable[Seq], skip_ahead: int) -> Candidates:
        # `yield from`, not `return`: the pool is made when the first candidate is asked for,
        # because the queue may change until then.
        yield from self._merge(self._make_pool(waiting, skip_ahead), progress=None)

    def preview_order(self, waiting: Iterable[Seq], count: int) -> Iterator[Seq]:
        # Asking for candidates passes turns on, and a preview computes none of them.
        saved = self._rounds.save()
        try:
            candidates = self._merge(self._make_pool(waiting, count), progress=None)
            yield from itertools.islice(refuse_each(candidates), count)
        finally:
            self._rounds.restore(saved)

    def _make_pool(self, order: Iterable[Seq], most_skipped: int) -> CandidatePool:
        """Queues of all classes for one plan.

        Args:
            order: those that wait, in the order of the policy.
            most_skipped: waiting sequences that could not start, per class, after which no further
                one is handed out.
        """
        pool = CandidatePool(order, self._place_of)
        for counters, waiting in zip(self._counters, self._waiting, strict=True):
            pool.add_class(counters, waiting, most_skipped)
        return pool

    def _merge(self, pool: CandidatePool, progress: PrefillProgress | None) -> Candidates:
        """Candidates in the order in which they should be tried.

        Args:
            progress: limits of the plan. A request starts only if fewer than its
                `max_partial_prefills` unfinished prompts were handed out before it, none of its
                class, or this step completes it. None: nothing limits requests but their tenants.
        """
        ready = pool.ready_classes()
        self._leave_idle_classes(pool, ready)
        usage = TenantUsage(self._limits, self._holders())
        rule = StartRule(usage, progress)
        while ready:
            # Without a slot only prompts in progress follow: reading the queue would be in vain.
            if progress is not None and not progress.may_admit:
                rule.is_open = False
            if rule.is_open:
                number = self._rounds.next_turn(ready)
            else:
                # The turn stays where it is: a class whose requests lack a slot keeps it for them.
                number = self._rounds.least_served(ready)
            class_queue = pool.classes[number]
            seq: Seq | None = None
            # A closed plan reads no further than the last prompt in progress of the class.
            if rule.is_open or class_queue.first or class_queue.pending:
                seq = class_queue.next_candidate(rule)
            if seq is None:
                ready.discard(number)
                # A class without work loses its credit; one whose requests lack a slot keeps it.
                if rule.is_open or not self._waiting[number]:
                    self._rounds.leave(number)
                continue
            outcome = yield seq
            if progress is not None:
                progress.record(seq, outcome)
            # The other tenants of the class follow: one large request delays none of them.
            if isinstance(outcome, CandidateRefused):
                class_queue.skip_tenant(self._limits.tenant_of(seq.req))
            elif isinstance(outcome, CandidatePlanned):
                # The limits of a tenant count what this very plan has admitted.
                if outcome.was_admitted:
                    usage.add(seq)
                rule.num_ahead += outcome.is_unfinished
                class_queue.num_ahead += outcome.is_unfinished

    def _leave_idle_classes(self, pool: CandidatePool, ready: set[int]) -> None:
        """Void the credit of classes with nothing to compute; all accounts if no class has any."""
        # With nothing to compute there is no debt either: a class that was alone owes nothing.
        if not ready:
            self._rounds.settle()
        for number in range(len(pool.classes)):
            # Idle time gives no credit: a class that returns would starve the others with it.
            if number not in ready:
                self._rounds.leave(number)

    def filter_startable(self, seqs: Iterable[Seq]) -> Iterator[Seq]:
        usage = TenantUsage(self._limits, self._holders())
        return (seq for seq in seqs if usage.has_room_for(seq))

    # ------------------------------------------------------------------ the accounts

    def charge_prompt(self, seq: Seq, computed: int, cached: int) -> None:
        rules = self._rules
        number, tenant = self._place_of(seq)
        self._rounds.charge(number, computed)
        computed_cost = rules.prompt_token_weight * computed
        cached_cost = rules.cached_token_weight * rules.prompt_token_weight * cached
        cost = computed_cost + cached_cost
        self._counters[number].charge(tenant, cost / self._limits.rule_of(tenant).weight)
        self._class_tokens[number][0] += computed
        tokens = self._tokens_of(tenant)
        tokens[0] += computed
        tokens[1] += cached

    def charge_generated(self, seq: Seq) -> None:
        number, tenant = self._place_of(seq)
        # --disable-class-charge-decode: long answers cost their class no prompt tokens.
        if self._rules.charge_decode:
            self._rounds.charge(number, 1)
        cost = self._rules.output_token_weight
        self._counters[number].charge(tenant, cost / self._limits.rule_of(tenant).weight)
        self._class_tokens[number][1] += 1
        self._tokens_of(tenant)[2] += 1

    def _tokens_of(self, tenant: str) -> list[int]:
        """Prompt, cached and generated tokens of a tenant, under its metric label."""
        tokens = self._tenant_tokens
        label = tenant or INTERNAL
        most_labels = MAX_LABELS + len(self._limits.rules.named)
        # Clients choose the names of tenants: without a bound the metrics would grow for ever.
        if label not in tokens and len(tokens) >= most_labels:
            label = OTHER
        return tokens.setdefault(label, [0, 0, 0])

    # ------------------------------------------------------------------ reports

    def gauges(self) -> dict[str, float]:
        if not self._rules.classes.classes:
            return {}
        return {
            f'class_waiting{{class="{name}"}}': float(self._waiting[number].total())
            for name, number in self._number.items()
        }

    def counters(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._rules.classes.classes:
            for name, number in self._number.items():
                prompt, generated = self._class_tokens[number]
                values[f'class_tokens_total{{class="{name}",kind="prompt"}}'] = prompt
                values[f'class_tokens_total{{class="{name}",kind="generated"}}'] = generated
        if self._rules.tenants is not None:
            for tenant, counts in self._tenant_tokens.items():
                for kind, tokens in zip(("prompt", "cached", "generated"), counts, strict=True):
                    values[f'tenant_tokens_total{{tenant="{tenant}",kind="{kind}"}}'] = tokens
            for reason, count in self._limits.throttled.items():
                values[f'tenant_throttled_total{{reason="{reason}"}}'] = count
            values["tenants_forgotten_total"] = sum(
                counters.num_forgotten for counters in self._counters
            )
        return values
