"""Matrices that stay quantized in memory, where a kernel multiplies them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from baton.layers.ops import QuantizedMatrix
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.stored import KEPT_NIBBLE

_SIGNED_OFFSET = 128
"""Added to signed codes and to their zeros, which changes no difference."""
_FP8_NAN = 0x7F
_LARGEST_CODE = 512
"""Above any difference of a code and a zero, and above FP8's largest number."""


def keep_quantized(
    kernel: Callable[..., QuantizedMatrix | None], parts: list[GroupedMatrix], bits: int
) -> QuantizedMatrix | None:
    """One weight of parts that are stacked along dimension 0; None where they are stored in
    different ways, or in one that the kernel does not take.

    Args: `kernel`: `ops.quantized_kernel`. `bits`: of the widest code.
    """
    first = parts[0]
    column_group = first.column_group
    if not all(_is_alike(part, first) for part in parts):
        return None
    # A share of the columns needs a share of their groups.
    groups = slice(int(column_group.min()), int(column_group.max()) + 1)
    scales = torch.cat([part.scales[part.row_group, groups] for part in parts])
    stacked_codes = torch.cat([part.codes.contiguous().view(torch.uint8) for part in parts])
    code_type, codes, offset = _unsigned_codes(stacked_codes, first, bits)
    zeros: Tensor | float
    if isinstance(first.zeros, Tensor):
        stacked = [_zeros_of(part)[part.row_group, groups] for part in parts]
        zeros = (torch.cat(stacked) + offset).contiguous()
    else:
        zeros = float(first.zeros + offset)
    return kernel(
        code_type,
        codes,
        scales=scales.contiguous(),
        zeros=zeros,
        column_group=(column_group - groups.start).int(),
    )


def check_numbers(part: GroupedMatrix) -> None:
    """Raise ValueError where a number of a matrix is not finite, or overflows in the product."""
    limit = torch.finfo(torch.float32).max / _LARGEST_CODE
    if not (part.scales.abs() <= limit).all():
        raise ValueError("a scale is no finite number")
    if part.codes.dtype == torch.float8_e4m3fn:
        codes = part.codes.contiguous().view(torch.uint8)
        if ((codes & _FP8_NAN) == _FP8_NAN).any():
            raise ValueError("a code is no finite number")


def _is_alike(part: GroupedMatrix, other: GroupedMatrix) -> bool:
    """Return whether two matrices can be one."""
    if part.codes.dtype != other.codes.dtype or part.scales.shape[1] != other.scales.shape[1]:
        return False
    if isinstance(part.zeros, Tensor) or isinstance(other.zeros, Tensor):
        has_like_zeros = isinstance(part.zeros, Tensor) and isinstance(other.zeros, Tensor)
    else:
        has_like_zeros = part.zeros == other.zeros
    return has_like_zeros and torch.equal(part.column_group, other.column_group)


def _zeros_of(part: GroupedMatrix) -> Tensor:
    assert isinstance(part.zeros, Tensor), "all parts have zeros, or none"
    return part.zeros


def _unsigned_codes(
    codes: Tensor, stored_as: GroupedMatrix, bits: int
) -> tuple[Literal["int4", "int8", "fp8", "fp4"], Tensor, int]:
    """The type of codes, the codes, and what their zeros grow by."""
    if stored_as.code_numbers is not None:
        return "fp4", codes, 0
    match stored_as.codes.dtype:
        case torch.float8_e4m3fn:
            return "fp8", codes, 0
        case torch.int8:
            # Two's complement plus 128, as a byte.
            return "int8", codes ^ _SIGNED_OFFSET, _SIGNED_OFFSET
        case _:
            return ("int4" if bits <= KEPT_NIBBLE else "int8"), codes, 0
