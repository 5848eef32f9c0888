"""The kernels of experts: values in Triton's interpreter, in an engine with recorded steps, and machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.layers import kernels, ops
from baton.layers.spec import KernelShapes
from tests.support import effort
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.whole_model import load_model
from tests.support.processes.prepared_python import PreparedPython
from tests.unit.layers.kernels.test_heads import CPU, needs_triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from baton.layers.kernels import coded, experts

plain = {"CODE": "plain", "PER_BYTE": 1, "FACTOR": 1.0, "HAS_ZEROS": False, "ZERO": 0.0}
plain |= {"DEPTH": coded.MAX_DEPTH}
fp8 = plain | {"CODE": "fp8", "FACTOR": coded.FACTORS["fp8"]}
fp4 = plain | {"CODE": "fp4", "FACTOR": coded.FACTORS["fp4"], "PER_BYTE": 2, "DEPTH": 16}
sizes = {"INNER": 768, "COLUMNS": experts.COLUMNS, "PRECISION": "tf32"}
plain_form = {"IS_CLAMPED": False, "GAIN": 1.0, "LIMIT": 0.0}
clamped = {"IS_CLAMPED": True, "GAIN": 1.702, "LIMIT": 7.0}
types = dict.fromkeys(("x", "gated", "results", "y", "biases"), "*bf16")
types |= dict.fromkeys(("experts", "counts"), "*i64")
types |= dict.fromkeys(("order", "num_tiles", "tile_table"), "*i32")
types |= {"weights": "*fp32", "zeros": "*fp32"}
codes_of = {"plain": "*bf16", "fp8": "*u8", "fp4": "*u8"}
scales_of = {"plain": "*bf16", "fp8": "*fp32", "fp4": "*bf16"}

def compile(kernel, **constants):
    names = kernel.arg_names
    code = constants.get("CODE", "plain")
    known = types | {"codes": codes_of[code], "scales": scales_of[code]}
    known |= dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in names}
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": experts.WARPS})
    print(kernel.__name__, len(made.asm["cubin"]) > 0)

compile(experts._group_choices, ROWS=16, SCAN=experts.SCAN)
for rows, codes, form in (
    (experts.FEW_ROWS, plain, plain_form),
    (experts.MANY_ROWS, fp8, plain_form),
    (experts.FEW_ROWS, fp4, clamped),
):
    shared = sizes | codes | {"ROWS": rows, "HAS_BIAS": form is clamped}
    compile(experts._multiply_gate_up, **shared, **form, ROW_CHOICES=8)
    compile(experts._multiply_down, **shared, HIDDEN=2048)
compile(experts._add_results, HIDDEN=2048, SLOTS=8, COLUMNS=experts.ADD)
"""


@needs_triton
def test_experts_are_the_sums_of_plain_torch(triton_interpreter: PreparedPython) -> None:
    module = "tests.support.kernels.expert_cases"
    assert f"{12 if effort.EVERY else 9} shapes" in triton_interpreter.output("-m", module)


@needs_triton
def test_machine_code_is_made_without_a_gpu(torch_process: PreparedPython) -> None:
    found = torch_process.output("-c", COMPILE).splitlines()
    products = ["_multiply_gate_up True", "_multiply_down True"]
    assert found == ["_group_choices True", *products * 3, "_add_results True"]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "quantization", "codes"),
    [
        ("qwen3-moe", "plain", 0),
        ("qwen3-moe", "fp8-block", 2),
        ("deepseek-v3", "fp8-block", 2),
        ("gpt-oss", "plain", 0),
        ("llama4", "plain", 0),
    ],
)
def test_recorded_steps_have_the_tokens_of_plain_torch_and_padding_chooses_nothing(
    triton_interpreter: PreparedPython, tmp_path: Path, variant: str, quantization: str, codes: int
) -> None:
    module = "tests.support.devices.expert_engine"
    found = triton_interpreter.output("-m", module, variant, quantization, str(tmp_path))
    assert f"choices, {codes} output projections are codes" in found


@pytest.fixture
def kernel_shapes(tmp_path: Path) -> KernelShapes:
    return load_model(make_checkpoint("qwen3-moe", tmp_path / "m")).spec.kernel_shapes


@needs_triton
def test_kernels_are_tried_with_the_sizes_of_the_mixture(
    triton_interpreter: PreparedPython, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3-moe", tmp_path / "m")
    code = f"""
import torch
from tests.support.models.whole_model import load_model
from baton.layers import kernels
from baton.layers.kernels.experts import StackedExperts
shapes = load_model({str(path)!r}).spec.kernel_shapes
tried = []
StackedExperts.pass_tokens = lambda self, x, experts, *_: tried.append((self.down.shape[1:], tuple(experts.shape)))
print(kernels.find_obstacle(shapes, torch.device("cpu")), tried)
"""
    expected = "None [((64, 32), (1, 2)), ((64, 32), (64, 2))]"
    assert triton_interpreter.output("-c", code).splitlines()[-1] == expected


def test_experts_without_triton_end_the_start_whatever_the_backend(
    kernel_shapes: KernelShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(ops, "_head_kernel", None)
    monkeypatch.setattr(kernels, "usable", True)
    monkeypatch.setattr(kernels, "_try_out", fail)
    for required in (False, True):
        with pytest.raises(
            ConfigError, match=r"cannot run here \(Failed .*\), and experts have no others on a GPU"
        ):
            ops.choose_cuda([kernel_shapes], CPU, required=required)


def test_experts_of_host_memory_get_no_kernel_of_a_gpu() -> None:
    matrices = [torch.zeros(4, 2), torch.zeros(4, 2)]
    assert ops.pack_experts(list(matrices), list(matrices), 0) is None
