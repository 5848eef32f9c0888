"""Constraint of an answer that reasons before it follows its grammar, or has a limit for its
reasoning.

1. inside the reasoning tokens are free, but for the end of the answer while a grammar waits, and
   for calls that the grammar could not begin with;
2. a reasoning at its limit is ended token by token, each the only one in its mask;
3. behind the reasoning the grammar's matcher fills the masks. While it is undecided whether the
   answer reasons, a begin marker is allowed beside them if the model likes it most.

Invariant: the matcher has consumed the tokens behind the reasoning, in order, and no others.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from baton.runtime.grammar.reasoning_tracker import ReasoningTracker, TokenPlace
from baton.runtime.grammar.sequence_grammar import SequenceGrammar
from baton.runtime.grammar.token_constraint import GrammarState, TokenConstraint
from baton.runtime.grammar.token_masks import WORD_BITS
from baton.sched.types.reasoning import ReasoningGate, ReasoningPhase

log = logging.getLogger("baton.grammar")


class GateVocabulary:
    """Facts of the tokens that gates need."""

    def __init__(self, trie: LLTokenizer) -> None:
        self._trie = trie
        self.eos_token_ids = tuple(trie.eos_tokens)
        self._newline_ids: dict[int, list[int]] = {}

    def newline_ids(self, most: int) -> list[int]:
        """Tokens of at most so many newlines and nothing else."""
        found = self._newline_ids.get(most)
        if found is None:
            texts = [b"\n" * count for count in range(1, most + 1)]
            tokens = map(self._trie.tokenize_bytes, texts)
            found = [ids[0] for ids in tokens if len(ids) == 1]
            self._newline_ids[most] = found
        return found

    def token_bytes(self, token: int) -> bytes:
        return self._trie.decode_bytes([token])

    def tokens_beyond(self, text: bytes) -> list[int]:
        """Tokens that begin with `text`, and have other characters than newlines behind it."""
        tokens = self._sorted_tokens
        place = bisect.bisect_left(tokens, (text, -1))
        beyond = []
        while place < len(tokens) and tokens[place][0].startswith(text):
            token_text, token = tokens[place]
            if token_text[len(text) :].strip(b"\n"):
                beyond.append(token)
            place += 1
        return beyond

    @functools.cached_property
    def _sorted_tokens(self) -> list[tuple[bytes, int]]:
        """All tokens by their text: needed by the few models whose markers are text."""
        return sorted((self.token_bytes(token), token) for token in range(self._trie.vocab_size))


class GatedGrammar(TokenConstraint):
    def __init__(
        self,
        gate: ReasoningGate,
        vocabulary: GateVocabulary,
        start_grammar: Callable[[], SequenceGrammar] | None,
        output: Iterable[int] = (),
    ) -> None:
        """
        Args:
            start_grammar: returns the grammar at its beginning; None: the answer is free behind the
                reasoning.
            output: the answer so far.
        """
        self.state = GrammarState.OPEN
        self._vocabulary = vocabulary
        self._tracker = ReasoningTracker(gate, vocabulary.token_bytes)
        self._start_grammar = start_grammar
        self._grammar: SequenceGrammar | None = None
        self._is_ahead = False
        """Undecided: the grammar has consumed tokens that may turn out to be a marker."""
        self._is_refused = False
        """Undecided: the grammar refuses the answer so far, which must become a marker."""
        self._optional_ids: list[int] = []
        self._begin_ids = tuple(ids for marker in gate.begins for ids in marker.ids[:1])
        self._inside_bans: tuple[int, ...] = ()
        if start_grammar is not None:
            self._grammar = start_grammar()
            refused = [
                token
                for token in gate.call_ids
                if not gate.is_ended_by_calls or not self._grammar.accepts(token)
            ]
            self._inside_bans = (*vocabulary.eos_token_ids, *refused)
        for token in output:
            self.advance(token)

    def advance(self, token: int) -> GrammarState:
        self._optional_ids = []
        # The next step is planned before the end of the answer is known, and brings one more token.
        if self.state is not GrammarState.OPEN:
            return self.state
        place = self._tracker.advance(token)
        # Only the reasoning is limited; the answer behind it is free.
        if self._grammar is None:
            return self.state
        if self._tracker.has_overrun:
            self._fail("the end marker of its reasoning shares a token with other text")
        elif place is TokenPlace.REASONING:
            self._restart_grammar()
        elif self._tracker.phase is ReasoningPhase.UNDECIDED:
            self._try_token(self._grammar, token)
        elif self._is_refused:
            self._fail("its beginning is neither a reasoning nor in the grammar")
        else:
            self.state = self._grammar.advance(token)
        return self.state

    def fork(self) -> GatedGrammar:
        copied = copy.copy(self)
        copied._tracker = self._tracker.fork()
        if self._grammar is not None:
            copied._grammar = self._grammar.fork()
        return copied

    def count_admitted(self, tokens: Sequence[int]) -> int:
        ahead = self.fork()
        for count, token in enumerate(tokens):
            if ahead.state is not GrammarState.OPEN or not ahead._admits(token):
                return count
            ahead.advance(token)
        return len(tokens)

    def _admits(self, token: int) -> bool:
        """True if the token may come next; where the model may choose to reason instead of
        following the grammar, only the grammar's tokens count.
        """
        forced = self._tracker.forced_token
        if forced is not None:
            return token == forced
        if self.has_mask and self._grammar is not None:
            return self._grammar.accepts(token)
        return token not in self.banned_ids

    def forced_tokens(self) -> list[int]:
        forced = self._tracker.forced_token
        if forced is not None:
            return [forced]
        if self._grammar is None or self._tracker.phase is not ReasoningPhase.CONTENT:
            return []
        return self._grammar.forced_tokens()

    def _restart_grammar(self) -> None:
        """Begin the grammar again: what it has consumed was the beginning of a marker."""
        if self._is_ahead and self._start_grammar is not None:
            self._grammar = self._start_grammar()
        self._is_ahead = False
        self._is_refused = False

    def _try_token(self, grammar: SequenceGrammar, token: int) -> None:
        if self._is_refused or not grammar.accepts(token):
            self._is_refused = True
            return
        self._is_ahead = True
        self.state = grammar.advance(token)

    @property
    def has_mask(self) -> bool:
        if self._tracker.forced_token is not None:
            return True
        return self._grammar is not None and self._tracker.phase is not ReasoningPhase.INSIDE

    @property
    def banned_ids(self) -> Sequence[int]:
        if self.has_mask:
            return ()
        phase = self._tracker.phase
        if phase is ReasoningPhase.INSIDE and self._grammar is not None:
            return (*self._inside_bans, *self._tokens_beyond_ends())
        second_header = self._tracker.second_header_id
        if second_header is not None:
            return (second_header,)
        if phase is ReasoningPhase.BEHIND and self._tracker.is_at_limit:
            return self._begin_ids
        return ()

    def _tokens_beyond_ends(self) -> list[int]:
        """Tokens with the end of a marker and a part of the answer, which the grammar could not
        read.
        """
        ends = self._tracker.open_ends()
        return list(itertools.chain.from_iterable(map(self._vocabulary.tokens_beyond, ends)))

    @property
    def optional_ids(self) -> Sequence[int]:
        return self._optional_ids

    @property
    def decides_end(self) -> bool:
        return self._grammar is not None or self._tracker.forced_token is not None

    @property
    def fillable_matcher(self) -> LLMatcher | None:
        if self._grammar is None or self._is_refused or self._tracker.forced_token is not None:
            return None
        return self._grammar.fillable_matcher

    @property
    def lexer(self) -> object:
        return None if self._grammar is None else self._grammar.lexer

    def finish_mask(self, mask: NDArray[np.int32], *, has_tokens: bool) -> bool:
        self._optional_ids = []
        if self.state is GrammarState.FAILED:
            return False
        forced = self._tracker.forced_token
        if forced is not None:
            mask[:] = 0
            _allow_tokens(mask, [forced])
            return True
        if self._grammar is None:
            return False
        if not self._is_refused and not self._grammar.finish_mask(mask, has_tokens=has_tokens):
            self.state = GrammarState.FAILED
            return False
        tracker = self._tracker
        added: list[int] = []
        if tracker.phase is ReasoningPhase.UNDECIDED:
            added = [token for token in tracker.begin_ids() if not _is_allowed(mask, token)]
            self._optional_ids = [] if self._is_refused else added
        elif tracker.phase is ReasoningPhase.BEHIND and tracker.lead_newlines is not None:
            added = self._vocabulary.newline_ids(tracker.lead_newlines)
        _allow_tokens(mask, added)
        return has_tokens or bool(added)

    def _fail(self, reason: str) -> None:
        self.state = GrammarState.FAILED
        log.warning("an answer ends, its grammar cannot be followed further: %s", reason)


def _is_allowed(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask.view(np.uint32)[token // WORD_BITS] >> token % WORD_BITS & 1)


def _allow_tokens(mask: NDArray[np.int32], tokens: Iterable[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)
