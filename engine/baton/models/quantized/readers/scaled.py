"""FP8 and int8 with a grid of scales."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.quantized.forms import EXPONENT_TYPES, ScaledForm
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint
from baton.models.quantized.stored import StoredSource
from baton.models.weight_files import TensorEntry

_EXPONENT_BIAS = 127


def read_share(
    files: OpenCheckpoint, source: StoredSource, form: ScaledForm, share: MatrixShare
) -> GroupedMatrix:
    codes = files.read(source.tensors["weight"], (*share.entry, share.rows, share.columns))
    scales = _read_grid(files, source.tensors["scale"], share)
    block_rows, restart = form.row_blocks(source.shape, len(scales))
    numbers = torch.arange(share.rows.start, share.rows.stop)
    per_part = -(-restart // block_rows)
    row_group = numbers // restart * per_part + numbers % restart // block_rows
    block_columns = form.column_block(source.shape[-1], scales.shape[1])
    column_group = torch.arange(share.columns.start, share.columns.stop) // block_columns
    zeros: Tensor | int = 0
    if "zero" in source.tensors:
        zeros = _read_grid(files, source.tensors["zero"], share)
    return GroupedMatrix(codes, scales, zeros, row_group, column_group)


def read_exponents(stored: Tensor) -> Tensor:
    """Scales that are stored as exponents (e8m0): float32."""
    return torch.exp2(stored.view(torch.uint8).float() - _EXPONENT_BIAS)


def _read_grid(files: OpenCheckpoint, entry: TensorEntry, share: MatrixShare) -> Tensor:
    """Scales or zeros of the whole matrix: float32 [row groups, column groups]."""
    grid = files.read(entry, share.entry)
    if entry.dtype in EXPONENT_TYPES:
        grid = read_exponents(grid)
    # One number for all, or one per row without a second dimension.
    return grid.float().reshape(-1, grid.shape[-1] if grid.dim() == 2 else 1)
