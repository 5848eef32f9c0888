"""The index arrays of paged kernels: read back the way a kernel reads them, they give every row's own slots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.layers.attention.paged_indices import (
    PagedRows,
    StepIndices,
    capture_size,
    capture_sizes,
    pad_decode,
    pad_slots,
    split_step,
)
from tests.support.kernels.attention_batch import AttentionRow, build_batch


@dataclass(frozen=True)
class Step:
    rows: list[AttentionRow]
    page_size: int
    num_pages: int


@st.composite
def steps(draw: st.DrawFn, *, only_decode: bool = False) -> Step:
    """Rows with scattered pages, some of them shared; decode rows first; tables may be longer than the KV they hold."""
    page_size = draw(st.sampled_from((1, 2, 3, 16, 64)))
    decode = draw(st.lists(st.integers(1, 3 * page_size), max_size=6, min_size=only_decode))
    prefill = (
        []
        if only_decode
        else draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=4))
    )
    shapes = [(kv_len - 1, 1) for kv_len in decode] + prefill
    spare = draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    counts = [
        -(-(start + n) // page_size) + extra
        for (start, n), extra in zip(shapes, spare, strict=True)
    ]
    num_pages = max(counts, default=0) + draw(st.integers(0, 20))
    rng = random.Random(draw(st.integers(0, 2**20)))
    tables = [rng.sample(range(num_pages), count) for count in counts]
    rows = [
        AttentionRow([7] * n, start, table)
        for (start, n), table in zip(shapes, tables, strict=True)
    ]
    return Step(rows, page_size, num_pages)


def prepare(step: Step) -> tuple[StepIndices, Any]:
    batch = build_batch(step.rows, step.page_size)
    arrays = (batch.qo_indptr, batch.kv_lens, batch.page_indptr, batch.page_indices)
    return split_step(*(a.numpy() for a in arrays), batch.num_decode, step.page_size), batch


def slots_read(rows: PagedRows, page_size: int) -> list[list[int]]:
    """Row by row, the slots a kernel visits: whole pages, and of the last one the first `last_page_len`."""
    found = []
    for r in range(len(rows)):
        pages = rows.kv_indices[rows.kv_indptr[r] : rows.kv_indptr[r + 1]].tolist()
        fill = [page_size] * (len(pages) - 1) + [int(rows.last_page_len[r])]
        found.append(
            [p * page_size + i for p, n in zip(pages, fill, strict=True) for i in range(n)]
        )
    return found


def slots_held(row: AttentionRow, page_size: int) -> list[int]:
    length = row.start + len(row.token_ids)
    return [row.pages[p // page_size] * page_size + p % page_size for p in range(length)]


@given(steps())
def test_every_row_reads_its_page_table_and_nothing_else(step: Step) -> None:
    indices, batch = prepare(step)
    n = batch.num_decode
    for rows, expected in ((indices.decode, step.rows[:n]), (indices.prefill, step.rows[n:])):
        assert slots_read(rows, step.page_size) == [
            slots_held(row, step.page_size) for row in expected
        ]
        kv_lens = (
            np.diff(rows.kv_indptr) - 1
        ) * step.page_size + rows.last_page_len  # as a kernel derives them
        assert kv_lens.tolist() == [row.start + len(row.token_ids) for row in expected]
        assert rows.kv_indptr[0] == 0
        for array in (rows.kv_indptr, rows.kv_indices, rows.last_page_len):
            assert array.dtype == np.int32


@given(steps())
def test_decode_and_prefill_queries_together_are_the_steps_tokens(step: Step) -> None:
    indices, batch = prepare(step)
    n = batch.num_decode
    assert len(indices.decode) == n
    assert np.diff(indices.qo_indptr).tolist() == [len(row.token_ids) for row in step.rows[n:]]
    assert indices.qo_indptr[0] == 0
    assert n + indices.qo_indptr[-1] == len(batch.token_ids)


@given(steps(only_decode=True), st.integers(0, 9))
def test_padding_leaves_live_rows_alone_and_touches_the_dummy_page_only(
    step: Step, added: int
) -> None:
    indices, batch = prepare(step)
    dummy = step.num_pages
    # Prompts of one token at the head of the queue are decode rows too, so that all rows are.
    assert batch.num_decode == len(step.rows)
    padded = pad_decode(indices.decode, batch.num_decode + added, dummy)
    read = slots_read(padded, step.page_size)
    assert read[: batch.num_decode] == slots_read(indices.decode, step.page_size)
    assert read[batch.num_decode :] == [[dummy * step.page_size]] * added
    live = {slot // step.page_size for slots in read[: batch.num_decode] for slot in slots}
    assert dummy not in live
    written = pad_slots(batch.slot_mapping.numpy(), batch.num_decode + added, dummy, step.page_size)
    assert written[: batch.num_decode].tolist() == batch.slot_mapping.tolist()
    assert {int(slot) // step.page_size for slot in written[batch.num_decode :]} <= {dummy}
    assert (written.dtype, padded.kv_indptr.dtype, padded.kv_indices.dtype) == (
        np.int64,
        np.int32,
        np.int32,
    )


@given(st.integers(1, 600), st.data())
def test_ladder_holds_each_batch_with_little_padding(largest: int, data: st.DataObject) -> None:
    ladder = capture_sizes(largest)
    assert list(ladder) == sorted(set(ladder))
    assert (ladder[0], ladder[-1]) == (1, largest)
    assert len(ladder) <= 4 + largest // 8
    rows = data.draw(st.integers(1, largest))
    size = capture_size(ladder, rows)
    assert size is not None
    assert rows <= size < min(2 * rows + (rows == 1), rows + 8) or size == rows
    assert size == min(s for s in ladder if s >= rows)
    assert capture_size(ladder, largest + 1) is None


def test_ladder_by_example() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(5) == (1, 2, 4, 5)
    assert capture_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert len(capture_sizes(256)) == 35


CONTRADICTIONS = [
    ({"num_decode": 3}, "needs 3, 3 and at most 2"),
    ({"page_indptr": [0, 1]}, "needs 3, 3 and at most 2"),
    ({"page_indices": [4, 5, 6, 7]}, "ends at the number of pages"),
    ({"num_decode": 2}, "decode row with several queries"),
    ({"qo_indptr": [0, 1, 1]}, "no query"),
    ({"kv_lens": [3, 1]}, "more queries than KV"),
    ({"kv_lens": [3, 9]}, "at 4 tokens a page"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS)
def test_contradicting_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    step: dict[str, Any] = {
        "qo_indptr": [0, 1, 3], "kv_lens": [3, 5], "page_indptr": [0, 1, 3], "page_indices": [4, 5, 6],
        "num_decode": 1, "page_size": 4,
    }  # fmt: skip
    split_step(**as_arrays(step))
    with pytest.raises(ValueError, match=message):
        split_step(**as_arrays(step | change))


def as_arrays(step: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(v, np.int32) if isinstance(v, list) else v for name, v in step.items()}


def test_padding_refuses_a_live_dummy_page_and_a_batch_too_small() -> None:
    rows = PagedRows(np.array([0, 1], np.int32), np.array([5], np.int32), np.array([2], np.int32))
    with pytest.raises(ValueError, match="page 5 is reserved"):
        pad_decode(rows, 2, 5)
    with pytest.raises(ValueError, match="1 rows do not fit a batch of 0"):
        pad_decode(rows, 0, 9)
    with pytest.raises(ValueError, match="2 rows do not fit a batch of 1"):
        pad_slots(np.array([1, 2]), 1, 9, 4)
    with pytest.raises(ValueError, match="empty batch"):
        capture_size((1, 2), 0)
