"""From logits to tokens: penalties, filters, one draw per row, and logprobs.

For each row of a step: (1) logprobs are taken from the raw logits, as OpenAI and vLLM do; (2) rows with logit_bias,
penalties or min_new_tokens get their logits edited; (3) greedy rows take the largest logit, the lowest id among equals;
(4) the others draw: temperature, then top_k, top_p, min_p in transformers' order, then one number u decides:

    most likely first   |----- id 7 -----|--- id 3 ---|- 12 -|…| cut by the filters
                        0              u * kept mass            kept mass

u is a hash of (seed, position) and nothing else, so that a token does not depend on the rest of the batch, on
preemption, on the page size, or on which node draws it (the first token is drawn on P, the others on D).

Cost: sorting 152 k logits takes 15 ms, the 256 largest 0.3 ms (one thread), so filters are decided among those 256 and
more is sorted only when they reach further. Rows of all-greedy steps cost one argmax.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.request import SamplingParams
from baton.sched.mix import uniform
from baton.sched.plan import StepResult, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow (matches vLLM)."""
HEAD = 256
_ROWS_AT_ONCE = 8
"""Bounds the scratch memory of a draw to 8 * vocab floats."""


class SampleRow:
    """What the sampler knows of one sequence, from admission until it leaves its slot.

    The owner calls `append` with every token drawn; `position` is where the next token will stand in prompt + output.
    """

    __slots__ = ("_counts", "_ids", "_index", "_penalises", "is_greedy", "params", "position", "prompt_tokens")

    def __init__(self, params: SamplingParams, prompt_tokens: int, history: Sequence[int]) -> None:
        """`history`: all tokens so far, of which the first `prompt_tokens` are the prompt."""
        self.params = params
        self.prompt_tokens = prompt_tokens
        self.position = prompt_tokens
        self.is_greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        self._penalises = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self._index: dict[int, int] = {}
        self._ids = array("q")
        """Distinct tokens of prompt and output, in order of appearance, while the row has penalties."""
        self._counts = array("q")
        """How often each occurs in the output; 0 for tokens of the prompt alone."""
        if self._penalises:
            drawn_here = prompt_tokens - params.resumed
            for i, token in enumerate(history[:prompt_tokens]):
                self._count(token, int(i >= drawn_here))
        for token in history[prompt_tokens:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Record the token that now stands at `position`."""
        self.position += 1
        if self._penalises:
            self._count(token, 1)

    @property
    def is_plain(self) -> bool:
        """Greedy with untouched logits and no logprobs: argmax says all."""
        return self.is_greedy and self.params.logprobs < 0 and not self.is_edited

    @property
    def is_edited(self) -> bool:
        return self._penalises or bool(self.params.logit_bias) or self._must_continue

    @property
    def _must_continue(self) -> bool:
        return self.position - self.prompt_tokens < self.params.min_new_tokens

    def edit(self, logits: Tensor) -> None:
        """Apply logit_bias, penalties and min_new_tokens to float32 [vocab], in place.

        Order: bias, repetition (prompt and output), frequency and presence (output), then the ban of stop ids.
        """
        p, vocab = self.params, len(logits)
        # The edge checks ids against the tokenizer, which may know more tokens than the model.
        if bias := [(token, amount) for token, amount in p.logit_bias if token < vocab]:
            biased, amounts = zip(*bias, strict=True)
            logits.index_add_(0, torch.tensor(biased), torch.tensor(amounts, dtype=logits.dtype))
        if self._penalises:
            ids = torch.from_numpy(np.array(self._ids))
            counts = torch.from_numpy(np.array(self._counts)).to(logits.dtype)
            seen = logits[ids]
            if p.repetition_penalty != 1.0:
                seen = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
            seen -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
            logits[ids] = seen
        if self._must_continue and (stops := [token for token in p.stop_token_ids if token < vocab]):
            logits[torch.tensor(stops)] = -torch.inf

    def _count(self, token: int, times: int) -> None:
        at = self._index.setdefault(token, len(self._ids))
        if at == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[at] += times


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> StepResult:
    """Choose one token per row. The rows are not advanced: call `append` with what you keep.

    Args:
        logits: float32 [S, vocab]; overwritten where rows edit theirs.
        rows: S rows, in the order of logits.
    """
    if all(row.is_plain for row in rows):
        return StepResult(tokens=logits.argmax(-1).tolist())
    raw = {i: logits[i].log_softmax(-1) for i, row in enumerate(rows) if row.params.logprobs >= 0}
    for i, row in enumerate(rows):
        if row.is_edited:
            row.edit(logits[i])
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    for start in range(0, len(drawn), _ROWS_AT_ONCE):
        some = drawn[start : start + _ROWS_AT_ONCE]
        for i, token in zip(some, _draw(logits[some], [rows[i] for i in some]), strict=True):
            tokens[i] = token
    return StepResult(tokens, {i: _token_logprobs(lp, tokens[i], rows[i].params.logprobs) for i, lp in raw.items()})


def _token_logprobs(logprobs: Tensor, token: int, k: int) -> TokenLogprobs:
    top = logprobs.topk(k)
    return TokenLogprobs(float(logprobs[token]), top.indices.tolist(), top.values.tolist())


def _draw(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    """One token for each non-greedy row of logits [n, vocab]."""
    vocab = logits.shape[1]
    head = min(HEAD, vocab)
    scaled = logits / torch.tensor([row.params.temperature for row in rows], dtype=logits.dtype)[:, None]
    probs = scaled.softmax(-1)
    ids = _largest(scaled, head)
    mass, kept = _kept_mass(probs.gather(1, ids).numpy(), [row.params for row in rows], vocab)
    tokens = []
    for i, row in enumerate(rows):
        u = uniform(row.params.seed, row.position)
        if head == vocab or _ends_within(row.params, int(kept[i]), head, vocab):
            tokens.append(int(ids[i, _pick(mass[i], u)]))
        elif _is_unfiltered(row.params, vocab):
            tokens.append(_pick_unfiltered(probs[i].numpy(), ids[i].numpy(), mass[i], u))
        else:
            order = _candidates(scaled[i], probs[i], row.params)
            all_mass, _ = _kept_mass(probs[i][order].numpy()[None], [row.params], vocab)
            tokens.append(int(order[_pick(all_mass[0], u)]))
    return tokens


def _candidates(logits: Tensor, probs: Tensor, params: SamplingParams) -> Tensor:
    """Ids of one row, most likely first, that surely hold all the filters keep: int64 [m].

    All tokens below (1 - top_p) / vocab together weigh less than 1 - top_p, so the nucleus lies above; half of that
    leaves room for rounding. A peaked row thus sorts some thousands of its 152 k tokens.
    """
    vocab = len(logits)
    if 0 < params.top_k < vocab:
        return _largest(logits[None], params.top_k)[0]
    floor = max((1.0 - params.top_p) / (2 * vocab), 0.999 * params.min_p * float(probs.max()))
    ids = (probs >= floor).nonzero()[:, 0]
    return ids[logits[ids].sort(dim=0, descending=True, stable=True).indices]


def _largest(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, largest first, lowest id first among equals: int64 [n, k]."""
    if k == logits.shape[1]:
        return logits.sort(dim=-1, descending=True, stable=True).indices
    ids = logits.topk(k, sorted=False).indices.sort(-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _kept_mass(probs: np.ndarray, params: Sequence[SamplingParams], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """What the filters leave of probs [n, k], sorted descending.

    Returns the running sum of kept probability, float64 [n, k] (flat from the first cut on), and how many are kept.
    A token survives top_p while the mass before it is below top_p, so the one that crosses the limit is kept.
    """
    wide = probs.astype(np.float64)
    limit = np.array([p.top_k or vocab for p in params])[:, None]
    allowed = np.arange(wide.shape[1])[None, :] < limit
    wide *= allowed
    running = wide.cumsum(-1)
    total = np.where(limit[:, 0] < vocab, running[:, -1], 1.0)
    top_p = np.array([p.top_p * t if p.top_p < 1 else np.inf for p, t in zip(params, total, strict=True)])[:, None]
    min_p = np.array([p.min_p for p in params])[:, None] * wide[:, :1]
    keep = allowed & (running - wide < top_p) & (wide >= min_p)
    return (wide * keep).cumsum(-1), keep.sum(-1)


def _ends_within(params: SamplingParams, kept: int, head: int, vocab: int) -> bool:
    """Whether the filters' outcome is known from the `head` most likely tokens."""
    if 0 < params.top_k < vocab:
        return params.top_k <= head
    return kept < head


def _is_unfiltered(params: SamplingParams, vocab: int) -> bool:
    return params.top_p >= 1 and params.min_p == 0 and (params.top_k == 0 or params.top_k >= vocab)


def _pick(mass: np.ndarray, u: float) -> int:
    """The index at which the running sum passes u * its end; never one without probability."""
    end = mass[-1]
    return int(min(np.searchsorted(mass, u * end, side="right"), np.searchsorted(mass, end, side="left")))


def _pick_unfiltered(probs: np.ndarray, head_ids: np.ndarray, head_mass: np.ndarray, u: float) -> int:
    """Any token of the vocabulary may come: the head in order of probability, then the others by id, unsorted."""
    if u < head_mass[-1]:
        return int(head_ids[np.searchsorted(head_mass, u, side="right")])
    tail = probs.astype(np.float64)
    tail[head_ids] = 0.0
    return _pick(tail.cumsum(), min((u - head_mass[-1]) / (1.0 - head_mass[-1]), 1.0) if head_mass[-1] < 1 else 0.0)
