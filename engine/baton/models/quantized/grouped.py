"""A share of a quantized matrix as numbers, whatever its packing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 1 << 20
"""Elements that are numbers at a time: 4 MiB for each intermediate result."""


class GroupedMatrix(NamedTuple):
    """Codes, and the scale and zero of each: W[n, k] = (code[n, k] - zero) * scale, both at
    [row_group[n], column_group[k]]."""

    codes: Tensor
    """[n, k], int8, uint8 or float8_e4m3fn"""
    scales: Tensor
    """float32 [row groups, column groups]"""
    zeros: Tensor | int
    """float32 like scales, or one for all"""
    row_group: Tensor
    """int64 [n]"""
    column_group: Tensor
    """int64 [k]"""
    code_numbers: Tensor | None = None
    """float32: the number of each code; None: a code is its number."""

    def dequantize_into(self, out: Tensor) -> None:
        """Compute in float32, and round once to the type of `out` [n, k], on any device.

        Raises ValueError where a result is no finite number.
        """
        rows, columns = self.codes.shape
        step = max(_AT_ONCE // max(columns, 1), 1)
        for first in range(0, rows, step):
            part = slice(first, min(first + step, rows))
            groups = self.row_group[part]
            numbers = self._numbers(part)
            if isinstance(self.zeros, Tensor):
                numbers -= self.zeros[groups].index_select(1, self.column_group)
            elif self.zeros:
                numbers -= self.zeros
            numbers *= self.scales[groups].index_select(1, self.column_group)
            if not torch.isfinite(numbers).all():
                raise ValueError("a code or a scale is no finite number")
            out[part].copy_(numbers)

    def _numbers(self, rows: slice) -> Tensor:
        """Codes of some rows as float32."""
        codes = self.codes[rows]
        return codes.float() if self.code_numbers is None else self.code_numbers[codes.int()]
