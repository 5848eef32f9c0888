"""Plain numbers that are quantized as they are read (--quantization)."""

from __future__ import annotations

import torch

from baton.models.quantized.forms import OnLoadForm
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint
from baton.models.quantized.stored import StoredSource


def read_share(
    files: OpenCheckpoint, source: StoredSource, form: OnLoadForm, share: MatrixShare
) -> GroupedMatrix:
    """Round to the nearest code, with a scale per row and group of columns.

    Groups are those of the whole matrix, so that ranks have the numbers of one process: columns
    around the share that belong to its groups are read, too.
    """
    size = form.group_size
    first = share.columns.start // size * size
    end = min(-(-share.columns.stop // size) * size, source.shape[-1])
    weight = files.read_plain(source, share, slice(first, end)).float()
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size))
    groups = padded.unflatten(1, (-1, size))
    # Codes are 1 to 2 * zero - 1, as many above zero as below.
    zero = 1 << (form.bits - 1)
    scales = groups.abs().amax(2) / (zero - 1)
    # A group of zeros has no scale; any one gives zeros.
    scales[scales == 0] = 1.0
    codes = (groups / scales.unsqueeze(2)).round_().clamp_(1 - zero, zero - 1) + zero
    own = slice(share.columns.start - first, share.columns.stop - first)
    column_group = torch.arange(share.columns.start, share.columns.stop) // size - first // size
    return GroupedMatrix(
        codes.flatten(1)[:, own].to(torch.uint8),
        scales,
        zero,
        torch.arange(len(weight)),
        column_group,
    )
