"""The budgets of one scheduler (names, defaults and help: baton.config; the mapping:
sched.setup.from_config).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.sched.fairness.fair_queue import FairnessRules
from baton.sched.policies.base import PolicyParams
from baton.sched.types.priority import PriorityRule


@dataclass(frozen=True, slots=True)
class Limits:
    num_pages: int
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    step_tokens: int
    """Token budget of one step (EngineConfig.step_tokens)."""
    prefill_max_requests: int | None = None
    num_reserved_decode_tokens: int = 512
    role: str = "null"
    policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    radix_cache: bool = True
    radix_eviction_policy: str = "lru"
    """Which cached pages go first (cache.eviction)."""
    kv_event_batches: int = 0
    """Batches of KV events kept for replay; 0: there are no events."""
    prefill_first: bool = False
    enable_mixed_chunk: bool = False
    """Under prefill_first, too, decode rows join the steps that prefill."""
    max_decode_gap_secs: float = 0.0
    """Under prefill_first: predicted time that decode rows may wait; 0: one prefill step."""
    enable_dynamic_chunking: bool = False
    step_target_secs: float = 0.0
    """Predicted time of a step that prompt chunks may fill; 0: no target (see
    `enable_dynamic_chunking`).
    """
    watermark: float = 0.0
    """Share of the pool kept available when admitting beside others."""
    clip_max_new_tokens: int = 4096
    max_queued_tokens: int | None = None
    """Most prompt tokens waiting in all."""
    queue_timeout_secs: float = 0.0
    """Longest wait of a request that has not started [s]; 0: no limit."""
    aborts_missed_deadlines: bool = False
    """A request without its first token at its ttft_deadline ends with an error."""
    policy_params: PolicyParams = field(default_factory=PolicyParams)
    priority: PriorityRule = field(default_factory=PriorityRule)
    max_partial_prefills: int = 4
    """A request does not start behind so many unfinished prompts, unless one step completes it:
    they hold pages.
    """
    admission_skip_ahead: int = 8
    """Waiting requests that could not start and that a step passes over, per class."""
    is_chunked: bool = True
    """Prompts may be split over several steps."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt per step; 0: as many as the step's budget allows."""
    preemption_mode: str = "cache"
    """Treatment of a preempted request's KV: recompute, cache, offload, auto
    (docs/scheduling/preemption.md).
    """
    host_pages: int = 0
    """Size of the host tier; 0: none."""
    host_pages_per_s: float = 10_000.0
    """Pages copied between device and host per second, until it has been measured."""
    max_preemptions_per_request: int = 8
    preemption_min_remaining_tokens: int = 8
    """A request this close to its end is not preempted."""
    fairness: FairnessRules = field(default_factory=FairnessRules)

    starvation_secs: float = 10.0
    """Waiting for longer, overtaken by later requests, is starving (metrics only)."""

    def prompt_tokens(self, num_decode: int) -> int:
        """Prompt tokens of a step with so many decode rows.

        At least a page: beside more decode rows than `step_tokens` no prompt would advance.
        """
        return max(self.step_tokens - num_decode, self.page_size)

    @property
    def capacity_tokens(self) -> int:
        return self.num_pages * self.page_size
