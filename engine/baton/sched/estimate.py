"""How much of their allowance running requests will really use: SGLang's new_token_ratio, as a small state machine.

The ratio starts at 0.7 x conservativeness, decays linearly to 14 % of that over 600 decode steps without trouble, jumps
up when memory ran out, and starts afresh when the engine turns idle (constants of SGLang 0.5.7).
"""

from __future__ import annotations

from collections.abc import Iterable

CLIP_NEW_TOKENS = 4096
"""An answer is never estimated longer than this [tokens]: a huge max_tokens must not block admission."""
RETRACT_LOOKAHEAD = 20
"""After a retraction assume at least this many more tokens per survivor [tokens]."""


class NewTokenRatio:
    def __init__(self, conservativeness: float) -> None:
        self.initial = min(1.0, 0.7 * conservativeness)
        self.floor = self.initial * 0.14
        self._decay = (self.initial - self.floor) / 600
        self.value = self.initial

    def on_decode_step(self) -> None:
        self.value = max(self.floor, self.value - self._decay)

    def on_retraction(self, survivors: Iterable[tuple[int, int]]) -> None:
        """`survivors`: (generated, max_new_tokens) of every request still running."""
        pairs = list(survivors)
        done = sum(generated for generated, _ in pairs) + RETRACT_LOOKAHEAD * len(pairs)
        self.value = min(1.0, max(self.value, done / (sum(limit for _, limit in pairs) + 1)))

    def on_idle(self) -> None:
        self.value = self.initial

    def estimate(self, remaining: int) -> int:
        """Tokens a request with `remaining` allowed tokens is expected to still generate."""
        return int(min(remaining, CLIP_NEW_TOKENS) * self.value)
