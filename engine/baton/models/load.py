"""Checkpoint files to a ready `Decoder`.

1. `read_spec` checks the config; `plan_weights` says which tensors must come and where each goes.
2. Files are memory-mapped (safetensors) and copied tensor by tensor into their stacked places on
   the device, cast on the way; peak memory is the finished model there plus one tensor on the host.
   A tensor-parallel rank reads its shares of them and nothing else.
3. Quantized matrices stay so where a kernel multiplies them as they are; elsewhere they are
   dequantized as they are copied.
4. Anything missing, unexpected or of another shape ends the start with one ConfigError that lists
   it.

`load_format="dummy"` fills the same places with seeded noise instead: same seed, same weights, on
every node and device. It needs config.json only, and next to no host memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers import ops
from baton.layers.collectives import ALONE, Collectives
from baton.layers.ops import TORCH_DTYPES, QuantizedMatrix
from baton.layers.shard import WHOLE, Shard
from baton.models.checkpoint import GIB, StoredWeights, check_files
from baton.models.decoder import Decoder, DecoderLayer, DecoderWeights
from baton.models.quantized.kept import check_numbers, keep_quantized
from baton.models.quantized.readers import MatrixShare, OpenCheckpoint, read_grouped
from baton.models.quantized.stored import StoredSource
from baton.models.spec.model import OUTSIDE, ModelSpec, PlacedParam, plan_weights, share_of
from baton.models.spec.tensors import Param, Part

log = logging.getLogger("baton.load")

_DUMMY_STD = 0.02
_NOISE = 4194301
"""Values that are really drawn. A prime, so that no two rows of a matrix are the same stretch of
them."""
_PROGRESS_SECS = 5.0
_CPU = torch.device("cpu")

OnProgress = Callable[[int, int], None]
"""Called with the parameters in memory and those to come in total, first with 0, last when they are
equal."""
LoadedTensors = dict[int, dict[str, Any]]
"""Tensors, and matrices that stay quantized: by layer, OUTSIDE for those that belong to none, and
by name."""


def load_weights(
    spec: ModelSpec,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    shard: Shard = WHOLE,
    tp: Collectives = ALONE,
    device: torch.device = _CPU,
    on_progress: OnProgress = lambda done, total: None,
) -> Decoder:
    """The share of model `spec` that a tensor-parallel rank computes; only that is read of the
    files.

    Args:
        path: a Hugging Face model directory, of which `read_spec` has made `spec`.
        load_format: auto reads safetensors files; dummy needs config.json only and draws weights
        from `seed`.
        tp: how it meets the other ranks.
        device: where the weights are put, one after the other; torch.OutOfMemoryError when they do
        not fit.
    Raises:
        ConfigError: missing or malformed files, or the model cannot be divided so.
    """
    started = time.monotonic()
    share = share_of(spec, shard)
    tensors = load_tensors(spec, path, load_format, seed, shard, device, on_progress)
    layers = [
        DecoderLayer.make(layer, tensors[number], tp) for number, layer in enumerate(share.layers)
    ]
    weights = DecoderWeights.make(share, tensors[OUTSIDE], layers)
    decoder = Decoder(share, weights, shard, tp)
    decoder.to(device)
    log.info(
        "loaded %s from %s: %d parameters as %s, share %d of %d, in %.2f s",
        spec.architecture, path, spec.num_parameters, spec.dtype, shard.rank + 1, shard.size,
        time.monotonic() - started,
    )  # fmt: skip
    return decoder


def load_tensors(
    spec: ModelSpec,
    path: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    shard: Shard = WHOLE,
    device: torch.device = _CPU,
    on_progress: OnProgress = lambda done, total: None,
) -> LoadedTensors:
    """The tensors of `load_weights`, before blocks are made of them."""
    if load_format == "dummy":
        return _dummy_tensors(spec, seed, shard, device, on_progress)
    return _from_files(spec, Path(path), shard, device, on_progress)


def _dummy_tensors(
    spec: ModelSpec, seed: int, shard: Shard, device: torch.device, on_progress: OnProgress
) -> LoadedTensors:
    """Whole tensors are filled, and this rank's shares kept: a model is the same however it is
    divided.

    One stretch of noise is drawn on the host, which does it alike everywhere, and repeated over all
    matrices.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(_NOISE).normal_(0.0, _DUMMY_STD, generator=generator).to(dtype).to(device)
    used = 0

    def fill_noise(shape: tuple[int, ...]) -> Tensor:
        nonlocal used
        tensor = torch.empty(shape, dtype=dtype, device=device)
        flat = tensor.view(-1)
        filled = 0
        while filled < len(flat):
            stretch = noise[used : used + len(flat) - filled]
            flat[filled : filled + len(stretch)] = stretch
            filled = filled + len(stretch)
            used = (used + len(stretch)) % _NOISE
        return tensor

    own_params = {(layer, param.name): param for layer, param in plan_weights(spec, shard)}
    tensors: LoadedTensors = defaultdict(dict)
    progress = _Progress(sum(param.size for param in own_params.values()), on_progress)
    for layer, param in plan_weights(spec):
        tensor = (
            torch.ones(param.shape, dtype=dtype, device=device)
            if param.is_norm
            else fill_noise(param.shape)
        )
        if (mine := own_params.get((layer, param.name))) is None:
            continue
        parts = zip(tensor.split(param.part_rows), mine.parts, param.parts, strict=True)
        shares = [rows[part.cuts_within(whole)] for rows, part, whole in parts]
        share = tensor if mine == param else torch.cat(shares)
        tensors[layer][param.name] = share.to(TORCH_DTYPES[spec.dtype_of(param)])
        progress.add(share.numel(), share.nbytes)
    return tensors


