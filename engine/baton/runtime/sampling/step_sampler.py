"""The sampler's definition (`runtime.sampling.sampler`) without a look at the logits from the host.

1. `SamplingLaunch(rows, vocab, put)` writes down what the rows ask for, from parameters and positions alone;
2. `queue_draw(logits)` queues the work, the draw in one launch (`kernels.draw`), and returns tensors on
the logits' device;
3. `read_result` turns their host copies into a result later.

A row's token is the same in any batch, and but for the rounding of sums on any device; INVALID_TOKEN where its largest
logit is NaN or infinite. `sampler.draw_tokens` draws from logits on the host (`sample_tokens` does all
three), and where there is no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.layers import kernels
from baton.runtime.sampling import sampler
from baton.runtime.sampling.sampler import LogitEdits, Put, SampleRow, draw_columns
from baton.sched.types.plan import INVALID_TOKEN, StepResult, TokenLogprobs


class SamplingResult(NamedTuple):
    """Tokens and logprobs of a step, on one device. Logprobs are of the m rows that asked, k is the most one asked."""

    tokens: Tensor
    """int64 [S]; INVALID_TOKEN of a row whose logits are not finite, and its logprobs mean nothing"""
    chosen: Tensor | None = None
    """float32 [m]"""
    top_ids: Tensor | None = None
    """int64 [m, k]"""
    top_logprobs: Tensor | None = None
    """float32 [m, k]"""


class SamplingLaunch:
    """Draw of one token for each of S rows. The rows are read when it is made: they may advance before `run`."""

    def __init__(self, rows: Sequence[SampleRow], vocab: int, put: Put) -> None:
        """`put` must not wait for the device."""
        self._put = put
        self._vocab = vocab
        special = [(i, row) for i, row in enumerate(rows) if not row.is_plain]
        self.is_plain = not special
        """argmax says all."""
        self._logprobs = [
            (i, row.params.logprobs) for i, row in special if row.params.logprobs >= 0
        ]
        edited = [(i, row) for i, row in special if row.is_edited]
        self._edits = LogitEdits(edited, vocab) if edited else None
        self._drawn = [i for i, row in special if not row.is_greedy]
        self._columns = [draw_columns(rows[i], vocab) for i in self._drawn]

    def queue_draw(self, logits: Tensor, greedy: Tensor | None = None) -> SamplingResult:
        """Queue the draw. Waits for nothing.

        Args:
            logits: float32 [S, vocab]; overwritten where rows edit theirs.
            greedy: int64 [S]: `greedy_tokens` of the logits, when they are known.
        """
        best = greedy_tokens(logits) if greedy is None else greedy
        if self.is_plain:
            return SamplingResult(best)
        raw = rows_with_logprobs = None
        if self._logprobs:
            rows_with_logprobs = self._put(np.array([i for i, _ in self._logprobs]))
            raw = logits[rows_with_logprobs].log_softmax(-1)
        if self._edits is not None:
            self._edits.apply(logits, self._put)
            tokens = torch.where(best < 0, best, greedy_tokens(logits))
        else:
            tokens = best.clone()
        if self._drawn:
            self._draw_into(tokens, logits)
        if raw is None or rows_with_logprobs is None:
            return SamplingResult(tokens)
        chosen = raw.gather(1, tokens[rows_with_logprobs].clamp_min(0)[:, None])[:, 0]
        top = raw.topk(min(max(k for _, k in self._logprobs), self._vocab))
        return SamplingResult(tokens, chosen, top.indices, top.values)

    def _draw_into(self, tokens: Tensor, logits: Tensor) -> None:
        rows = self._put(np.array(self._drawn))
        if logits.is_cuda and kernels.usable:
            launch_draw(logits, rows, self._put(np.array(self._columns).T.copy()), tokens)
        else:
            is_bad = tokens[rows] < 0
            some = logits[rows].masked_fill_(is_bad[:, None], 0.0).cpu()
            drawn = torch.tensor(sampler.draw_tokens(some, self._columns)).to(tokens.device)
            tokens[rows] = drawn.masked_fill_(is_bad, INVALID_TOKEN)

    def read_result(self, drawn: SamplingResult) -> StepResult:
        """The result, of copies on the host."""
        tokens = drawn.tokens.tolist()
        if drawn.chosen is None or drawn.top_ids is None or drawn.top_logprobs is None:
            return StepResult(tokens)
        chosen = drawn.chosen.tolist()
        ids = drawn.top_ids.tolist()
        values = drawn.top_logprobs.tolist()
        requested = [(n, i, k) for n, (i, k) in enumerate(self._logprobs) if tokens[i] >= 0]
        return StepResult(
            tokens,
            {i: TokenLogprobs(chosen[n], ids[n][:k], values[n][:k]) for n, i, k in requested},
        )


@torch.inference_mode()
def sample_tokens(logits: Tensor, rows: Sequence[SampleRow]) -> StepResult:
    """Choose one token per row, of logits on the host. The rows are not advanced: call `append` with what you keep.

    Args:
        logits: float32 [S, vocab]; overwritten where rows edit theirs.
        rows: S rows, in the order of logits.
    """
    sampling = SamplingLaunch(rows, logits.shape[1], torch.from_numpy)
    return sampling.read_result(sampling.queue_draw(logits))


def greedy_tokens(logits: Tensor) -> Tensor:
    """Ids of the largest logits, the lowest among equals: int64 [S]; INVALID_TOKEN where that logit is not finite."""
    largest, ids = logits.max(-1)  # a NaN counts as the largest
    return ids.masked_fill_((largest - largest) != 0, INVALID_TOKEN)


def launch_draw(logits: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
    from baton.layers.kernels.draw import draw_rows  # imports Triton

    draw_rows(logits, rows, columns, tokens)
