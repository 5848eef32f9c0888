"""Flags about the waiting queue: its order, classes and tenants, priorities, and what is cached for
the requests in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt

QUEUE_ORDERS = (
    "auto",
    "fcfs",
    "lpm",
    "dfs-weight",
    "lof",
    "random",
    "short-first",
    "srpt-aging",
    "hrrn",
    "edf",
)
"""Values of --schedule-policy: auto and the names of sched.policies.POLICIES (a test compares)."""
EVICTION_ORDERS = ("lru", "lfu", "fifo", "mru", "filo", "priority")
"""Values of --radix-eviction-policy: the names of cache.eviction.EVICTION_POLICIES (a test
compares).
"""


@dataclass(frozen=True, kw_only=True)
class OrderFlags:
    HEADING: ClassVar = "order of the queue"

    schedule_policy: str = opt(
        "auto",
        "order of the waiting queue; auto: srpt-aging on a prefill node, fcfs elsewhere",
        choices=QUEUE_ORDERS,
        simulated=False,
    )
    lpm_degrade_threshold: int = opt(
        4096, "lpm turns to fcfs above this many waiting requests; 0: never", ge=0
    )
    lpm_aging_tokens_per_s: float = opt(
        0.0, "lpm: waiting counts as this many cached tokens per second [tokens/s]", ge=0, lt=1e12
    )
    in_batch_prefix_caching_check_threshold: int = opt(
        -1,
        "lpm: a request with at most this many cached tokens goes last if an earlier waiting one "
        "has the same first tokens (SGLang: 32); -1: off, since requests of one step share their "
        "pages anyway [tokens]",
        env="IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
        ge=-1,
    )
    in_batch_prefix_caching_deprioritize_threshold: int = opt(
        32,
        "lpm: number of first tokens that are compared for that [tokens]",
        env="IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
        ge=1,
    )
    short_first_output_weight: str = opt(
        "auto",
        "short-first: share of max_tokens that counts as work; auto: as the engine measures; 0: "
        "prompts only",
    )
    short_first_aging_tokens_per_s: float = opt(
        500.0, "short-first: a waiting request counts as shorter by this [tokens/s]", ge=0, lt=1e12
    )
    srpt_aging: float = opt(
        0.05,
        "srpt-aging: a waiting prompt counts as shorter by this share of the prefill rate",
        ge=0,
        lt=1e12,
    )
    srpt_aging_backlog_secs: float = opt(
        60.0,
        "srpt-aging: with more work than this waiting, aging shrinks in proportion; 0: never "
        "[s of prefill]",
        ge=0,
        lt=1e12,
    )
    default_deadline_ms: int = opt(
        60000, "edf: first-token deadline of requests that state none [ms]", ge=1
    )
    deadline_miss_action: str = opt(
        "demote",
        "for a request that cannot meet its ttft_deadline_ms: demote: edf moves it back by "
        "edf-demotion-secs; keep: it keeps its place; abort: it ends with 504",
        choices=("demote", "keep", "abort"),
    )
    edf_demotion_secs: float = opt(
        300.0,
        "edf: a request that cannot meet its deadline is ordered as if the deadline were this much "
        "later, which bounds its wait behind requests that can [s]",
        ge=0,
        lt=1e12,
    )
    max_partial_prefills: int = opt(
        4,
        "srpt-aging, edf, or with priorities: behind this many unfinished prompts, which hold "
        "pages, a request starts only if one step completes it",
        ge=1,
    )
    admission_skip_ahead: int = opt(
        8,
        "waiting requests without enough pages (or behind max-partial-prefills) that a step may "
        "pass over, per class; pages are kept for the first of them; 0: nothing passes",
        ge=0,
    )


@dataclass(frozen=True, kw_only=True)
class FairnessFlags:
    HEADING: ClassVar = "classes and tenants"

    priority_classes: str | None = opt(
        None,
        "classes that share by weight, most important first: name:weight or "
        "name:weight:min_priority, with commas between, e.g. interactive:8,standard:4,batch:1",
    )
    disable_class_charge_decode: bool = opt(
        False, "generated tokens do not count against their class, only prompts"
    )
    tenant_config: str | None = opt(
        None,
        "JSON file (or the JSON itself) with limits of tenants; the tenants of a class "
        "then share by weight",
    )
    prompt_token_weight: float = opt(
        1.0, "weight of a computed prompt token in its tenant's account", gt=0, le=1e6
    )
    output_token_weight: float = opt(
        2.0, "weight of a generated token in its tenant's account", gt=0, le=1e6
    )
    cached_token_weight: float = opt(
        0.1,
        "weight of a prompt token found in the cache, as a share of a computed one, 0 to 1",
        ge=0,
        le=1,
    )
    max_idle_tenants: int = opt(
        10000,
        "kept accounts of tenants without waiting requests; the longest idle one is dropped",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class PriorityFlags:
    HEADING: ClassVar = "priority and preemption"

    enable_priority_scheduling: bool = opt(
        False, "order by the request field priority first, and preempt for it"
    )
    schedule_low_priority_values_first: bool = opt(
        False, "smaller priority values are more important"
    )
    abort_on_priority_when_disabled: bool = opt(
        False,
        "refuse requests with a priority while the feature is off",
        simulated=False,
    )
    priority_scheduling_preemption_threshold: int = opt(
        10,
        "a waiting request preempts running ones of a priority lower by more than this",
        ge=0,
    )
    default_priority: int | None = opt(
        None,
        "priority of requests that state none (default: below every stated one)",
        ge=1 - 2**31,
        le=2**31 - 1,
    )
    priority_aging_rate: float = opt(
        0.0, "priority gained per second of waiting (order only, never preemption)", ge=0, lt=1e12
    )
    priority_aging_max: float | None = opt(
        None, "most priority that waiting can gain (default: no limit)", ge=0, lt=1e12
    )
    priority_adjustment_function: str | None = opt(
        None,
        "module:callable that may replace a waiting request's priority, called "
        "as fn(request, load)",
        simulated=False,
    )
    priority_adjust_interval_ms: int = opt(
        250,
        "interval of the calls of that function for a waiting request [ms]",
        ge=1,
        le=3_600_000,
        simulated=False,
    )
    preemption_mode: str = opt(
        "cache",
        "a preempted request's KV: recompute drops it, cache keeps it evictable, offload moves it "
        "to the host pool, auto offloads where copying is faster than computing",
        choices=("recompute", "cache", "offload", "auto"),
    )
    max_preemptions_per_request: int = opt(
        8, "after this many preemptions a request is immune", ge=1
    )
    preemption_min_remaining_tokens: int = opt(
        8, "a request with fewer tokens to go is not preempted [tokens]", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class CacheFlags:
    HEADING: ClassVar = "estimates and cache"

    starvation_threshold_ms: int = opt(
        10000,
        "a request waiting for longer, overtaken by later ones, counts as starving in "
        "the metrics [ms]",
        ge=1,
        le=86_400_000,
    )
    schedule_conservativeness: float = opt(
        1.0, "scales the estimate of how much running requests will still generate", gt=0, lt=1e6
    )
    disable_radix_cache: bool = opt(False, "do not reuse KV of equal prompt prefixes")
    radix_eviction_policy: str = opt(
        "lru",
        "which cached prefix goes first when pages run out (docs/scheduling/cache.md)",
        choices=EVICTION_ORDERS,
    )
    kv_events_config: str = opt(
        "",
        "announce cached pages: JSON object with the keys of vLLM's option "
        "(docs/scheduling/cache.md)",
        simulated=False,
    )
