"""Restriction of the tokens of one answer, as the sampler sees it.

1. before each draw the sampler reads `banned_ids` and, where `has_mask`, gets the mask that the
   constraint's matcher fills (`token_masks`) and `finish_mask` completes; `optional_ids` belong to
   that mask;
2. `advance` takes over the token that was drawn, and says whether the answer is complete.

The state depends on the tokens of the answer alone: a preempted, resumed or transferred sequence
gets a new constraint, which is fed its tokens.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class GrammarState(enum.Enum):
    """Progress of an answer in its grammar."""

    OPEN = "open"
    """Further tokens are possible."""
    COMPLETE = "complete"
    """Nothing but the end of the answer can follow, or the end has been drawn."""
    FAILED = "failed"


class TokenConstraint(ABC):
    """Not thread-safe: a step's masks are filled after the results of all earlier steps have been
    read.
    """

    state: GrammarState

    @abstractmethod
    def advance(self, token: int) -> GrammarState:
        """Take over the token that the sequence has now; returns the state behind it."""

    @abstractmethod
    def fork(self) -> TokenConstraint:
        """A copy that goes on by itself."""

    @abstractmethod
    def count_admitted(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """Tokens that come next whatever the model likes, as far as that is known."""

    @property
    @abstractmethod
    def has_mask(self) -> bool:
        """The next token is drawn under a mask."""

    @property
    @abstractmethod
    def banned_ids(self) -> Sequence[int]:
        """Tokens that may not come next where there is no mask."""

    @property
    @abstractmethod
    def optional_ids(self) -> Sequence[int]:
        """Tokens of the finished mask that may come only if the model likes no other token more.

        A mask takes tokens away from the model that it may have preferred: without this rule a
        model that would begin its answer at once, but not in the form of the grammar, would reason.
        """

    @property
    @abstractmethod
    def decides_end(self) -> bool:
        """The answer's end is not left to the request's least number of tokens."""

    @property
    @abstractmethod
    def fillable_matcher(self) -> LLMatcher | None:
        """The matcher that fills the next mask; None: the mask stays empty."""

    @property
    @abstractmethod
    def lexer(self) -> object:
        """Identifies the matchers that share a lexer: one of them at a time can fill a mask."""

    @abstractmethod
    def finish_mask(self, mask: NDArray[np.int32], *, has_tokens: bool) -> bool:
        """Complete and check the mask that the matcher has just filled in; False: the sequence
        cannot go on.

        Args:
            has_tokens: False if the mask is 0.
        """
