"""A model with states as on a GPU, on CPU tensors: Triton's kernels, run by the interpreter, in
prompts and in recorded decode steps. tests/unit/layers/kernels/test_recurrent.py starts it with the
variant of a checkpoint and a folder.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from baton.layers import ops
from baton.layers.kernels import recurrent
from tests.support.devices import device_engine
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.kernels.interpreted import prepare_interpreter
from tests.support.models.checkpoints import make_checkpoint

PROMPTS = [[5, 9, 30, 2, 17], [8], [3, 3, 41, 60, 12, 7, 7, 19, 21]]
TOKENS = 6
FLAGS: dict[str, object] = {"chunked_prefill_size": 8, "state_snapshot_tokens": 4}


def main() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    variant, folder = sys.argv[1:]
    path = make_checkpoint(variant, Path(folder) / "m")
    plain = make_engine(path, attention_backend="torch", **FLAGS)
    want = answer(plain, PROMPTS, greedy(TOKENS))
    copies = []

    def copy_states(*args: object, **more: object) -> None:
        copies.append(more["to_pages"])
        recurrent.copy_states(*args, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("causal_conv", "gated_delta"):
            patch.setitem(device_engine._PLAIN, name, getattr(recurrent, name))
        patch.setattr(ops, "copy_states", copy_states)
        device = Device(patch)
        engine = device.recorded(path, 4, poison=True, **FLAGS)
        # The second round begins with snapshots of the first.
        for _ in range(2):
            got = answer(engine, PROMPTS, greedy(TOKENS))
            assert got == want, (got, want)
        assert device.recorder.replays >= 2 * (TOKENS - 2), device.recorder.replays
    print(f"{copies.count(True)} copies to pages, {copies.count(False)} back")


if __name__ == "__main__":
    main()
