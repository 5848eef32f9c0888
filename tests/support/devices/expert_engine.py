"""A model as on a GPU, on CPU tensors: its experts and its quantized matrices are Triton's kernels,
run by the interpreter, in recorded decode steps. tests/unit/layers/kernels/test_experts.py starts
it with the variant of a checkpoint, its quantization or "plain", and a folder.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.kernels.coded import CodedMatrix
from baton.layers.kernels.experts import StackedExperts
from baton.layers.spec import ExpertForm
from baton.runtime.engine_loop import EngineLoop
from tests.support.devices import fake_flashinfer
from tests.support.devices.device_engine import Device
from tests.support.engines.draft_model import count_drafts
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.kernels.interpreted import prepare_interpreter
from tests.support.models.checkpoints import VOCAB, make_checkpoint
from tests.support.models.quantized_checkpoints import quantize

PROMPTS = [[5, 9, 30, 2, 17], [8], [3, 3, 41, 60, 12, 7, 7, 19] * 2]
TOKENS = 12


def record(y: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Make a launch that the recorder of CPU tensors knows: it writes to y."""

    def launch() -> None:
        y.copy_(compute())

    if fake_flashinfer.record_kernel is None:
        launch()
    else:
        fake_flashinfer.record_kernel(launch)
    return y


def record_launches(patch: pytest.MonkeyPatch) -> None:
    pass_tokens = StackedExperts.pass_tokens
    multiply = CodedMatrix.multiply

    def pass_recorded(self: StackedExperts, x: Tensor, *routing: Tensor) -> Tensor:
        return record(torch.empty_like(x), lambda: pass_tokens(self, x, *routing))

    def multiply_recorded(self: CodedMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x.new_empty(len(x), self.shape[0])
        return record(y, lambda: multiply(self, x, bias))

    patch.setattr(StackedExperts, "pass_tokens", pass_recorded)
    patch.setattr(CodedMatrix, "multiply", multiply_recorded)


def stack(
    gate_up: list[Tensor],
    down: list[Tensor],
    first_expert: int,
    *,
    form: ExpertForm,
    gate_up_biases: list[Tensor],
    down_biases: list[Tensor],
) -> StackedExperts:
    """In place of `ops.pack_experts`, for experts in host memory."""
    stacked = (CodedMatrix.stack(gate_up), CodedMatrix.stack(down))
    biases = [torch.stack(each) if each else None for each in (gate_up_biases, down_biases)]
    return StackedExperts(
        *stacked, first_expert, form=form, gate_up_biases=biases[0], down_biases=biases[1]
    )


def count_choices(engine: EngineLoop) -> list[list[int]]:
    return [counts.tolist() for counts in engine.runner.expert_counts()]  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    variant, quantization, folder = sys.argv[1:]
    plain_path = path = make_checkpoint(variant, Path(folder) / "m")
    if quantization != "plain":
        path, plain_path = quantize(path, quantization, Path(folder))
    # Llama 4's chunks of 11 tokens are whole pages.
    flags: dict[str, object] = {"disable_radix_cache": True, "page_size": 1}
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch)
        plain = make_engine(plain_path, attention_backend="torch", **flags)
        want = answer(plain, PROMPTS, greedy(TOKENS))
        record_launches(patch)
        patch.setattr(ops, "pack_experts", stack)
        patch.setattr(
            ops,
            "quantized_kernel",
            lambda dtype, device: functools.partial(CodedMatrix.make, dtype=dtype, device=device),
        )
        # Three rows are padded to a recording of four, whose dummy page is NaN.
        engine = device.recorded(path, 4, poison=True, **flags)
        before = count_choices(engine)
        got = answer(engine, PROMPTS, greedy(TOKENS))
        assert got == want, (got, want)
        assert device.recorder.replays >= TOKENS - 2, device.recorder.replays
        chosen = [
            [now - then for now, then in zip(*pair, strict=True)]
            for pair in zip(count_choices(engine), before, strict=True)
        ]
        assert chosen == count_choices(plain), "rows of padding chose experts"
        layers = engine.runner._model.weights.layers
        quantized = sum(isinstance(layer.attention.o, CodedMatrix) for layer in layers)
        # Drafts are rows of a recording, which choose experts.
        engine.close()
        drafting = device.recorded(path, 8, poison=True, most_drafts=2, **flags)
        answers = {(tuple(p), 0): tokens for p, tokens in zip(PROMPTS, want, strict=True)}
        speculate(drafting, ScriptedDrafter(answers, 0.7, VOCAB), 2)
        got = answer(drafting, PROMPTS, greedy(TOKENS))
        assert got == want, (got, want)
        assert count_drafts(drafting)[1] > 0
        assert sum(map(sum, count_choices(drafting))) > sum(map(sum, chosen))
        print(f"{sum(map(sum, chosen))} choices, {quantized} output projections are codes")


if __name__ == "__main__":
    main()
