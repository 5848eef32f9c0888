"""The sampler's definition carried out row by row on the host: what `step_sampler.sample` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.runtime.sampling.sampler import LogitEdits, SampleRow, draw, draw_columns
from baton.sched.types.plan import INVALID_TOKEN, StepResult, TokenLogprobs


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> StepResult:
    """Choose one token per row. The rows are not advanced: call `append` with what you keep.

    Args:
        logits: float32 [S, vocab]; overwritten where rows edit theirs.
        rows: S rows, in the order of logits.
    """
    best = logits.argmax(-1)  # the place of a NaN, where there is one
    is_finite = logits.gather(1, best[:, None])[:, 0].isfinite()
    bad = [] if is_finite.all() else (~is_finite).nonzero()[:, 0].tolist()
    if all(row.is_plain for row in rows):
        return StepResult(_without(bad, best.tolist()))
    if bad:
        logits[bad] = 0.0
    raw = {i: logits[i].log_softmax(-1) for i, row in enumerate(rows) if row.params.logprobs >= 0}
    if edited := [(i, row) for i, row in enumerate(rows) if row.is_edited]:
        LogitEdits(edited, logits.shape[1]).apply(logits, torch.from_numpy)
    tokens: list[int] = logits.argmax(-1).tolist()
    for i, row in enumerate(rows):
        if not row.is_greedy:
            tokens[i] = draw(logits[i : i + 1], [draw_columns(row, logits.shape[1])])[0]
    asked = {
        i: _token_logprobs(lp, tokens[i], rows[i].params.logprobs)
        for i, lp in raw.items()
        if i not in bad
    }
    return StepResult(_without(bad, tokens), asked)


def _without(bad: Sequence[int], tokens: list[int]) -> list[int]:
    for i in bad:
        tokens[i] = INVALID_TOKEN
    return tokens


def _token_logprobs(logprobs: Tensor, token: int, k: int) -> TokenLogprobs:
    top = logprobs.topk(k)
    return TokenLogprobs(float(logprobs[token]), top.indices.tolist(), top.values.tolist())


def edit(row: SampleRow, logits: Tensor) -> None:
    """Apply logit_bias, penalties and min_new_tokens to float32 [vocab], in place."""
    LogitEdits([(0, row)], len(logits)).apply(logits[None], torch.from_numpy)
