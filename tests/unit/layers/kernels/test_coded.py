"""Products with matrices that stay quantized on a GPU: values in Triton's interpreter, and machine
code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.layers import kernels, ops
from tests.support import effort
from tests.support.models import shapes
from tests.support.models.whole_model import load_model
from tests.support.processes.prepared_python import PreparedPython
from tests.unit.layers.kernels.test_heads import CPU, needs_triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from baton.layers.kernels import coded

kernel = coded._multiply_rows
names = kernel.arg_names
types = dict.fromkeys(("x", "bias", "y"), "*bf16") | {"codes": "*u8", "zeros": "*fp32"}

def compile(code, per_byte, tile, scales="*fp32"):
    constants = dict(HAS_BIAS=True, ROWS=tile[0], COLUMNS=tile[1], CODE=code, PER_BYTE=per_byte)
    constants |= dict(FACTOR=coded.FACTORS.get(code, 1.0), HAS_ZEROS=code == "int", ZERO=0.0)
    constants |= dict(DEPTH=coded.MIN_DEPTH * per_byte, PRECISION="tf32")
    known = types | {"scales": scales}
    known |= dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in names}
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": coded.WARPS})
    print(code, len(made.asm["cubin"]) > 0)

compile("int", 1, coded.MANY)
compile("int", 2, coded.FEW)
compile("fp8", 1, coded.FEW)
compile("fp4", 2, coded.MANY, "*bf16")
"""


@needs_triton
def test_products_are_those_of_dequantized_numbers(triton_interpreter: PreparedPython) -> None:
    module = "tests.support.kernels.coded_cases"
    assert f"{36 if effort.EVERY else 12} shapes" in triton_interpreter.output("-m", module)


@needs_triton
def test_machine_code_is_made_without_a_gpu(torch_process: PreparedPython) -> None:
    found = torch_process.output("-c", COMPILE).splitlines()
    assert found == ["int True", "int True", "fp8 True", "fp4 True"]


@needs_triton
def test_products_of_all_codes_are_tried_where_weights_stay_quantized(
    triton_interpreter: PreparedPython, tmp_path: Path
) -> None:
    path = shapes.make("tiny", tmp_path / "m")
    code = f"""
from dataclasses import replace
import torch
from tests.support.models.whole_model import load_model
from baton.layers import kernels
from baton.layers.kernels.coded import CodedMatrix
shapes = load_model({str(path)!r}, load_format="dummy").spec.kernel_shapes
tried = []
CodedMatrix.multiply = lambda self, x: tried.append((self.code, self.codes_per_byte))
for is_quantized in (False, True):
    made = replace(shapes, is_quantized=is_quantized)
    print(kernels.find_obstacle(made, torch.device("cpu")), tried)
"""
    found = triton_interpreter.output("-c", code).splitlines()[-2:]
    assert found == ["None []", "None [('int', 2), ('int', 1), ('fp8', 1), ('fp4', 2)]"]


def test_quantized_weights_without_triton_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(ops, "_head_kernel", None)
    monkeypatch.setattr(kernels, "usable", True)
    monkeypatch.setattr(kernels, "_try_out", fail)
    path = shapes.make("tiny", tmp_path / "m")
    made = load_model(path, load_format="dummy").spec.kernel_shapes
    with pytest.raises(ConfigError, match="quantized weights have no others on a GPU; install"):
        ops.choose_cuda([replace(made, is_quantized=True)], CPU, required=False)
