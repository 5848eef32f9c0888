"""The kernels of experts against plain torch: run in Triton's interpreter by
tests/unit/layers/kernels/test_experts.py, and by tests/gpu.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.kernels import experts as kernels
from baton.layers.kernels.coded import CodedMatrix, CodeType
from baton.layers.kernels.experts import StackedExperts
from baton.layers.spec import PLAIN_EXPERTS, ClampedSilu, ExpertForm
from tests.support import effort
from tests.support.kernels.coded_cases import make_case
from tests.support.kernels.interpreted import prepare_interpreter

CPU = torch.device("cpu")


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
    code_type: CodeType | None = None
    """None: plain numbers."""
    form: ExpertForm = PLAIN_EXPERTS
    has_biases: bool = False


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
    # gpt-oss, DeepSeek-V3, Llama 4, and integers.
    clamped = ExpertForm(ClampedSilu(1.702, 1.5))
    made += [
        ExpertShape(9, 2, 4, (0, 4), 64, 40, "bfloat16", 1, "fp4", clamped, has_biases=True),
        ExpertShape(3, 3, 5, (2, 5), 80, 32, "float32", 0, "fp8"),
        ExpertShape(5, 1, 4, (0, 4), 32, 16, "float16", 2, None, ExpertForm(weighs_inputs=True)),
        ExpertShape(4, 2, 4, (0, 4), 48, 32, "float32", 0, "int4"),
    ]
    return made


def make_matrices(
    shape: ExpertShape, outputs: int, inputs: int, device: torch.device, generator: torch.Generator
) -> tuple[CodedMatrix, Tensor]:
    """Matrices of the held experts as the kernel has them, and their numbers."""
    first, end = shape.held
    dtype = getattr(torch, shape.dtype)
    if shape.code_type is None:
        size = (end - first, outputs, inputs)
        numbers = (torch.randn(size, generator=generator) / inputs**0.5).to(device, dtype)
        return CodedMatrix.stack(list(numbers)), numbers
    groups = torch.arange(inputs) // 32
    cases = [
        make_case(
            shape.code_type,
            outputs,
            groups,
            has_zeros=shape.code_type == "int4",
            generator=generator,
        )
        for _ in range(first, end)
    ]
    stacked = CodedMatrix.stack([case.move(shape.code_type, dtype, device) for case in cases])
    return stacked, torch.stack([case.dense for case in cases]).to(device)


def check(shape: ExpertShape, seed: int, device: torch.device = CPU) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    first, end = shape.held
    rows = shape.tokens + shape.padding
    # Rows lie apart, as those of a slice do.
    x = noise(rows, shape.hidden + 8)[:, : shape.hidden]
    stacked_gate_up, gate_up = make_matrices(
        shape, 2 * shape.inner, shape.hidden, device, generator
    )
    stacked_down, down = make_matrices(shape, shape.hidden, shape.inner, device, generator)
    gate_up_biases = noise(end - first, 2 * shape.inner) if shape.has_biases else None
    down_biases = noise(end - first, shape.hidden) if shape.has_biases else None
    scores = torch.rand(rows, shape.num_experts, generator=generator)
    experts = scores.argsort(dim=-1)[:, : shape.slots].contiguous().to(device)
    weights = torch.rand(rows, shape.slots, generator=generator).to(device)
    # What padding rows hold must not spread.
    x[shape.tokens :] = torch.nan
    experts[shape.tokens :] = ops.NO_EXPERT
    counts = torch.full((shape.num_experts,), 7, dtype=torch.int64, device=device)

    kernel = StackedExperts(
        stacked_gate_up,
        stacked_down,
        first,
        form=shape.form,
        gate_up_biases=gate_up_biases,
        down_biases=down_biases,
    )
    got = kernel.pass_tokens(x, experts, weights, counts)
    live = slice(shape.tokens)

    def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        return ops.linear(rows.float(), matrix.float(), wide_bias).to(dtype)

    def pass_expert(place: int, rows: Tensor) -> Tensor:
        of_gate_up = None if gate_up_biases is None else gate_up_biases[place]
        of_down = None if down_biases is None else down_biases[place]
        both = multiply(rows, gate_up[place], of_gate_up)
        clamped = shape.form.clamped
        if clamped is None:
            inner = ops.silu_mul(both)
        else:
            inner = ops.clamped_silu_mul(both, clamped.gain, clamped.limit)
        return multiply(inner, down[place], of_down)

    want = ops.pass_experts(
        x[live],
        experts[live],
        weights[live],
        held=range(*shape.held),
        pass_expert=pass_expert,
        weighs_inputs=shape.form.weighs_inputs,
    )
    tolerance = {"float32": 2e-5, "float16": 2**-8, "bfloat16": 2**-5}[shape.dtype]
    torch.testing.assert_close(got[live], want, rtol=tolerance, atol=tolerance, msg=str(shape))
    assert (got[shape.tokens :] == 0).all(), f"padding of {shape}"
    chosen = experts[live].flatten().bincount(minlength=shape.num_experts)
    chosen[:first] = 0
    assert torch.equal(counts - 7, chosen), f"counts of {shape}"


def main() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    # Smaller than on a GPU, so that small cases have several of them.
    kernels.COLUMNS = 32
    kernels.SCAN = 64
    made = shapes(6 if effort.EVERY else 3)  # 3: each type
    for seed, shape in enumerate(made):
        check(shape, seed)
    print(f"{len(made)} shapes")


if __name__ == "__main__":
    main()
