"""The sampler's definition (`runtime.sampler`) in tensor operations that never look at the logits from the host.

1. `Draw(rows, vocab, put)` writes down what the rows ask for, from parameters and positions alone; 2. `run(logits)`
queues the work and returns tensors on the logits' device; 3. `read` turns their host copies into a result later.

A row's parameters choose its route, never the other rows: its token is the same in any batch, up to the rounding of the
device's reductions. Tokens equal those of `sampler.sample` on the same logits, except that tokens of equal logit at the
edge of the head may stand for each other.

Works on any device, and is tested on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.runtime import sampler
from baton.runtime.sampler import Edits, Put, Route, SampleRow, filter_columns, kept_mass, largest, route
from baton.sched.mix import uniform
from baton.sched.plan import StepResult, TokenLogprobs

ROWS_AT_ONCE = 32
"""Bounds the scratch memory of a draw to about 32 * vocab * 40 bytes: 195 MB for 152 k tokens."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, all on one device. Logprobs are of the m rows that asked for them, k is the most one asked."""

    tokens: Tensor
    """int64 [S]"""
    chosen: Tensor | None = None
    """float32 [m]"""
    top_ids: Tensor | None = None
    """int64 [m, k]"""
    top_logprobs: Tensor | None = None
    """float32 [m, k]"""


class Draw:
    """One token for each of S rows. The rows are read when it is made: they may advance before `run`."""

    def __init__(self, rows: Sequence[SampleRow], vocab: int, put: Put) -> None:
        """`put` must not wait for the device."""
        self._put = put
        self._vocab = vocab
        special = [(i, row) for i, row in enumerate(rows) if not row.is_always_plain]
        self.is_plain = not special
        """argmax says all."""
        self._logprobs = [(i, row.params.logprobs) for i, row in special if row.params.logprobs >= 0]
        edited = [(i, row) for i, row in special if row.is_edited]
        self._edits = Edits(edited, vocab) if edited else None
        by_route: dict[Route, list[int]] = {way: [] for way in Route}
        for i, row in special:
            if not row.is_greedy:
                by_route[route(row.params, vocab)].append(i)
        self._ways = [(way, len(some)) for way, some in by_route.items() if some]
        self._drawn = [i for some in by_route.values() for i in some]
        """Rows that draw, those of one route together."""
        self._columns = [
            (r.params.temperature, uniform(r.params.seed, r.position), *filter_columns(r.params, vocab))
            for r in (rows[i] for i in self._drawn)
        ]

    def run(self, logits: Tensor, greedy: Tensor | None = None) -> Drawn:
        """Queue the draw. Waits for nothing.

        Args:
            logits: float32 [S, vocab]; overwritten where rows edit theirs.
            greedy: int64 [S]: their argmax, when it is known.
        """
        if self.is_plain:
            return Drawn(logits.argmax(-1) if greedy is None else greedy)
        raw = asked = None
        if self._logprobs:
            asked = self._put(np.array([i for i, _ in self._logprobs]))
            raw = logits[asked].log_softmax(-1)
        if self._edits is not None:
            self._edits.apply(logits, self._put)
        tokens = logits.argmax(-1) if greedy is None or self._edits is not None else greedy.clone()
        if self._drawn:
            self._draw_into(tokens, logits)
        if raw is None or asked is None:
            return Drawn(tokens)
        chosen = raw.gather(1, tokens[asked][:, None])[:, 0]
        most = min(max(k for _, k in self._logprobs), self._vocab)
        if not most:
            return Drawn(tokens, chosen)
        top = raw.topk(most)
        return Drawn(tokens, chosen, top.indices, top.values)

    def _draw_into(self, tokens: Tensor, logits: Tensor) -> None:
        at = self._put(np.array(self._drawn))
        columns = self._put(np.array(self._columns).T.copy())[:, :, None]
        first = 0
        for way, count in self._ways:
            for start in range(first, first + count, ROWS_AT_ONCE):
                some = slice(start, min(start + ROWS_AT_ONCE, first + count))
                tokens.index_copy_(0, at[some], _draw(way, logits[at[some]], columns[:, some]))
            first += count

    def read(self, drawn: Drawn) -> StepResult:
        """The result, of copies on the host."""
        tokens = drawn.tokens.tolist()
        if drawn.chosen is None:
            return StepResult(tokens)
        chosen = drawn.chosen.tolist()
        if drawn.top_ids is None or drawn.top_logprobs is None:
            return StepResult(tokens, {i: TokenLogprobs(chosen[n]) for n, (i, _) in enumerate(self._logprobs)})
        ids, values = drawn.top_ids.tolist(), drawn.top_logprobs.tolist()
        return StepResult(
            tokens,
            {i: TokenLogprobs(chosen[n], ids[n][:k], values[n][:k]) for n, (i, k) in enumerate(self._logprobs)},
        )


def _draw(way: Route, logits: Tensor, columns: Tensor) -> Tensor:
    """One token for each row of logits [n, vocab]: int64 [n].

    Args:
        columns: float64 [6, n, 1]: temperature, u, then the filters' columns.
    """
    temperature, u, filters = columns[0], columns[1], columns[2:]
    scaled = logits / temperature.to(logits.dtype)
    probs = scaled.softmax(-1)
    vocab = logits.shape[1]
    ids = largest(scaled, vocab if way is Route.SORTED else min(sampler.HEAD, vocab))
    ranks = torch.arange(ids.shape[1], device=ids.device)[None, :]
    mass, _ = kept_mass(probs.gather(1, ids).double(), ranks, filters)
    if way is not Route.ALL:
        return ids.gather(1, _pick(mass, u))[:, 0]
    # The head where u falls into its mass, else the others by id, unsorted.
    head = mass[:, -1:].contiguous()
    in_head = torch.searchsorted(mass, u, right=True).clamp_max(mass.shape[1] - 1)
    rest = probs.double().scatter_(1, ids, 0.0).cumsum(-1)
    by_id = _pick(rest, ((u - head) / (1.0 - head)).clamp_max(1.0).nan_to_num(0.0))
    return torch.where(u < head, ids.gather(1, in_head), by_id)[:, 0]


def _pick(mass: Tensor, u: Tensor) -> Tensor:
    """The index at which each row's running sum passes u * its end; never one without probability: int64 [n, 1]."""
    end = mass[:, -1:].contiguous()
    return torch.minimum(torch.searchsorted(mass, u * end, right=True), torch.searchsorted(mass, end, right=False))
