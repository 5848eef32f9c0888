"""Readers: a share of a stored matrix as codes, scales and zeros, a file per packing."""

from __future__ import annotations

from baton.models.quantized.forms import (
    AwqForm,
    GptqForm,
    Mxfp4Form,
    OnLoadForm,
    PackedForm,
    ScaledForm,
)
from baton.models.quantized.grouped import GroupedMatrix
from baton.models.quantized.readers import awq, gptq, mxfp4, on_load, packed, scaled
from baton.models.quantized.readers.files import MatrixShare, OpenCheckpoint
from baton.models.quantized.stored import StoredSource

__all__ = ["MatrixShare", "OpenCheckpoint", "read_grouped"]


def read_grouped(files: OpenCheckpoint, source: StoredSource, share: MatrixShare) -> GroupedMatrix:
    """The share of a quantized matrix. Raises ConfigError for damaged files."""
    match source.form:
        case ScaledForm():
            return scaled.read_share(files, source, source.form, share)
        case PackedForm():
            return packed.read_share(files, source, source.form, share)
        case AwqForm():
            return awq.read_share(files, source, source.form, share)
        case GptqForm():
            return gptq.read_share(files, source, source.form, share)
        case Mxfp4Form():
            return mxfp4.read_share(files, source, share)
        case OnLoadForm():
            return on_load.read_share(files, source, source.form, share)
        case None:
            raise AssertionError(f"{source.name} is a plain tensor")
