"""The sampler's definition (`runtime.sampling.sampler`) without a look at the logits from the host.

1. `SamplingLaunch(rows, vocab, put)` writes down the draws of the rows, from parameters and
positions alone, and the tokens that they may draw, for which the results of all earlier steps must
have been read;
2. `queue_draw(logits)` queues the work, the draw in one launch (`kernels.draw`), and returns
tensors on the logits' device;
3. `read_result` turns their host copies into a result later, and the grammars take over the tokens.

A row's token is the same in any batch, and but for the rounding of sums on any device;
INVALID_TOKEN where its largest logit is NaN or infinite. `sampler.draw_tokens` draws from logits on
the host (`sample_tokens` does all three), and where there is no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers import kernels
from baton.layers.kernels.draw_columns import DrawColumns
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.sampling import sampler
from baton.runtime.sampling.grammar_masks import AllowedTokens, GrammarMasks
from baton.runtime.sampling.sampler import LogitEdits, Put, SampleRow, draw_columns
from baton.sched.types.plan import INVALID_TOKEN, StepResult, TokenLogprobs


class SamplingResult(NamedTuple):
    """Tokens and logprobs of a step, on one device.

    Logprobs are of the m rows that asked, k is the most one asked.
    """

    tokens: Tensor
    """int64 [S]; INVALID_TOKEN of a row whose logits are not finite, and its logprobs mean
    nothing
    """
    chosen: Tensor | None = None
    """float32 [m]"""
    top_ids: Tensor | None = None
    """int64 [m, k]"""
    top_logprobs: Tensor | None = None
    """float32 [m, k]"""
    id_logprobs: Tensor | None = None
    """float32 [m, i], of the ids that were asked for; i is the most one asked.

    None: no row asked for any.
    """


class SamplingLaunch:
    """Draw of one token for each of S rows.

    The rows are read when it is made: they may advance before `run`.
    """

    def __init__(
        self,
        rows: Sequence[SampleRow],
        vocab: int,
        put: Put,
        filler: MaskFiller | None = None,
    ) -> None:
        """
        Args:
            put: must not wait for the device.
            filler: needed where a row has a grammar.
        """
        self._put = put
        self._vocab = vocab
        special = [(i, row) for i, row in enumerate(rows) if not row.is_plain]
        self.is_plain = not special
        """argmax says all."""
        self._logprobs = [(i, row.params) for i, row in special if row.params.logprobs >= 0]
        wanted = [params.logprob_token_ids for _, params in self._logprobs]
        self._ids = pad_ids(wanted) if any(wanted) else None
        """Ids whose logprobs the m rows asked for."""
        edited = [(i, row) for i, row in special if row.is_edited]
        self._edits = LogitEdits(edited, vocab) if edited else None
        drawn = [(i, row) for i, row in special if not row.is_greedy]
        self._drawn = {i: draw_columns(row, vocab) for i, row in drawn}
        restricted = [(i, row) for i, row in special if row.is_restricted]
        self._masks = GrammarMasks(restricted, vocab, filler) if restricted else None
        self._edited_rows = [i for i, _ in edited]
        self._row_indices: dict[tuple[int, ...], Tensor] = {}

    def queue_draw(self, logits: Tensor, greedy: Tensor | None = None) -> SamplingResult:
        """Queue the draw. Waits for nothing.

        Args:
            logits: float32 [S, vocab]; overwritten where rows edit theirs.
            greedy: int64 [S]: `greedy_tokens` of the logits, when they are known.
        """
        best = choose_greedy(logits) if greedy is None else greedy
        if self.is_plain:
            return SamplingResult(best)
        raw = rows_with_logprobs = None
        if self._logprobs:
            rows_with_logprobs = self._put_rows([i for i, _ in self._logprobs])
            raw = logits[rows_with_logprobs].log_softmax(-1)
        if self._edits is not None:
            self._edits.apply(logits, self._put)
        tokens = best.clone()
        self._choose_largest(tokens, logits, self._edited_rows)
        drawn = self._drawn
        if self._masks is not None:
            self._masks.bar_second_choices(logits, tokens, self._put)
            few = self._restrict_logits(self._masks, logits, tokens)
            for row, ids in few:
                tokens[row] = choose_among(logits[row].numpy(), ids, drawn.get(row))
            drawn = {row: drawn[row] for row in drawn.keys() - {row for row, _ in few}}
        if drawn:
            self._draw_into(tokens, logits, drawn)
        if raw is None or rows_with_logprobs is None:
            return SamplingResult(tokens)
        chosen = raw.gather(1, tokens[rows_with_logprobs].clamp_min(0)[:, None])[:, 0]
        top = raw.topk(min(max(p.logprobs for _, p in self._logprobs), self._vocab))
        of_ids = None if self._ids is None else raw.gather(1, self._put(self._ids))
        return SamplingResult(tokens, chosen, top.indices, top.values, of_ids)

    def _restrict_logits(
        self, masks: GrammarMasks, logits: Tensor, tokens: Tensor
    ) -> list[AllowedTokens]:
        """Apply the masks; returns the rows where the choice among few tokens takes the place of a
        mask.
        """
        if not is_on_host(logits):
            masks.apply(logits, self._put_rows(masks.rows), self._put)
            self._choose_largest(tokens, logits, masks.greedy_rows)
            return []
        choices = masks.restrict_on_host(logits, tokens.tolist())
        self._choose_largest(tokens, logits, choices.masked)
        return choices.few

    def _choose_largest(self, tokens: Tensor, logits: Tensor, rows: Sequence[int]) -> None:
        """Choose the tokens of these rows again, whose logits have changed; a row without a token
        gets none.
        """
        if not rows:
            return
        if len(rows) == len(tokens):
            tokens.copy_(torch.where(tokens < 0, tokens, choose_greedy(logits)))
            return
        index = self._put_rows(rows)
        before = tokens[index]
        tokens[index] = torch.where(before < 0, before, choose_greedy(logits[index]))

    def _put_rows(self, rows: Sequence[int]) -> Tensor:
        """Numbers of rows on the logits' device: int64.

        Most lists are the same: each is copied once.
        """
        key = tuple(rows)
        index = self._row_indices.get(key)
        if index is None:
            index = self._put(np.array(rows, np.int64))
            self._row_indices[key] = index
        return index

    def _draw_into(self, tokens: Tensor, logits: Tensor, drawn: Mapping[int, DrawColumns]) -> None:
        """Draw the tokens of these rows."""
        rows = self._put_rows(list(drawn))
        columns = list(drawn.values())
        if logits.is_cuda and kernels.usable:
            launch_draw(logits, rows, self._put(np.array(columns).T.copy()), tokens)
        else:
            is_bad = tokens[rows] < 0
            some = logits[rows].masked_fill_(is_bad[:, None], 0.0).cpu()
            chosen = torch.tensor(sampler.draw_tokens(some, columns)).to(tokens.device)
            tokens[rows] = chosen.masked_fill_(is_bad, INVALID_TOKEN)

    def read_result(self, drawn: SamplingResult) -> StepResult:
        """The result, of copies on the host.

        To be called once: the grammars of the rows take over their tokens.
        """
        tokens = drawn.tokens.tolist()
        completed = frozenset[int]() if self._masks is None else self._masks.advance(tokens)
        if drawn.chosen is None or drawn.top_ids is None or drawn.top_logprobs is None:
            return StepResult(tokens, completed=completed)
        chosen = drawn.chosen.tolist()
        ids = drawn.top_ids.tolist()
        values = drawn.top_logprobs.tolist()
        of_ids = None if drawn.id_logprobs is None else drawn.id_logprobs.tolist()
        found = {}
        for n, (i, params) in enumerate(self._logprobs):
            # The logprobs of a row with logits that are not finite mean nothing.
            if tokens[i] < 0:
                continue
            k = params.logprobs
            own_ids = () if of_ids is None else of_ids[n][: len(params.logprob_token_ids)]
            found[i] = TokenLogprobs(chosen[n], ids[n][:k], values[n][:k], own_ids)
        return StepResult(tokens, found, completed)


@torch.inference_mode()
def sample_tokens(
    logits: Tensor, rows: Sequence[SampleRow], filler: MaskFiller | None = None
) -> StepResult:
    """Choose one token per row, of logits on the host. The rows are not advanced, only their
    grammars: call `append` with what you keep.

    Args:
        logits: float32 [S, vocab]; overwritten where rows edit theirs.
        rows: S rows, in the order of logits.
        filler: needed where a row has a grammar.
    """
    sampling = SamplingLaunch(rows, logits.shape[1], torch.from_numpy, filler)
    return sampling.read_result(sampling.queue_draw(logits))


def pad_ids(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Lists of ids as one matrix, filled up with 0."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids


def is_on_host(logits: Tensor) -> bool:
    return logits.device.type == "cpu"


def greedy_tokens(logits: Tensor) -> Tensor:
    """Ids of the largest logits, the lowest among equals: int64 [S]; INVALID_TOKEN where that logit
    is not finite. Can be recorded.
    """
    largest, ids = logits.max(-1)  # a NaN counts as the largest
    return ids.masked_fill_((largest - largest) != 0, INVALID_TOKEN)


def choose_greedy(logits: Tensor) -> Tensor:
    """`greedy_tokens`, on the host by numpy, which takes 1/5 to 1/12 of torch's time."""
    if not is_on_host(logits):
        return greedy_tokens(logits)
    ids = torch.from_numpy(logits.numpy().argmax(axis=-1))  # a NaN counts as the largest, too
    largest = logits.gather(-1, ids[:, None])[:, 0]
    return ids.masked_fill_((largest - largest) != 0, INVALID_TOKEN)


def choose_among(
    logits: NDArray[np.float32], ids: NDArray[np.int64], columns: DrawColumns | None
) -> int:
    """Choose one of these ids, ascending, by one row's logits [vocab]; INVALID_TOKEN where no
    choice is defined.

    Args:
        columns: of the draw; None: the largest logit.
    """
    values = logits[ids]
    index = int(values.argmax())  # a NaN counts as the largest
    if not np.isfinite(values[index]):
        return INVALID_TOKEN
    if columns is not None:
        (index,) = sampler.draw_tokens(torch.from_numpy(values)[None], [columns])
    return int(ids[index]) if index >= 0 else INVALID_TOKEN


def launch_draw(logits: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor) -> None:
    from baton.layers.kernels.draw import draw_rows  # imports Triton

    draw_rows(logits, rows, columns, tokens)
