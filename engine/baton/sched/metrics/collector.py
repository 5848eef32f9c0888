"""Statistics of the scheduler: requests that wait too long or gave way, and the cost of that.

The scheduler calls one hook per event; `counters`, `gauges` and `histograms` render the sums under
the names of docs/metrics.md. Nothing here influences a decision.

1. `on_queued`: a request waits, for the first time or again (retracted, preempted).
2. `on_admitted`: its next row is planned. Waiting time and overtaking are observed once, at the
   first admission.
3. `on_suspended`, `on_step`, `on_first_token`: on its way.
4. `on_ended`: forgotten.

The same hooks write the timelines of traced requests (sched.types.request_timeline); with none of
them traced that costs nothing.

A request is *overtaken* when one that arrived later is admitted (for the first time) before it. It
is *starving* while it waits for longer than the threshold and has been overtaken; it counts once in
priority_starvation.

Cost: O(log n) per admission in the number of waiting requests; per step one set of the step's
handles, and of the waits that have become too long at most MAX_DUE_PER_PLAN: those of a burst are
counted over several steps.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from baton.sched.metrics.bypass_counter import BypassCounter, Key
from baton.sched.metrics.histogram import (
    GAP_BUCKETS,
    REQUEST_BUCKETS,
    SLACK_BUCKETS,
    STAGE_BUCKETS,
    Histogram,
)
from baton.sched.metrics.step_time import StepTime
from baton.sched.types.plan import StepPlan
from baton.sched.types.request_timeline import FirstTokenStages, PulledPages, RequestTimeline
from baton.sched.types.sequence import Seq, SeqState

RATE_SMOOTHING = 0.1
MAX_DUE_PER_PLAN = 256
"""Waits that a plan finds to have become too long: some 0.7 ms."""

REQUEUE_EVENTS = {
    "memory": "retracted",
    "priority": "preempted",
    "slots": "preempted",
    "admin": "suspended",
    "checksum": "retracted",
}
"""Name in a timeline, by reason."""


@dataclass(slots=True)
class _RequestStats:
    """Times and counts of a live request."""

    cls: str
    key: Key
    since: float
    """When it began to wait, this time."""
    waits: bool = True
    was_admitted: bool = False
    is_starving: bool = False
    has_starved: bool = False
    lost_tokens: int = 0
    """Tokens whose KV it had when it was sent back."""
    queue_seconds: float = 0.0
    """From arrival to the first admission."""
    pulled: PulledPages | None = None


class SchedStats:
    """Build with the wait [s] beyond which an overtaken request starves, and what labels a request
    in metrics.
    """

    def __init__(self, starvation_secs: float, class_of: Callable[[Seq], str]) -> None:
        self._starvation_secs = starvation_secs
        self.class_of = class_of
        self._request_stats: dict[int, _RequestStats] = {}
        self._order = BypassCounter()
        self._due: list[tuple[float, int]] = []
        """(when the wait gets too long, handle): a heap; entries of waits that are over stay until
        their time.
        """
        self._overdue: list[tuple[Key, int]] = []
        """(arrival, handle) of those that wait too long and were not overtaken yet: a heap."""
        self._last_step: set[int] = set()
        """Handles that got a token from the step committed last, at `_last_step_at`."""
        self._last_step_at = 0.0
        self._last_token_at: dict[int, float] = {}
        """Requests that were not in the last step."""
        self.now = 0.0
        """Time as far as it has come, for hooks without a time argument."""
        self._timelines: dict[int, RequestTimeline] = {}
        """Timelines of traced requests that live."""
        self._unread = RequestTimeline(-1, b"", 0)
        """Timeline of all the others."""
        self.queued: Counter[str] = Counter()
        """Waiting requests by class."""
        self.starving: Counter[str] = Counter()
        self.starved: Counter[str] = Counter()
        self.suspensions: Counter[tuple[str, str, str]] = Counter()
        """(class, class it gave way to, reason) → requests sent back to the queue."""
        self.requeued: list[tuple[int, str]] = []
        """(handle, reason) since the last record of a decision, which clears it."""
        self.decode_rate = 0.0
        """Tokens of decode rows per second of steps that had some, smoothed."""
        self.recomputed_tokens = 0
        self.draft_rows = 0
        self.draft_tokens = 0
        self.drafts_drawn: Counter[int] = Counter()
        """How often the draft at each place of a row was the token drawn."""
        self._drafts_drawn_in_step = 0
        self.draft_seconds = {"saved": 0.0, "spent": 0.0}
        self.deadlines_missed = {"ttft": 0, "total": 0}
        self.waiting_time = defaultdict[str, Histogram](lambda: Histogram(STAGE_BUCKETS))
        self.overtaken = Histogram(REQUEST_BUCKETS)
        self.decode_stall = Histogram(GAP_BUCKETS)
        self.deadline_slack = Histogram(SLACK_BUCKETS)
        self.pull_durations = defaultdict[str, Histogram](lambda: Histogram(STAGE_BUCKETS))
        """D: durations of pulls by transport."""
        self._leased_at: dict[int, float] = {}
        """P: start of each live lease by handle, in the order in which the leases began."""

    def timeline_of(self, seq: Seq) -> RequestTimeline:
        """Timeline of a traced request, to be written; for any other request one that is never
        read.
        """
        return self._timelines.get(seq.handle, self._unread)

    # ------------------------------------------------------------------ waiting

    def on_queued(self, seq: Seq, now: float) -> None:
        """A request waits; one that waits already (an admission was taken back) keeps its place."""
        stats = self._request_stats.get(seq.handle)
        if stats is None:
            arrival = seq.req.arrival
            stats = self._request_stats[seq.handle] = _RequestStats(
                self.class_of(seq), (arrival, seq.handle), arrival
            )
            if seq.req.trace:
                self._timelines[seq.handle] = RequestTimeline(
                    seq.handle, seq.req.trace, seq.prompt_len
                )
        elif stats.waits:
            return
        else:
            stats.waits = True
            stats.since = now
            if seq.state is SeqState.OPENING:
                self.timeline_of(seq).add_event(self.now, "revoked", 0)
        self.queued[stats.cls] += 1
        self._order.enter(seq.handle, seq.req.arrival)
        heapq.heappush(self._due, (stats.since + self._starvation_secs, seq.handle))
        if len(self._due) > 1024 + 4 * len(self._request_stats):
            self._due = [entry for entry in self._due if self._is_due(*entry)]
            heapq.heapify(self._due)

    def _is_due(self, time: float, handle: int) -> bool:
        """True if the wait that this entry of `_due` belongs to lasts."""
        stats = self._request_stats.get(handle)
        return stats is not None and stats.waits and stats.since + self._starvation_secs == time

    def on_plan(self, now: float) -> None:
        """Time has come to `now`: who waits too long from here on?"""
        self.now = now
        for _ in range(MAX_DUE_PER_PLAN):
            if not self._due or self._due[0][0] >= now:
                return
            time, handle = heapq.heappop(self._due)
            if not self._is_due(time, handle):
                continue
            stats = self._request_stats[handle]
            if self._order.count(handle):
                self._mark_starving(stats)
            else:
                heapq.heappush(self._overdue, (stats.key, handle))

    def _mark_starving(self, stats: _RequestStats) -> None:
        stats.is_starving = True
        self.starving[stats.cls] += 1
        if not stats.has_starved:
            stats.has_starved = True
            self.starved[stats.cls] += 1

    def on_admitted(self, seq: Seq, now: float) -> None:
        """A waiting request got its row; `seq.computed` tokens of it come from the cache."""
        stats = self._request_stats[seq.handle]
        if stats.was_admitted:
            self._order.leave(seq.handle)
        else:
            stats.was_admitted = True
            self._overtake_overdue(stats.key, now)
            self.overtaken.observe(self._order.admit(seq.handle))
            stats.queue_seconds = max(now - seq.req.arrival, 0.0)
            self.waiting_time[stats.cls].observe(stats.queue_seconds)
        self._stop_waiting(stats)
        timeline = self.timeline_of(seq)
        if timeline.admitted_at is None:
            timeline.admitted_at = now
            timeline.is_transfer = seq.state is SeqState.TRANSFER
        else:
            timeline.add_event(now, "admitted", seq.computed)
        if stats.lost_tokens:
            self.recomputed_tokens += max(stats.lost_tokens - seq.computed, 0)
            stats.lost_tokens = 0

    def _overtake_overdue(self, key: Key, now: float) -> None:
        """Mark requests that wait too long and arrived before `key`: they are overtaken now."""
        while self._overdue and self._overdue[0][0] < key:
            _, handle = heapq.heappop(self._overdue)
            stats = self._request_stats.get(handle)
            # The wait of this entry may be over, and another one have begun.
            if stats is None or not stats.waits or stats.is_starving:
                continue
            if now - stats.since > self._starvation_secs:
                self._mark_starving(stats)

    def _stop_waiting(self, stats: _RequestStats) -> None:
        stats.waits = False
        self.queued[stats.cls] -= 1
        if stats.is_starving:
            stats.is_starving = False
            self.starving[stats.cls] -= 1

    # ------------------------------------------------------------------ running

    def on_suspended(self, seq: Seq, reason: str, by: Seq | None = None) -> None:
        """A request is about to give way, to `by` if to one.

        Args:
            reason: memory (retracted), priority (preempted for its pages), slots (for its slot),
                checksum (a page of it came back damaged from the host), or admin, which takes
                waiting ones too.
        """
        stats = self._request_stats[seq.handle]
        self.timeline_of(seq).add_event(self.now, REQUEUE_EVENTS[reason], seq.computed)
        if stats.waits:
            self.on_withdrawn(seq)
            return
        self.requeued.append((seq.handle, reason))
        other = None if by is None else self._request_stats.get(by.handle)
        self.suspensions[stats.cls, other.cls if other else "", reason] += 1
        stats.lost_tokens = seq.computed

    def on_computed(self, plan: StepPlan, now: float) -> None:
        """A step is done; its tokens have not been handed out yet."""
        self.now = now
        if self._timelines:
            for row in plan.prompt_rows:
                timeline = self._timelines.get(row.handle)
                if timeline is not None:
                    timeline.on_computed(now, row.n)

    def on_step(self, plan: StepPlan, now: float) -> None:
        """A step is committed: how long did running requests wait for its token because of other
        work?

        A gap counts when one of its steps computed prompt tokens or went without the request.
        """
        current = {row.handle for row in plan.rows if row.sample}
        last = self._last_step
        last_at = self._last_step_at
        stayed = len(current)
        if current != last:
            for handle in last - current:
                if handle in self._request_stats:
                    self._last_token_at[handle] = last_at
            for handle in current - last:
                stayed -= 1
                since = self._last_token_at.pop(handle, None)
                if since is not None:
                    self.decode_stall.observe(now - since)
        if stayed and plan.num_answering < len(plan.rows):
            self.decode_stall.observe(now - last_at, stayed)
        self._last_step = current
        self._last_step_at = now

    def on_observed(self, plan: StepPlan, seconds: float, times: StepTime) -> None:
        """How long a step took on the device; it has been committed."""
        rows = plan.num_answering
        tokens = rows + self._drafts_drawn_in_step
        if plan.drafted:
            # So many steps more would have been needed.
            steps = self._drafts_drawn_in_step / rows
            self.draft_seconds["saved"] += steps * times.decode_seconds(rows)
            self.draft_seconds["spent"] += times.draft_seconds(sum(plan.drafted))
        self._drafts_drawn_in_step = 0
        if plan.num_answering and seconds > 0:
            rate = tokens / seconds
            if self.decode_rate:
                self.decode_rate += RATE_SMOOTHING * (rate - self.decode_rate)
            else:
                self.decode_rate = rate

    def on_drafts_made(self, seconds: float) -> None:
        """The device has spent this time on drafts, besides that of the steps that have them."""
        self.draft_seconds["spent"] += seconds

    def on_drafted(self, seq: Seq, drafts: int, drawn: int) -> None:
        """A row with drafts: so many of them, from the first on, were the tokens drawn."""
        self.draft_rows += 1
        self.draft_tokens += drafts
        self._drafts_drawn_in_step += drawn
        for position in range(drawn):
            self.drafts_drawn[position] += 1
        timeline = self.timeline_of(seq)
        timeline.draft_tokens += drafts
        timeline.drafts_drawn += drawn

    def on_first_token(self, seq: Seq, now: float) -> FirstTokenStages:
        """By the step that ended `now`; or, on D, it came with the pages, after the last plan was
        made.
        """
        now = max(now, self.now)
        self.timeline_of(seq).first_token_at = now
        if seq.req.ttft_deadline is not None:
            slack = seq.req.ttft_deadline - now
            self.deadline_slack.observe(slack)
            self.deadlines_missed["ttft"] += slack < 0
        stats = self._request_stats[seq.handle]
        return FirstTokenStages(stats.queue_seconds, stats.pulled)

    def on_pulled(self, seq: Seq, pulled: PulledPages | None) -> None:
        """D: its pages are here."""
        self._request_stats[seq.handle].pulled = pulled
        if pulled is not None:
            self.pull_durations[pulled.transport].observe(pulled.pull_seconds)
        self.timeline_of(seq).pulled = pulled

    def on_leased(self, seq: Seq, pages: int) -> None:
        """P: its prompt is computed, and waits for D."""
        self._leased_at[seq.handle] = self.now
        self.timeline_of(seq).leased_pages = pages

    def on_withdrawn(self, seq: Seq) -> None:
        """A request waits no longer, if it did, and was not admitted."""
        stats = self._request_stats.get(seq.handle)
        if stats is not None and stats.waits:
            self._order.leave(seq.handle)
            self._stop_waiting(stats)

    def on_ended(self, seq: Seq) -> RequestTimeline | None:
        """Returns its timeline, once, if it was traced."""
        self.on_withdrawn(seq)
        self._request_stats.pop(seq.handle, None)
        self._last_token_at.pop(seq.handle, None)
        self._leased_at.pop(seq.handle, None)
        timeline = self._timelines.pop(seq.handle, None)
        if timeline is not None:
            timeline.ended_at = self.now
            timeline.cached_tokens = max(seq.cached_tokens, 0)
            timeline.output_tokens = len(seq.tokens) - seq.prompt_len
            timeline.retractions = seq.retractions
            timeline.preemptions = seq.preemptions
            if seq.finish is not None:
                timeline.finish = seq.finish.name.lower()
        return timeline

    # ------------------------------------------------------------------ reports

    def gauges(self) -> dict[str, float]:
        return {
            **{f'starving_requests{{class="{cls}"}}': float(n) for cls, n in self.starving.items()},
        }

    def oldest_lease_seconds(self, now: float) -> float:
        """Returns the age of the oldest live lease on P; 0 without leases."""
        oldest = next(iter(self._leased_at.values()), now)
        return max(now - oldest, 0.0)

    def counters(self) -> dict[str, float]:
        values = {
            f'priority_starvation_total{{class="{cls}"}}': float(n)
            for cls, n in self.starved.items()
        }
        reasons: Counter[str] = Counter()
        for (cls, by, reason), n in self.suspensions.items():
            values[f'priority_preemption_total{{class="{cls}",by="{by}",reason="{reason}"}}'] = (
                float(n)
            )
            reasons[reason] += n
        for reason, n in reasons.items():
            values[f'request_retraction_reasons_total{{reason="{reason}"}}'] = float(n)
        for kind, n in self.deadlines_missed.items():
            values[f'deadline_missed_total{{kind="{kind}"}}'] = float(n)
        values["recomputed_tokens_total"] = float(self.recomputed_tokens)
        values["spec_decode_num_drafts_total"] = float(self.draft_rows)
        values["spec_decode_num_draft_tokens_total"] = float(self.draft_tokens)
        values["spec_decode_num_accepted_tokens_total"] = float(self.drafts_drawn.total())
        for kind, seconds in self.draft_seconds.items():
            values[f"spec_decode_{kind}_seconds_total"] = seconds
        for position, n in sorted(self.drafts_drawn.items()):
            name = f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
            values[name] = float(n)
        return values

    def histograms(self) -> dict[str, Histogram]:
        return {
            "request_overtaken": self.overtaken,
            "decode_stall_seconds": self.decode_stall,
            "deadline_slack_seconds": self.deadline_slack,
            **{
                f'priority_waiting_time_seconds{{class="{cls}"}}': h
                for cls, h in self.waiting_time.items()
            },
            **{
                f'kv_pull_duration_seconds{{transport="{name}"}}': h
                for name, h in self.pull_durations.items()
            },
        }
