"""States of slots: zeros at a sequence's beginning, rows that continue them, and snapshots in pages of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import numpy as np
import pytest
import torch

from baton.cache.group_pages import NO_PAGE
from baton.layers.kv_pool import make_pool
from baton.layers.kv_spec import KVSpec, describe_heads
from baton.layers.recurrent_state import StateRows, StepStates
from baton.layers.spec import DeltaSpec
from baton.runtime.runner.slot_states import SlotStates, StateError
from baton.runtime.runner.step_inputs import Growth, StepInputs
from baton.sched.types.plan import FurtherGrowth, StateCopy

LAYER = DeltaSpec(key_heads=1, value_heads=2, key_dim=3, value_dim=5, taps=4)
PAGE = 4
WIDTH = 5
Kind: TypeAlias = Literal["park", "load", "save"]


def make_states() -> SlotStates:
    group = describe_heads([0], [0], 4, dtype="float32", page_tokens=PAGE)
    spec = KVSpec((group,)).with_states({0: LAYER, 2: LAYER}, 8)
    assert spec.snapshots is not None
    assert spec.snapshots.width == WIDTH
    pool = make_pool(spec, 40, native=False)
    pool.data.fill_(torch.nan)
    return SlotStates((LAYER, LAYER), pool, slots=3)


def step_of(
    *rows: tuple[int, int, int],
    fresh: tuple[int, ...] = (),
    snapshots: dict[int, list[int]] | None = None,
    copies: Iterable[tuple[Kind, int, int, int]] = (),
) -> StepInputs:
    """Args: slot, start and length of each row; slots with a new owner; by slot, the first page of each block; kind,
    slot, tokens and first page of each copy between a slot and pages of its sequence."""
    slots, starts, lengths = np.array(rows, np.int64).reshape(-1, 3).T
    none = np.empty(0, np.int64)
    further = []
    for slot, blocks in (snapshots or {}).items():
        pages = [first + i if first >= 0 else NO_PAGE for first in blocks for i in range(WIDTH)]
        further.append(FurtherGrowth(slot, 0, 0, array("i", pages)))
    growth = [Growth(slot, 0, array("i", [0])) for slot in fresh]
    states = tuple(
        StateCopy(kind, slot, tokens, array("i", range(first, first + WIDTH)))
        for kind, slot, tokens, first in copies
    )
    return StepInputs(
        0, 0, slots, starts, lengths, none, none, none, growth, (), array("i"), tuple(further),
        states=states,
    )  # fmt: skip


def count_tokens(states: StepStates) -> list[list[tuple[int, int, int]]]:
    """Add a row's tokens to every number of its states; returns the rows of each level."""
    levels: list[list[tuple[int, int, int]]] = []

    def adder(layer: int, part: int) -> Callable[[StateRows], None]:
        def compute(rows: StateRows) -> None:
            for start, end, slot in rows.in_order():
                states.layer(layer)[part][slot] += end - start
            if layer == part == 0:
                levels.append(list(rows.in_order()))

        return compute

    for layer in range(2):
        for part in range(2):
            states.advance(layer, part, adder(layer, part))
    return levels


def seen(states: SlotStates, slot: int) -> set[float]:
    """Numbers in a slot's states."""
    return {x for layer in states.buffers.layers for part in layer for x in part[slot].flatten().tolist()}  # fmt: skip


def run(states: SlotStates, step: StepInputs) -> list[list[tuple[int, int, int]]]:
    states.park(step)
    levels = count_tokens(states.begin_step(step))
    states.end_step()
    return levels


def test_sequence_that_begins_finds_zeros_and_others_keep_their_states() -> None:
    states = make_states()
    assert run(states, step_of((0, 0, 4), (2, 0, 1), fresh=(0, 2))) == [[(0, 4, 0), (4, 5, 2)]]
    run(states, step_of((2, 1, 1), (0, 0, 6), fresh=(0,)))
    assert (seen(states, 0), seen(states, 1), seen(states, 2)) == ({6.0}, {0.0}, {2.0})


def test_row_that_does_not_continue_its_state_is_refused() -> None:
    states = make_states()
    run(states, step_of((1, 0, 4), fresh=(1,)))
    for start in (3, 8):
        with pytest.raises(StateError, match=rf"slot 1: .* seen 4 tokens, .* position {start}"):
            states.begin_step(step_of((1, start, 1)))
    with pytest.raises(StateError, match="seen 0 tokens"):
        states.begin_step(step_of((1, 4, 1), fresh=(1,)))


def test_snapshots_inside_a_row_are_restored_on_another_slot() -> None:
    states = make_states()
    blocks = [NO_PAGE, 10, NO_PAGE, 20]
    levels = run(states, step_of((1, 0, 18), fresh=(1,), snapshots={1: blocks}))
    assert levels == [[(0, 8, 1)], [(8, 16, 1)], [(16, 18, 1)]]
    assert seen(states, 1) == {18.0}
    run(states, step_of((0, 8, 1), (2, 16, 3), fresh=(0, 2), snapshots={0: blocks, 2: blocks}))
    assert (seen(states, 0), seen(states, 2)) == ({9.0}, {19.0})
    with pytest.raises(StateError, match="position 12, where there is no snapshot"):
        states.begin_step(step_of((0, 12, 1), fresh=(0,), snapshots={0: blocks}))
    with pytest.raises(StateError, match="position 9"):
        states.begin_step(step_of((0, 9, 1), fresh=(0,), snapshots={0: blocks}))


