"""The head kernel against plain torch: run in Triton's interpreter by tests/unit/layers/kernels/test_heads.py, and by
tests/gpu.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.kernels.heads import store_heads
from baton.layers.kv_pool import KvTensors, make_pool
from baton.layers.kv_spec import KVSpec, describe_heads
from tests.support import effort
from tests.support.kernels.interpreted import prepare_interpreter

EPS = 1e-6
CPU = torch.device("cpu")
LAYERS = 3
POSITIONS = 40
PAGES = 5


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: str
    has_norm: bool
    tokens: int
    is_one_table: bool
    """Cosines and sines as two halves of one table, as on a GPU, or as two."""


def shapes(count: int) -> list[Shape]:
    rng = random.Random(11)
    groups = [(1, 1), (2, 2), (4, 2), (3, 1), (8, 1), (6, 2)]
    return [
        Shape(
            *groups[i % len(groups)],
            dim=(16, 64, 96, 128, 256)[i % 5],
            page_size=rng.choice((1, 4, 16, 64)),
            dtype=("float32", "bfloat16", "float16")[i % 3],
            has_norm=rng.random() < 0.6,
            tokens=rng.choice((1, 2, 4)),
            is_one_table=rng.random() < 0.5,
        )
        for i in range(count)
    ]


def filled_pool(shape: Shape, device: torch.device) -> KvTensors:
    group = describe_heads(
        range(LAYERS),
        range(shape.kv_heads),
        shape.dim,
        dtype=shape.dtype,
        page_tokens=shape.page_size,
    )
    kv = make_pool(KVSpec((group,)), PAGES, native=False, device=device)
    kv.data.fill_(7.0)
    return kv


def plain(heads: Tensor, shape: Shape, norms: tuple[Tensor, Tensor] | None, positions: Tensor,
          tables: tuple[Tensor, Tensor], data: Tensor, layer: int, slots: Tensor) -> Tensor:  # fmt: skip
    """The definition: what `models.decoder` and a backend do, function by function. Returns q."""
    q, k, v = heads.clone().split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
    if norms is not None:
        q, k = ops.rms_norm(q, norms[0], EPS), ops.rms_norm(k, norms[1], EPS)
    q, k = ops.apply_rope(q, k, positions, *tables)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            data[slot // shape.page_size, layer, 0, slot % shape.page_size] = k[i]
            data[slot // shape.page_size, layer, 1, slot % shape.page_size] = v[i]
    return q


def check(shape: Shape, seed: int, device: torch.device = CPU) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, getattr(torch, shape.dtype))

    fused = noise(shape.tokens, (shape.heads + 2 * shape.kv_heads) * shape.dim)
    heads = fused.view(shape.tokens, -1, shape.dim)
    norms = (
        (noise(shape.dim).clamp(-1, 1), noise(shape.dim).clamp(-1, 1)) if shape.has_norm else None
    )
    cos, sin = (
        torch.randn(POSITIONS, shape.dim, generator=generator)
        .clamp(-1, 1)
        .to(device)
        .chunk(2, dim=1)
    )
    tables = (cos, sin) if shape.is_one_table else (cos.contiguous(), sin.contiguous())
    positions = torch.randint(0, POSITIONS, (shape.tokens,), generator=generator).to(device)
    slots = torch.randperm(PAGES * shape.page_size, generator=generator)[: shape.tokens]
    if shape.tokens > 1:
        slots[seed % shape.tokens] = -1
    slots = slots.to(device)
    want_pool, pool, layer = filled_pool(shape, device), filled_pool(shape, device), seed % LAYERS
    want = plain(heads, shape, norms, positions, tables, want_pool.data, layer, slots)
    unused = heads[:, shape.heads :].clone()
    pages = (pool.data[:, layer, 0], pool.data[:, layer, 1])
    store_heads(heads, shape.heads, norms, EPS, positions, tables, pages, slots)
    # A mean summed in another order, or a fused product and sum on a GPU, may round to the neighbor.
    exact = device.type == "cpu" and not shape.has_norm
    tolerance = {"float32": 1e-5, "float16": 2**-8, "bfloat16": 2**-5}[shape.dtype]
    tolerance = 0.0 if exact else tolerance
    torch.testing.assert_close(
        heads[:, : shape.heads], want, rtol=tolerance, atol=tolerance, msg=f"q of {shape}"
    )
    torch.testing.assert_close(
        pool.data, want_pool.data, rtol=tolerance, atol=tolerance, msg=f"pool of {shape}"
    )
    untouched = want_pool.data == 7.0
    assert (pool.data[untouched] == 7.0).all(), f"other slots and layers of {shape}"
    assert heads[:, shape.heads :].equal(unused), "K and V stay where they were"


def main() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    made = shapes(30 if effort.EVERY else 15)  # 15: each size of a head with each type
    for seed, shape in enumerate(made):
        check(shape, seed)
    print(f"{len(made)} shapes")


if __name__ == "__main__":
    main()
