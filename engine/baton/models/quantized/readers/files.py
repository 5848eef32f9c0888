"""Tensors of open safetensors files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.shard import slice_length
from baton.models.quantized.forms import count_groups
from baton.models.quantized.stored import StoredSource
from baton.models.weight_files import TensorEntry, refuse_unreadable


class MatrixShare(NamedTuple):
    """Part of a matrix, or of one expert's matrix in a tensor of all."""

    rows: slice
    columns: slice
    expert: int | None = None

    @staticmethod
    def of(share: tuple[slice | int, ...], *, is_transposed: bool) -> MatrixShare:
        """Args: `share`: of a checkpoint's tensor, by dimension. `is_transposed`: its matrices are
        [inputs, outputs]."""
        slices = [cut for cut in share if isinstance(cut, slice)]
        rows, columns = slices[::-1] if is_transposed else slices
        experts = [cut for cut in share if isinstance(cut, int)]
        return MatrixShare(rows, columns, experts[0] if experts else None)

    @property
    def entry(self) -> tuple[int, ...]:
        """Index of the expert in a tensor of all."""
        return () if self.expert is None else (self.expert,)

    @property
    def shape(self) -> tuple[int, int]:
        return (slice_length(self.rows), slice_length(self.columns))


class OpenCheckpoint:
    """Files of a checkpoint, memory-mapped at first use and kept so until the end of the `with`
    block."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, entry: TensorEntry, share: tuple[slice | int, ...] = ()) -> Tensor:
        """A tensor, or the share of it. Raises ConfigError for damaged files."""
        with _refuse_damaged(entry.file):
            if entry.file not in self._open:
                opened = safe_open(str(entry.file), framework="pt")
                self._open[entry.file] = self._stack.enter_context(opened)
            file = self._open[entry.file]
            taken: Tensor = (
                file.get_slice(entry.stored_name)[share]
                if share
                else file.get_tensor(entry.stored_name)
            )
            return taken

    def read_plain(self, source: StoredSource, share: MatrixShare, columns: slice) -> Tensor:
        """Plain numbers of the share's rows and of `columns`: [rows, columns]."""
        entry = source.tensors["weight"]
        if source.is_transposed:
            return self.read(entry, (*share.entry, columns, share.rows)).t()
        return self.read(entry, (*share.entry, share.rows, columns))


@contextlib.contextmanager
def _refuse_damaged(file: Path) -> Iterator[None]:
    try:
        with refuse_unreadable(file):
            yield
    except SafetensorError as err:
        raise ConfigError(f"{file}: {err}; the file is damaged, download it again") from err


def read_column_groups(
    files: OpenCheckpoint, source: StoredSource, columns: slice, group_size: int
) -> Tensor:
    """The group of each column of a share: int64 [columns]. Raises ConfigError for groups that
    there are not."""
    entry = source.tensors.get("group")
    if entry is None:
        numbers = torch.arange(columns.start, columns.stop)
        return numbers // group_size if group_size else torch.zeros_like(numbers)
    groups = files.read(entry, (columns,)).long()
    count = count_groups(source.shape[-1], group_size)
    if len(groups) and (groups.min() < 0 or groups.max() >= count):
        raise ConfigError(
            f"{entry.file}: {entry.name} names groups {int(groups.min())} to {int(groups.max())}, "
            f"but the matrix has {count}; the file is damaged, download it again"
        )
    return groups
