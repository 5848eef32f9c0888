"""AWQ's gemm packing: the transposed matrix, 8 of its columns in a word."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.models.quantized.forms import AwqForm
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint, read_column_groups
from baton.models.quantized.readers.words import WORD_BITS, unpack_values, word_slice
from baton.models.quantized.stored import StoredSource

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In a word, the place of each of its 8 columns."""


def read_share(
    files: OpenCheckpoint, source: StoredSource, form: AwqForm, share: MatrixShare
) -> GroupedMatrix:
    words = word_slice(share.rows, form.bits)
    per_word = WORD_BITS // form.bits
    first = share.rows.start - words.start * per_word

    def unpack(packed: Tensor) -> Tensor:
        """[share's rows, n] of [n, words]."""
        everything = slice(words.start * per_word, words.stop * per_word)
        values = unpack_values(packed, everything, form.bits)
        in_order = values.unflatten(1, (-1, per_word))[..., list(_PLACES)].flatten(1)
        own: Tensor = in_order[:, first : first + share.shape[0]]
        return own.t()

    groups = slice(0, source.tensors["scale"].shape[0])
    codes = unpack(files.read(source.tensors["weight"], (share.columns, words)))
    zeros = unpack(files.read(source.tensors["zero"], (groups, words))).float()
    scales = files.read(source.tensors["scale"], (groups, share.rows)).t().float()
    column_group = read_column_groups(files, source, share.columns, form.group_size)
    return GroupedMatrix(codes, scales, zeros, torch.arange(len(codes)), column_group)
