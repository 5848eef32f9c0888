"""CpuLatentAttention against the torch backend, and what it promises to keep exactly equal."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("baton._native", reason="the native module is not built")

from baton.errors import ConfigError
from baton.layers.attention import make_backend
from baton.layers.attention.cpu import CpuLatentAttention
from baton.layers.attention.flashinfer_latent import FlashInferLatentAttention
from baton.layers.attention.reference import TorchLatentAttention
from baton.layers.kv_pool import KvTensors, make_pool
from baton.layers.kv_spec import KVSpec, describe_attention
from baton.layers.spec import LatentSpec
from tests.support.devices import fake_flashinfer
from tests.support.kernels.attention_batch import AttentionRow, build_batch

LAYERS = 2
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_kv(
    spec: LatentSpec,
    dtype: str,
    page_size: int,
    num_pages: int = 512,
    device: torch.device = CPU,
) -> KvTensors:
    kv_spec = KVSpec((describe_attention([spec] * LAYERS, dtype, page_size),))
    kv = make_pool(kv_spec, num_pages, native=False, device=device)
    kv.data.fill_(float("nan"))  # unwritten slots must not be read
    return kv


class Sequence:
    """A request with scattered pages and fixed queries, latents and keys per layer and position."""

    def __init__(
        self, spec: LatentSpec, dtype: str, length: int, page_size: int, free: list[int], seed: int
    ) -> None:
        self.length = length
        count = -(-length // page_size)
        self.pages, free[:] = free[:count], free[count:]
        rng = torch.Generator().manual_seed(seed)
        shape = (LAYERS, length, spec.num_heads + 1, spec.row_dim)
        drawn = torch.randn(*shape, generator=rng).to(DTYPES[dtype])
        self.queries, self.rows = drawn.split((spec.num_heads, 1), dim=2)

    def row(self, start: int, n: int) -> AttentionRow:
        return AttentionRow(range(n), start, self.pages)


def run(
    backend: Any,
    spec: LatentSpec,
    parts: list[tuple[Sequence, int, int]],
    page_size: int,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Attend (sequence, start, n) as one step; per part [LAYERS, n, Hq * L], on the host."""
    backend.plan(build_batch([s.row(start, n) for s, start, n in parts], page_size))
    layers = []
    for layer in range(LAYERS):
        q = torch.cat([s.queries[layer, start : start + n] for s, start, n in parts]).to(device)
        rows = torch.cat([s.rows[layer, start : start + n] for s, start, n in parts]).to(device)
        parts_of_rows = rows.split((spec.latent_dim, spec.key_dim), dim=2)
        layers.append(backend.forward(layer, q, *parts_of_rows).cpu())
    return list(torch.stack(layers).split([n for _, _, n in parts], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "latent_dim", "key_dim", "page_size"),
    [(4, 32, 8, 1), (16, 512, 64, 16), (3, 20, 6, 4), (100, 16, 2, 64)],
)
def test_equals_the_torch_backend(
    heads: int, latent_dim: int, key_dim: int, page_size: int, dtype: str
) -> None:
    spec = LatentSpec(heads, latent_dim, key_dim, scale=(latent_dim + key_dim) ** -0.5)
    free = list(range(512))
    random.Random(heads).shuffle(free)
    sequences = [Sequence(spec, dtype, n, page_size, free, n) for n in (1, 17, 64, 65, 150)]
    results = []
    for name in ("cpu", "torch"):
        backend = make_backend(name, [spec] * LAYERS, make_kv(spec, dtype, page_size))
        prefill = run(backend, spec, [(s, 0, max(1, s.length - 3)) for s in sequences], page_size)
        longer = [s for s in sequences if s.length > 3]
        middle = run(backend, spec, [(s, s.length - 3, 2) for s in longer], page_size)
        decode = run(backend, spec, [(s, s.length - 1, 1) for s in longer], page_size)
        results.append(prefill + middle + decode)
    rtol, atol = {"float32": (1e-5, 3e-6), "bfloat16": (1.6e-2, 1e-2)}[dtype]
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_neighbors_pages_and_phase_do_not_change_a_bit(dtype: str) -> None:
    spec = LatentSpec(5, 32, 8, scale=0.3)
    rng = random.Random(7)
    whole: torch.Tensor | None = None
    for case in range(12):
        free = list(range(512))
        rng.shuffle(free)
        page_size = rng.choice((1, 4, 16, 64))
        ours = Sequence(spec, dtype, 140, page_size, free, seed=1)
        other = Sequence(spec, dtype, 90, page_size, free, seed=case)
        backend = CpuLatentAttention(spec, LAYERS, make_kv(spec, dtype, page_size))
        cuts = sorted(rng.sample(range(1, 140), rng.choice((0, 1, 5, 139))))
        pieces = []
        for start, end in itertools.pairwise([0, *cuts, 140]):
            company = [(other, 0, 90)] if rng.random() < 0.5 else []
            pieces.append(run(backend, spec, [*company, (ours, start, end - start)], page_size)[-1])
        got = torch.cat(pieces, dim=1)
        whole = got if whole is None else whole
        assert torch.equal(got, whole), f"case {case}: page size {page_size}, cuts {cuts}"


