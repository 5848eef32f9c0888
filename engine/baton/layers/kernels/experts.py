"""Pass tokens through the experts that they chose, in Triton: one grouped product for all experts.

A choice is a token and one of its slots; a tile is up to ROWS choices of one expert.

    group     choices sorted by expert; a list of tiles, each with its expert and its rows
    gate_up   a tile's rows of x times gate and up of its expert, then their activation
    down      a tile's gated rows times down, to the places of its choices
    add       of each token: its results times their weights, in float32, in the order of the slots

Which experts are chosen, and how many tiles there are, is known on the device alone: grids are as
large as a step of so many tokens may need, and programs behind the last tile end at once. The host
waits for nothing, so a step can be part of a CUDA graph. A choice of `ops.NO_EXPERT` takes no place in a
tile and adds nothing: the rows that fill up a recorded step choose so, and read no weights.

The experts' matrices may stay quantized (`kernels.coded`). Where a choice's weight multiplies what
enters the expert (`ExpertForm`), x has a row for each choice.

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

from baton.layers.kernels.coded import CodedMatrix, multiply_tile
from baton.layers.spec import PLAIN_EXPERTS, ExpertForm

COLUMNS = 64
"""Columns of a tile's result."""
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

    __slots__ = ("_biases", "_first", "_form", "down", "gate_up")

    def __init__(
        self,
        gate_up: CodedMatrix,
        down: CodedMatrix,
        first_expert: int,
        *,
        form: ExpertForm = PLAIN_EXPERTS,
        gate_up_biases: Tensor | None = None,
        down_biases: Tensor | None = None,
    ) -> None:
        """
        Args:
            gate_up: [experts, 2 * inner, hidden]: gate rows, then up rows.
            down: [experts, hidden, inner].
            first_expert: number of the first one.
            gate_up_biases: [experts, 2 * inner], contiguous; None: there are none.
            down_biases: [experts, hidden], contiguous.
        """
        self.gate_up = gate_up
        self.down = down
        self._first = first_expert
        self._form = form
        self._biases = (gate_up_biases, down_biases)

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
        row_choices = slots
        if self._form.weighs_inputs:
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            weights = torch.ones_like(weights)
            row_choices = 1
        clamped = self._form.clamped
        gate_up_biases, down_biases = self._biases
        _group_choices[(held,)](
            chosen, order, num_tiles, tile_table, tiles, counts, self._first, choices,
            ROWS=rows, SCAN=SCAN, num_warps=WARPS,
        )  # fmt: skip
        _multiply_gate_up[(tiles, triton.cdiv(inner, COLUMNS))](
            x, x.stride(0), x if gate_up_biases is None else gate_up_biases, gated,
            order, num_tiles, tile_table, tiles, *self.gate_up.kernel_arguments,
            INNER=inner, ROW_CHOICES=row_choices, HAS_BIAS=gate_up_biases is not None,
            IS_CLAMPED=clamped is not None, GAIN=1.0 if clamped is None else clamped.gain,
            LIMIT=0.0 if clamped is None else clamped.limit, ROWS=rows, COLUMNS=COLUMNS,
            **self.gate_up.kernel_constants, num_warps=WARPS,
        )  # fmt: skip
        _multiply_down[(tiles, triton.cdiv(hidden, COLUMNS))](
            gated, x if down_biases is None else down_biases, results,
            order, num_tiles, tile_table, tiles, *self.down.kernel_arguments,
            HIDDEN=hidden, INNER=inner, HAS_BIAS=down_biases is not None, ROWS=rows,
            COLUMNS=COLUMNS, **self.down.kernel_constants, num_warps=WARPS,
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
    x, x_stride, biases, gated, order, num_tiles, tile_table, table_stride,
    codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
    INNER: tl.constexpr, ROW_CHOICES: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CODE: tl.constexpr, PER_BYTE: tl.constexpr, FACTOR: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Args: `ROW_CHOICES`: choices that share a row of x."""
    tile = tl.program_id(0)
    # Which tiles there are is known on the device alone.
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_table + tile).to(tl.int64)
    first = tl.load(tile_table + table_stride + tile)
    count = tl.load(tile_table + 2 * table_stride + tile)
    row = tl.arange(0, ROWS)
    is_row = row < count
    x_row = tl.load(order + first + row, mask=is_row, other=0) // ROW_CHOICES
    x_at = x + x_row.to(tl.int64)[:, None] * x_stride
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < INNER
    gate = multiply_tile(
        x_at, is_row, column, is_column, expert,
        codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
        ROWS, COLUMNS, CODE, PER_BYTE, FACTOR, HAS_ZEROS, ZERO, DEPTH, PRECISION,
    )  # fmt: skip
    up = multiply_tile(
        x_at, is_row, column + INNER, is_column, expert,
        codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
        ROWS, COLUMNS, CODE, PER_BYTE, FACTOR, HAS_ZEROS, ZERO, DEPTH, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        bias_at = biases + expert * outputs + column
        gate += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + INNER, mask=is_column, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if IS_CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    activated = gate / (1.0 + tl.exp(-GAIN * gate))
    to = gated + (first + row).to(tl.int64)[:, None] * INNER + column[None, :]
    product = activated.to(dtype).to(tl.float32) * up
    tl.store(to, product.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def _multiply_down(
    gated, biases, results, order, num_tiles, tile_table, table_stride,
    codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CODE: tl.constexpr, PER_BYTE: tl.constexpr, FACTOR: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_table + tile).to(tl.int64)
    first = tl.load(tile_table + table_stride + tile)
    count = tl.load(tile_table + 2 * table_stride + tile)
    row = tl.arange(0, ROWS)
    is_row = row < count
    choice = tl.load(order + first + row, mask=is_row, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < HIDDEN
    total = multiply_tile(
        gated + (first + row).to(tl.int64)[:, None] * INNER, is_row, column, is_column, expert,
        codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
        ROWS, COLUMNS, CODE, PER_BYTE, FACTOR, HAS_ZEROS, ZERO, DEPTH, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        bias_at = biases + expert * outputs + column
        total += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = results + choice.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(to, total.to(results.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


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
