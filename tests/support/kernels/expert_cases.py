"""The kernels of experts against plain torch: run in Triton's interpreter by
tests/unit/layers/kernels/test_experts.py, and by tests/gpu.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from baton.layers import ops
from baton.layers.kernels import experts as kernels
from baton.layers.kernels.experts import StackedExperts
from tests.support.kernels.head_cases import converted

CPU = torch.device("cpu")
create_dot = interpreter.InterpreterBuilder.create_dot


@dataclass(frozen=True)
class ExpertShape:
    tokens: int
    slots: int
    num_experts: int
    held: tuple[int, int]
    hidden: int
    inner: int
    dtype: str
    padding: int
    """Rows behind the tokens that choose no expert."""


def shapes(count: int) -> list[ExpertShape]:
    rng = random.Random(3)
    made = []
    for number in range(count):
        num_experts = rng.choice((2, 5, 8))
        first = rng.choice((0, 0, num_experts // 2))
        tokens = rng.choice((1, 2, 3, 9, 40))
        made.append(
            ExpertShape(
                tokens=tokens,
                slots=rng.randint(1, min(3, num_experts)),
                num_experts=num_experts,
                held=(first, num_experts),
                hidden=rng.choice((16, 64, 96)),
                inner=rng.choice((8, 64, 80)),
                dtype=("float32", "bfloat16", "float16")[number % 3],
                padding=rng.choice((0, 1, 7)),
            )
        )
    # Several tiles of an expert, of both sizes, and more choices than a program compares at once.
    made.append(ExpertShape(80, 2, 2, (1, 2), 32, 16, "float32", 5))
    made.append(ExpertShape(60, 1, 8, (0, 8), 32, 16, "bfloat16", 0))
    return made


def check(shape: ExpertShape, seed: int, device: torch.device = CPU) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    first, end = shape.held
    rows = shape.tokens + shape.padding
    # Rows lie apart, as those of a slice do.
    x = noise(rows, shape.hidden + 8)[:, : shape.hidden]
    gate_up = noise(end - first, 2 * shape.inner, shape.hidden) / shape.hidden**0.5
    down = noise(end - first, shape.hidden, shape.inner) / shape.inner**0.5
    scores = torch.rand(rows, shape.num_experts, generator=generator)
    experts = scores.argsort(dim=-1)[:, : shape.slots].contiguous().to(device)
    weights = torch.rand(rows, shape.slots, generator=generator).to(device)
    # What padding rows hold must not spread.
    x[shape.tokens :] = torch.nan
    experts[shape.tokens :] = ops.NO_EXPERT
    counts = torch.full((shape.num_experts,), 7, dtype=torch.int64, device=device)

    kernel = StackedExperts(gate_up, down, first)
    got = kernel.pass_tokens(x, experts, weights, counts)
    live = slice(shape.tokens)

    def pass_expert(place: int, rows: Tensor) -> Tensor:
        return ops.linear(ops.silu_mul(ops.linear(rows, gate_up[place])), down[place])

    want = ops.pass_experts(
        x[live], experts[live], weights[live], held=range(*shape.held), pass_expert=pass_expert
    )
    tolerance = {"float32": 2e-5, "float16": 2**-8, "bfloat16": 2**-5}[shape.dtype]
    torch.testing.assert_close(got[live], want, rtol=tolerance, atol=tolerance, msg=str(shape))
    assert (got[shape.tokens :] == 0).all(), f"padding of {shape}"
    chosen = experts[live].flatten().bincount(minlength=shape.num_experts)
    chosen[:first] = 0
    assert torch.equal(counts - 7, chosen), f"counts of {shape}"


def multiply(builder: Any, left: Any, right: Any, *others: Any) -> Any:
    """Triton 3.9's interpreter multiplies the bits of bfloat16 numbers as integers."""
    if left.dtype == tl.bfloat16:
        left, right = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            for x in (left, right)
        )
    return create_dot(builder, left, right, *others)


def main() -> None:
    torch.set_num_threads(1)
    ops._native = None  # the definition, not the CPU's kernels
    interpreter._convert_float = converted
    interpreter.InterpreterBuilder.create_dot = multiply
    # Smaller than on a GPU, so that small cases have several of them.
    kernels.COLUMNS = 32
    kernels.SCAN = 64
    made = shapes(6)
    for seed, shape in enumerate(made):
        check(shape, seed)
    print(f"{len(made)} shapes")


if __name__ == "__main__":
    main()
