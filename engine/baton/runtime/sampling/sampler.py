"""From logits to tokens: penalties, filters, one draw per row, and logprobs.

For each row of a step: (1) logprobs are taken from the raw logits, as OpenAI and vLLM do; (2) rows
with logit_bias, penalties, bad words or min_new_tokens get their logits edited; (3) greedy rows
take the largest logit, the lowest id among equals; (4) the others draw: temperature, then top_k,
top_p, min_p in transformers' order, then one number u decides among the tokens that are kept, in
order of id (the inverse of their distribution function). Where an answer follows a grammar, or has
a list of allowed tokens, (3) and (4) see only those that are allowed (`grammar_masks`):

    tokens kept, by id   |--- id 3 ---|----- id 7 -----|- id 12 -|
                         0              u * kept mass            kept mass

A row gets INVALID_TOKEN if its largest logit is NaN or infinite, also after its edits; the other
rows of the step are not affected.

u is a hash of (seed, position) and nothing else, so that a token does not depend on the rest of the
batch, on preemption, on the page size, or on which node draws it (the first token is drawn on P,
the others on D).

Cost: sorting 152 k logits takes 15 ms, the 256 largest 0.3 ms (one thread), so filters are decided
among those 256 and more is sorted only when they reach further. Rows of all-greedy steps cost one
argmax.

`step_sampler` samples a step. Where logits lie on a device a kernel draws (`layers.kernels.draw`),
elsewhere `draw`, by the same definition. This module has the parts that both share: `LogitEdits`
and `draw_columns`.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.kernels.draw_columns import DrawColumns
from baton.runtime.grammar.token_constraint import TokenConstraint
from baton.runtime.sampling.bad_words import BadWords
from baton.sched.types.hashing import uniform
from baton.sched.types.plan import INVALID_TOKEN
from baton.sched.types.request import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow (matches vLLM)."""
LEAST_TOP_P = 1e-12
"""A smaller top_p keeps the most likely token alone as well, and its product with a mass would be
0.
"""
LARGEST_LOGIT = 1e30
"""Bounds a logit that a tiny repetition_penalty divides: far from overflow when a temperature
divides it, too.
"""
HEAD = 256
_ROWS_AT_ONCE = 8
"""Bounds the scratch memory of a draw to 8 * vocab floats."""

Put: TypeAlias = Callable[[np.ndarray], Tensor]
"""An array from the host as a tensor on the device of the logits."""


