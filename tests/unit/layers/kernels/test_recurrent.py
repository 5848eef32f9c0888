"""The kernels of layers with states: values in Triton's interpreter, machine code, and what is said
without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.layers import kernels, ops
from baton.layers.spec import DeltaSpec
from tests.support import effort
from tests.support.models import shapes
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.whole_model import load_model
from tests.support.processes.prepared_python import PreparedPython
from tests.unit.layers.kernels.test_heads import CPU, needs_triton

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from baton.layers.kernels import recurrent

def compile(kernel, warps, types, **constants):
    names = kernel.arg_names
    known = types | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "i32") for name in names}
    positions = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.__name__, len(made.asm["cubin"]) > 0)

integers = dict.fromkeys(("starts", "ends", "slots", "table"), "*i32")
words = integers | dict.fromkeys(("states", "pages"), "*i32")
compile(
    recurrent._copy_states, recurrent.COPY_WARPS, words, TO_PAGES=True, BLOCK=recurrent.COPY_WORDS
)
rows = integers | dict.fromkeys(("x", "qkv", "strengths", "decays", "out"), "*bf16")
rows |= {"weight": "*fp32", "rate": "*fp32", "bias": "*fp32", "query_length": "fp32"}
compile(
    recurrent._convolve, recurrent.CONV_WARPS, rows | {"state": "*bf16"},
    TAPS=4, CHANNELS=8192, TOKENS=recurrent.TILE_TOKENS, BLOCK=recurrent.CHANNELS,
)
for by_row in (False, True):
    compile(
        recurrent._pass_tokens, recurrent.RULE_WARPS, rows | {"state": "*fp32"},
        KEY_HEADS=16, VALUE_HEADS=32, KEY_DIM=128, VALUE_DIM=128, BY_ROW=by_row, ROWS=128,
        COLUMNS=recurrent.COLUMNS,
    )
"""


@needs_triton
def test_states_and_results_are_those_of_plain_torch_in_any_cuts_of_rows(
    triton_interpreter: PreparedPython,
) -> None:
    count = 24 if effort.EVERY else 5
    module = "tests.support.kernels.recurrent_cases"
    assert f"{count} cases" in triton_interpreter.output("-m", module)


@needs_triton
def test_machine_code_is_made_without_a_gpu(torch_process: PreparedPython) -> None:
    """Of the sizes of Qwen3-Next."""
    found = torch_process.output("-c", COMPILE).splitlines()
    names = ["_copy_states", "_convolve", "_pass_tokens", "_pass_tokens"]
    assert found == [f"{name} True" for name in names]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3-next", "qwen3.5", "kimi-linear"])
def test_recorded_steps_have_the_tokens_of_plain_torch(
    triton_interpreter: PreparedPython, tmp_path: Path, variant: str
) -> None:
    found = triton_interpreter.output(
        "-m", "tests.support.devices.state_engine", variant, str(tmp_path)
    )
    to_pages, back = (int(part.split()[0]) for part in found.splitlines()[-1].split(", "))
    assert to_pages > 0
    assert back > 0


@needs_triton
@pytest.mark.slow
def test_kernels_are_tried_with_the_sizes_of_the_model(
    triton_interpreter: PreparedPython, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3.5", tmp_path / "m")
    code = f"""
import torch
from tests.support.models.whole_model import load_model
from baton.layers import kernels
from baton.layers.kernels import recurrent
shapes = load_model({str(path)!r}).spec.kernel_shapes
tried = []
rule = recurrent.gated_delta
def note(qkv, *args, **more):
    tried.append((len(qkv), more["sizes"] == shapes.state, more["bias"].numel()))
    rule(qkv, *args, **more)
recurrent.gated_delta = note
print(kernels.find_obstacle(shapes, torch.device("cpu")), tried)
"""
    found = triton_interpreter.output("-c", code).splitlines()[-1]
    assert found == "None [(1, True, 4), (1, True, 64), (2, True, 4), (2, True, 64)]"


def test_states_without_triton_end_the_start_whatever_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(ops, "_head_kernel", None)
    monkeypatch.setattr(kernels, "usable", True)
    monkeypatch.setattr(kernels, "_try_out", fail)
    path = shapes.make("tiny", tmp_path / "m")
    plain = load_model(path, load_format="dummy").spec.kernel_shapes
    delta = DeltaSpec(key_heads=1, value_heads=1, key_dim=4, value_dim=4, taps=2)
    with pytest.raises(ConfigError, match="states of sequences have no others on a GPU; install"):
        ops.choose_cuda([replace(plain, state=delta)], CPU, required=False)
