"""An engine as it is on a GPU, on CPU tensors: late results, flashinfer's calls, recorded decode steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.models.decoder import Decoder
from baton.runtime import engine as runtime
from baton.runtime import ops
from baton.runtime.attention import flashinfer
from baton.runtime.gpu.runner import DeviceRunner
from baton.runtime.kv_pool import KvTensors, make_pool
from baton.runtime.loop import Engine
from tests.support import fake_flashinfer
from tests.support.engine_run import make_engine
from tests.support.late_stream import LateStream
from tests.support.tape import TapeRecorder


@dataclass
class Device:
    """How the engines are made, and what they are made of."""

    monkeypatch: pytest.MonkeyPatch
    stream: LateStream = field(default_factory=LateStream)
    recorder: TapeRecorder = field(default_factory=TapeRecorder)
    runner: DeviceRunner | None = None

    def late(self, path: Path | str, tell: Callable[[bytes], None] | None = None, **flags: object) -> Engine:
        """The attention backend of the flags, and the CPU's kernels. `tell`: as of the first of several ranks."""

        def make_runner(*args: Any, **more: Any) -> DeviceRunner:
            self.runner = DeviceRunner(*args, stream=self.stream, **{**more, "tell": tell})
            return self.runner

        return self._make(path, make_runner, **flags)

    def recorded(self, path: Path | str, largest: int, poison: bool = False, **flags: object) -> Engine:
        """flashinfer's stand-in and plain torch, which can be recorded; `largest` 0: everything runs eagerly.

        Args: `poison`: the dummy page is NaN before each step.
        """
        half, dims = (torch.float32, *flashinfer.DTYPES), (16, *flashinfer.HEAD_DIMS)
        for module, name, value in (
            (flashinfer, "DTYPES", half), (flashinfer, "HEAD_DIMS", dims), (fake_flashinfer, "HALF", half),
            (fake_flashinfer, "HEAD_DIMS", dims), (ops, "_native", None),
        ):  # fmt: skip
            self.monkeypatch.setattr(module, name, value)

        def make_runner(model: Decoder, kv: KvTensors, attn: object, max_slots: int, **more: Any) -> DeviceRunner:
            pool = make_pool(model.spec.kv, kv.page_size, kv.num_pages, native=False, dummy_page=True)
            backend = flashinfer.FlashInferAttention(model.spec, pool, fake_flashinfer)
            made = _Poisoning if poison else DeviceRunner
            self.runner = made(model, pool, backend, max_slots, stream=self.stream, **more)
            if largest:
                self.runner.record_graphs(self.recorder, largest, model.spec.max_context)
            return self.runner

        return self._make(path, make_runner, attention_backend="torch", **flags)

    def _make(self, path: Path | str, make_runner: Any, **flags: object) -> Engine:
        with self.monkeypatch.context() as patch:
            patch.setattr(runtime, "make_runner", make_runner)
            return make_engine(path, **flags)


class _Poisoning(DeviceRunner):
    @torch.inference_mode()
    def execute(self, plan: Any) -> Any:
        self._kv.data[self._kv.dummy_page].fill_(torch.nan)
        return super().execute(plan)
