"""Reference attention in plain torch: the definition the fast backends are compared with.

Decode rows are gathered together, padded to the longest, and attended in one batched product; each
prefill row is attended alone. All arithmetic is float32, whatever the pool's type, and codes of K
and V become numbers first; results are rounded once, at the end.

A row with a window W, or with chunks, reads only the pages its oldest query can see:

    positions   0 …… first page start ….. (start - W + 1) …… start …… kv_len
                      |<------------------ gathered ------------------->|
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.layers.attention.base import ForwardBatch, PagedAttention
from baton.layers.kv_pool import KvTensors
from baton.layers.spec import EVERYTHING, AttentionSpec, LatentSpec, Sight


class _Gather(NamedTuple):
    """Rows attended together, for one kind of layers."""

    pages: Tensor
    """int64 [r, p]: padded with a page of the row itself."""
    visible: Tensor
    """bool [r, n, p * page_size]: which gathered slots each query sees; padding and stale slots
    never."""
    unseen: tuple[Tensor, Tensor]
    """(row, slot) pairs that no query sees."""


class _Rows(NamedTuple):
    first_token: int
    num_tokens: int
    shape: tuple[int, int]
    """(rows, queries per row)"""
    by_sight: dict[Sight, _Gather]


class TorchAttention(PagedAttention):
    """Paged causal attention with grouped queries, windows or chunks by layer, soft-capped scores
    and sinks."""

    def __init__(self, layers: Sequence[AttentionSpec], kv: KvTensors) -> None:
        super().__init__(layers, kv)
        self._groups: list[list[_Rows]] = []
        """By table of the pool."""

    def plan(self, batch: ForwardBatch) -> None:
        tables = batch.tables
        self._set_slots(*(table.slot_mapping for table in tables))
        sights = tuple(dict.fromkeys(self._sights))
        self._groups = [
            _group_rows(batch, table.page_indices, self._kv, sights) for table in tables
        ]

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(len(q), self._heads.q_size, dtype=q.dtype, device=q.device)
        for rows in self._groups[self._places[layer].table]:
            tokens = slice(rows.first_token, rows.first_token + rows.num_tokens)
            out[tokens] = self._attend_rows(layer, q[tokens], rows, sinks)
        return out

    def _attend_rows(self, layer: int, q: Tensor, rows: _Rows, sinks: Tensor | None) -> Tensor:
        spec = self._heads
        r, n = rows.shape
        gather = rows.by_sight[self._sights[layer]]
        # [r, p, 2, page, Hk, D] -> two of [r, Hk, p * page, D]
        pages = self._kv.data[:, self._places[layer].row]
        if self._kv.scales:
            # Bytes can be indexed on any device.
            gathered = pages.view(torch.uint8)[gather.pages].view(pages.dtype)
        else:
            gathered = pages[gather.pages]
        both = gathered.float().permute(2, 0, 4, 1, 3, 5).flatten(3, 4)
        # A slot no query sees may hold anything a former owner left, and 0 * NaN is NaN.
        row, slot = gather.unseen
        both[:, row, :, slot] = 0.0
        keys, values = both
        if self._kv.scales:
            scales = self._kv.scales[layer]
            keys *= scales.key
            values *= scales.value
        queries = q.reshape(r, n, spec.num_heads, spec.head_dim).transpose(1, 2).float()
        visible = gather.visible[:, None]
        if spec.soft_cap or sinks is not None:
            out = _attend_scored(queries, keys, values, visible, spec=spec, sinks=sinks)
        else:
            out = functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=visible,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
                scale=spec.scale,
            )
        return out.transpose(1, 2).reshape(r * n, spec.q_size).to(q.dtype)


class TorchLatentAttention:
    """Paged causal attention over latents."""

    def __init__(self, latents: LatentSpec, kv: KvTensors) -> None:
        self._spec = latents
        self._kv = kv
        self._groups: list[_Rows] = []
        self._slots: tuple[Tensor, Tensor] | None = None
        """Page and offset of each of the step's tokens."""

    def plan(self, batch: ForwardBatch) -> None:
        slots = batch.slot_mapping.to(self._kv.data.device)
        self._slots = (slots // self._kv.page_size, slots % self._kv.page_size)
        self._groups = _group_rows(batch, batch.page_indices, self._kv, (EVERYTHING,))

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert self._slots is not None, "plan() comes first"
        pages = self._kv.data[:, layer]
        pages[self._slots] = torch.cat((k, v), dim=2)[:, 0]
        out = torch.empty(len(q), self._spec.result_size, dtype=q.dtype, device=q.device)
        for rows in self._groups:
            tokens = slice(rows.first_token, rows.first_token + rows.num_tokens)
            out[tokens] = self._attend_rows(pages, q[tokens], rows)
        return out

    def _attend_rows(self, pages: Tensor, q: Tensor, rows: _Rows) -> Tensor:
        spec = self._spec
        r, n = rows.shape
        gather = rows.by_sight[EVERYTHING]
        # [r, p, page, L + R] -> [r, p * page, L + R]
        kept = pages[gather.pages].float().flatten(1, 2)
        # As in `TorchAttention`: what no query sees may be NaN.
        kept[gather.unseen] = 0.0
        queries = q.reshape(r, n, spec.num_heads, spec.row_dim).transpose(1, 2).float()
        out = functional.scaled_dot_product_attention(
            queries,
            kept[:, None],
            kept[:, None, :, : spec.latent_dim],
            attn_mask=gather.visible[:, None],
            enable_gqa=True,
            scale=spec.scale,
        )
        return out.transpose(1, 2).reshape(r * n, spec.result_size).to(q.dtype)


def _group_rows(
    batch: ForwardBatch, page_indices: Tensor, kv: KvTensors, sights: Sequence[Sight]
) -> list[_Rows]:
    """The rows of a step that are attended together: all decode rows, and each other row alone."""
    starts = batch.qo_indptr.tolist()
    kv_lens = batch.kv_lens.tolist()
    first_page = batch.page_indptr.tolist()
    pages = page_indices.long()
    tables = [pages[a:b] for a, b in itertools.pairwise(first_page)]
    decode = list(range(batch.num_decode))
    groups = [decode] if decode else []
    groups += [[r] for r in range(batch.num_decode, len(kv_lens))]
    grouped = []
    for rows in groups:
        n = starts[rows[0] + 1] - starts[rows[0]]
        row_tables = [tables[r] for r in rows]
        row_lens = [kv_lens[r] for r in rows]
        by_sight = {sight: _gather_rows(kv, row_tables, row_lens, n, sight) for sight in sights}
        grouped.append(_Rows(starts[rows[0]], n * len(rows), (len(rows), n), by_sight))
    return grouped


def _gather_rows(
    kv: KvTensors, tables: list[Tensor], kv_lens: list[int], n: int, sight: Sight
) -> _Gather:
    """Pages and visibility of rows with n queries each, of which the last is at position kv_len
    - 1."""
    size = kv.page_size
    skipped = [sight.first_seen(kv_len - n) // size for kv_len in kv_lens]
    used = [-(-kv_len // size) for kv_len in kv_lens]
    width = max(u - s for u, s in zip(used, skipped, strict=True))
    pages = torch.stack(
        [_pad_pages(t[s:u], width) for t, s, u in zip(tables, skipped, used, strict=True)]
    )
    first = torch.tensor(skipped)[:, None, None] * size
    last_query = torch.tensor(kv_lens)[:, None, None] - n
    query = last_query + torch.arange(n)[None, :, None]
    slot = first + torch.arange(width * size)[None, None, :]
    visible = slot <= query
    if sight.window:
        visible &= slot > query - sight.window
    if sight.chunk:
        visible &= slot >= query - query % sight.chunk
    row, slot = (~visible.any(1)).nonzero(as_tuple=True)
    device = kv.data.device
    return _Gather(pages.to(device), visible.to(device), (row.to(device), slot.to(device)))


def _attend_scored(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Attention whose scores pass a soft cap or meet a sink, which torch's own function has no
    arguments for.

    Args: queries [r, Hq, n, D]; keys, values [r, Hk, m, D]; visible [r, 1, n, m]; sinks [Hq].
    """
    group = spec.num_heads // spec.num_kv_heads
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = queries @ keys.transpose(-1, -2) * spec.scale
    if spec.soft_cap:
        scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ values
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ values


def _pad_pages(pages: Tensor, width: int) -> Tensor:
    return functional.pad(pages, (0, width - len(pages)), value=int(pages[-1]))