def test_row_begins_with_a_snapshot_of_the_same_step() -> None:
    states = make_states()
    blocks = [NO_PAGE, 10]
    levels = run(
        states, step_of((1, 0, 8), (0, 8, 2), fresh=(0, 1), snapshots={0: blocks, 1: blocks})
    )
    assert levels == [[(0, 8, 1)], [(8, 10, 0)]]
    assert (seen(states, 0), seen(states, 1)) == ({10.0}, {8.0})


def test_layers_copy_states_only_where_a_row_goes_on_behind_the_copy() -> None:
    """Other copies surround the layers, which may then be a recorded step."""
    states = make_states()
    steps = [
        (step_of((1, 0, 7), fresh=(1,)), False),
        (step_of((1, 7, 1), snapshots={1: [NO_PAGE, 10]}), False),
        (step_of((1, 8, 5), snapshots={1: [NO_PAGE, 10, 20]}), True),
        (step_of((0, 8, 4), fresh=(0,), snapshots={0: [NO_PAGE, 10, 30]}), False),
        (
            step_of(
                (1, 13, 3),
                (2, 16, 1),
                fresh=(2,),
                snapshots={n: [NO_PAGE] * 3 + [5] for n in (1, 2)},
            ),
            True,
        ),
    ]
    for step, within in steps:
        prepared = states.begin_step(step)
        assert prepared.copies_within == within
        count_tokens(prepared)
        states.end_step()
    assert (seen(states, 0), seen(states, 1), seen(states, 2)) == ({12.0}, {16.0}, {17.0})


def test_tables_of_a_former_owner_do_not_count() -> None:
    states = make_states()
    run(states, step_of((1, 0, 8), fresh=(1,), snapshots={1: [NO_PAGE, 10]}))
    with pytest.raises(StateError, match="no snapshot"):
        states.begin_step(step_of((1, 8, 1), fresh=(1,)))


def test_row_takes_no_snapshot_whose_pages_were_taken_back() -> None:
    """Drafts brought no row to the border, and the pages have another owner when one reaches it."""
    states = make_states()
    run(states, step_of((1, 0, 6), fresh=(1,), snapshots={1: [NO_PAGE, 10]}))
    run(states, step_of((1, 6, 4), snapshots={1: [NO_PAGE, NO_PAGE]}))
    with pytest.raises(StateError, match="no snapshot"):
        states.begin_step(step_of((1, 8, 1)))


def test_state_at_a_prompts_end_is_saved_inside_a_page_and_loaded_by_another_slot() -> None:
    states = make_states()
    run(states, step_of((1, 0, 6), fresh=(1,), copies=[("save", 1, 6, 10)]))
    run(states, step_of((1, 6, 3), (2, 0, 1), fresh=(2,)))
    levels = run(states, step_of((0, 6, 1), fresh=(0,), copies=[("load", 0, 6, 10)]))
    assert levels == [[(0, 1, 0)]]
    assert (seen(states, 0), seen(states, 1), seen(states, 2)) == ({7.0}, {9.0}, {1.0})


def test_state_is_saved_behind_the_snapshots_of_its_row() -> None:
    states = make_states()
    blocks = {1: [10, 20]}
    levels = run(
        states, step_of((1, 0, 8), fresh=(1,), snapshots=blocks, copies=[("save", 1, 8, 30)])
    )
    assert levels == [[(0, 4, 1)], [(4, 8, 1)]]
    for tokens, page in ((4, 10), (8, 20), (8, 30)):
        run(states, step_of((0, tokens, 1), fresh=(0,), copies=[("load", 0, tokens, page)]))
        assert seen(states, 0) == {tokens + 1.0}


def test_parked_state_leaves_its_slot_before_the_next_owner_begins() -> None:
    states = make_states()
    run(states, step_of((1, 0, 6), fresh=(1,)))
    parked = [("park", 1, 6, 10), ("load", 2, 6, 10)]
    run(states, step_of((1, 0, 3), (2, 6, 2), fresh=(1, 2), copies=parked))
    assert (seen(states, 1), seen(states, 2)) == ({3.0}, {8.0})
    states.park(step_of(copies=[("park", 1, 3, 20)]))
    run(states, step_of((0, 3, 1), fresh=(0,), copies=[("load", 0, 3, 20)]))
    assert seen(states, 0) == {4.0}, "a step without rows parks, too"


def test_states_that_have_seen_other_tokens_are_neither_kept_nor_continued() -> None:
    states = make_states()
    run(states, step_of((1, 0, 6), fresh=(1,)))
    with pytest.raises(StateError, match=r"slot 1: the state of 7 tokens .* seen 6"):
        states.park(step_of(copies=[("park", 1, 7, 10)]))
    with pytest.raises(StateError, match=r"slot 1: the state of 8 tokens .* seen 7"):
        run(states, step_of((1, 6, 1), copies=[("save", 1, 8, 10)]))
    run(states, step_of((1, 0, 6), fresh=(1,), copies=[("save", 1, 6, 10)]))
    with pytest.raises(StateError, match=r"seen 5 tokens, .* position 6"):
        run(states, step_of((0, 6, 1), fresh=(0,), copies=[("load", 0, 5, 10)]))
