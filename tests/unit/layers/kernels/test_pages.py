"""The kernels that copy and sum pages: values in Triton's interpreter, machine code, and plain torch without them."""

from __future__ import annotations

import torch

from baton.layers.cuda import device_pages
from tests.support.processes.prepared_python import PreparedPython
from tests.unit.layers.kernels.test_heads import needs_triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from baton.layers.kernels.pages import BLOCK, WARPS, _copy_and_sum

types = dict.fromkeys(("source", "target"), "*i32")
types |= dict.fromkeys(("source_pages", "target_pages", "weights", "sums"), "*i64")
for copies in (False, True):
    constants = {"COPIES": copies, "BLOCK": BLOCK}
    names = _copy_and_sum.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=_copy_and_sum, signature=signature, constexprs=positions)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
    print(len(compiled.asm["cubin"]) > 0)
"""


@needs_triton
def test_copies_and_sums_are_those_of_plain_integers(triton_interpreter: PreparedPython) -> None:
    assert "6 sizes" in triton_interpreter.output("-m", "tests.support.kernels.page_cases")


@needs_triton
def test_machine_code_is_made_without_a_gpu(torch_process: PreparedPython) -> None:
    assert torch_process.output("-c", COMPILE).split() == ["True", "True"]


def test_host_memory_gets_no_kernels() -> None:
    rows = torch.zeros(2, 4, dtype=torch.int64)
    assert device_pages.page_kernels(rows, torch.zeros(8, dtype=torch.int64)) is None