class SampleRow:
    """State of one sequence in the sampler, from admission until it leaves its slot.

    The owner calls `append` with every token drawn; `position` is where the next token will stand
    in prompt + output.
    """

    __slots__ = (
        "_bad_words", "_counts", "_ids", "_index", "allowed_bytes", "grammar", "has_penalties",
        "is_always_plain", "is_greedy", "is_restricted", "needs_tokens", "params", "position",
        "prompt_tokens",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: int,
        history: Sequence[int],
        grammar: TokenConstraint | None = None,
    ) -> None:
        """
        Args:
            history: all tokens so far, of which the first `prompt_tokens` are the prompt.
            grammar: behind the output in `history`; None: the answer is free.
        """
        self.params = params
        self.grammar = grammar
        self.prompt_tokens = prompt_tokens
        self.position = prompt_tokens
        self.is_greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        self.has_penalties = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self.allowed_bytes: NDArray[np.uint8] = np.frombuffer(params.allowed_tokens, np.uint8)
        """As `SamplingParams.allowed_tokens`; empty: every token may be drawn."""
        self.is_restricted = grammar is not None or len(self.allowed_bytes) > 0
        """True if draws may be among the tokens of a mask (`grammar_masks`)."""
        self._bad_words = BadWords(params.bad_words) if params.bad_words else None
        follows_words = self._bad_words is not None and self._bad_words.need_tokens
        self.needs_tokens = self.has_penalties or grammar is not None or follows_words
        """True if draws depend on the tokens drawn before; other rows need not know which they
        were.
        """
        self.is_always_plain = self.is_plain
        """`is_plain` now and later: nothing else about this row will matter."""
        self._index: dict[int, int] = {}
        self._ids = array("q")
        """Distinct tokens of prompt and output, in order of appearance, while the row has
        penalties.
        """
        self._counts = array("q")
        """How often each occurs in the output; 0 for tokens of the prompt alone."""
        drawn_here = prompt_tokens - params.resumed
        if self._bad_words is not None:
            self._bad_words.extend(history[drawn_here:prompt_tokens])
        if self.has_penalties:
            for i, token in enumerate(history[:prompt_tokens]):
                self._count_token(token, int(i >= drawn_here))
        for token in history[prompt_tokens:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Record the token that now stands at `position`.

        The grammar learns it where the result is read.
        """
        self.position += 1
        if self.has_penalties:
            self._count_token(token, 1)
        if self._bad_words is not None:
            self._bad_words.append(token)

    def fork(self) -> SampleRow:
        """A copy that goes on by itself, its grammar too."""
        copied = copy.copy(self)
        if self.has_penalties:
            copied._index = self._index.copy()
            copied._ids = self._ids[:]
            copied._counts = self._counts[:]
        if self._bad_words is not None:
            copied._bad_words = self._bad_words.fork()
        if self.grammar is not None:
            copied.grammar = self.grammar.fork()
        return copied

    @property
    def is_plain(self) -> bool:
        """Greedy with untouched logits and no logprobs: argmax says all."""
        is_free = not self.is_restricted
        return is_free and self.is_greedy and self.params.logprobs < 0 and not self.is_edited

    @property
    def is_masked(self) -> bool:
        """True if the next token is drawn from a mask."""
        return len(self.allowed_bytes) > 0 or (self.grammar is not None and self.grammar.has_mask)

    @property
    def is_edited(self) -> bool:
        """True if the logits change before the draw, apart from a mask."""
        if self.has_penalties or self.params.logit_bias:
            return True
        return not self.is_masked and self.has_bans

    @property
    def has_bans(self) -> bool:
        """True if single tokens may be banned: `banned_tokens` names those."""
        return self._bad_words is not None or self.must_continue or bool(self._grammar_bans)

    @property
    def _grammar_bans(self) -> Sequence[int]:
        """Tokens that the grammar bans where it has no mask."""
        return () if self.grammar is None else self.grammar.banned_ids

    @property
    def must_continue(self) -> bool:
        """Whether the answer may not stop yet (min_new_tokens); a grammar decides where one is."""
        # A ban of the end could leave a row no token where the grammar allows only the end.
        if self.grammar is not None and self.grammar.decides_end:
            return False
        return self.position - self.prompt_tokens < self.params.min_new_tokens

    def banned_tokens(self) -> list[int]:
        """Tokens that may not come next, whatever a mask allows."""
        banned = [] if self._bad_words is None else self._bad_words.banned_tokens()
        if self.must_continue:
            banned += self.params.stop_token_ids
        banned += self._grammar_bans
        return banned

    def token_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens so far and how often each was drawn, int64 both; only with penalties."""
        return np.array(self._ids), np.array(self._counts)

    def _count_token(self, token: int, times: int) -> None:
        index = self._index.setdefault(token, len(self._ids))
        if index == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[index] += times


class LogitEdits:
    """Changes by logit_bias, penalties and bans to the logits [S, vocab] of a step, as flat arrays.

    Order: bias, repetition (prompt and output), frequency and presence (output), then the bans: of
    stop ids, of bad words, and of what a grammar bans. In rows with a mask the bans are part of it.
    """

    __slots__ = ("_banned", "_biased", "_penalties", "_seen")

    def __init__(self, rows: Iterable[tuple[int, SampleRow]], vocab: int) -> None:
        """`rows`: those that are edited, with their row of the logits.

        They may advance before `apply`.
        """
        self._biased: list[tuple[int, int, float]] = []
        self._banned: list[tuple[int, int]] = []
        self._seen: list[np.ndarray] = []
        """int64 [2, n] each: row and id of the tokens that have been seen in it."""
        self._penalties: list[np.ndarray] = []
        """float32 [4, n] each: how often they were drawn, repetition, frequency and presence
        penalty.
        """
        # The edge checks ids against the tokenizer, which may know more tokens than the model.
        for i, row in rows:
            p = row.params
            self._biased += [(i, token, amount) for token, amount in p.logit_bias if token < vocab]
            if row.has_penalties:
                ids, counts = row.token_counts()
                self._seen.append(np.stack((np.full(len(ids), i), ids)))
                penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
                of_each = np.repeat(np.array(penalties, np.float32)[:, None], len(ids), axis=1)
                self._penalties.append(np.concatenate((counts[None].astype(np.float32), of_each)))
            if row.has_bans and not row.is_masked:
                self._banned += [(i, token) for token in row.banned_tokens() if token < vocab]

    def apply(self, logits: Tensor, put: Put) -> None:
        """In place. Waits for nothing that `put` does not wait for."""
        if self._biased:
            rows, ids, amounts = zip(*self._biased, strict=True)
            places = put(np.array((rows, ids)))
            logits.index_put_(
                (places[0], places[1]), put(np.array(amounts, np.float32)), accumulate=True
            )
        if self._seen:
            places = put(np.concatenate(self._seen, axis=1))
            count, repetition, frequency, presence = put(np.concatenate(self._penalties, axis=1))
            values = logits[places[0], places[1]]
            values = torch.where(values > 0, values / repetition, values * repetition)
            values.clamp_(-LARGEST_LOGIT, LARGEST_LOGIT)  # a NaN stays one
            logits.index_put_(
                (places[0], places[1]), values - (frequency * count + presence * (count > 0))
            )
        if self._banned:
            places = put(np.array(self._banned).T.copy())
            logits.index_put_((places[0], places[1]), logits.new_full((), -torch.inf))


def draw_columns(row: SampleRow, vocab: int) -> DrawColumns:
    """Inputs of a draw for one row.

    The most likely token always passes top_p and min_p (as min_tokens_to_keep in transformers).
    """
    p = row.params
    return DrawColumns(
        temperature=p.temperature,
        u=uniform(p.seed, row.position),
        top_k=p.top_k if 0 < p.top_k < vocab else 0,
        top_p=max(p.top_p, LEAST_TOP_P),
        min_p=min(p.min_p, 1.0),
    )


def draw_tokens(logits: Tensor, columns: Sequence[DrawColumns]) -> list[int]:
    """Draw a token for each non-greedy row of logits [n, vocab]; INVALID_TOKEN where no probability
    is a number.

    Args: `columns`: `draw_columns` of each.
    """
    temperatures = torch.tensor([row.temperature for row in columns], dtype=logits.dtype)[:, None]
    tokens = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        scaled = logits[rows] / temperatures[rows]
        probs = scaled.softmax(-1)
        is_undefined = probs[:, 0].isnan().tolist()  # then the whole row is
        for i, row in enumerate(columns[rows]):
            if is_undefined[i]:
                tokens.append(INVALID_TOKEN)
            elif not row.top_k and row.top_p >= 1 and not row.min_p:
                tokens.append(_pick_index(probs[i].numpy(), row.u))
            else:
                ids = kept_ids(scaled[i], probs[i], int(row.top_k), row.top_p, row.min_p)
                tokens.append(int(ids[_pick_index(probs[i][ids].numpy(), row.u)]))
    return tokens


def kept_ids(logits: Tensor, probs: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids of one row that the filters keep, ascending: int64 [m]."""
    vocab = len(logits)
    ids = largest_ids(logits, top_k or min(HEAD, vocab))
    count = _kept_count(probs[ids].numpy(), top_k, top_p, min_p)
    if not top_k and count == len(ids) < vocab:
        ids = _candidate_ids(logits, probs, top_p, min_p)
        count = _kept_count(probs[ids].numpy(), top_k, top_p, min_p)
    return ids[:count].sort().values


def _candidate_ids(logits: Tensor, probs: Tensor, top_p: float, min_p: float) -> Tensor:
    """Ids of one row, most likely first, that surely hold all that top_p and min_p keep: int64 [m].

    All tokens below (1 - top_p) / vocab together weigh less than 1 - top_p, so the nucleus lies
    above; half of that leaves room for rounding. A peaked row thus sorts some thousands of its 152
    k tokens.
    """
    floor = max((1.0 - top_p) / (2 * len(logits)), 0.999 * min_p * float(probs.max()))
    ids = (probs >= floor).nonzero()[:, 0]
    return ids[logits[ids].sort(dim=0, descending=True, stable=True).indices]


def largest_ids(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of one row, largest first, lowest id first among equals: int64 [k]."""
    if k < len(logits):
        edge = logits.topk(k).values[-1]
        above = (logits > edge).nonzero()[:, 0]
        equal = (logits == edge).nonzero()[: k - len(above), 0]  # topk takes any of them
        ids = torch.cat((above, equal)).sort().values
    else:
        ids = torch.arange(len(logits))
    return ids[logits[ids].sort(descending=True, stable=True).indices]


def _kept_count(probs: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> int:
    """The definition of top_p and min_p: how many of a row's tokens, most likely first, are kept.
    With top_k these are all there is.

    A token survives top_p while the mass before it is below top_p, so the one that crosses the
    limit is kept.
    """
    wide = probs.astype(np.float64)
    running = wide.cumsum()
    total = running[-1] if top_k else 1.0
    keep = wide >= min_p * wide[0]
    if top_p < 1:
        keep &= running - wide < top_p * total
    return int(keep.sum())


def _pick_index(probs: NDArray[np.float32], u: float) -> int:
    """The index at which the running sum passes u * its end; never one without probability."""
    mass = probs.cumsum(dtype=np.float64)
    end = mass[-1]
    return int(
        min(np.searchsorted(mass, u * end, side="right"), np.searchsorted(mass, end, side="left"))
    )
