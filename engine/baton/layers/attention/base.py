"""Description of a forward pass's rows, and the protocol of attention backends.

A step: (1) the runner turns a plan into one `ForwardBatch`; (2) `backend.plan(batch)` once; (3) per
layer `backend.forward(layer, q, k, v)` writes the step's K and V into the pool, then attends; (4)
the batch is dropped.

    row r:  its pages    page_indices[page_indptr[r] : page_indptr[r+1]], position p lives in page p // page_size
            its queries  tokens [qo_indptr[r] : qo_indptr[r+1]), the last of kv_lens[r] positions

                 |<------------- kv_lens[r] ------------->|
                 |  already in the pool  |  n new tokens  |

Invariants: decode rows (n = 1) come first; kv_lens[r] >= n >= 1; page ids are in the pool; no slot
is written twice.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.recurrent_state import StepStates
from baton.layers.spec import common_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.layers.attention.paged_indices import PagedRows, View
    from baton.layers.cuda.stream import CudaStream
    from baton.layers.kv_pool import KvTensors
    from baton.layers.spec import AttentionSpec


NOTHING = torch.empty(0, dtype=torch.int32)


@dataclass(slots=True)
class PageTable:
    """Pages of a step's rows in a further page group; positions and lengths are those of the step.

    Entries for pages that no query sees name any page of the pool.
    """

    slot_mapping: Tensor
    """int64 [T], as ForwardBatch.slot_mapping"""
    page_indices: Tensor
    """int32 [page_indptr[-1]], as ForwardBatch.page_indices"""


@dataclass(slots=True)
class ForwardBatch:
    """Rows of a step as tensors: T tokens, R rows, S sampling rows.

    What each token needs (ids, positions, slots, sample_index) is on the device that computes; what each row needs
    (indptr, lengths, pages) is on the host, where backends plan. A recorded step has none of that.
    """

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    slot_mapping: Tensor
    """int64 [T]: page * page_size + offset of every token's KV."""
    sample_index: Tensor
    """int64 [S]: indices into T of the last token of rows that sample, then those of the tokens whose rows predict a
    prompt token with a missing logprob."""
    qo_indptr: Tensor = NOTHING
    """int32 [R+1]: rows in plan order, decode rows first."""
    kv_lens: Tensor = NOTHING
    """int32 [R]: tokens in KV after this step."""
    page_indptr: Tensor = NOTHING
    """int32 [R+1]"""
    page_indices: Tensor = NOTHING
    """int32 [page_indptr[-1]]"""
    num_decode: int = 0
    num_prompt_rows: int = 0
    """How many entries of `sample_index` predict prompt tokens."""
    max_kv_len: int = 0
    further: tuple[PageTable, ...] = ()
    """Tables 1, 2, ... of the pool (kv_spec.LayerPlace); the fields above are of table 0."""
    is_padding: Tensor | None = None
    """bool [T]: rows that fill up a recorded step; None: there are none."""
    states: StepStates | None = None
    """Of layers that keep a state per sequence; None: no layer does."""

    @property
    def tables(self) -> tuple[PageTable, ...]:
        return PageTable(self.slot_mapping, self.page_indices), *self.further


class AttentionBackend(Protocol):
    """Causal attention over the paged pool; one per rank, not thread-safe."""

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for the layers of one step."""

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Write k, v [T, Hk, D] of the step into the pool, then attend with q [T, Hq, D]: returns
        [T, Hq * D].

        Layers with latents (`LatentSpec`) have latents [T, 1, L] for k and rotated keys [T, 1, R]
        for v. A query [T, Hq, L + R] has been multiplied by its head's share of the key
        projection, and the result [T, Hq * L] is yet to be multiplied by that of the value
        projection.

        Args: `sinks`: float32 [Hq] for layers that have them.
        """


