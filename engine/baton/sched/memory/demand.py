"""How much memory running requests will still take.

`NewTokenRatio` says how much of its allowance an answer will really use: SGLang's new_token_ratio
as a small state machine. It starts at 0.7 x conservativeness, decays linearly to 14 % of that over
600 decode steps without trouble, jumps up when memory ran out, and starts afresh when the engine
turns idle (constants of SGLang 0.5.7).

`peak_growth` is for answers of known length (ignore_eos): it walks through their endings, so that a
request may count on pages which another one will have given back by then (SGLang does so for
ignore_eos without a radix cache).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

RETRACT_LOOKAHEAD = 20
"""After a retraction assume at least this many more tokens per survivor [tokens]."""


class NewTokenRatio:
    """Args: `clip`: an answer is never expected to be longer, so that a huge max_tokens does not
    block [tokens].
    """

    def __init__(self, conservativeness: float, clip: int = 4096) -> None:
        self.initial = min(1.0, 0.7 * conservativeness)
        self.floor = self.initial * 0.14
        self.clip = clip
        self._decay = (self.initial - self.floor) / 600
        self.value = self.initial

    def on_decode_step(self) -> None:
        self.value = max(self.floor, self.value - self._decay)

    def on_retraction(self, survivors: Iterable[tuple[int, int]]) -> None:
        """`survivors`: (generated, max_new_tokens) of every request still running."""
        pairs = list(survivors)
        expected_tokens = sum(generated for generated, _ in pairs)
        expected_tokens += RETRACT_LOOKAHEAD * len(pairs)
        allowed_tokens = sum(limit for _, limit in pairs)
        share = expected_tokens / (allowed_tokens + 1)
        self.value = min(1.0, max(self.value, share))

    def on_idle(self) -> None:
        self.value = self.initial

    def estimate(self, remaining: int) -> int:
        """Tokens a request with `remaining` allowed tokens is expected to still generate."""
        return int(min(remaining, self.clip) * self.value)


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    tokens: int
    """Tokens whose KV has, or is about to get, a place."""
    to_come: int
    held_alone: int
    """Pages it holds now that its end gives back."""


def peak_growth(answers: Iterable[KnownAnswer], page_size: int) -> int:
    """Most pages that these requests will need at once beyond those they hold, each getting one
    token per step.

    What a request gives back counts from the second step after its last one: with overlap its end
    is noticed so late. The need only falls there, hence its peak is at an ending or one step later.
    Cost: O(n log n + distinct endings * min(n, page_size)).
    """
    by_ending = sorted(answers, key=lambda answer: answer.to_come)
    # Free places in the last page → requests.
    free_places: Counter[int] = Counter(-answer.tokens % page_size for answer in by_ending)
    peak = kept_by_ended = given_back = 0
    # (ending step, pages) not to be counted on yet.
    pending_returns: deque[tuple[int, int]] = deque()
    for steps, group in itertools.groupby(by_ending, key=lambda answer: answer.to_come):
        ended = list(group)
        for step in (steps, steps + 1):
            while pending_returns and pending_returns[0][0] + 1 < step:
                given_back += pending_returns.popleft()[1]
            growth = sum(
                n * -(-max(step - free, 0) // page_size) for free, n in free_places.items()
            )
            peak = max(peak, growth + kept_by_ended - given_back)
            for answer in ended:
                free = -answer.tokens % page_size
                free_places[free] -= 1
                own_growth = -(-max(steps - free, 0) // page_size)
                pending_returns.append((steps, answer.held_alone + own_growth))
                kept_by_ended += own_growth
            ended = []
    return peak
