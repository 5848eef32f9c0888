"""An engine as it is on a GPU, on CPU tensors: late results, flashinfer's calls, recorded decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention import flashinfer, flashinfer_latent
from baton.layers.attention.base import GraphAttention
from baton.layers.attention.flashinfer_latent import FlashInferLatentAttention
from baton.layers.host_pool import HostPool
from baton.layers.kv_pool import KvTensors, make_pool
from baton.layers.recurrent_state import StateRows
from baton.layers.spec import (
    PLAIN_EXPERTS,
    AttentionSpec,
    ExpertForm,
    LayerAttention,
    common_latents,
)
from baton.models.decoder import Decoder
from baton.runtime import build as runtime
from baton.runtime import draft_model
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.memory import profile
from baton.runtime.runner.cuda_runner import DeviceRunner
from tests.support.devices import fake_flashinfer
from tests.support.devices.late_stream import LateStream
from tests.support.devices.tape import TapeRecorder
from tests.support.engines.engine_run import make_engine
from tests.support.probes import RunnerProbe


@dataclass
class Device:
    """How the engines are made, and what they are made of."""

    monkeypatch: pytest.MonkeyPatch
    stream: LateStream = field(default_factory=LateStream)
    recorder: TapeRecorder = field(default_factory=TapeRecorder)
    runner: DeviceRunner | None = None
    """Of the model; that of a draft model is made as it is."""

    def late(
        self, path: Path | str, broadcast: Callable[[bytes], None] | None = None, **flags: object
    ) -> EngineLoop:
        """The attention backend of the flags, and the CPU's kernels. `broadcast`: as of the first of several ranks."""

        def make_runner(*args: Any, **more: Any) -> DeviceRunner:
            return DeviceRunner(*args, stream=self.stream, **{**more, "broadcast": broadcast})

        return self._make(path, make_runner, **flags)

    def recorded(
        self,
        path: Path | str,
        largest: int,
        poison: bool = False,
        head_kernel: bool = False,
        most_drafts: int = 0,
        **flags: object,
    ) -> EngineLoop:
        """flashinfer's stand-in and plain torch, which can be recorded; `largest` 0: everything runs eagerly.

        Args:
            poison: the dummy page is NaN before each step, and the token table rubbish behind drafts.
            head_kernel: heads are stored by a stand-in of the kernel, from now on.
            most_drafts: of a row of recorded steps.
        """
        self.monkeypatch.setattr(ops, "head_kernel", lambda x: store_heads if head_kernel else None)
        half, dims = (torch.float32, *flashinfer.DTYPES), (16, 24, 32, *flashinfer.HEAD_DIMS)
        for module, name, value in (
            (flashinfer_latent, "DTYPES", half), (flashinfer_latent, "SIZES", (32, 8)),
            (flashinfer, "DTYPES", half), (flashinfer, "HEAD_DIMS", dims), (fake_flashinfer, "HALF", half),
            (fake_flashinfer, "HEAD_DIMS", dims), (ops, "_native", None),
        ):  # fmt: skip
            self.monkeypatch.setattr(module, name, value)

        for name in ("causal_conv", "gated_delta"):
            self.monkeypatch.setattr(ops, name, recorded_kernel(_PLAIN[name]))
        self.monkeypatch.setattr(ops, "pack_experts", pack_plain_experts)

        def make_runner(
            model: Decoder, kv: KvTensors, attn: object, max_slots: int, **more: Any
        ) -> DeviceRunner:
            pool = make_pool(kv.spec, kv.num_pages, native=False, dummy_page=True)
            host: HostPool | None = more.pop("host", None)
            if host is not None:
                more["host"] = HostPool(pool, len(host.memory))
            backend = make_backend("flashinfer", model.spec.attention, pool)
            made = _Poisoning if poison else DeviceRunner
            return made(model, pool, backend, max_slots, stream=self.stream, **more)

        # What drafts is made with it, too.
        self.monkeypatch.setattr(draft_model, "make_backend", make_backend)
        engine = self._make(path, make_runner, attention_backend="torch", **flags)
        assert self.runner is not None
        if largest:
            context = RunnerProbe(self.runner).model.spec.max_context
            self.runner.record_graphs(self.recorder, largest, context, most_drafts)
        return engine

    def started(self, path: Path | str, **flags: object) -> EngineLoop:
        """`recorded`, by the steps of a start on a GPU: what drafts is loaded before the pool is
        sized, everything is warmed up, and steps of all sizes are recorded."""
        load = runtime._load_native

        def load_beside_memory(*args: Any) -> Any:
            return replace(load(*args), memory=PlentyOfMemory())

        self.monkeypatch.setattr(runtime, "_load_native", load_beside_memory)
        self.monkeypatch.setattr(runtime, "CudaRecorder", lambda _: self.recorder)
        self.monkeypatch.setattr(profile, "make_backend", make_backend)
        return self.recorded(path, 0, **flags)  # type: ignore[arg-type]

    def _make(self, path: Path | str, make_runner: Any, **flags: object) -> EngineLoop:
        def make_first(*args: Any, **more: Any) -> DeviceRunner:
            self.runner = make_runner(*args, **more)
            return self.runner

        with self.monkeypatch.context() as patch:
            patch.setattr(runtime, "make_runner", make_first)
            patch.setattr(draft_model, "make_runner", make_runner)
            return make_engine(path, **flags)


