"""Whole requests through an attention backend, in mixed steps, against dense attention over contiguous K and V.

Used for every backend that reads the paged pool, on any device: the reference shares no code with any of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.layers.attention.base import AttentionBackend
from baton.layers.kv_pool import KvTensors
from baton.layers.kv_spec import KVSpec, describe_attention
from baton.layers.spec import AttentionSpec
from tests.support.kernels.attention_batch import AttentionRow, build_batch


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    windows: tuple[int, ...] = (0, 5)
    """One per layer."""
    soft_cap: float = 0.0
    lengths: tuple[int, ...] = (1, 7, 33, 40)
    longest_chunk: int = 24
    seed: int = 0

    def layers(self) -> list[AttentionSpec]:
        return [
            AttentionSpec(self.heads, self.kv_heads, self.dim, window, soft_cap=self.soft_cap)
            for window in self.windows
        ]

    def kv_spec(self) -> KVSpec:
        dtype = str(self.dtype).removeprefix("torch.")
        return KVSpec((describe_attention(self.layers(), dtype, self.page_size),))

    def pool(self, device: str) -> KvTensors:
        """Filled with NaN: unwritten slots must not be read. Twice the pages needed, so that they lie scattered."""
        pages = 2 * sum(-(-n // self.page_size) for n in self.lengths)
        spec = self.kv_spec()
        shape = (pages, *spec.full_group.shape)
        return KvTensors(spec, torch.full(shape, math.nan, dtype=self.dtype, device=device))


def chunks(case: Case) -> list[list[tuple[int, int, int]]]:
    """Steps of (request, start, n): every request is computed in chunks of 1 to `longest_chunk`; decode rows first."""
    rng = random.Random(case.seed)
    done = [0] * len(case.lengths)
    steps = []
    while any(d < n for d, n in zip(done, case.lengths, strict=True)):
        rows = []
        for i, length in enumerate(case.lengths):
            if done[i] < length and rng.random() < 0.8:
                n = rng.choice((1, rng.randint(1, case.longest_chunk)))
                n = min(n, length - done[i])
                rows.append((i, done[i], n))
                done[i] += n
        if rows:
            steps.append(sorted(rows, key=lambda row: row[2] > 1))
    return steps


def dense(case: Case, window: int, qkv: Tensor) -> Tensor:
    """Causal attention of one request, [n, Hq + 2 Hk, D] in: float32 [n, Hq, D]."""
    q, k, v = qkv.float().split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    n, group = len(q), case.heads // case.kv_heads
    out = torch.empty(n, case.heads, case.dim)
    for head in range(case.heads):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(case.dim)
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        seen = torch.ones(n, n).tril()
        if window:
            seen = seen.triu(1 - window)
        out[:, head] = scores.masked_fill(seen == 0, -math.inf).softmax(-1) @ v[:, head // group]
    return out


def check(
    case: Case,
    make: Callable[[list[AttentionSpec], KvTensors], AttentionBackend],
    device: str = "cpu",
    tolerance: float = 0.02,
) -> None:
    """Run the case's requests through the backend and compare every token's output in every layer."""
    kv = case.pool(device)
    backend = make(case.layers(), kv)
    rng = torch.Generator().manual_seed(case.seed)
    width = case.heads + 2 * case.kv_heads
    layers = range(len(case.windows))
    qkv = [
        torch.randn(len(layers), n, width, case.dim, generator=rng).to(case.dtype)
        for n in case.lengths
    ]
    inputs = [x.to(device) for x in qkv]
    pages = random.Random(case.seed + 1).sample(range(kv.num_pages), kv.num_pages // 2)
    tables = []
    for n in case.lengths:
        needed = -(-n // case.page_size)
        tables.append(pages[:needed])
        pages = pages[needed:]
    got = [torch.full((len(layers), n, case.heads * case.dim), math.nan) for n in case.lengths]
    outputs = []
    for step in chunks(case):
        batch = build_batch(
            [AttentionRow([0] * n, start, tables[i]) for i, start, n in step], case.page_size
        )
        backend.plan(replace(batch, slot_mapping=batch.slot_mapping.to(device)))
        for layer in layers:
            fused = torch.cat([inputs[i][layer, start : start + n] for i, start, n in step])
            q, k, v = fused.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
            outputs.append((layer, step, backend.forward(layer, q, k, v)))
    # Only now: a GPU must not be waited for between steps, or plans that overtake it would go unnoticed.
    for layer, step, output in outputs:
        for (i, start, n), out in zip(
            step, output.float().cpu().split([n for _, _, n in step]), strict=True
        ):
            got[i][layer, start : start + n] = out
    compare(case, qkv, got, tolerance)


def compare(case: Case, qkv: Sequence[Tensor], got: Sequence[Tensor], tolerance: float) -> None:
    for i, n in enumerate(case.lengths):
        for layer, window in enumerate(case.windows):
            expected = dense(case, window, qkv[i][layer]).reshape(n, -1)
            message = f"{case}: request {i}, layer {layer}, window {window}"
            torch.testing.assert_close(
                got[i][layer],
                expected,
                atol=tolerance,
                rtol=tolerance,
                msg=lambda text, m=message: f"{m}\n{text}",
            )


PAGE_SIZES = [Case(page_size=size, seed=size) for size in (1, 2, 4, 8, 16, 32, 64)]
CASES = [
    *PAGE_SIZES,
    Case(heads=4, kv_heads=4),
    Case(heads=6, kv_heads=2),
    Case(heads=8, kv_heads=2, dim=128),
    Case(heads=8, kv_heads=1, dim=256),
    Case(heads=7, kv_heads=1),
    Case(dtype=torch.float16),
    Case(windows=(16, 0, 16), lengths=(70, 3, 65)),
    Case(windows=(1,)),
    Case(soft_cap=2.0),
    Case(soft_cap=30.0, heads=2, kv_heads=2, dtype=torch.float16),
]
