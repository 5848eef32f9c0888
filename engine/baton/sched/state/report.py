"""Read-only views of a rank's scheduler, for metrics, routers, the priority hook and the log.

The page ledger is `Scheduler.ledger`, because counting it also checks the books.
"""

from __future__ import annotations

from array import array

from baton.cache.kv_events import Stored
from baton.sched.metrics.step_log import StepLog
from baton.sched.policies.base import tokens_to_compute
from baton.sched.queue.priority_hook import LoadView, RequestView
from baton.sched.state.load_report import LoadReport, measure_load
from baton.sched.state.tables import SchedulerState
from baton.sched.types.sequence import Seq

DUMPED_DECISIONS = 20
"""Decisions in the dump of a scheduler whose page ledger does not balance."""


class SchedulerReport:
    """Views of one scheduler's state; no method changes it."""

    def __init__(self, state: SchedulerState, decisions: StepLog) -> None:
        self._state = state
        self._decisions = decisions

    def answering(self) -> list[Seq]:
        """Running sequences whose answers have begun, to be read."""
        return [seq for seq in self._state.running.values() if len(seq.tokens) > seq.prompt_len]

    @property
    def page_generations(self) -> array[int]:
        """By page of the pool: how often it has been handed out, to be read."""
        return self._state.memory.allocator.generations

    def load(self) -> LoadReport:
        """Load report for routers."""
        return measure_load(self._state)

    def counters(self) -> dict[str, float]:
        """Counters for metrics, since the start, beside those of `stats`, `sharing` and
        `decisions`.
        """
        state = self._state
        queues = (state.waiting, state.opening)
        counts = state.admission.turned_away.items()
        sources = state.memory.hit_tokens.items()
        return {
            **{f'queue_turned_away_total{{reason="{reason}"}}': count for reason, count in counts},
            **{
                f'cached_prompt_tokens_by_source_total{{source="{source}"}}': tokens
                for source, tokens in sources
            },
            "retractions_total": state.retractions,
            "preemptions_total": state.preemptions,
            "suspensions_total": state.suspensions,
            "schedule_policy_degraded_total": sum(queue.policy.degraded_total for queue in queues),
            "kv_quarantined_pages_total": state.memory.quarantined_pages,
        }

    def gauges(self) -> dict[str, float]:
        """Gauges for metrics, beside those of `stats` and `sharing`.

        The queue order in force has 1; the configured one has 0 while another is in force.
        """
        policy = self._state.arrival_policy
        active = {policy.name: 0.0, policy.active: 1.0}
        further = self._state.memory.further_usage(self._state.seqs.values())
        return {
            **{
                f'kv_further_pages{{kind="{kind}",state="{state}"}}': float(pages)
                for kind, usage in further.items()
                for state, pages in (("held", usage.held), ("cached", usage.cached))
            },
            **{
                f'requests{{state="{state}"}}': float(count)
                for state, count in self.counts().items()
            },
            **{
                f'schedule_policy_active{{policy="{name}"}}': value
                for name, value in active.items()
            },
            "new_token_ratio": self._state.memory.ratio.value,
            "max_running_requests": float(self._state.limits.max_running_requests),
        }

    def cached_blocks(self) -> list[Stored]:
        """Everything announced and not removed since, parents first. O(pages)."""
        if self._state.memory.kv_events is None:
            return []
        return self._state.memory.kv_events.snapshot(self._state.memory.cache.edges())

    def counts(self) -> dict[str, int]:
        """Requests by state."""
        state = self._state
        return {
            "waiting": len(state.waiting),
            "opening": len(state.opening),
            "transfer": len(state.transfer),
            "running": len(state.running),
            "suspended": len(state.suspended),
            "leased": len(state.leased),
            "aborting": len(state.closing),
        }

    def oldest_arrival(self) -> float | None:
        """When the oldest request that is not over arrived, leased ones included; None: there is
        none.
        """
        return min((seq.req.arrival for seq in self._state.seqs.values()), default=None)

    def request_view(self, handle: int, now: float) -> RequestView | None:
        """View of a waiting request for a hook; None: it is unknown, or does not wait now."""
        state = self._state
        seq = state.seqs.get(handle)
        if seq is None:
            return None
        if seq not in state.waiting and seq not in state.opening:
            return None
        return RequestView(
            id=seq.req.rid,
            priority=self._state.limits.priority.base(seq),
            priority_class=seq.req.priority_class,
            tenant=seq.req.tenant,
            wait_secs=now - seq.req.arrival,
            work_tokens=tokens_to_compute(seq, state.policy_context()),
            answer_tokens=state.memory.ratio.estimate(seq.max_new_tokens - seq.generated),
            generated_tokens=seq.generated,
            preemptions=seq.preemptions,
        )

    def load_view(self) -> LoadView:
        state = self._state
        waiting = len(state.waiting) + len(state.opening)
        return LoadView(
            waiting, len(state.running), state.memory.available, state.times.prefill_rate
        )

    def dump(self) -> dict[str, object]:
        """Pages by owner, and the last decisions: for the log when the page ledger does not
        balance.
        """
        memory = self._state.memory
        return {
            "free": memory.allocator.free_count,
            "evictable": memory.cache.evictable_pages,
            "locked": memory.cache.locked_pages,
            "capacity": self._state.limits.num_pages,
            "requests": [
                {
                    "rid": seq.req.rid,
                    "state": seq.state.value,
                    "pages": seq.pages.tolist(),
                    "private": sorted(seq.private),
                    "published": seq.published,
                }
                for seq in self._state.seqs.values()
            ],
            "decisions": self._decisions.recent(DUMPED_DECISIONS),
        }
