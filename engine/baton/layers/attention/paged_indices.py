"""A step's rows as the index arrays that paged decode and paged prefill kernels take. Integers
only, numpy only.

1. Layers that see a window or a chunk get rows without the pages in front of it (`see_rows`), which
may be another sequence's by now. 2. `split_step` cuts a step at `num_decode`: decode rows (one
query each) go to one kernel, the others to the other, and each kernel sees arrays that start at 0.
3. For a captured CUDA graph, whose batch size is frozen, the decode rows (`decode_rows`) are padded
up to one of the `capture_sizes` with `pad_decode` and `pad_slots`.

The arrays are those of flashinfer's paged wrappers (a CSR page table plus the fill of each last
page):

    row r of a kernel:  kv_indices[kv_indptr[r] : kv_indptr[r+1]]     its pages, in order of position
                        (pages - 1) * page_size + last_page_len[r]    its tokens in KV; 1 <= last_page_len <= page_size
                        queries [qo_indptr[r] : qo_indptr[r+1])       prefill only; decode rows have one each

Rows may share pages (a cached prefix). Invariant: a padding row names the dummy page only, reads
one slot of it and writes that slot; its result is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.layers.spec import EVERYTHING, Sight

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

LADDER_STEP = 8
"""Distance of capture sizes from this size on: small enough that padding costs under 8 rows, large
enough that a batch of 256 needs 35 graphs. mini-sglang and vLLM step by 8 too."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """R rows' pages, in the order of the rows."""

    kv_indptr: Int32
    """[R+1], starts at 0."""
    kv_indices: Int32
    """[kv_indptr[-1]]: page ids."""
    last_page_len: Int32
    """[R]"""

    def __len__(self) -> int:
        return len(self.last_page_len)


@dataclass(frozen=True, slots=True)
class StepIndices:
    """Step cut in two. Decode rows own tokens [0, len(decode)), prefill rows the rest."""

    decode: PagedRows
    prefill: PagedRows
    qo_indptr: Int32
    """[len(prefill)+1], starts at 0: queries of the prefill rows, counted from the first of
    them."""


class View(NamedTuple):
    """What launches of some layers read of a step's rows."""

    table: int
    """Of the pool."""
    sight: Sight


class SeenRows(NamedTuple):
    """A step's rows as layers of one sight have them: R' rows, whose positions count from the first
    page that their queries see. The tokens are those of the step, in its order."""

    qo_indptr: Int32
    """[R'+1]"""
    kv_lens: Int32
    """[R']"""
    page_indptr: Int32
    """[R'+1]"""
    places: Int64 | slice
    """[page_indptr[-1]]: of their pages among those of the step's rows."""


