"""The budgets of one scheduler (names, defaults and help: baton.config; the mapping:
sched.setup.from_config).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from baton.cache.group_pages import GroupRule
from baton.sched.fairness.fair_queue import FairnessRules
from baton.sched.policies.base import PolicyParams
from baton.sched.types.priority import PriorityRule


@dataclass(frozen=True, slots=True)
class Limits:
    num_pages: int
    page_size: int
    """Tokens of a page of group 0, and of a block of a further group."""
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

    page_groups: tuple[GroupRule, ...] = ()
    """The page groups beside group 0, which holds every token of a sequence."""
    state_snapshot_share: float = 0.5
    """Most of the pool that snapshots of states take."""
    starvation_secs: float = 10.0
    """Waiting for longer, overtaken by later requests, is starving (metrics only)."""

    def prompt_tokens(self, answer_tokens: int) -> int:
        """Prompt tokens of a step whose decode rows have so many tokens, drafts included.

        At least a page: beside more decode rows than `step_tokens` no prompt would advance.
        """
        return max(self.step_tokens - answer_tokens, self.page_size)

    def longest_chunk(self, tokens: int) -> int:
        """Most tokens of a row of a sequence that has `tokens` to compute."""
        if not self.is_chunked:
            return max(tokens, 1)
        return max(min(tokens, max(self.step_tokens, self.page_size)), 1)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds, alone."""
        return self._capacity_of(self.num_pages)

    @property
    def room_capacity_tokens(self) -> int:
        """`capacity_tokens` of a prompt that P sends to D: its state has pages beside it."""
        return self._capacity_of(self.num_pages - self.state_pages)

    @property
    def state_pages(self) -> int:
        """Pages of a state that travels with a prompt; 0: there are none, or nothing travels."""
        if self.role == "null":
            return 0
        return sum(rule.width for rule in self.page_groups if rule.kind == "state")

    def _capacity_of(self, pages: int) -> int:
        if not self.page_groups:
            return pages * self.page_size
        # A row may be as long as the longest prompt: the more tokens, the more pages it takes.
        fits = bisect.bisect_right(range(max(pages, 0) + 1), pages, key=self.most_pages)
        return max(fits - 1, 0) * self.page_size

    def most_pages(self, blocks: int) -> int:
        """Most pages that a sequence of `blocks` pages of tokens holds, in all groups."""
        row_tokens = self.longest_chunk(blocks * self.page_size)
        return blocks + sum(
            min(blocks, rule.most_blocks(self.page_size, row_tokens)) * rule.width
            for rule in self.page_groups
        )
