"""The kernel that stores a layer's heads: against plain torch in Triton's interpreter, and when it is chosen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from baton.layers import kernels, ops
from baton.layers.spec import KernelShapes
from tests.support import effort
from tests.support.models import shapes
from tests.support.models.whole_model import load_model
from tests.support.processes.prepared_python import PreparedPython

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
def test_heads_are_normed_rotated_and_stored_as_by_plain_torch(
    triton_interpreter: PreparedPython,
) -> None:
    count = 30 if effort.EVERY else 15
    module = "tests.support.kernels.head_cases"
    assert f"{count} shapes" in triton_interpreter.output("-m", module)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from baton.layers.kernels.draw import WARPS, _draw_token
from baton.layers.kernels.heads import HEADS, _store_heads
from baton.layers.kernels import masks

def compiled(kernel, constants, warps, **types):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=at)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.__name__, len(made.asm["cubin"]) > 0)

compiled(_draw_token, {"BLOCK": 1024}, WARPS, logits="*fp32", rows="*i64", columns="*fp64", tokens="*i64")
names = ("heads", "q_norm", "k_norm", "keys", "values")
others = dict(eps="fp32", positions="*i64", slots="*i64", cos="*fp32", sin="*fp32")
sizes = dict(Q_HEADS=16, KV_HEADS=8, HALF=64, BLOCK=64, HEADS=HEADS, HAS_NORM=True)
mask_types = dict(logits="*fp32", rows="*i64", packed="*i32")
compiled(masks._mask_row, {"BLOCK": masks.BLOCK}, masks.WARPS, **mask_types)
compiled(_store_heads, sizes, 4, **dict.fromkeys(names, "*bf16"), **others)
"""


@needs_triton
def test_kernels_compile_for_a_gpu_of_compute_capability_9(
    torch_process: PreparedPython,
) -> None:
    """To machine code, which needs no GPU; the interpreter takes what the compiler does not."""
    found = torch_process.output("-c", COMPILE).splitlines()
    assert found == ["_draw_token True", "_mask_row True", "_store_heads True"]


@pytest.fixture
def kernel_shapes(tmp_path: Path) -> KernelShapes:
    return load_model(shapes.make("tiny", tmp_path / "m"), load_format="dummy").spec.kernel_shapes


@pytest.fixture
def _undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_head_kernel", None)
    monkeypatch.setattr(kernels, "usable", True)


@needs_triton
def test_kernels_that_run_are_chosen_at_start(
    triton_interpreter: PreparedPython, tmp_path: Path
) -> None:
    path = shapes.make("tiny", tmp_path / "m")
    code = f"""
import torch
from tests.support.models.whole_model import load_model
from baton.layers import ops
from baton.layers import kernels
spec = load_model({str(path)!r}, load_format="dummy").spec
ops._choose_triton([spec.kernel_shapes], torch.device("cpu"), required=True)
print(ops.head_kernel(torch.empty(1, device="meta")).__name__, ops.head_kernel(torch.empty(1)), kernels.usable)
"""
    assert triton_interpreter.output("-c", code).splitlines()[-1] == "store_heads None True"


@pytest.mark.usefixtures("_undo")
def test_kernels_that_cannot_be_compiled_end_the_start_unless_the_reference_is_asked_for(
    kernel_shapes: KernelShapes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(kernels, "_try_out", fail)
    with pytest.raises(
        ConfigError,
        match=r"cannot run here \(Failed to find C compiler.*\); install triton and a C compiler .* or use --att",
    ):
        ops.choose_cuda([kernel_shapes], CPU, required=True)
    caplog.clear()
    ops._choose_triton([kernel_shapes], CPU, required=False)
    assert len(caplog.messages) == 1
    assert (
        "tokens drawn on the host; Triton's kernels: Failed to find C compiler"
        in caplog.messages[0]
    )
    assert ops.head_kernel(torch.empty(1, device="meta")) is None
    assert not kernels.usable


@pytest.mark.usefixtures("_undo")
def test_absent_triton_is_one_sentence(
    kernel_shapes: KernelShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("triton", "baton.layers.kernels.draw", "baton.layers.kernels.heads"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "ImportError: import of" in str(
        kernels.find_obstacle(kernel_shapes, CPU)
    ) or "ModuleNotFoundError" in str(kernels.find_obstacle(kernel_shapes, CPU))
    assert not kernels.usable