def see_rows(
    qo_indptr: Int32, kv_lens: Int32, page_indptr: Int32, sight: Sight, page_size: int
) -> SeenRows:
    """Leave out the pages that no query of a row sees, and part rows at the borders of chunks: so a
    kernel with a causal mask, and a window, sees what the layers see.

    Args: `sight`: a chunk is whole pages.
    """
    # Gathering all pages of long rows anew would take longer than planning the step.
    if sight == EVERYTHING:
        return SeenRows(qo_indptr, kv_lens, page_indptr, slice(None))
    starts = kv_lens - np.diff(qo_indptr)
    row_ends = kv_lens
    row_of = np.arange(len(kv_lens))
    if sight.chunk:
        first_chunks = starts // sight.chunk
        parts = (row_ends - 1) // sight.chunk - first_chunks + 1
        row_of = np.repeat(row_of, parts)
        number = np.arange(len(row_of)) - np.repeat(np.cumsum(parts) - parts, parts)
        chunks = first_chunks[row_of] + number
        first_seen = chunks * sight.chunk
        starts = np.maximum(starts[row_of], first_seen)
        row_ends = np.minimum(row_ends[row_of], first_seen + sight.chunk)
    else:
        first_seen = np.maximum(starts - sight.window + 1, 0)
    skipped = first_seen // page_size
    num_pages = -(-row_ends // page_size) - skipped
    ends = np.cumsum(num_pages)
    first_places = page_indptr[row_of] + skipped
    places = np.arange(num_pages.sum()) + np.repeat(first_places - (ends - num_pages), num_pages)
    return SeenRows(
        _indptr(row_ends - starts),
        (row_ends - skipped * page_size).astype(np.int32),
        _indptr(num_pages),
        places,
    )


def _indptr(counts: NDArray[np.signedinteger]) -> Int32:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def decode_rows(
    kv_lens: Int32,
    page_indptr: Int32,
    tables: Sequence[Int32],
    views: Sequence[View],
    page_size: int,
) -> list[PagedRows]:
    """A step of decode rows as each view has it.

    Args: `tables`: the rows' pages by table of the pool.
    """
    qo_indptr = np.arange(len(kv_lens) + 1, dtype=np.int32)
    seen: dict[Sight, SeenRows] = {}
    found = []
    for table, sight in views:
        if sight not in seen:
            seen[sight] = see_rows(qo_indptr, kv_lens, page_indptr, sight, page_size)
        rows = seen[sight]
        last_page_len = ((rows.kv_lens - 1) % page_size + 1).astype(np.int32)
        found.append(PagedRows(rows.page_indptr, tables[table][rows.places], last_page_len))
    return found


def split_step(
    qo_indptr: Int32,
    kv_lens: Int32,
    page_indptr: Int32,
    page_indices: Int32,
    num_decode: int,
    page_size: int,
) -> StepIndices:
    """Cut a step (the arrays of `ForwardBatch`) into its decode and its prefill rows. Either may be
    empty.

    Raises ValueError when the arrays contradict each other; a kernel would read out of bounds instead.
    Cost: O(rows + pages) copies; no loop in Python.
    """
    _check_step(qo_indptr, kv_lens, page_indptr, page_indices, num_decode, page_size)
    first_page = page_indptr[num_decode]
    last_page_len = ((kv_lens - 1) % page_size + 1).astype(np.int32)
    return StepIndices(
        PagedRows(
            page_indptr[: num_decode + 1].copy(),
            page_indices[:first_page].copy(),
            last_page_len[:num_decode],
        ),
        PagedRows(
            page_indptr[num_decode:] - first_page,
            page_indices[first_page:].copy(),
            last_page_len[num_decode:],
        ),
        qo_indptr[num_decode:] - qo_indptr[num_decode],
    )


def _check_step(
    qo_indptr: Int32,
    kv_lens: Int32,
    page_indptr: Int32,
    page_indices: Int32,
    num_decode: int,
    page_size: int,
) -> None:
    rows = len(kv_lens)
    if len(qo_indptr) != rows + 1 or len(page_indptr) != rows + 1 or not 0 <= num_decode <= rows:
        sizes = (
            f"{len(qo_indptr)} qo_indptr, {len(page_indptr)} page_indptr, {num_decode} decode rows"
        )
        raise ValueError(
            f"{rows} rows with {sizes}; needs {rows + 1}, {rows + 1} and at most {rows}"
        )
    if qo_indptr[0] != 0 or page_indptr[0] != 0 or page_indptr[-1] != len(page_indices):
        ends = f"qo_indptr[0] {qo_indptr[0]}, page_indptr {page_indptr[0]} to {page_indptr[-1]}"
        raise ValueError(
            f"{ends} for {len(page_indices)} pages; indptr starts at 0 and ends at the number of pages"
        )
    queries = np.diff(qo_indptr)
    if (queries < 1).any() or (kv_lens < queries).any() or (queries[:num_decode] != 1).any():
        raise ValueError(
            "a row has no query, more queries than KV, or is a decode row with several queries"
        )
    if (np.diff(page_indptr) != -(-kv_lens // page_size)).any():
        raise ValueError(f"a row's pages are not what its KV fills at {page_size} tokens a page")


def capture_sizes(largest: int) -> tuple[int, ...]:
    """The batch sizes for which decode graphs are captured: 1, 2, 4, then multiples of 8 up to and
    with `largest`."""
    if largest < 1:
        raise ValueError(f"largest batch {largest}: must be at least 1")
    sizes = [1, 2, 4, *range(LADDER_STEP, largest, LADDER_STEP)]
    return (*(r for r in sizes if r < largest), largest)


def capture_size(sizes: tuple[int, ...], rows: int) -> int | None:
    """The smallest batch size of the ladder that holds `rows` (at least 1) rows; None: run without
    a graph."""
    if rows < 1:
        raise ValueError(f"{rows} rows: an empty batch has no graph")
    index = int(np.searchsorted(sizes, rows))
    return sizes[index] if index < len(sizes) else None


def pad_decode(rows: PagedRows, batch_size: int, dummy_page: int) -> PagedRows:
    """Add rows that read the first slot of `dummy_page` until there are `batch_size`.

    Args:
        dummy_page: a page that the scheduler does not know: never any row's.
    Raises:
        ValueError: too many rows, or a row holds the dummy page.
    """
    added = batch_size - len(rows)
    if added < 0:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {batch_size}")
    if (rows.kv_indices == dummy_page).any():
        raise ValueError(f"page {dummy_page} is reserved for padding, but a row holds it")
    ends = rows.kv_indptr[-1] + np.arange(1, added + 1, dtype=np.int32)
    return PagedRows(
        np.concatenate((rows.kv_indptr, ends)),
        np.concatenate((rows.kv_indices, np.full(added, dummy_page, np.int32))),
        np.concatenate((rows.last_page_len, np.ones(added, np.int32))),
    )


def pad_slots(slots: Int64, batch_size: int, dummy_page: int, page_size: int) -> Int64:
    """Where the padded batch writes its K and V: padding rows all write the first slot of the dummy
    page.

    They may overwrite each other there; only padding rows read it, and their results are dropped.
    """
    added = batch_size - len(slots)
    if added < 0:
        raise ValueError(f"{len(slots)} rows do not fit a batch of {batch_size}")
    return np.concatenate((slots, np.full(added, dummy_page * page_size, np.int64)))
