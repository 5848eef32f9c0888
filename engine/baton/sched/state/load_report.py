"""Load of a rank: routers choose a rank by it, without a coordinator.

The work that waits is reported by band of the order key, so that a router can ask how many tokens a
new request would wait behind: those of running requests (`started_tokens`), and of requests that
wait in its band or a more important one. Its own band counts whole, because its requests arrived
earlier. So the sum is exact but for those of its band that are less important than it, and for
changes since the report.

With priorities a band holds the requests with a present priority, aging included, that lies in it
(sched.queue.priority_buckets). Priorities that age at the same rate everywhere order requests of
different ranks consistently: P + R * (now - t0) orders like the constant P - R * t0, and t0 is
stamped once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from baton.cache.group_pages import GroupUsage
from baton.sched.policies.base import cached_tokens
from baton.sched.queue.priority_buckets import BANDS, DEFAULT, band
from baton.sched.state.tables import SchedulerState
from baton.sched.types.sequence import wants_row

NEW_PROBES = 64
"""10 us each for prompts of 1000 tokens."""


@dataclass(slots=True)
class WaitingLoad:
    requests: int = 0
    tokens: int = 0
    """Tokens to compute for their first tokens: prompts, and answers of those sent back, less what
    is cached.
    """


@dataclass(frozen=True, slots=True)
class LoadReport:
    """State of a rank at one moment. Tokens count KV slots; pages hold `page_size` of them."""

    bands: dict[str, WaitingLoad]
    """Waiting requests by band of the order key, most important first; bands without any are left
    out.
    """
    classes: dict[str, WaitingLoad]
    """The same requests by class (--priority-classes; without them the bands of the priorities as
    given).
    """
    queued_requests: int
    queued_prompt_tokens: int
    queued_tokens: int
    """Sum of `tokens` over the bands."""
    started_tokens: int
    """Prompt tokens still to compute for requests that run already."""
    running_requests: int
    running_tokens: int
    """Tokens of running requests, computed or not."""
    transfer_requests: int
    """D: prompts whose pages are on their way."""
    leased_requests: int
    """P: prompts whose pages wait for D."""
    suspended_requests: int
    slots_free: int
    pages_free: int
    pages_evictable: int
    pages: int
    page_size: int
    further_pages: dict[str, GroupUsage]
    """Those of `pages` that further page groups take, by the groups' kind; empty where the model
    has one group."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Measured, smoothed; 0 before the first step with decode rows."""


def measure_load(state: SchedulerState) -> LoadReport:
    """Looks at every waiting request.

    What of it is cached is what the last look into the tree found: the queue order's or, at most
    NEW_PROBES times per report, one of our own.
    """
    rule = state.limits.priority
    index = state.memory.cache
    now = state.now
    probes = NEW_PROBES
    by_band: dict[str, WaitingLoad] = defaultdict(WaitingLoad)
    by_class: dict[str, WaitingLoad] = defaultdict(WaitingLoad)
    waiting = [*state.waiting, *state.opening]
    for seq in waiting:
        if seq.probe is None and probes:
            probes -= 1
            cached_tokens(seq, index)
        cached = seq.computed or (seq.probe.num_tokens if seq.probe is not None else 0)
        tokens = seq.total_len - cached
        name = band(-rule.key(seq, now)) if rule.enabled else DEFAULT
        for entry in (by_band[name], by_class[state.stats.class_of(seq)]):
            entry.requests += 1
            entry.tokens += tokens
    running = state.running.values()
    return LoadReport(
        bands={name: by_band[name] for name in BANDS if name in by_band},
        classes=dict(by_class),
        queued_requests=len(waiting),
        queued_prompt_tokens=sum(seq.prompt_len for seq in waiting),
        queued_tokens=sum(entry.tokens for entry in by_band.values()),
        started_tokens=sum(
            seq.extend_tokens for seq in running if not seq.is_decoding and wants_row(seq)
        ),
        running_requests=len(state.running),
        running_tokens=sum(seq.total_len for seq in running),
        transfer_requests=len(state.transfer),
        leased_requests=len(state.leased),
        suspended_requests=len(state.suspended),
        slots_free=len(state.slots),
        pages_free=state.memory.allocator.free_count,
        pages_evictable=index.evictable_pages,
        pages=state.limits.num_pages,
        page_size=state.limits.page_size,
        further_pages=state.memory.further_usage(state.seqs.values()),
        prefill_tokens_per_s=state.times.prefill_rate,
        decode_tokens_per_s=state.stats.decode_rate,
    )
