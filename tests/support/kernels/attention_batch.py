"""A `ForwardBatch` of rows written in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.layers.attention.base import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Row of a batch as plain Python: `token_ids` are computed at positions start, start + 1, …"""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    """The request's pages, at least enough for start + len(token_ids) tokens."""
    samples: bool = True


def build_batch(rows: Sequence[AttentionRow], page_size: int) -> ForwardBatch:
    """Make the tensors of one step. Raises ValueError for a row without tokens or with too few pages."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    pages: list[int] = []
    qo, page_ends, kv_lens, sample = [0], [0], [], []
    num_decode = 0
    for i, row in enumerate(rows):
        n = len(row.token_ids)
        end = row.start + n
        needed = -(-end // page_size)
        if n == 0 or len(row.pages) < needed:
            have = f"{n} tokens from {row.start} with {len(row.pages)} pages of {page_size}"
            raise ValueError(f"row {i}: {have}; needs at least 1 token and {needed} pages")
        if n == 1 and num_decode == i:
            num_decode += 1
        tokens.extend(row.token_ids)
        positions.extend(range(row.start, end))
        slots.extend(
            row.pages[p // page_size] * page_size + p % page_size for p in range(row.start, end)
        )
        pages.extend(row.pages[:needed])
        qo.append(len(tokens))
        page_ends.append(len(pages))
        kv_lens.append(end)
        if row.samples:
            sample.append(len(tokens) - 1)
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        qo_indptr=torch.tensor(qo, dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        page_indptr=torch.tensor(page_ends, dtype=torch.int32),
        page_indices=torch.tensor(pages, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        sample_index=torch.tensor(sample, dtype=torch.int64),
        num_decode=num_decode,
        max_kv_len=max(kv_lens, default=0),
    )
