"""compressed-tensors' pack-quantized. Stored values are unsigned: 2 ** (bits - 1) more than the
integers, and so are zeros, whose difference is all that counts."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.models.quantized.forms import PackedForm
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint, read_column_groups
from baton.models.quantized.readers.words import unpack_values, word_slice
from baton.models.quantized.stored import StoredSource


def read_share(
    files: OpenCheckpoint, source: StoredSource, form: PackedForm, share: MatrixShare
) -> GroupedMatrix:
    _check_shape(files, source)
    words = word_slice(share.columns, form.bits)
    packed = files.read(source.tensors["weight"], (share.rows, words))
    codes = unpack_values(packed, share.columns, form.bits)
    whole_groups = slice(0, source.tensors["scale"].shape[1])
    scales = files.read(source.tensors["scale"], (share.rows, whole_groups)).float()
    zeros: Tensor | int = 1 << (form.bits - 1)
    if form.has_zeros:
        zero_words = word_slice(share.rows, form.bits)
        columns = files.read(source.tensors["zero"], (zero_words, whole_groups)).t()
        zeros = unpack_values(columns, share.rows, form.bits).t().float()
    column_group = read_column_groups(files, source, share.columns, form.group_size)
    return GroupedMatrix(codes, scales, zeros, torch.arange(len(codes)), column_group)


def _check_shape(files: OpenCheckpoint, source: StoredSource) -> None:
    """The words may hold a few values more than the matrix has, so their number says too little."""
    entry = source.tensors["shape"]
    stated = files.read(entry).tolist()
    if stated != list(source.shape):
        raise ConfigError(
            f"{entry.file}: {entry.name} says {stated}, config.json implies {list(source.shape)}; "
            "make them agree"
        )
