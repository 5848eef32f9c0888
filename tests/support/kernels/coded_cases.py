"""Products with quantized matrices against those of their numbers in float32: run in Triton's
interpreter by tests/unit/layers/kernels/test_coded.py, and by tests/gpu.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from baton.layers.kernels import coded as kernels
from baton.layers.kernels.coded import CodedMatrix, CodeType
from baton.models.quantized.readers.mxfp4 import FP4_NUMBERS
from tests.support import effort
from tests.support.kernels.interpreted import prepare_interpreter

CPU = torch.device("cpu")
CODE_TYPES: tuple[CodeType, ...] = get_args(CodeType)
TOLERANCES = {"float32": 2e-5, "float16": 2**-9, "bfloat16": 2**-6}
_FP8_NAN = 0x7F


@dataclass(frozen=True)
class CodedShape:
    code_type: CodeType
    tokens: int
    outputs: int
    inputs: int
    group_size: int
    offset: int
    """Columns of the first group that are not there."""
    has_zeros: bool
    has_bias: bool
    dtype: str


def shapes(count: int) -> list[CodedShape]:
    rng = random.Random(5)
    made = []
    for number in range(count):
        code_type = CODE_TYPES[number % 4]
        group_size = rng.choice((16, 32, 24, 128, 15))
        made.append(
            CodedShape(
                code_type,
                tokens=rng.choice((1, 3, 17)),
                outputs=rng.choice((16, 33)),
                inputs=rng.choice((32, 47, 70)),
                group_size=group_size,
                offset=rng.choice((0, 0, 4, 5)),
                has_zeros=code_type.startswith("int") and rng.random() < 0.6,
                has_bias=rng.random() < 0.5,
                dtype=("float32", "bfloat16", "float16")[number // 4 % 3],
            )
        )
    return made


@dataclass(frozen=True)
class CodedCase:
    """A matrix as the loader gives it to a kernel, and its numbers."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | float
    column_group: Tensor
    dense: Tensor
    """float32"""

    def move(self, code_type: CodeType, dtype: torch.dtype, device: torch.device) -> CodedMatrix:
        made = CodedMatrix.make(
            code_type,
            self.codes,
            scales=self.scales,
            zeros=self.zeros,
            column_group=self.column_group,
            dtype=dtype,
            device=device,
        )
        assert made is not None
        return made


def make_case(
    code_type: CodeType,
    outputs: int,
    column_group: Tensor,
    *,
    has_zeros: bool,
    generator: torch.Generator,
) -> CodedCase:
    """Every code occurs that a file may have."""
    inputs = len(column_group)
    values = 16 if code_type in ("int4", "fp4") else 256
    codes = torch.randint(0, values, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = (outputs, int(column_group.max()) + 1)
    scales = torch.rand(groups, generator=generator) / inputs**0.5 / values * 8 + 1e-6
    zeros: Tensor | float = float(values // 2) if code_type.startswith("int") else 0.0
    if has_zeros:
        zeros = torch.randint(0, values, groups, generator=generator).float()
    match code_type:
        case "fp8":
            codes[(codes & _FP8_NAN) == _FP8_NAN] = 0
            numbers = codes.view(torch.float8_e4m3fn).float()
            scales /= 8
        case "fp4":
            numbers = FP4_NUMBERS[codes.int()]
            exponents = torch.randint(-4, 0, groups, generator=generator) - inputs.bit_length() // 2
            scales = torch.exp2(exponents.float())
        case _:
            numbers = codes.float()
    wide_zeros = zeros[:, column_group] if isinstance(zeros, Tensor) else zeros
    dense = (numbers - wide_zeros) * scales[:, column_group]
    return CodedCase(codes, scales, zeros, column_group.int(), dense)


def check(shape: CodedShape, seed: int, device: torch.device = CPU) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    column_group = (torch.arange(shape.inputs) + shape.offset) // shape.group_size
    case = make_case(
        shape.code_type,
        shape.outputs,
        column_group - column_group[0],
        has_zeros=shape.has_zeros,
        generator=generator,
    )
    # Rows lie apart, as those of a slice do.
    x = torch.randn(shape.tokens, shape.inputs + 8, generator=generator).to(device, dtype)
    x[:, shape.inputs :] = torch.nan
    x = x[:, : shape.inputs]
    bias = None
    if shape.has_bias:
        bias = torch.randn(shape.outputs, generator=generator).to(device, dtype)
    matrix = case.move(shape.code_type, dtype, device)
    assert matrix.shape == (shape.outputs, shape.inputs)
    got = matrix.multiply(x, bias)
    want = x.double() @ case.dense.to(device).double().t()
    if bias is not None:
        want += bias.double()
    assert got.dtype == dtype
    tolerance = TOLERANCES[shape.dtype]
    torch.testing.assert_close(
        got.double(), want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{shape}: {text}"
    )


def main() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    # Smaller than on a GPU, so that small cases have several of them.
    kernels.FEW = (16, 32)
    kernels.MANY = (32, 32)
    kernels.MAX_DEPTH = 16
    made = shapes(36 if effort.EVERY else 12)  # 12: each kind of codes in each type
    for seed, shape in enumerate(made):
        check(shape, seed)
    print(f"{len(made)} shapes")


if __name__ == "__main__":
    main()
