"""Products with matrices that stay quantized in a GPU's memory, in Triton.

A matrix is codes, and a scale and a zero for each row and group of columns: W[n, k] = (code[n, k] -
zero[n, group]) * scale[n, group]. A tile is DEPTH bytes of codes, all of one group, of so many rows
of W. Their numbers (code - zero) are exact in any compute type; products are summed in float32, and
a tile's sum is multiplied by the scale of its group. So no weight is rounded, as on the CPU
(`layers.ops_cpu.QuantizedWeight`), which adds in another order.

    columns        0 … first group … | … group … | … last group … inputs
    in memory  |<---- group_size ---->|

A rank's share of the columns may begin `offset` columns behind the begin of a group, and the last
group may be smaller; a row has whole groups in memory. With two codes in a byte, a group's first
half is in the low bits and its second half in the high bits, so a tile reads columns side by side
of x, too.

Codes of floats are made numbers by moving their bits to the places that float16 has for them, which
gives the number over a power of two: any GPU can do that, and FP8 instructions are not needed.

`multiply_tile` is part of the kernels of experts, too (`kernels.experts`), where plain numbers are
their own codes. Tested on the CPU by Triton's interpreter (tests/support/kernels/coded_cases.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton.errors import ConfigError

CodeType: TypeAlias = Literal["int4", "int8", "fp8", "fp4"]
"""What a byte of `CodedMatrix.make` means."""
FEW_TOKENS = 16
"""Steps of up to so many tokens have small tiles: more programs read the matrix at once."""
FEW = (16, 32)
MANY = (64, 64)
"""Rows and columns of a tile of the result."""
MAX_DEPTH = 64
MIN_DEPTH = 16
"""Bytes of codes of a row that a program loads at a time; a product has at least 16 columns."""
WARPS = 4
FACTORS = {"fp8": 2.0**8, "fp4": 2.0**14}
"""Of the number that a code's bits are as float16: bias 15 in place of 7, and of 1."""


class GroupRuns(NamedTuple):
    """Columns in the order of their groups."""

    group_size: int
    offset: int
    """Columns of the first group that another rank has."""


