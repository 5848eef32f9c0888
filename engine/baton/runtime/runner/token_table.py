"""The last token sampled in each slot, on the device: the next step reads it there, and the host
need not know it.

Invariant: every entry is an id of the vocabulary. The INVALID_TOKEN of a row that ends is stored as
0: the row may be part of a step that is planned already.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenTable:
    def __init__(self, slots: int, device: torch.device) -> None:
        self.dummy = slots
        """An entry that is no slot's, for rows that are only padding."""
        self._tokens = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    @staticmethod
    def make_references(slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """References that stand for "the last token of this slot" among token ids."""
        return -1 - slots

    def resolve_tokens(self, token_ids: Tensor) -> Tensor:
        """Token ids in which every reference is replaced by the token."""
        return torch.where(token_ids < 0, self._tokens[(-1 - token_ids).clamp_min(0)], token_ids)

    def write_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Both int64 [n] on the device; slots are different, except for the dummy and those of
        drafted tokens: any of their tokens is kept then, and none is read."""
        self._tokens.index_copy_(0, slots, tokens.clamp_min(0))