_PLAIN: dict[str, Callable[..., None]] = {
    "causal_conv": ops.causal_conv,
    "gated_delta": ops.gated_delta,
}


@dataclass
class PlainExperts:
    """In place of the Triton kernel of experts of the plain form: plain torch, which reads choices
    when it is launched, and when it is replayed. Rows of padding choose none."""

    gate_up: list[Tensor]
    down: list[Tensor]
    first_expert: int

    def pass_tokens(self, x: Tensor, experts: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        y = torch.empty_like(x)

        def launch() -> None:
            total = torch.zeros(x.shape)
            chosen = experts[experts >= 0]
            counts.add_(chosen.bincount(minlength=len(counts)))
            for slot in range(experts.shape[1]):
                for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
                    rows = (experts[:, slot] == self.first_expert + number).nonzero().flatten()
                    result = ops.linear(ops.silu_mul(ops.linear(x[rows], gate_up)), down)
                    total[rows] += result.float() * weights[rows, slot, None].float()
            y.copy_(total)

        if fake_flashinfer.record_kernel is None:
            launch()
        else:
            fake_flashinfer.record_kernel(launch)
        return y


def pack_plain_experts(
    gate_up: list[Tensor],
    down: list[Tensor],
    first_expert: int,
    *,
    form: ExpertForm,
    gate_up_biases: Sequence[Tensor],
    down_biases: Sequence[Tensor],
) -> PlainExperts | None:
    """In place of `ops.pack_experts`. Experts of another form are computed by `ops.pass_experts`,
    in eager steps."""
    if form != PLAIN_EXPERTS or gate_up_biases or down_biases:
        return None
    return PlainExperts(gate_up, down, first_expert)


def recorded_kernel(plain: Callable[..., None]) -> Callable[..., None]:
    """In place of a Triton kernel on rows of states: strict about rows, plain torch inside, which
    reads them when it is launched, and when it is replayed."""

    def launch(*args: Any, rows: StateRows, **more: Any) -> None:
        count = len(rows.slots)
        for x in rows[:3]:
            assert isinstance(x, Tensor)
            assert x.dtype == torch.int32
            assert x.shape == (count,)
            assert x.is_contiguous()
        record = fake_flashinfer.record_kernel
        if record is None:
            lengths = rows.ends - rows.starts
            assert lengths.min() >= 0
            assert lengths.max() <= rows.longest
            plain(*args, rows=rows, **more)
        else:
            assert rows.longest == 1
            record(lambda: plain(*args, rows=rows, **more))

    return launch


class PlentyOfMemory:
    """As device_memory.DeviceMemory."""

    device = torch.device("cpu")

    def free_bytes(self) -> tuple[int, int]:
        return 60 << 30, 80 << 30

    def reserved_bytes(self) -> int:
        return 1 << 30

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 2 << 30


def make_backend(name: str, layers: Sequence[LayerAttention], kv: KvTensors) -> GraphAttention:
    """In place of attention.make_backend: by flashinfer's stand-in."""
    if (latents := common_latents(layers)) is not None:
        return FlashInferLatentAttention(latents, kv, fake_flashinfer)
    heads = [layer for layer in layers if isinstance(layer, AttentionSpec)]
    return flashinfer.FlashInferAttention(heads, kv, fake_flashinfer)


def store_heads(
    heads: Tensor, num_heads: int, norms: tuple[Tensor, Tensor] | None, eps: float, positions: Tensor,
    tables: tuple[Tensor, Tensor], pages: tuple[Tensor, Tensor], slots: Tensor,
) -> None:  # fmt: skip
    """In place of the Triton kernel: strict about arguments, plain torch inside."""
    (keys, values), (cos, sin) = pages, tables
    tokens, every, dim = heads.shape
    size, kv_heads = keys.shape[1:3]
    assert every == num_heads + 2 * kv_heads
    assert keys.shape[3] == dim == 2 * cos.shape[1] == 2 * sin.shape[1]
    assert keys.stride() == values.stride()
    assert cos.stride() == sin.stride()
    assert heads.stride(-1) == keys.stride(-1) == cos.stride(-1) == 1
    assert positions.shape == slots.shape == (tokens,)
    assert positions.dtype == slots.dtype == torch.int64
    assert positions.is_contiguous()
    assert slots.is_contiguous()
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        assert norms[0].shape == norms[1].shape == (dim,)
        q.copy_(ops.rms_norm(q, norms[0], eps))
        k = ops.rms_norm(k, norms[1], eps)
    ops.apply_rope(q, k, positions, cos, sin)
    keys[slots // size, slots % size] = k
    values[slots // size, slots % size] = v


RUBBISH = 3
"""A token that answers rarely have."""


class _Poisoning(DeviceRunner):
    @torch.inference_mode()
    def execute(self, plan: Any) -> Any:
        self._kv.data[self._kv.dummy_page].fill_(torch.nan)
        launched = super().execute(plan)
        if plan.drafted:
            self._table.write_tokens(
                torch.arange(self._table.dummy), torch.full((self._table.dummy,), RUBBISH)
            )
        return launched
