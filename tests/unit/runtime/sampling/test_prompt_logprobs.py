"""Logprobs of prompts that come in chunks, beside other prompts, against a log_softmax of each position."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.runtime.sampling.prompt_logprobs import PromptTable
from baton.sched.types.plan import AdmittedSeq, PromptLogprobs, Row, new_row
from baton.sched.types.request import SamplingParams

VOCAB = 11
LENGTH = 12
SLICE = 4
"""Rows whose logits are described at once."""
EMPTY = array("i")


def prompt_of(handle: int) -> list[int]:
    return [(handle * 3 + place * 7) % VOCAB for place in range(LENGTH)]


def logits_of(handle: int, position: int) -> Tensor:
    """Logits behind a position of a prompt."""
    generator = torch.Generator().manual_seed(handle * 100 + position)
    return torch.randn(VOCAB, generator=generator)


def admit(table: PromptTable, handle: int, params: SamplingParams, first: int = 1) -> None:
    prompt = array("i", prompt_of(handle))
    table.admit(AdmittedSeq(handle, handle, params, LENGTH, prompt, first))


def chunk(handle: int, start: int, count: int) -> Row:
    tokens = array("i", prompt_of(handle)[start : start + count])
    return new_row((handle, handle, start, count, start + count == LENGTH, tokens, 0, EMPTY))


def run_step(table: PromptTable, rows: Sequence[Row]) -> dict[int, PromptLogprobs]:
    prompt_rows = table.rows_of(rows)
    if prompt_rows is None:
        return {}
    behind = [logits_of(row.handle, row.start + i) for row in rows for i in range(row.n)]
    wanted = torch.stack(behind)[torch.from_numpy(prompt_rows.index)]
    slices = []
    for first in range(0, len(wanted), SLICE):
        logits = wanted[first : first + SLICE]
        slices.append(prompt_rows.describe_tokens(logits, first, torch.from_numpy).numpy())
    return prompt_rows.split_records(slices, VOCAB)


def check_records(handle: int, found: PromptLogprobs, params: SamplingParams) -> None:
    """Compare each record with the numbers of its own position."""
    top = min(params.prompt_logprobs, VOCAB)
    ids = params.logprob_token_ids
    form = struct.Struct(f"<fi{top}i{top}f{len(ids)}f")
    assert found.top == top
    assert len(found.records) == found.count * form.size
    for place, record in enumerate(form.iter_unpack(found.records)):
        position = found.position + place
        logprobs = logits_of(handle, position - 1).log_softmax(-1)
        token = prompt_of(handle)[position]
        likeliest = logprobs.topk(top)
        rank = int((logprobs > logprobs[token]).sum()) + 1
        assert record[1] == rank
        assert list(record[2 : 2 + top]) == likeliest.indices.tolist()
        expected = [logprobs[token], *likeliest.values, *(logprobs[i] for i in ids)]
        numbers = [record[0], *record[2 + top :]]
        assert numbers == pytest.approx([float(number) for number in expected])


def test_later_chunk_has_the_logprobs_of_its_own_positions() -> None:
    params = SamplingParams(prompt_logprobs=2)
    table = PromptTable()
    admit(table, 1, params)
    parts = []
    for start, count in ((0, 5), (5, 4), (9, 3)):
        (found,) = run_step(table, [chunk(1, start, count)]).values()
        check_records(1, found, params)
        parts.append((found.position, found.count))
    assert parts == [(1, 5), (6, 4), (10, 2)]
    assert table.rows_of([chunk(1, 0, 5)]) is None


def test_prompts_of_one_step_have_their_own_widths() -> None:
    """Of different numbers of likeliest tokens and of ids, some wider than the vocabulary."""
    wanted = {
        1: SamplingParams(prompt_logprobs=1, logprob_token_ids=(3, 8)),
        2: SamplingParams(prompt_logprobs=4),
        3: SamplingParams(prompt_logprobs=0, logprob_token_ids=(5,)),
        4: SamplingParams(prompt_logprobs=VOCAB + 3),
    }
    table = PromptTable()
    for handle, params in wanted.items():
        admit(table, handle, params, first=handle)
    for start, count in ((0, 7), (7, 5)):
        found = run_step(table, [chunk(9, 3, 1), *(chunk(h, start, count) for h in wanted)])
        assert list(found) == list(wanted)
        for handle, params in wanted.items():
            check_records(handle, found[handle], params)
            assert found[handle].position == (handle if start == 0 else start + 1)


def test_first_position_may_lie_in_a_later_chunk() -> None:
    params = SamplingParams(prompt_logprobs=1)
    table = PromptTable()
    admit(table, 1, params, first=8)
    assert run_step(table, [chunk(1, 0, 6)]) == {}
    (found,) = run_step(table, [chunk(1, 6, 6)]).values()
    assert (found.position, found.count) == (8, 4)
    check_records(1, found, params)


def test_rows_are_places_among_the_tokens_of_the_step() -> None:
    table = PromptTable()
    admit(table, 1, SamplingParams(prompt_logprobs=0))
    rows = table.rows_of([chunk(9, 3, 2), chunk(1, 0, 4)])
    assert rows is not None
    assert np.array_equal(rows.index, [2, 3, 4, 5])
