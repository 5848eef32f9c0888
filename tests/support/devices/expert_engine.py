"""A model with experts as on a GPU, on CPU tensors: its experts are Triton's kernels, run by the
interpreter, in recorded decode steps. Started by tests/unit/layers/kernels/test_experts.py.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.kernels.experts import StackedExperts
from baton.runtime.engine_loop import EngineLoop
from tests.support.devices import fake_flashinfer
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import make_checkpoint

PROMPTS = [[5, 9, 30, 2, 17], [8], [3, 3, 41, 60, 12, 7, 7, 19]]
TOKENS = 6


class RecordedExperts(StackedExperts):
    """Launches that the recorder of CPU tensors knows."""

    def pass_tokens(self, x: Tensor, experts: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        y = torch.empty_like(x)

        def launch() -> None:
            y.copy_(StackedExperts.pass_tokens(self, x, experts, weights, counts))

        if fake_flashinfer.record_kernel is None:
            launch()
        else:
            fake_flashinfer.record_kernel(launch)
        return y


def stack(gate_up: list[Tensor], down: list[Tensor], first_expert: int) -> RecordedExperts:
    """In place of `ops.pack_experts`."""
    return RecordedExperts(torch.stack(gate_up), torch.stack(down), first_expert)


def count_choices(engine: EngineLoop) -> list[list[int]]:
    return [counts.tolist() for counts in engine.runner.expert_counts()]  # type: ignore[attr-defined]


def main() -> None:
    torch.set_num_threads(1)
    path = make_checkpoint(sys.argv[1], Path(sys.argv[2]) / "m")
    flags: dict[str, object] = {"attention_backend": "torch", "disable_radix_cache": True}
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch)
        patch.setattr(ops, "_native", None)
        plain = make_engine(path, **flags)
        want = answer(plain, PROMPTS, greedy(TOKENS))
        patch.setattr(ops, "pack_experts", stack)
        # Three rows are padded to a recording of four, whose dummy page is NaN.
        engine = device.recorded(path, 4, poison=True, disable_radix_cache=True)
        before = count_choices(engine)
        got = answer(engine, PROMPTS, greedy(TOKENS))
        assert got == want, (got, want)
        assert device.recorder.replays >= TOKENS - 2, device.recorder.replays
        chosen = [
            [now - then for now, then in zip(*pair, strict=True)]
            for pair in zip(count_choices(engine), before, strict=True)
        ]
        assert chosen == count_choices(plain), "rows of padding chose experts"
        print(f"{sum(map(sum, chosen))} choices")


if __name__ == "__main__":
    main()
