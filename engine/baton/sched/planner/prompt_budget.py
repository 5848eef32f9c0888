"""Tokens and time that prompt chunks may still take in one step, and the size of the next chunk."""

from __future__ import annotations

from baton.sched.metrics.step_time import StepTime
from baton.sched.planner.draft import PlanDraft
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StopReason


class PromptBudget:
    """Budget of one step beside the rows that extend answers, which are in `draft`."""

    def __init__(self, limits: Limits, times: StepTime, draft: PlanDraft) -> None:
        self._limits = limits
        self._times = times
        self.tokens = limits.prompt_tokens(draft.answer_tokens)
        """Prompt tokens that may still be taken."""
        self.seconds = self._initial_seconds(draft)
        """Predicted time that prompt chunks may still add; None: they are sized by tokens alone."""
        self.exhausted_by: StopReason | None = None
        """The budget that is used up; None: another prompt may be tried."""
        self._num_prompts = 0

    def _initial_seconds(self, draft: PlanDraft) -> float | None:
        limits = self._limits
        if limits.step_target_secs:
            # The target holds for the whole step, and decode rows are not negotiable.
            decode_secs = self._times.decode_seconds(len(draft.rows))
            decode_secs += self._times.draft_seconds(sum(draft.drafted))
            return max(limits.step_target_secs - decode_secs, 0.0)
        # A chunk may take as long as the first of a prompt, whose attention costs least.
        if limits.enable_dynamic_chunking:
            return self._times.chunk_seconds(0, limits.step_tokens)
        return None

    def chunk_tokens(self, start: int, remaining: int) -> int:
        """How many of a prompt's `remaining` tokens, from `start` on, to compute now.

        All, or whole pages so that chunks end at page ends. By time alone it may be none, but the
        first prompt of a step gets a page, so that every prompt advances. Without chunking it is
        all or none, and the first prompt of a step gets all.
        """
        limits = self._limits
        most = self.tokens
        is_first = not self._num_prompts
        # Refused, the first prompt of a step would never be computed if it exceeds every budget.
        if not limits.is_chunked:
            return remaining if remaining <= most or is_first else 0
        # A long prompt leaves tokens of each step to the short ones behind it, as in vLLM.
        if limits.long_prefill_token_threshold:
            most = min(most, limits.long_prefill_token_threshold)
        if self.seconds is not None:
            timed = self._times.chunk_tokens(start, self.seconds)
            # Decode rows alone may exceed the target: without a page per step no prompt would end.
            if is_first:
                timed = max(timed, limits.page_size)
            most = min(most, timed)
        if remaining <= most:
            return remaining
        # Only whole pages are shared, published and sent to D.
        end = start + most
        page_end = end - end % limits.page_size
        return max(page_end - start, 0)

    def spend(self, start: int, num_tokens: int) -> None:
        """Take the chunk [start, start + num_tokens) of one more prompt."""
        if self.seconds is not None:
            self.seconds -= self._times.chunk_seconds(start, num_tokens)
        self.tokens -= num_tokens
        self._num_prompts += 1
        most_prompts = self._limits.prefill_max_requests
        if self.tokens <= 0:
            self.exhausted_by = StopReason.TOKEN_BUDGET
        # --prefill-max-requests: SGLang's bound of the prompts in one step.
        elif most_prompts is not None and self._num_prompts >= most_prompts:
            self.exhausted_by = StopReason.MAX_REQUESTS