class PagedAttention(AttentionBackend):
    """A backend on any device. A kernel may write K and V itself: then `attend` takes the place of
    `forward`."""

    def __init__(self, layers: Sequence[AttentionSpec], kv: KvTensors) -> None:
        self._heads = common_heads(layers)
        self._sights = tuple(layer.sight for layer in layers)
        """By layer."""
        self._kv = kv
        self._scales = kv.scales
        """By layer, where the pages hold codes; else empty."""
        self._places = kv.spec.layer_places
        self._slot_mappings: list[Tensor] = []
        """By table of the pool."""
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}
        """Pages and offsets by table, once a layer of the step has asked for them."""

    @functools.cached_property
    def _pages(self) -> list[tuple[Tensor, Tensor]]:
        data = self._kv.data
        return [(data[:, place.row, 0], data[:, place.row, 1]) for place in self._places]

    def _set_slots(self, *slot_mappings: Tensor) -> None:
        """Args: `slot_mappings`: by table of the pool."""
        self._slot_mappings = [slots.to(self._kv.data.device) for slots in slot_mappings]
        self._slots = {}

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        table = self._places[layer].table
        slots = self._slots.get(table)
        if slots is None:
            mapping = self._slot_mappings[table]
            slots = (mapping // self._kv.page_size, mapping % self._kv.page_size)
            self._slots[table] = slots
        keys, values = self._pages[layer]
        if self._scales:
            scales = self._scales[layer]
            _store_codes(keys, slots, k, scales.key)
            _store_codes(values, slots, v, scales.value)
        else:
            keys[slots] = k
            values[slots] = v
        return self.attend(layer, q, sinks)

    @property
    def keeps_codes(self) -> bool:
        """Whether the pages hold codes of K and V, which `forward` alone writes."""
        return bool(self._scales)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [pages, page_size, Hk, D] with strides of the pool."""
        return self._pages[layer]

    def slot_mapping(self, layer: int) -> Tensor:
        """Where K and V of the step's tokens lie in one layer: int64 [T]."""
        return self._slot_mappings[self._places[layer].table]

    @abstractmethod
    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """`forward` for K and V that are in the pool already."""


def _store_codes(pages: Tensor, slots: tuple[Tensor, Tensor], x: Tensor, scale: float) -> None:
    """Write the codes of x / scale; what exceeds the largest code becomes it."""
    limit = torch.finfo(pages.dtype).max
    codes = (x.float() / scale).clamp(-limit, limit).to(pages.dtype)
    # Bytes can be indexed on any device.
    pages.view(torch.uint8)[slots] = codes.view(torch.uint8)


class RowInputs:
    """What one view of a recorded step's rows reads:

    int32   fill of the last page [B] | page indptr [B + 1] | page indices
    """

    def __init__(self, words: Tensor, rows: int, pages: int) -> None:
        """Args: `words`: int64 [row_words(rows, pages)]."""
        self.words = words
        self._rows = rows
        tail = words.view(torch.int32)
        self.last_page_len = tail[:rows]
        self.page_indptr = tail[rows : 2 * rows + 1]
        self.page_indices = tail[2 * rows + 1 : 2 * rows + 1 + pages]

    def pack(self, rows: PagedRows) -> NDArray[np.int64]:
        """The words up to the last page of `rows`. What lies behind them stays as it was."""
        n = len(rows)
        pages = len(rows.kv_indices)
        words = np.zeros(row_words(self._rows, pages), np.int64)
        tail = words.view(np.int32)
        tail[:n] = rows.last_page_len
        tail[self._rows : self._rows + n + 1] = rows.kv_indptr
        tail[2 * self._rows + 1 : 2 * self._rows + 1 + pages] = rows.kv_indices
        return words


def row_words(rows: int, pages: int) -> int:
    """Words of 8 bytes that a view's arrays take."""
    return (2 * rows + 1 + pages + 1) // 2


class GraphInputs:
    """The buffers a recorded step reads. What all steps have lies in one piece of device memory, so
    that one copy fills it; each further view is one more.

    int64   token ids [B] | positions [B] | entries of the token table [B] | KV slots by table [B]
    then    the first view's rows
    """

    def __init__(
        self, rows: int, pages: int, device: torch.device, tables: int = 1, views: int = 1
    ) -> None:
        """Args: `tables`: of the pool; `views`: kinds of rows that launches read."""
        self.rows = rows
        self.pages = pages
        self.device = device
        self.columns = 3 + tables
        self._head = self.columns * rows
        """Words of 8 bytes before the first view."""
        size = row_words(rows, pages)
        self.words = torch.zeros(self._head + size, dtype=torch.int64, device=device)
        columns = self.words[: self._head].split(rows)
        self.token_ids, self.positions, self.entries = columns[:3]
        self.slot_mappings = columns[3:]
        further = torch.zeros((views - 1, size), dtype=torch.int64, device=device)
        self.views = [RowInputs(x, rows, pages) for x in (self.words[self._head :], *further)]

    def fill(
        self, stream: CudaStream, columns: NDArray[np.int64], views: Sequence[PagedRows]
    ) -> None:
        """Args: `columns`: [3 + tables, n] in the order above, for the n rows of each view. What
        lies behind them stays as it was."""
        head = np.zeros((self.columns, self.rows), np.int64)
        head[:, : columns.shape[1]] = columns
        first, *further = (view.pack(rows) for view, rows in zip(self.views, views, strict=True))
        words = np.concatenate((head.reshape(-1), first))
        stream.put_into(self.words[: len(words)], words)
        for view, words in zip(self.views[1:], further, strict=True):
            stream.put_into(view.words[: len(words)], words)


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose `forward` can be recorded (runtime.runner.capture), for steps of `size`
    decode rows.

    `capture_bytes` says what all captures will take; `prepare_capture` runs once per size, the largest first;
    `plan_replay` before recording and before each replay; `use_capture` is the first thing recorded, the layers'
    `forward` follow.
    """

    views: tuple[View, ...]
    """What launches read of a step's rows."""

    def capture_bytes(self, largest: int) -> int:
        """Device memory that captures of up to `largest` rows take for good, besides what `forward`
        allocates."""

    def prepare_capture(self, size: int, static: GraphInputs) -> None:
        """`static`: where the step's index arrays will lie, filled before the work of `plan_replay`
        is done."""

    def plan_replay(self, size: int, views: Sequence[PagedRows]) -> None:
        """Prepare for rows, padded to `size`, as each of `views` has them; the same as in
        `static`."""

    def use_capture(self, size: int, slot_mappings: Sequence[Tensor]) -> None:
        """Make `forward` use this capture's buffers.

        Args: `slot_mappings`: by table of the pool, as in ForwardBatch, at fixed places.
        """