class _Progress:
    """Progress of loading `total` parameters: calls `on_progress`, and logs a line every few
    seconds."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._total = total
        self._done = 0
        self._bytes = 0
        self._on_progress = on_progress
        self._started = self._said = time.monotonic()
        on_progress(0, total)

    def add(self, parameters: int, nbytes: int) -> None:
        self._done += parameters
        self._bytes += nbytes
        self._on_progress(self._done, self._total)
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECS:
            self._said = now
            secs = now - self._started
            log.info(
                "loading weights: %.0f %%, %.2f GiB, %.0f s, %.2f GB/s",
                100 * self._done / self._total, self._bytes / 2**30, secs, self._bytes / secs / 1e9,
            )  # fmt: skip


def _from_files(
    spec: ModelSpec, root: Path, shard: Shard, device: torch.device, on_progress: OnProgress
) -> LoadedTensors:
    stored = check_files(spec, root, shard)
    tensors: LoadedTensors = defaultdict(dict)
    places: dict[str, list[tuple[Part, Tensor]]] = defaultdict(list)
    kernel = ops.quantized_kernel(TORCH_DTYPES[spec.dtype], device)
    kept: list[PlacedParam] = []

    def make_place(layer: int, param: Param) -> None:
        dtype = TORCH_DTYPES[spec.dtype_of(param)]
        target = torch.empty(param.shape, dtype=dtype, device=device)
        tensors[layer][param.name] = target
        for part, rows in zip(param.parts, target.split(param.part_rows), strict=True):
            places[part.source].append((part, rows))

    progress = _Progress(sum(param.size for _, param in stored.params), on_progress)
    with OpenCheckpoint() as files:
        for layer, param in stored.params:
            matrix = None
            if kernel is not None and stored.can_stay_quantized(param):
                matrix = _keep_quantized(kernel, files, stored, param)
            if matrix is None:
                make_place(layer, param)
                continue
            tensors[layer][param.name] = matrix
            kept.append(PlacedParam(layer, param))
            progress.add(param.size, matrix.nbytes)
        for source in stored.sources.values():
            for part, rows in places[source.name]:
                if source.form is None:
                    taken = files.read(
                        source.tensors["weight"], () if part.shape == part.whole else part.share
                    )
                    rows.copy_(taken.t() if part.is_transposed else taken)
                    progress.add(taken.numel(), taken.nbytes)
                else:
                    with _refuse_damaged(source):
                        share = MatrixShare.of(part.share, is_transposed=part.is_transposed)
                        read_grouped(files, source, share).dequantize_into(rows)
                    progress.add(rows.numel(), rows.nbytes)
    _log_quantization(spec, stored, tensors, len(kept), kernel is not None)
    return tensors


def _keep_quantized(
    kernel: Callable[..., QuantizedMatrix | None],
    files: OpenCheckpoint,
    stored: StoredWeights,
    param: Param,
) -> QuantizedMatrix | None:
    """The matrix as its kernel takes it; None where it does not take it (`keep_quantized`)."""
    sources = [stored.sources[part.source] for part in param.parts]
    parts = [
        read_grouped(files, source, MatrixShare.of(part.share, is_transposed=part.is_transposed))
        for source, part in zip(sources, param.parts, strict=True)
    ]
    bits = max(source.form.code_bits for source in sources if source.form is not None)
    for source, matrix in zip(sources, parts, strict=True):
        with _refuse_damaged(source):
            check_numbers(matrix)
    return keep_quantized(kernel, parts, bits)


@contextlib.contextmanager
def _refuse_damaged(source: StoredSource) -> Iterator[None]:
    """Turn a ValueError about the numbers of a matrix into a ConfigError."""
    try:
        yield
    except ValueError as err:
        entry = source.tensors["weight"]
        raise ConfigError(
            f"{entry.file}: {source.name}: {err}; the file is damaged, download it again"
        ) from err


def _log_quantization(
    spec: ModelSpec, stored: StoredWeights, tensors: LoadedTensors, kept: int, has_kernel: bool
) -> None:
    """Say how the weights are stored, in how much memory they are computed, and why."""
    if spec.quantization is not None:
        origin = spec.quantization.method
    elif spec.form_on_load is not None:
        origin = "--quantization"
    else:
        return
    forms = Counter(str(source.form) for source in stored.quantized)
    described = "; ".join(f"{count} of {form}" for form, count in forms.items()) or "no matrix"
    in_files = sum(source.nbytes for source in stored.sources.values())
    in_memory = sum(tensor.nbytes for layer in tensors.values() for tensor in layer.values())
    if kept:
        reason = (
            f"{kept} matrices stay quantized, and kernels multiply their codes by activations in "
            f"{spec.dtype}"
        )
        others = sum(stored.can_stay_quantized(param) for _, param in stored.params) - kept
        if others:
            reason += (
                f"; {others} are dequantized at load, because their parts have different forms, or "
                "the kernels need the columns of a group side by side"
            )
    elif has_kernel:
        reason = f"dequantized to {spec.dtype} at load: no matrix is quantized as a whole"
    else:
        reason = (
            f"dequantized to {spec.dtype} at load: no kernel computes with quantized weights of "
            "this type on this device"
        )
    log.info(
        "quantized weights (%s): %s; %.3f GiB in the files, %.3f GiB in memory: %s; activations "
        "are not quantized",
        origin, described, in_files / GIB, in_memory / GIB, reason,
    )  # fmt: skip
