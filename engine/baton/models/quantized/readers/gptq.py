"""GPTQ's packing: the transposed matrix, its rows side by side in words."""

from __future__ import annotations

import torch

from baton.models.quantized.forms import GptqForm
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint, read_column_groups
from baton.models.quantized.readers.words import unpack_values, word_slice
from baton.models.quantized.stored import StoredSource


def read_share(
    files: OpenCheckpoint, source: StoredSource, form: GptqForm, share: MatrixShare
) -> GroupedMatrix:
    words = word_slice(share.columns, form.bits)
    packed = files.read(source.tensors["weight"], (words, share.rows))
    codes = unpack_values(packed.t(), share.columns, form.bits)
    groups = slice(0, source.tensors["scale"].shape[0])
    zero_words = word_slice(share.rows, form.bits)
    stored_zeros = files.read(source.tensors["zero"], (groups, zero_words))
    zeros = unpack_values(stored_zeros, share.rows, form.bits).t().int()
    # Version 1 stores a zero less 1, modulo the number of values.
    zeros = (zeros + form.zero_offset) & ((1 << form.bits) - 1)
    scales = files.read(source.tensors["scale"], (groups, share.rows)).t().float()
    column_group = read_column_groups(files, source, share.columns, form.group_size)
    return GroupedMatrix(codes, scales, zeros.float(), torch.arange(len(codes)), column_group)
