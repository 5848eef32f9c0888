"""MXFP4: blocks of 32 columns, two codes in a byte, the first one in the low bits."""

from __future__ import annotations

import torch

from baton.models.quantized.forms import MXFP4_BLOCK
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint
from baton.models.quantized.readers.scaled import read_exponents
from baton.models.quantized.stored import StoredSource

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1: two bits of exponent with bias 1, one of mantissa; the fourth bit is the sign."""
FP4_NUMBERS = torch.tensor(_MAGNITUDES + tuple(-number for number in _MAGNITUDES))


def read_share(files: OpenCheckpoint, source: StoredSource, share: MatrixShare) -> GroupedMatrix:
    columns = share.columns
    groups = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
    place: tuple[slice | int, ...] = (*share.entry, share.rows, groups)
    blocks = files.read(source.tensors["weight"], (*place, slice(0, MXFP4_BLOCK // 2)))
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(1)
    first = columns.start - groups.start * MXFP4_BLOCK
    column_group = torch.arange(columns.start, columns.stop) // MXFP4_BLOCK - groups.start
    return GroupedMatrix(
        codes[:, first : first + share.shape[1]],
        read_exponents(files.read(source.tensors["scale"], place)),
        0,
        torch.arange(len(codes)),
        column_group,
        FP4_NUMBERS,
    )
