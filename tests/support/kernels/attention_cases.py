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

from baton.layers.attention.base import AttentionBackend, PageTable
from baton.layers.kv_pool import KvTensors
from baton.layers.kv_spec import KVSpec, describe_attention
from baton.layers.spec import AttentionSpec, Sight
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
    chunks: tuple[int, ...] = ()
    """One per layer, in place of windows."""
    soft_cap: float = 0.0
    has_sinks: bool = False
    is_divided: bool = False
    """The pool has a page group for each part that layers see, where some see everything; what they do not see lies in
    pages of NaN."""
    lengths: tuple[int, ...] = (1, 7, 33, 40)
    longest_chunk: int = 24
    seed: int = 0

    @property
    def sights(self) -> list[Sight]:
        """By layer."""
        if self.chunks:
            return [Sight(chunk=chunk) for chunk in self.chunks]
        return [Sight(window) for window in self.windows]

    def layers(self) -> list[AttentionSpec]:
        return [
            AttentionSpec(
                self.heads, self.kv_heads, self.dim, sight.window, sight.chunk, soft_cap=self.soft_cap,
                has_sinks=self.has_sinks,
            )
            for sight in self.sights
        ]  # fmt: skip

    def sinks(self, device: str = "cpu") -> list[Tensor | None]:
        """By layer."""
        rng = torch.Generator().manual_seed(self.seed)
        made = [torch.randn(self.heads, generator=rng).to(device) for _ in self.sights]
        return list(made) if self.has_sinks else [None] * len(made)

    def kv_spec(self) -> KVSpec:
        dtype = str(self.dtype).removeprefix("torch.")
        spec = KVSpec((describe_attention(self.layers(), dtype, self.page_size),))
        return spec.divide(self.layers()) if self.is_divided else spec

    def pool(self, device: str) -> KvTensors:
        """Filled with NaN: unwritten slots must not be read. Twice the pages needed, so that they lie scattered."""
        spec = self.kv_spec()
        pages = 2 * spec.num_tables * sum(-(-n // self.page_size) for n in self.lengths)
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


def dense(case: Case, layer: int, qkv: Tensor) -> Tensor:
    """Causal attention of one request, [n, Hq + 2 Hk, D] in: float32 [n, Hq, D]."""
    sight = case.sights[layer]
    sinks = case.sinks()[layer]
    q, k, v = qkv.float().split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    n, group = len(q), case.heads // case.kv_heads
    out = torch.empty(n, case.heads, case.dim)
    for head in range(case.heads):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(case.dim)
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        seen = torch.ones(n, n).tril()
        if sight.window:
            seen = seen.triu(1 - sight.window)
        if sight.chunk:
            numbers = torch.arange(n) // sight.chunk
            seen = seen * (numbers[:, None] == numbers[None, :])
        scores = scores.masked_fill(seen == 0, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].expand(n, 1)), dim=1)
        out[:, head] = scores.softmax(-1)[:, :n] @ v[:, head // group]
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
    layers = range(len(case.sights))
    sinks = case.sinks(device)
    qkv = [
        torch.randn(len(layers), n, width, case.dim, generator=rng).to(case.dtype)
        for n in case.lengths
    ]
    inputs = [x.to(device) for x in qkv]
    pages = random.Random(case.seed + 1).sample(range(kv.num_pages), kv.num_pages // 2)
    # Of each table of the pool, the requests' pages.
    tables: list[list[list[int]]] = []
    for _ in range(kv.spec.num_tables):
        tables.append([])
        for n in case.lengths:
            needed = -(-n // case.page_size)
            tables[-1].append(pages[:needed])
            pages = pages[needed:]
    unused = next(p for p in range(kv.num_pages) if all(p not in t for of in tables for t in of))
    # Where all layers have windows there is one group, whose pages are all kept.
    passes_pages = len(kv.spec.groups) > 1
    sight_of_table = {
        place.table: sight for place, sight in zip(kv.spec.layer_places, case.sights, strict=True)
    }
    got = [torch.full((len(layers), n, case.heads * case.dim), math.nan) for n in case.lengths]
    outputs = []
    for step in chunks(case):
        batches = []
        for number, table in enumerate(tables):
            rows = []
            for i, start, n in step:
                passed = sight_of_table[number].first_seen(start) // case.page_size
                held = [unused] * passed + table[i][passed:] if passes_pages else table[i]
                rows.append(AttentionRow([0] * n, start, held))
            batches.append(build_batch(rows, case.page_size))
        first, *further = batches
        backend.plan(
            replace(
                first,
                slot_mapping=first.slot_mapping.to(device),
                further=tuple(
                    PageTable(b.slot_mapping.to(device), b.page_indices) for b in further
                ),
            )
        )
        for layer in layers:
            fused = torch.cat([inputs[i][layer, start : start + n] for i, start, n in step])
            q, k, v = fused.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
            outputs.append((layer, step, backend.forward(layer, q, k, v, sinks[layer])))
    # Only now: a GPU must not be waited for between steps, or plans that overtake it would go unnoticed.
    for layer, step, output in outputs:
        for (i, start, n), out in zip(
            step, output.float().cpu().split([n for _, _, n in step]), strict=True
        ):
            got[i][layer, start : start + n] = out
    compare(case, qkv, got, tolerance)


def compare(case: Case, qkv: Sequence[Tensor], got: Sequence[Tensor], tolerance: float) -> None:
    for i, n in enumerate(case.lengths):
        for layer, sight in enumerate(case.sights):
            expected = dense(case, layer, qkv[i][layer]).reshape(n, -1)
            message = (
                f"{case}: request {i}, layer {layer}, window {sight.window}, chunk {sight.chunk}"
            )
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
    Case(has_sinks=True),
    Case(has_sinks=True, windows=(16, 0, 16), lengths=(70, 3, 65), is_divided=True),
    Case(chunks=(0, 32), lengths=(70, 3, 96, 65), longest_chunk=50),
    Case(chunks=(16, 0, 16, 16), lengths=(70, 3, 65), longest_chunk=50, is_divided=True),
    Case(windows=(5, 0, 16, 5, 5), lengths=(70, 3, 65), page_size=4, is_divided=True),
    Case(windows=(2, 1), lengths=(2, 9), page_size=1, is_divided=True),
]
