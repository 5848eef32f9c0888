"""CpuAttention against the torch backend, and what it promises to keep exactly equal."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("baton._native", reason="the native module is not built")

from baton.errors import ConfigError
from baton.layers.attention.base import ForwardBatch
from baton.layers.attention.cpu import CpuAttention
from baton.layers.attention.reference import TorchAttention
from baton.layers.kv_pool import KvTensors, make_pool
from baton.layers.kv_spec import FP8, KvScales, KVSpec, describe_attention
from baton.layers.spec import AttentionSpec
from tests.support.kernels.attention_batch import AttentionRow, build_batch

LAYERS = 2


@dataclass
class Sizes:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, int] = (0, 0)
    dtype: str = "float32"
    chunks: tuple[int, int] = (0, 0)
    has_sinks: bool = False
    scales: tuple[KvScales, ...] = ()

    def kv_spec(self, page_size: int) -> KVSpec:
        pages = FP8 if self.scales else self.dtype
        group = describe_attention(self.layers, pages, page_size, self.scales)
        return KVSpec((group,), self.dtype)

    @property
    def layers(self) -> list[AttentionSpec]:
        return [
            AttentionSpec(
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                window,
                chunk,
                has_sinks=self.has_sinks,
            )
            for window, chunk in zip(self.windows, self.chunks, strict=True)
        ]

    @property
    def sinks(self) -> torch.Tensor | None:
        if not self.has_sinks:
            return None
        return torch.linspace(-4, 4, self.num_heads)


def make_kv(spec: Sizes, page_size: int, num_pages: int = 64) -> KvTensors:
    kv = make_pool(spec.kv_spec(page_size), num_pages, native=False)
    kv.data.fill_(float("nan"))  # unwritten slots must not be read
    return kv


class Sequence:
    """A request with scattered pages and fixed q, k, v per layer and position."""

    def __init__(
        self, spec: Sizes, length: int, page_size: int, pages: list[int], seed: int
    ) -> None:
        self.length = length
        count = -(-length // page_size)
        self.pages, pages[:] = pages[:count], pages[count:]
        rng = torch.Generator().manual_seed(seed)
        width = spec.num_heads + 2 * spec.num_kv_heads
        dtype = torch.float32 if spec.dtype == "float32" else torch.bfloat16
        self.qkv = torch.randn(LAYERS, length, width, spec.head_dim, generator=rng).to(dtype)

    def row(self, start: int, n: int) -> AttentionRow:
        return AttentionRow(range(n), start, self.pages)


def run(
    backend: Any, spec: Sizes, parts: list[tuple[Sequence, int, int]], page_size: int
) -> list[torch.Tensor]:
    """Attend (sequence, start, n) as one step; per part [LAYERS, n, Hq * D]."""
    batch = build_batch([s.row(start, n) for s, start, n in parts], page_size)
    backend.plan(batch)
    sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    layers = []
    for layer in range(LAYERS):
        fused = torch.cat([s.qkv[layer, start : start + n] for s, start, n in parts])
        layers.append(backend.forward(layer, *fused.split(sizes, dim=1), spec.sinks))
    return list(torch.stack(layers).split([n for _, _, n in parts], dim=1))


SCALES = (KvScales(0.02, 0.008), KvScales(0.3, 1.5))
"""Of two layers: in the second one many codes are small."""


@pytest.mark.parametrize("scales", [(), SCALES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "windows"),
    [
        (4, 4, 16, 1, (0, 0)),
        (14, 2, 64, 16, (0, 0)),
        (8, 1, 80, 4, (0, 7)),
        (6, 2, 128, 16, (70, 0)),
        (2, 1, 256, 64, (0, 0)),
        (3, 3, 10, 16, (0, 33)),
    ],
)
def test_equals_the_torch_backend(
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    windows: tuple[int, int],
    dtype: str,
    scales: tuple[KvScales, ...],
) -> None:
    spec = Sizes(heads, kv_heads, dim, windows, dtype, scales=scales)
    assert_equal_backends(spec, page_size)


@pytest.mark.parametrize("scales", [(), SCALES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sinks_and_chunks_equal_the_torch_backend(
    page_size: int, dtype: str, scales: tuple[KvScales, ...]
) -> None:
    sinks = Sizes(8, 2, 64, (17, 0), dtype, has_sinks=True, scales=scales)
    assert_equal_backends(sinks, page_size)
    chunks = Sizes(4, 2, 32, (0, 0), dtype, chunks=(64, 23), scales=scales)
    assert_equal_backends(chunks, page_size)


def assert_equal_backends(spec: Sizes, page_size: int) -> None:
    dim = spec.head_dim
    free = list(range(512))
    random.Random(dim).shuffle(free)
    sequences = [Sequence(spec, n, page_size, free, n) for n in (1, 17, 64, 65, 150)]
    results = []
    for backend_class in (CpuAttention, TorchAttention):
        backend = backend_class(spec.layers, make_kv(spec, page_size, 512))
        prefill = run(backend, spec, [(s, 0, max(1, s.length - 3)) for s in sequences], page_size)
        decode = [(s, s.length - 1, 1) for s in sequences if s.length > 3]
        middle = run(
            backend, spec, [(s, s.length - 3, 2) for s in sequences if s.length > 3], page_size
        )
        results.append(prefill + middle + run(backend, spec, decode, page_size))
    tolerance = {"float32": (1e-5, 3e-6), "bfloat16": (1.6e-2, 1e-2)}[spec.dtype]
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize("backend_class", [CpuAttention, TorchAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_codes_are_those_that_torch_rounds_to(
    backend_class: type[CpuAttention | TorchAttention], dtype: torch.dtype
) -> None:
    """Over the whole range, and beyond it, where codes stop at the largest one."""
    spec = Sizes(2, 2, 32, dtype=str(dtype).removeprefix("torch."), scales=SCALES)
    kv = make_kv(spec, 16, 4)
    backend = backend_class(spec.layers, kv)
    generator = torch.Generator().manual_seed(1)
    exponents = torch.empty(2, 48, 2, 32).uniform_(-14, 11, generator=generator)
    signs = torch.empty_like(exponents).uniform_(-1, 1, generator=generator).sign()
    k, v = (signs * exponents.exp2()).to(dtype)
    backend.plan(build_batch([AttentionRow(range(48), 0, [3, 0, 2])], 16))
    for layer, scales in enumerate(SCALES):
        backend.forward(layer, torch.zeros(48, 2, 32, dtype=dtype), k, v)
        for place, (numbers, scale) in enumerate(((k, scales.key), (v, scales.value))):
            quotients = numbers.float() / torch.tensor(scale)
            expected = quotients.clamp(-448, 448).to(torch.float8_e4m3fn)
            assert (quotients.abs() > 448).any(), "some exceed the largest code"
            stored = kv.data[[3, 0, 2], layer, place].flatten(0, 1)
            assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    assert kv.data[1].isnan().all(), "other pages stay as they were"


def test_codes_that_are_no_numbers_show_in_the_result() -> None:
    spec = Sizes(2, 2, 32, scales=SCALES)
    backend = CpuAttention(spec.layers, make_kv(spec, 16, 4))
    backend.plan(build_batch([AttentionRow(range(3), 0, [3])], 16))
    k = torch.ones(3, 2, 32)
    v = torch.ones(3, 2, 32)
    v[1, 0, 5] = torch.nan
    out = backend.forward(0, torch.ones(3, 2, 32), k, v).view(3, 2, 32)
    assert out[1:, 0, 5].isnan().all()
    assert out[:, 1].isfinite().all(), "the other head"


@pytest.mark.parametrize("scales", [(), SCALES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_neighbors_and_phase_do_not_change_a_bit(
    dtype: str, scales: tuple[KvScales, ...]
) -> None:
    spec = Sizes(4, 2, 32, (0, 50), dtype, chunks=(33, 0), has_sinks=True, scales=scales)
    rng = random.Random(7)
    whole: torch.Tensor | None = None
    for case in range(12):
        free = list(range(512))
        rng.shuffle(free)
        page_size = rng.choice((1, 4, 16, 64))
        ours = Sequence(spec, 140, page_size, free, seed=1)
        other = Sequence(spec, 90, page_size, free, seed=case)
        backend = CpuAttention(spec.layers, make_kv(spec, page_size, 512))
        cuts = sorted(rng.sample(range(1, 140), rng.choice((0, 1, 5, 139))))
        pieces = []
        for start, end in itertools.pairwise([0, *cuts, 140]):
            company = [(other, 0, 90)] if rng.random() < 0.5 else []
            pieces.append(run(backend, spec, [*company, (ours, start, end - start)], page_size)[-1])
        got = torch.cat(pieces, dim=1)
        whole = got if whole is None else whole
        assert torch.equal(got, whole), f"case {case}: page size {page_size}, cuts {cuts}"


def test_wrong_tensors_are_refused_with_both_sides_named() -> None:
    spec = Sizes(4, 2, 16)
    backend = CpuAttention(spec.layers, make_kv(spec, 16, 4))
    good = build_batch([AttentionRow([1, 2], 0, [3])], 16)
    backend.plan(good)
    q, kv = torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match=r"k is torch.bfloat16 .* not torch.float32 \[2, 2, 16\]"):
        backend.forward(0, q, kv.bfloat16(), kv)
    with pytest.raises(ValueError, match="q is"):
        backend.forward(0, q.transpose(1, 2).contiguous().transpose(1, 2), kv, kv)
    with pytest.raises(ValueError, match=r"page_indices\[0\] is 4; the pool has pages 0 to 3"):
        backend.plan(build_batch([AttentionRow([1, 2], 0, [4])], 16))
    wrong = ForwardBatch(
        **{**{f: getattr(good, f) for f in good.__slots__}, "kv_lens": good.kv_lens.long()}
    )
    with pytest.raises(ValueError, match=r"kv_lens is torch.int64"):
        backend.plan(wrong)


def test_head_sizes_the_kernels_lack_are_refused_at_start() -> None:
    spec = Sizes(2, 1, 512)
    with pytest.raises(ConfigError, match="use torch"):
        CpuAttention(spec.layers, make_kv(spec, 16, 2))
