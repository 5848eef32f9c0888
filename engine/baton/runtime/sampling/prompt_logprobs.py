"""Logprobs of prompt tokens, from the rows of a step that predict them.

    position of a token       start + 1   ...   start + n
    row that predicts it        start     ...   start + n - 1        one chunk of a prompt

1. `PromptTable` keeps the prompts of the slots whose logprobs are missing, and says which rows of a
step predict their tokens (`PromptRows`);
2. their logits come in slices of SLICE_ROWS rows, and `describe_tokens` makes a record of each row:
logits of a whole chunk would take 1.2 GB (2048 rows of 152 k);
3. `split_records` divides the records among the prompts (`PromptLogprobs`).

A token's logprob and those of the most likely tokens come from one row of log_softmax: where it is
the most likely one, both numbers are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.runtime.sampling.sampler import Put
from baton.runtime.sampling.step_sampler import pad_ids
from baton.sched.types.plan import AdmittedSeq, PromptLogprobs, Row

SLICE_ROWS = 128
"""Rows whose logits are in memory at once: 78 MB of float32 with 152 k ids."""
FIXED_COLUMNS = 2
"""Logprob and rank, in front of each record."""


@dataclass(frozen=True, slots=True)
class MissingLogprobs:
    """Prompt of a slot whose logprobs are missing from `position` on."""

    prompt: NDArray[np.int64]
    position: int
    top: int
    token_ids: tuple[int, ...]


class PromptPart(NamedTuple):
    """Tokens [position, position + num_tokens) of one prompt, which rows of a step predict."""

    handle: int
    position: int
    num_tokens: int
    top: int
    token_ids: tuple[int, ...]


class PromptRows:
    """Rows of a step that predict L prompt tokens, part by part."""

    def __init__(
        self, index: NDArray[np.int64], targets: NDArray[np.int64], parts: list[PromptPart]
    ) -> None:
        """
        Args:
            index: places of the rows among the step's tokens.
            targets: ids of the tokens that they predict.
        """
        self.index = index
        self._targets = targets
        self._parts = parts
        self._top = max(part.top for part in parts)
        wanted = [part.token_ids for part in parts]
        self._ids: NDArray[np.int64] | None = None
        """Ids asked for in each row [L, M], filled up with 0; None: no row asks for any."""
        if any(wanted):
            self._ids = pad_ids(wanted).repeat([part.num_tokens for part in parts], axis=0)

    def describe_tokens(self, logits: Tensor, first: int, put: Put) -> Tensor:
        """Records of the rows [first, first + m): int32 [m, columns], on the logits' device. Waits
        for nothing that `put` does not wait for.

        Args:
            logits: float32 [m, vocab].
        """
        rows = slice(first, first + len(logits))
        targets = put(self._targets[rows])[:, None]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, targets)
        ranks = (logprobs > chosen).sum(1, keepdim=True, dtype=torch.int32) + 1
        top = logprobs.topk(min(self._top, logits.shape[1]))
        columns = [chosen.view(torch.int32), ranks, top.indices.int(), top.values.view(torch.int32)]
        if self._ids is not None:
            of_ids = logprobs.gather(1, put(self._ids[rows]))
            columns.append(of_ids.view(torch.int32))
        return torch.cat(columns, 1)

    def split_records(
        self, slices: Iterable[NDArray[np.int32]], vocab: int
    ) -> dict[int, PromptLogprobs]:
        """Logprobs by handle, of the records of all rows on the host."""
        records = np.concatenate(list(slices))
        widest_top = min(self._top, vocab)
        logprobs_at = FIXED_COLUMNS + widest_top
        ids_at = logprobs_at + widest_top
        found = {}
        first = 0
        for part in self._parts:
            rows = records[first : first + part.num_tokens]
            first += part.num_tokens
            top = min(part.top, vocab)
            columns = (
                rows[:, : FIXED_COLUMNS + top],
                rows[:, logprobs_at : logprobs_at + top],
                rows[:, ids_at : ids_at + len(part.token_ids)],
            )
            own = np.concatenate(columns, axis=1)
            found[part.handle] = PromptLogprobs(part.position, part.num_tokens, top, own.tobytes())
        return found


class PromptTable:
    """Prompts of admitted sequences whose logprobs are missing, by slot."""

    def __init__(self) -> None:
        self._of_slot: dict[int, MissingLogprobs] = {}

    def admit(self, admitted: AdmittedSeq) -> None:
        """Take note of a sequence in its slot, in place of the one before."""
        self._of_slot.pop(admitted.slot, None)
        if admitted.logprob_position is None:
            return
        prompt = np.array(admitted.history[: admitted.prompt_tokens], np.int64)
        params = admitted.params
        self._of_slot[admitted.slot] = MissingLogprobs(
            prompt, admitted.logprob_position, params.prompt_logprobs, params.logprob_token_ids
        )

    def rows_of(self, rows: Iterable[Row]) -> PromptRows | None:
        """Rows of a step that predict prompt tokens with missing logprobs; None: there are none."""
        if not self._of_slot:
            return None
        parts: list[PromptPart] = []
        index = []
        targets = []
        row_begin = 0
        for row in rows:
            missing = self._of_slot.get(row.slot)
            if missing is not None:
                first = max(row.start + 1, missing.position)
                end = min(row.start + row.n + 1, len(missing.prompt))
                # A chunk that ends before the first missing position predicts none of the wanted
                # tokens.
                if first < end:
                    offset = row_begin - row.start - 1
                    index.append(np.arange(first + offset, end + offset, dtype=np.int64))
                    targets.append(missing.prompt[first:end])
                    part = PromptPart(
                        row.handle, first, end - first, missing.top, missing.token_ids
                    )
                    parts.append(part)
                # Later rows of the slot compute the answer, and predict no prompt token.
                if end == len(missing.prompt):
                    del self._of_slot[row.slot]
            row_begin += row.n
        if not parts:
            return None
        return PromptRows(np.concatenate(index), np.concatenate(targets), parts)