def test_wrong_tensors_are_refused_with_both_sides_named() -> None:
    spec = LatentSpec(2, 8, 4, scale=1.0)
    backend = CpuLatentAttention(spec, LAYERS, make_kv(spec, "float32", 16, 4))
    backend.plan(build_batch([AttentionRow([1, 2], 0, [3])], 16))
    q, latents, keys = torch.zeros(2, 2, 12), torch.zeros(2, 1, 8), torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match=r"k is torch.float32 \[2, 1, 4\].* not .*\[2, 1, 8\]"):
        backend.forward(0, q, keys, keys)
    with pytest.raises(ValueError, match=r"v is torch.bfloat16"):
        backend.forward(0, q, latents, keys.bfloat16())
    with pytest.raises(ValueError, match=r"q is torch.float32 \[2, 2, 8\]"):
        backend.forward(0, q[..., :8], latents, keys)


def test_sizes_the_kernels_lack_are_left_to_torch_or_refused() -> None:
    spec = LatentSpec(2, 1024, 64, scale=1.0)
    kv = make_kv(spec, "float32", 16, 2)
    with pytest.raises(ConfigError, match=r"latents of 1024 with keys of 64.* use torch"):
        make_backend("cpu", [spec] * LAYERS, kv)
    assert isinstance(make_backend("auto", [spec] * LAYERS, kv), TorchLatentAttention)
    with pytest.raises(ConfigError, match="float16 or bfloat16, the model in float32; use"):
        make_backend("flashinfer", [spec] * LAYERS, kv)
    half = make_kv(spec, "bfloat16", 16, 2)
    with pytest.raises(ConfigError, match="latents of 512 and keys of 64 elements, the model's"):
        make_backend("flashinfer", [spec] * LAYERS, half)


def check_flashinfer(
    heads: int, page_size: int, lengths: tuple[int, ...], library: Any, device: torch.device
) -> None:
    """Assert that prompts, and a step of both kinds of rows, are those of the torch backend."""
    spec = LatentSpec(heads, 512, 64, scale=0.05)
    free = list(range(512))
    random.Random(1).shuffle(free)
    sequences = [Sequence(spec, "bfloat16", n, page_size, free, n) for n in lengths]
    results = []
    for make in (
        lambda kv: FlashInferLatentAttention(spec, kv, library),
        lambda kv: TorchLatentAttention(spec, kv),
    ):
        backend = make(make_kv(spec, "bfloat16", page_size, device=device))
        prompts = [(s, 0, s.length - 2) for s in sequences]
        prefill = run(backend, spec, prompts, page_size, device)
        # Decode rows come first, then the rest of a prompt.
        first, *others = sequences
        mixed = [(s, s.length - 2, 1) for s in others] + [(first, first.length - 2, 2)]
        results.append(prefill + run(backend, spec, mixed, page_size, device))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfers_calls_equal_the_torch_backend(page_size: int) -> None:
    check_flashinfer(6, page_size, (3, 17, 64, 100), fake_flashinfer, CPU)


def test_step_that_flashinfer_cannot_plan_is_refused() -> None:
    spec = LatentSpec(128, 512, 64, scale=1.0)
    kv = make_kv(spec, "bfloat16", 64, 200)
    backend = FlashInferLatentAttention(spec, kv, fake_flashinfer)
    for tokens in (8192, 12800):
        rows = [AttentionRow(range(tokens), 0, list(range(-(-tokens // 64))))]
        backend.plan(build_batch(rows, 64))
    kv = make_kv(spec, "bfloat16", 64, 300)
    backend = FlashInferLatentAttention(spec, kv, fake_flashinfer)
    rows = [AttentionRow(range(16384), 0, list(range(256)))]
    with pytest.raises(ConfigError, match=r"16384 tokens and 128 heads .*--chunked-prefill-size"):
        backend.plan(build_batch(rows, 64))
