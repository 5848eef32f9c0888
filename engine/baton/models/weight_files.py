"""Weight files of a checkpoint: which ones count, and what their headers say. No torch here.

As transformers chooses them in a directory: `model.safetensors` alone if it is there, else the
files of `model.safetensors.index.json`. Files that neither names are left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from baton.config.files import is_given, read_regular_file, refuse_other_kinds
from baton.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
_COMPARED_BYTES = 4 << 20
"""Read of each of two tensors at a time."""
_FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file."""

    name: str
    """As a checkpoint of the text part alone has it."""
    stored_name: str
    file: Path
    dtype: str
    """As the format spells it: F32, BF16 …"""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int


def weight_files(root: Path) -> list[Path]:
    """The safetensors files of a checkpoint; where neither usual name exists, all that there are.
    May be empty.

    Raises ConfigError for an index that cannot be read or names absent files, and for something else
    under the name of a file.
    """
    if is_given(root / SINGLE_FILE):
        files = [root / SINGLE_FILE]
    elif is_given(root / INDEX_FILE):
        files = _indexed_files(root)
    else:
        files = sorted(root.glob("*.safetensors"))
    for file in files:
        with refuse_unreadable(file):
            refuse_other_kinds(file)
    return files


_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""In checkpoints that have parts for images beside the text part."""


def text_name(name: str) -> str:
    """The name that a tensor or module has in a checkpoint of the text part alone."""
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


@contextlib.contextmanager
def refuse_unreadable(file: Path) -> Iterator[None]:
    """Turn an OSError about `file` into a ConfigError: it may vanish, or may not be read."""
    try:
        yield
    except OSError as err:
        raise ConfigError(
            f"{file} cannot be read: {err.strerror or err}; download the file again, or correct its rights"
        ) from err


def _indexed_files(root: Path) -> list[Path]:
    index = root / INDEX_FILE
    try:
        with refuse_unreadable(index):
            text = read_regular_file(index).decode()
        weight_map = json.loads(text)["weight_map"]
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if not is_given(root / name)]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as err:
        raise ConfigError(
            f"{index}: no readable weight_map ({err!r}); download the file again"
        ) from err
    if absent:
        count = f"{len(absent)} of {len(names)}"
        raise ConfigError(
            f"{index}: {count} files are absent, first {absent[0]}; finish the download"
        )
    return [root / name for name in names]


def required_weight_files(root: Path) -> list[Path]:
    """Return `weight_files`; raise ConfigError when there is none."""
    files = weight_files(root)
    if files:
        return files
    patterns = ("*.bin", "*.gguf", "*.pth")
    others = [file.name for pattern in patterns for file in sorted(root.glob(pattern))]
    if others and others[0].endswith(".gguf"):
        advice = (
            f", only {others[0]}; GGUF files are not read: load it with transformers "
            "(from_pretrained with gguf_file), and save_pretrained the result"
        )
    elif others:
        advice = f", only {others[0]}; convert it with transformers' save_pretrained"
    else:
        advice = "; download the weights"
    raise ConfigError(
        f"{root}: no *.safetensors file{advice} "
        "(--load-format dummy runs without weights, for tests: it answers noise)"
    )


def safetensors_header(file: Path) -> bytes:
    """The JSON header: 8 bytes little-endian length, then that many bytes."""
    with refuse_unreadable(file), file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ConfigError(
                f"{file}: header of {size} bytes; this is not a safetensors file, download it again"
            )
        return f.read(size)


def read_tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Tensors of a safetensors file by `TensorEntry.name`. Raises ConfigError when its header or its length is
    wrong."""
    try:
        header = safetensors_header(file)
        data_begin = 8 + len(header)
        found = [
            _tensor_entry(name, file, entry, data_begin)
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        ]
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as err:
        raise ConfigError(
            f"{file}: no readable header ({err!r}); the file is damaged, download it again"
        ) from err
    entries: dict[str, TensorEntry] = {}
    for entry in found:
        # Which of the two a model was trained with, nobody could tell.
        if (other := entries.get(entry.name)) is not None:
            raise ConfigError(
                f"{file}: {other.stored_name} and {entry.stored_name} are names of one tensor; "
                "remove one of them"
            )
        entries[entry.name] = entry
    stated = max((entry.end for entry in found), default=data_begin)
    with refuse_unreadable(file):
        size = file.stat().st_size
    if size != stated:
        raise ConfigError(
            f"{file}: has {size} bytes, its header says {stated}; the file is damaged, download it again"
        )
    return entries


def _tensor_entry(name: str, file: Path, entry: dict[str, Any], data_begin: int) -> TensorEntry:
    begin, end = (data_begin + offset for offset in entry["data_offsets"])
    dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
    return TensorEntry(text_name(name), name, file, dtype, shape, begin, end)


def first_float_type(root: Path) -> str:
    """Type of the first tensor that holds floats, as torch spells it; float32 without weights."""
    first = None
    for file in weight_files(root):
        for entry in read_tensor_entries(file).values():
            if entry.dtype in _FLOAT_TYPES:
                return _FLOAT_TYPES[entry.dtype]
            first = first or entry.dtype
    return first or "float32"


def find_tensor(root: Path, name: str) -> TensorEntry | None:
    """The tensor of that name, if the checkpoint has it."""
    for file in weight_files(root):
        entry = read_tensor_entries(file).get(name)
        if entry is not None:
            return entry
    return None


def have_equal_content(one: TensorEntry, other: TensorEntry) -> bool:
    """Compare two tensors: true where type, shape and all bytes are equal.

    Cost: reads both, up to the first difference, in pieces of 4 MiB; keeps nothing.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with (
        refuse_unreadable(one.file),
        one.file.open("rb") as left,
        refuse_unreadable(other.file),
        other.file.open("rb") as right,
    ):
        left.seek(one.begin)
        right.seek(other.begin)
        return _have_equal_bytes(left, right, one.end - one.begin)


def _have_equal_bytes(left: BinaryIO, right: BinaryIO, size: int) -> bool:
    while size > 0:
        count = min(size, _COMPARED_BYTES)
        if left.read(count) != right.read(count):
            return False
        size -= count
    return True
