"""States of slots: zeros at a sequence's beginning, and rows that continue them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.layers.recurrent_state import StateError, StatePool
from baton.layers.spec import DeltaSpec

LAYER = DeltaSpec(key_heads=1, value_heads=2, key_dim=3, value_dim=5, taps=4)


def begin(pool: StatePool, *rows: tuple[int, int, int]) -> list[int]:
    """Args: slot, start and length of each row. Returns the slots in the step's rows."""
    slots, starts, lengths = np.array(rows).T
    return pool.begin_rows(slots, starts, lengths).rows.slots.tolist()


def test_sizes_are_those_of_the_layers() -> None:
    pool = StatePool((LAYER, LAYER), torch.bfloat16, 3)
    assert [layer.conv.shape for layer in pool.layers] == [(3, 3, 16)] * 2
    assert [layer.matrix.shape for layer in pool.layers] == [(3, 2, 3, 5)] * 2
    assert {layer.matrix.dtype for layer in pool.layers} == {torch.float32}
    assert pool.layers[0].conv.dtype == torch.bfloat16
    assert LAYER.state_bytes("bfloat16") == 3 * 16 * 2 + 2 * 3 * 5 * 4
    assert 0 <= pool.slot_bytes - 2 * LAYER.state_bytes("bfloat16") < 4 * 64


def test_sequence_that_begins_finds_zeros_and_others_keep_their_states() -> None:
    pool = StatePool((LAYER, LAYER), torch.float32, 3)
    begin(pool, (0, 0, 4), (2, 0, 1))
    for layer in pool.layers:
        layer.conv.fill_(7)
        layer.matrix.fill_(7)
    assert begin(pool, (2, 1, 1), (0, 0, 6)) == [2, 0]
    for layer in pool.layers:
        for part in layer:
            assert part[0].eq(0).all()
            assert part[1:].eq(7).all()


def test_row_that_does_not_continue_its_state_is_refused_and_changes_nothing() -> None:
    pool = StatePool((LAYER,), torch.float32, 3)
    begin(pool, (1, 0, 4))
    for start in (3, 5):
        with pytest.raises(StateError, match=rf"slot 1: .* seen 4 tokens, .* position {start}"):
            begin(pool, (1, start, 1))
    assert begin(pool, (1, 4, 2)) == [1]
    assert begin(pool, (1, 6, 1)) == [1]