def find_runs(column_group: Tensor) -> GroupRuns | None:
    """The runs of columns [inputs] of groups from 0 on; None where groups change otherwise. A
    rank's share may begin inside the first group, and end inside the last one."""
    counts = column_group.bincount().tolist()
    group_size = max(counts)
    offset = group_size - counts[0]
    expected = (torch.arange(len(column_group)) + offset) // group_size
    return GroupRuns(group_size, offset) if torch.equal(expected, column_group.long()) else None


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix [outputs, inputs] of codes on a GPU, or several alike, one behind the other."""

    code: str
    """int, fp8, fp4; plain: the codes are numbers of the compute type."""
    codes: Tensor
    """[..., outputs, groups * group_bytes], contiguous; plain ones are [..., outputs, inputs]."""
    scales: Tensor
    """[..., groups, outputs], contiguous; plain numbers have none, and this is any tensor."""
    zeros: Tensor | float
    """As scales, or one for all."""
    runs: GroupRuns
    inputs: int
    dtype: torch.dtype
    """Of products."""
    codes_per_byte: int = 1

    @staticmethod
    def make(
        code_type: CodeType,
        codes: Tensor,
        *,
        scales: Tensor,
        zeros: Tensor | float,
        column_group: Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> CodedMatrix | None:
        """Copies to `device`, of arguments that `ops_cpu.QuantizedWeight` takes; None for groups in
        another order than that of the columns (`find_runs`)."""
        runs = find_runs(column_group)
        if runs is None:
            return None
        inputs = codes.shape[1]
        groups = scales.shape[1]
        behind = groups * runs.group_size - runs.offset - inputs
        whole = functional.pad(codes.to(device), (runs.offset, behind))
        grouped = whole.unflatten(1, (groups, runs.group_size))
        per_byte = 2 if code_type in ("int4", "fp4") else 1
        if per_byte == 2:
            even = functional.pad(grouped, (0, runs.group_size % 2))
            low, high = even.chunk(2, dim=2)
            grouped = low | high << 4
        # Those of fp4 are powers of two, which bfloat16 holds.
        scale_type = torch.bfloat16 if code_type == "fp4" else torch.float32
        return CodedMatrix(
            "int" if code_type in ("int4", "int8") else code_type,
            grouped.flatten(1).contiguous(),
            scales.t().to(device, scale_type).contiguous(),
            zeros.t().to(device).contiguous() if isinstance(zeros, Tensor) else zeros,
            runs,
            inputs,
            dtype,
            per_byte,
        )

    @staticmethod
    def stack(matrices: Sequence[Tensor | CodedMatrix]) -> CodedMatrix:
        """Matrices of one shape and form, one behind the other. Raises ConfigError for others."""
        plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        coded = [matrix for matrix in matrices if isinstance(matrix, CodedMatrix)]
        if len(plain) == len(matrices):
            numbers = torch.stack(plain)
            inputs = numbers.shape[-1]
            runs = GroupRuns(inputs, 0)
            return CodedMatrix("plain", numbers, numbers, 0.0, runs, inputs, numbers.dtype)
        zeros = [matrix.zeros for matrix in coded if isinstance(matrix.zeros, Tensor)]
        forms = {
            (each.code, each.runs, each.inputs, each.codes_per_byte)
            + (() if isinstance(each.zeros, Tensor) else (each.zeros,))
            for each in coded
        }
        if plain or len(forms) > 1:
            raise ConfigError(
                "the experts of a layer are quantized in different forms, which has no kernel on a "
                "GPU; use --device cpu, or a checkpoint with one form"
            )
        return replace(
            coded[0],
            codes=torch.stack([each.codes for each in coded]),
            scales=torch.stack([each.scales for each in coded]),
            zeros=torch.stack(zeros) if zeros else coded[0].zeros,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., outputs, inputs]"""
        return (*self.codes.shape[:-1], self.inputs)

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        zeros = self.zeros.nbytes if isinstance(self.zeros, Tensor) else 0
        return self.codes.nbytes + self.scales.nbytes + zeros

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's codes; of plain numbers, how many there are."""
        return -(-self.runs.group_size // self.codes_per_byte)

    @property
    def kernel_arguments(self) -> tuple[Tensor | int, ...]:
        """Arguments of `multiply_tile` from `codes` on."""
        zeros = self.zeros if isinstance(self.zeros, Tensor) else self.scales
        size, offset = self.runs
        groups = -(-(self.inputs + offset) // size)
        outputs = self.codes.shape[-2]
        tensors = (self.codes, self.scales, zeros)
        return (*tensors, self.inputs, outputs, groups, size, self.group_bytes, offset)

    @property
    def kernel_constants(self) -> dict[str, Any]:
        """Constants of `multiply_tile` that follow from the matrix."""
        depth = min(MAX_DEPTH, triton.next_power_of_2(self.group_bytes))
        return {
            "CODE": self.code,
            "PER_BYTE": self.codes_per_byte,
            "FACTOR": FACTORS.get(self.code, 1.0),
            "HAS_ZEROS": isinstance(self.zeros, Tensor),
            "ZERO": 0.0 if isinstance(self.zeros, Tensor) else self.zeros,
            "DEPTH": max(MIN_DEPTH, depth),
            # float32 products would else be rounded to 10 bits on a GPU.
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] times the transpose, plus bias [outputs]: a new [T, outputs] in x's type.

        Args: x: T >= 1, last dimension contiguous.
        """
        tokens = len(x)
        outputs = self.codes.shape[0]
        rows, columns = FEW if tokens <= FEW_TOKENS else MANY
        y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
        _multiply_rows[(triton.cdiv(tokens, rows), triton.cdiv(outputs, columns))](
            x, x.stride(0), y if bias is None else bias, y, tokens, *self.kernel_arguments,
            HAS_BIAS=bias is not None, ROWS=rows, COLUMNS=columns, **self.kernel_constants,
            num_warps=WARPS,
        )  # fmt: skip
        return y


@triton.jit(do_not_specialize=["tokens"])
def _multiply_rows(
    x, x_stride, bias, y, tokens,
    codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CODE: tl.constexpr,
    PER_BYTE: tl.constexpr, FACTOR: tl.constexpr, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program per tile of the result."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < tokens
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    total = multiply_tile(
        x + row.to(tl.int64)[:, None] * x_stride, is_row, column, is_column, 0,
        codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
        ROWS, COLUMNS, CODE, PER_BYTE, FACTOR, HAS_ZEROS, ZERO, DEPTH, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def multiply_tile(
    x_at, is_row, column, is_column, matrix,
    codes, scales, zeros, inputs, outputs, groups, group_size, group_bytes, offset,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CODE: tl.constexpr, PER_BYTE: tl.constexpr,
    FACTOR: tl.constexpr, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, COLUMNS]: rows of x times the transpose of rows of a matrix.

    Args:
        x_at: [ROWS, 1], where rows of x begin.
        column: [COLUMNS], rows of the matrix, which are columns of the result.
        matrix: its number among those in `codes`.
    """
    dtype: tl.constexpr = x_at.dtype.element_ty
    group_tiles = tl.cdiv(group_bytes, DEPTH)
    line = matrix * outputs + column.to(tl.int64)
    codes_at = codes + line[None, :] * (groups * group_bytes)
    group_at = matrix * groups * outputs + column.to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(0, groups * group_tiles):
        group = tile // group_tiles
        byte = tile % group_tiles * DEPTH + tl.arange(0, DEPTH)
        is_code = (byte < group_bytes)[:, None] & is_column[None, :]
        code = tl.load(codes_at + (group * group_bytes + byte)[:, None], mask=is_code, other=0)
        zero = ZERO
        if HAS_ZEROS:
            zero = tl.load(zeros + group_at + group * outputs, mask=is_column, other=0.0)[None, :]
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for place in tl.static_range(PER_BYTE):
            of_group = place * group_bytes + byte
            k = group * group_size - offset + of_group
            is_k = (byte < group_bytes) & (of_group < group_size) & (k >= 0) & (k < inputs)
            left = tl.load(x_at + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            right = code
            if PER_BYTE == 2:
                right = (code >> (4 * place)) & 15
            right = _read_codes(right, zero, CODE).to(dtype)
            part = tl.dot(left, right, part, input_precision=PRECISION)
        if CODE == "plain":
            total += part
        else:
            scale = tl.load(scales + group_at + group * outputs, mask=is_column, other=0.0)
            total += part * FACTOR * scale.to(tl.float32)[None, :]
    return total


@triton.jit
def _read_codes(codes, zero, CODE: tl.constexpr):
    """Numbers of codes over FACTOR, less their zeros."""
    if CODE == "plain":
        return codes
    elif CODE == "int":
        return codes.to(tl.float32) - zero
    elif CODE == "fp8":
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        return bits.to(tl.float16, bitcast=True)
    else:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x7) << 9) | ((wide & 0x8) << 12)
        return bits.to(tl.float16, bitcast=True)
