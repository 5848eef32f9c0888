"""Pass tokens through the experts that they chose, in Triton: one grouped product for all experts.

A choice is a token and one of its slots; a tile is up to ROWS choices of one expert.

    group     choices sorted by expert; a list of tiles, each with its expert and its rows
    gate_up   a tile's rows of x times gate and up of its expert, then silu(gate) * up
    down      a tile's gated rows times down, to the places of its choices
    add       of each token: its results times their weights, in float32, in the order of the slots

Which experts are chosen, and how many tiles there are, is known on the device alone: grids are as
large as a step of so many tokens may need, and programs behind the last tile end at once. The host
waits for nothing, so a step can be part of a CUDA graph. A choice of `ops.NO_EXPERT` takes no place in a
tile and adds nothing: the rows that fill up a recorded step choose so, and read no weights.

Rounding is that of plain torch (`layers.ops.pass_experts`): gate, up, their product and each
expert's result are rounded to x's type. Tiles stand in the list in the order in which programs came
by, which changes no result. Tested on the CPU by Triton's interpreter
(tests/unit/layers/kernels/test_experts.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64
"""Columns of a tile's result."""
DEPTH = 64
"""Columns of the reduction that a program loads at a time."""
FEW_ROWS = 16
MANY_ROWS = 64
"""Rows of a tile where experts have few rows, and many."""
SCAN = 1024
"""Choices that a program of `group` compares at a time."""
ADD = 512
"""Columns that a program of `add` sums."""
WARPS = 4


