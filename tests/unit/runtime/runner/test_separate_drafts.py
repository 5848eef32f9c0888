"""Drafted tokens as rows of their own: what attention reads for each of them, against a naive list."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.runner.step_inputs import StepArrays, StepInputs, separate_drafts

FIRST_FURTHER_PAGE = 1000


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepInputs, StepArrays, int]:
    """Decode rows, rows with drafts, then parts of prompts; every page is another one."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    num_decode = draw(st.integers(0, 3))
    drafts = draw(st.lists(st.integers(1, 5), max_size=3))
    prompts = draw(st.lists(st.integers(1, 20), max_size=2))
    lengths = [1] * num_decode + [1 + n for n in drafts] + prompts
    if not lengths:
        lengths = [1]
        num_decode = 1
    starts = [draw(st.integers(0, 40)) for _ in lengths]
    kv_lens = np.array(starts) + lengths
    counts = -(-kv_lens // page_size)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    num_pages = int(counts.sum())
    step = StepInputs(
        number=1,
        num_decode=num_decode,
        slots=np.arange(len(lengths)),
        starts=np.array(starts),
        lengths=np.array(lengths),
        samples=np.ones(len(lengths), np.bool_),
        token_ids=np.arange(len(positions)),
        prompt_rows=np.empty(0, np.int64),
        growth=[],
        copies=(),
        new_pages=array("i"),
        num_drafted_rows=len(drafts),
    )
    pages = np.arange(num_pages, dtype=np.int32)
    arrays = StepArrays(
        token_ids=step.token_ids,
        positions=positions,
        slot_mapping=positions * 7,
        sample_index=np.arange(3),
        qo_indptr=np.cumsum([0, *lengths], dtype=np.int32),
        kv_lens=kv_lens.astype(np.int32),
        page_indptr=np.cumsum([0, *counts], dtype=np.int32),
        page_indices=pages,
        further=((positions * 5, pages + FIRST_FURTHER_PAGE),),
    )
    return step, arrays, page_size


Row = tuple[list[int], int, list[int]]
"""Its tokens, tokens in KV, and pages."""


def rows_of(arrays: StepArrays) -> list[Row]:
    rows = []
    for row in range(len(arrays.kv_lens)):
        tokens = list(range(arrays.qo_indptr[row], arrays.qo_indptr[row + 1]))
        pages = arrays.page_indices[arrays.page_indptr[row] : arrays.page_indptr[row + 1]]
        rows.append((tokens, int(arrays.kv_lens[row]), pages.tolist()))
    return rows


@given(steps())
def test_each_drafted_token_sees_the_pages_up_to_its_own(
    made: tuple[StepInputs, StepArrays, int],
) -> None:
    step, arrays, page_size = made
    whole = rows_of(arrays)
    answering = step.num_decode + step.num_drafted_rows
    expected: list[Row] = []
    for tokens, _, pages in whole[:answering]:
        for token in tokens:
            kv_len = int(arrays.positions[token]) + 1
            expected.append(([token], kv_len, pages[: -(-kv_len // page_size)]))
    expected += whole[answering:]
    separate = separate_drafts(step, arrays, page_size)
    assert rows_of(separate) == expected
    assert step.num_answering_tokens == sum(len(tokens) for tokens, _, _ in whole[:answering])
    ((slots, further),) = separate.further
    assert (further - FIRST_FURTHER_PAGE).tolist() == separate.page_indices.tolist()
    assert slots is arrays.further[0][0]
    for name in ("token_ids", "positions", "slot_mapping", "sample_index"):
        assert getattr(separate, name) is getattr(arrays, name)
    for name in ("qo_indptr", "kv_lens", "page_indptr", "page_indices"):
        assert getattr(separate, name).dtype == np.int32
