"""The native CPU kernels against torch doing the same work, arms interleaved in one run.

    python tests/perf/bench_kernels.py [--threads 1] [--seconds 0.4] [attention|latents|linear|small …]

Each line: best and median time of ours, and the ratio torch / ours (above 1: ours is faster) as median over rounds with
the 10th and 90th percentile. A round runs every arm once, in turn, so that a neighbor's load falls on all. Results of
the arms are compared before they are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from baton import _native
from baton.layers import ops_cpu
from baton.layers.attention.cpu import CpuAttention, CpuLatentAttention
from baton.layers.kv_pool import make_pool
from baton.layers.kv_spec import KVSpec, describe_attention
from baton.layers.spec import AttentionSpec, LatentSpec
from tests.support.kernels.attention_batch import AttentionRow, build_batch

Arm = Callable[[], Any]
DTYPES = (torch.float32, torch.bfloat16)


def compare(
    name: str, ours: Arm, torch_arm: Arm, seconds: float, work: float = 0.0, unit: str = ""
) -> None:
    """`work` units per call are printed as a rate of the best time."""
    result, reference = ours(), torch_arm()
    error = (
        result.float() - reference.float()
    ).abs().max() / reference.float().abs().max().clamp_min(1e-6)
    assert error < (3e-2 if result.dtype == torch.bfloat16 else 1e-4), (
        f"{name}: results differ by {error:.2e}"
    )
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for arm, spent in zip((ours, torch_arm), times, strict=True):
            start = time.perf_counter()
            arm()
            spent.append(time.perf_counter() - start)
    ratios = sorted(t / o for o, t in zip(*times, strict=True))
    tenth = len(ratios) // 10
    best = min(times[0])
    rate = f"{work / best / 1e9:8.1f} {unit}" if work else ""
    print(
        f"{name:44} {best * 1e6:9.1f} us (median {statistics.median(times[0]) * 1e6:9.1f})"
        f"  x{statistics.median(ratios):6.2f} [{ratios[tenth]:.2f} … {ratios[-1 - tenth]:.2f}]"
        f" best/best x{min(times[1]) / best:6.2f} n={len(ratios)} {rate}",
        flush=True,
    )


def attention(seconds: float) -> None:
    shapes = [(14, 2, 64), (16, 8, 128), (8, 8, 64)]
    for heads, kv_heads, dim in shapes:
        for dtype in DTYPES:
            for rows, kv_len, new in [
                (1, 128, 1),
                (8, 1024, 1),
                (1, 4096, 1),
                (1, 512, 512),
                (1, 2048, 256),
            ]:
                _attention_case(heads, kv_heads, dim, dtype, rows, kv_len, new, seconds)


def latents(seconds: float) -> None:
    """DeepSeek V2 Lite's heads, and V3's."""
    for heads in (16, 128):
        for rows, kv_len, new in [(1, 512, 1), (8, 1024, 1), (1, 512, 512), (1, 2048, 256)]:
            _latent_case(heads, torch.bfloat16, rows, kv_len, new, seconds)


def _latent_case(
    heads: int, dtype: torch.dtype, rows: int, kv_len: int, new: int, seconds: float
) -> None:
    """Ours reads scattered pages; torch gets contiguous latents, in the absorbed form too."""
    size = 16
    spec = LatentSpec(heads, latent_dim=512, key_dim=64, scale=192**-0.5)
    kv_spec = KVSpec((describe_attention([spec], "bfloat16", size),))
    each = -(-kv_len // size)
    kv = make_pool(kv_spec, rows * each, native=False)
    kv.data.copy_(torch.randn(kv.data.shape))
    order = torch.randperm(rows * each, generator=torch.Generator().manual_seed(1)).tolist()
    backend = CpuLatentAttention(spec, 1, kv)
    tables = [order[r * each : (r + 1) * each] for r in range(rows)]
    backend.plan(build_batch([AttentionRow(range(new), kv_len - new, t) for t in tables], size))
    q = torch.randn(rows * new, heads, spec.row_dim).to(dtype)
    kept = torch.randn(rows * new, 1, spec.row_dim).to(dtype)
    new_tokens = kept.split((spec.latent_dim, spec.key_dim), dim=2)
    backend.forward(0, q, *new_tokens)
    gathered = kv.data[:, 0][torch.tensor(tables)].flatten(1, 2)[:, None, :kv_len]
    queries = q.view(rows, new, heads, -1).transpose(1, 2)
    visible = torch.ones(new, kv_len, dtype=torch.bool).tril(kv_len - new)

    def reference() -> Tensor:
        values = gathered[..., : spec.latent_dim]
        out = functional.scaled_dot_product_attention(
            queries, gathered, values, attn_mask=visible, enable_gqa=True, scale=spec.scale
        )
        return out.transpose(1, 2).flatten(0, 1)

    pairs = rows * sum(range(kv_len - new + 1, kv_len + 1))
    compare(
        f"latents {heads} heads bfloat16 {rows} x {new} of {kv_len}",
        lambda: backend.forward(0, q, *new_tokens),
        reference,
        seconds,
        2.0 * pairs * heads * (spec.row_dim + spec.latent_dim),
        "GFLOP/s",
    )


def _attention_case(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    rows: int,
    kv_len: int,
    new: int,
    seconds: float,
) -> None:
    """Ours reads scattered pages; torch gets contiguous K and V for prefill and gathers pages for decode."""
    size = 16
    name = "float32" if dtype == torch.float32 else "bfloat16"
    layers = [AttentionSpec(heads, kv_heads, dim)]
    kv_spec = KVSpec((describe_attention(layers, name, size),))
    each = -(-kv_len // size)
    kv = make_pool(kv_spec, rows * each, native=False)
    kv.data.copy_(torch.randn(kv.data.shape))
    order = torch.randperm(rows * each, generator=torch.Generator().manual_seed(1)).tolist()
    backend = CpuAttention(layers, kv)
    tables = [order[r * each : (r + 1) * each] for r in range(rows)]
    backend.plan(build_batch([AttentionRow(range(new), kv_len - new, t) for t in tables], size))
    q = torch.randn(rows * new, heads, dim).to(dtype)
    k, v = torch.randn(2, rows * new, kv_heads, dim).to(dtype)
    backend.forward(0, q, k, v)
    index = torch.tensor(tables)

    def gathered() -> tuple[Tensor, Tensor]:
        both = kv.data[:, 0][index].flatten(1, 1)  # [rows, pages, 2, size, Hk, D]
        both = both.permute(2, 0, 4, 1, 3, 5).reshape(2, rows, kv_heads, each * size, dim)[
            :, :, :, :kv_len
        ]
        return both[0], both[1]

    visible = torch.ones(new, kv_len, dtype=torch.bool).tril(kv_len - new)
    queries = q.view(rows, new, heads, dim).transpose(1, 2)
    ready = gathered()

    def reference() -> Tensor:
        keys, values = ready if new > 1 else gathered()
        causal = new == kv_len
        mask = None if causal or new == 1 else visible
        out = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal and new > 1,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2).reshape(rows * new, heads * dim)

    pairs = rows * sum(range(kv_len - new + 1, kv_len + 1))
    label = f"attention {heads}/{kv_heads}x{dim} {name} {rows} x {new} of {kv_len}"
    compare(
        label,
        lambda: backend.forward(0, q, k, v),
        reference,
        seconds,
        4.0 * pairs * heads * dim,
        "GFLOP/s",
    )


def linear(seconds: float) -> None:
    for inputs, outputs in [(256, 768), (1024, 3072), (896, 4864), (4096, 11008)]:
        for dtype in DTYPES:
            weight = torch.randn(outputs, inputs).to(dtype) / inputs**0.5
            packed = ops_cpu.PackedWeight(weight)
            for rows in (1, 2, 4, 8, 32, 512):
                if rows == 512 and inputs == 4096:
                    continue
                x = torch.randn(rows, inputs).to(dtype)
                label = f"linear {inputs} -> {outputs} {dtype} M={rows}".replace("torch.", "")
                flops = 2.0 * rows * inputs * outputs
                read = float(weight.nbytes)
                arms = (partial(packed.multiply, x), partial(functional.linear, x, weight))
                compare(
                    label,
                    *arms,
                    seconds,
                    read if rows <= 8 else flops,
                    "GB/s" if rows <= 8 else "GFLOP/s",
                )


def small(seconds: float) -> None:
    for dtype in DTYPES:
        for rows in (1, 8, 512):
            for name, ours, reference in _small_cases(rows, dtype):
                compare(
                    f"{name} {rows} x 1024 {dtype}".replace("torch.", ""),
                    ours,
                    reference,
                    seconds / 2,
                )


def _small_cases(rows: int, dtype: torch.dtype) -> Iterator[tuple[str, Arm, Arm]]:
    x, w = torch.randn(rows, 1024).to(dtype), torch.rand(1024).to(dtype) + 0.5
    yield (
        "rms_norm",
        lambda: ops_cpu.rms_norm(x, w, 1e-6),
        lambda: functional.rms_norm(x, (1024,), w, 1e-6),
    )
    both = torch.randn(rows, 2048).to(dtype)

    def silu() -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up

    yield "silu_mul", lambda: ops_cpu.silu_mul(both), silu
    q, k = torch.randn(rows, 12, 64).to(dtype), torch.randn(rows, 4, 64).to(dtype)
    at = torch.arange(rows)
    # No turn at all: the arms run in place, again and again, and must stay comparable.
    cos, sin = torch.ones(rows, 32), torch.zeros(rows, 32)

    def rope() -> Tensor:
        c, s = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
        for t in (q, k):
            first, second = t.float().chunk(2, dim=-1)
            t.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
        return q

    yield "rope", lambda: ops_cpu.apply_rope(q, k, at, cos, sin)[0], rope


GROUPS = {"attention": attention, "latents": latents, "linear": linear, "small": small}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", choices=[[], *GROUPS], help="which kernels (default: all)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of both arms")
    parser.add_argument("--seconds", type=float, default=0.4, help="time per line [s]")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _native.set_threads(args.threads)
    print(f"isa {_native.cpu_isa()}, threads {args.threads}, torch {torch.__version__}")
    with torch.inference_mode():
        for group in args.groups or GROUPS:
            GROUPS[group](args.seconds)


if __name__ == "__main__":
    main()