class StackedExperts:
    """The experts of a layer that a rank has, in two tensors."""

    __slots__ = ("_first", "down", "gate_up")

    def __init__(self, gate_up: Tensor, down: Tensor, first_expert: int) -> None:
        """
        Args:
            gate_up: [experts, 2 * inner, hidden], contiguous: gate rows, then up rows.
            down: [experts, hidden, inner], contiguous.
            first_expert: number of the first one.
        """
        self.gate_up = gate_up
        self.down = down
        self._first = first_expert

    def pass_tokens(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Weighted sums of the chosen experts' results: a new [T, hidden] in x's type. Experts that
        are not held add nothing.

        Args:
            x: [T, hidden], T >= 1, last dimension contiguous.
            experts: int64 [T, slots]; `ops.NO_EXPERT` adds nothing.
            weights: [T, slots].
            counts: int64 [experts of all ranks], to which the choices of held experts are added.
        """
        held, hidden, inner = self.down.shape
        tokens, slots = experts.shape
        choices = tokens * slots
        rows = MANY_ROWS if choices >= MANY_ROWS * held else FEW_ROWS
        # An expert's last tile may be part full, so there may be one more for each expert.
        tiles = choices // rows + min(held, choices)
        chosen = experts.contiguous()
        num_tiles = torch.zeros(1, dtype=torch.int32, device=x.device)
        tile_table = torch.empty(3, tiles, dtype=torch.int32, device=x.device)
        order = torch.empty(choices, dtype=torch.int32, device=x.device)
        gated = torch.empty(choices, inner, dtype=x.dtype, device=x.device)
        results = torch.empty(choices, hidden, dtype=x.dtype, device=x.device)
        y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
        # float32 products would else be rounded to 10 bits on a GPU.
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        _group_choices[(held,)](
            chosen, order, num_tiles, tile_table, tiles, counts, self._first, choices,
            ROWS=rows, SCAN=SCAN, num_warps=WARPS,
        )  # fmt: skip
        _multiply_gate_up[(tiles, triton.cdiv(inner, COLUMNS))](
            x, x.stride(0), self.gate_up, gated, order, num_tiles, tile_table, tiles,
            HIDDEN=hidden, INNER=inner, SLOTS=slots, ROWS=rows, COLUMNS=COLUMNS, DEPTH=DEPTH,
            PRECISION=precision, num_warps=WARPS,
        )  # fmt: skip
        _multiply_down[(tiles, triton.cdiv(hidden, COLUMNS))](
            gated, self.down, results, order, num_tiles, tile_table, tiles,
            HIDDEN=hidden, INNER=inner, ROWS=rows, COLUMNS=COLUMNS, DEPTH=DEPTH,
            PRECISION=precision, num_warps=WARPS,
        )  # fmt: skip
        _add_results[(tokens, triton.cdiv(hidden, ADD))](
            results, chosen, weights.contiguous(), y, self._first, held,
            HIDDEN=hidden, SLOTS=slots, COLUMNS=ADD, num_warps=WARPS,
        )  # fmt: skip
        return y


# Sizes of a step vary: one variant is compiled for all of them.
@triton.jit(do_not_specialize=["table_stride", "choices", "first_expert"])
def _group_choices(
    experts, order, num_tiles, tile_table, table_stride, counts, first_expert, choices,
    ROWS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """A program per expert: the places of its choices in `order`, and its tiles: expert, first
    place and number of rows."""
    place = tl.program_id(0)
    expert = (place + first_expert).to(tl.int64)
    before = 0
    count = 0
    for first in range(0, choices, SCAN):
        choice = first + tl.arange(0, SCAN)
        inside = choice < choices
        chosen = tl.load(experts + choice, mask=inside, other=-1)
        before += tl.sum(((chosen >= first_expert) & (chosen < expert)).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    next_place = before
    for first in range(0, choices, SCAN):
        choice = first + tl.arange(0, SCAN)
        inside = choice < choices
        chosen = tl.load(experts + choice, mask=inside, other=-1)
        is_mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(is_mine, 0) - is_mine
        tl.store(order + next_place + rank, choice, mask=is_mine != 0)
        next_place += tl.sum(is_mine, 0)
    tl.store(counts + expert, tl.load(counts + expert) + count)
    tiles = (count + ROWS - 1) // ROWS
    first_tile = tl.atomic_add(num_tiles, tiles)
    for tile in range(0, tiles):
        at = tile_table + first_tile + tile
        tl.store(at, place)
        tl.store(at + table_stride, before + tile * ROWS)
        tl.store(at + 2 * table_stride, tl.minimum(count - tile * ROWS, ROWS))


@triton.jit(do_not_specialize=["table_stride"])
def _multiply_gate_up(
    x, x_stride, gate_up, gated, order, num_tiles, tile_table, table_stride,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    # Which tiles there are is known on the device alone.
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_table + tile).to(tl.int64)
    first = tl.load(tile_table + table_stride + tile)
    count = tl.load(tile_table + 2 * table_stride + tile)
    row = tl.arange(0, ROWS)
    is_row = (row < count)[:, None]
    token = tl.load(order + first + row, mask=row < count, other=0) // SLOTS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < INNER)[None, :]
    depth = tl.arange(0, DEPTH)
    x_at = x + token.to(tl.int64)[:, None] * x_stride
    weights = gate_up + expert * (2 * INNER * HIDDEN)
    gate_at = weights + column.to(tl.int64)[None, :] * HIDDEN
    up_at = gate_at + INNER * HIDDEN
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        k = start + depth
        is_k = k < HIDDEN
        left = tl.load(x_at + k[None, :], mask=is_row & is_k[None, :], other=0.0)
        is_weight = is_k[:, None] & is_column
        right = tl.load(gate_at + k[:, None], mask=is_weight, other=0.0)
        gate = tl.dot(left, right, gate, input_precision=PRECISION)
        right = tl.load(up_at + k[:, None], mask=is_weight, other=0.0)
        up = tl.dot(left, right, up, input_precision=PRECISION)
    dtype: tl.constexpr = x.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    to = gated + (first + row).to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(to, (activated * up).to(dtype), mask=is_row & is_column)


@triton.jit(do_not_specialize=["table_stride"])
def _multiply_down(
    gated, down, results, order, num_tiles, tile_table, table_stride,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_table + tile).to(tl.int64)
    first = tl.load(tile_table + table_stride + tile)
    count = tl.load(tile_table + 2 * table_stride + tile)
    row = tl.arange(0, ROWS)
    is_row = (row < count)[:, None]
    choice = tl.load(order + first + row, mask=row < count, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < HIDDEN)[None, :]
    depth = tl.arange(0, DEPTH)
    gated_at = gated + (first + row).to(tl.int64)[:, None] * INNER
    weights_at = down + expert * (HIDDEN * INNER) + column.to(tl.int64)[None, :] * INNER
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INNER, DEPTH):
        k = start + depth
        is_k = k < INNER
        left = tl.load(gated_at + k[None, :], mask=is_row & is_k[None, :], other=0.0)
        right = tl.load(weights_at + k[:, None], mask=is_k[:, None] & is_column, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    to = results + choice.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(to, total.to(results.dtype.element_ty), mask=is_row & is_column)


@triton.jit(do_not_specialize=["first_expert", "held"])
def _add_results(
    results, experts, weights, y, first_expert, held,
    HIDDEN: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in range(0, SLOTS):
        choice = token * SLOTS + slot
        expert = tl.load(experts + choice)
        is_held = (expert >= first_expert) & (expert < first_expert + held)
        # No program has written the result of another rank's expert, or of none.
        if is_held:
            at = results + choice * HIDDEN + column
            result = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
            total += result * tl.load(weights + choice).to(tl.float32)
    tl.store(y + token * HIDDEN + column, total.to(y.dtype.element_ty), mask=is_column)
