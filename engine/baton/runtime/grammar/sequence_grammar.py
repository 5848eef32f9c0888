"""The matcher of one sequence: which tokens may come next, and whether the answer is complete.

1. the runner makes one when a sequence gets a slot, from the compiled grammar and the output tokens
   so far: a matcher's state depends on nothing else, so that a preempted, resumed or transferred
   sequence goes on where it was;
2. its mask is filled (`token_masks`) before each draw, `advance` with the token that was drawn;
3. when no token but the end of the answer can follow, the answer is complete and ends at once.

Invariant: a matcher has consumed all output tokens of its sequence, in order, and no
end-of-sequence token. An error of the matcher is final and ends the answer with `grammar_failed`:
llguidance answers a mask of the end tokens then, which would look like success.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.runtime.grammar.token_constraint import GrammarState, TokenConstraint

log = logging.getLogger("baton.grammar")

FULL_LEXER = "too many states"
"""Part of llguidance's message where a lexer has as many states as it may have."""


@dataclass(eq=False, slots=True)
class GrammarLexer:
    """A matcher at the beginning of its grammar, to be copied for sequences: the copies share its
    lexer.
    """

    matcher: LLMatcher
    copies: int = 0
    is_full: bool = False
    """The lexer has no room for another state: every copy that meets one fails."""


class SequenceGrammar(TokenConstraint):
    has_mask = True
    banned_ids: Sequence[int] = ()
    optional_ids: Sequence[int] = ()
    decides_end = True
    lexer: object = None

    def __init__(
        self,
        matcher: LLMatcher | None,
        eos_token_ids: frozenset[int],
        output: Iterable[int] = (),
        lexer: object = None,
    ) -> None:
        """
        Args:
            matcher: at the beginning of the grammar, used by nothing else; None: the request has
                ended.
            lexer: as `TokenConstraint.lexer`; None: the matcher is no copy.
        """
        self.lexer = matcher if lexer is None else lexer
        self._eos_token_ids = eos_token_ids
        self.state = GrammarState.OPEN
        self.matcher = matcher
        if matcher is None:
            self.state = GrammarState.FAILED
        for token in output:
            self.advance(token)

    def advance(self, token: int) -> GrammarState:
        """Take over the token that the sequence has now; returns the state behind it."""
        # The next step is planned before the end of the answer is known, and brings one more token.
        if self.state is not GrammarState.OPEN or self.matcher is None:
            return self.state
        # Elsewhere an end token goes to the matcher, which refuses it: the answer fails instead of
        # being complete.
        if token in self._eos_token_ids and self.matcher.is_accepting():
            self.state = GrammarState.COMPLETE
        elif not self.matcher.consume_token(token):
            self._fail(f"token {token}: {_first_line(self.matcher.get_error())}")
        elif self.matcher.is_stopped():
            self._stop()
        return self.state

    def accepts(self, token: int) -> bool:
        """True if the token may come next."""
        return (
            self.matcher is not None
            and self.state is GrammarState.OPEN
            and self.matcher.validate_tokens([token]) == 1
        )

    def fork(self) -> SequenceGrammar:
        copied = copy.copy(self)
        if self.matcher is not None:
            copied.matcher = self.matcher.deep_copy()
        return copied

    def count_admitted(self, tokens: Sequence[int]) -> int:
        if self.matcher is None or self.state is not GrammarState.OPEN:
            return 0
        return self.matcher.validate_tokens(list(tokens))

    def forced_tokens(self) -> list[int]:
        if self.matcher is None or self.state is not GrammarState.OPEN:
            return []
        return self.matcher.compute_ff_tokens()

    @property
    def fillable_matcher(self) -> LLMatcher | None:
        """The matcher that fills the next mask; None after a failure."""
        return None if self.state is GrammarState.FAILED else self.matcher

    def finish_mask(self, mask: NDArray[np.int32], *, has_tokens: bool) -> bool:
        if self.matcher is None or self.state is GrammarState.FAILED:
            return False
        if self.matcher.is_error():
            self._fail(_first_line(self.matcher.get_error()))
            return False
        if not has_tokens:
            self._fail("no token of the vocabulary is allowed")
            return False
        return True

    def _stop(self) -> None:
        """The matcher takes no further token: because the grammar is complete, or because of an
        error.
        """
        if self.matcher is not None and self.matcher.is_error():
            self._fail(_first_line(self.matcher.get_error()))
        else:
            self.state = GrammarState.COMPLETE

    def _fail(self, reason: str) -> None:
        self.state = GrammarState.FAILED
        if isinstance(self.lexer, GrammarLexer) and FULL_LEXER in reason:
            self.lexer.is_full = True
        log.warning("an answer ends, its grammar cannot be followed further: %s", reason)


def _first_line(message: str) -> str:
    """The message without the schema and the answer, which llguidance appends."""
    return message.partition("\n")[0][:300]
