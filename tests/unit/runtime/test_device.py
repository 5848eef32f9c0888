"""--device: what is refused and why; and that a step mixes no devices, shown with tensors without data.

torch's fake tensors carry shapes, types and devices; an operation over two devices raises as it would on a GPU.
"""

from __future__ import annotations

import logging
import sys
import warnings
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from baton import config
from baton.errors import ConfigError
from baton.layers import kernels
from baton.layers.attention.base import ForwardBatch
from baton.layers.kv_pool import make_pool
from baton.models.decoder import Decoder
from baton.models.draft_head import load_head
from baton.models.head_reader import read_eagle3_head
from baton.runtime import device
from baton.runtime.runner import head_runner
from baton.runtime.runner.cuda_runner import DeviceRunner
from baton.runtime.runner.head_runner import HeadRunner, ScratchSlots
from baton.runtime.sampling import step_sampler
from baton.runtime.speculation.head_drafter import DraftRow
from baton.sched.types.plan import (
    UNKNOWN_TOKEN,
    AdmittedSeq,
    FurtherGrowth,
    Row,
    StateCopy,
    StepPlan,
    StepResult,
    StopReason,
)
from baton.sched.types.request import SamplingParams
from tests.support.models import tiny_model
from tests.support.models.checkpoints import make_checkpoint, variant_config
from tests.support.models.draft_heads import EAGLE3_LAYERS, make_eagle3
from tests.support.models.model_loop import forward_all
from tests.support.models.whole_model import load_model
from tests.support.probes import RunnerProbe

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has a GPU."""
    monkeypatch.setattr(device, "no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device.flashinfer_loader, "find_obstacle", lambda: None)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "no_cuda", lambda: "there is no CUDA device")


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes no tensors without data."""
    monkeypatch.setattr(step_sampler, "launch_draw", lambda *_: None)


def resolve(**flags: object) -> torch.device:
    return device.resolve_device(config.build_config(dict(flags)))


def test_default_is_the_cpu_even_beside_a_gpu(cuda: None) -> None:
    assert resolve() == torch.device("cpu")


@pytest.mark.usefixtures("no_cuda")
def test_cuda_without_a_gpu_is_an_error_and_auto_says_what_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        ConfigError, match="--device cuda: there is no CUDA device; or use --device cpu"
    ):
        resolve(device="cuda")
    with pytest.raises(
        ConfigError, match="--attention-backend flashinfer: it needs a CUDA device, but there is no"
    ):
        resolve(device="auto", attention_backend="flashinfer")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert resolve(device="auto") == torch.device("cpu")
    assert caplog.messages == ["--device auto: there is no CUDA device; the CPU is used instead"]


BEYOND = [
    (
        {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "shm"},
        "backend shm is for host memory; use",
    ),
    ({"dp_size": 2}, "one rank per engine is served, not --dp-size 2"),
    ({"attention_backend": "cpu"}, "work in host memory; use auto"),
]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("flags", "message"), BEYOND)
def test_flags_only_for_cpus_are_refused_on_cuda(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--device cuda: .*{message}"):
        resolve(device="cuda", **flags)
    assert resolve(device="auto", **flags) == torch.device("cpu")


@pytest.mark.usefixtures("cuda")
def test_cuda_is_taken_where_there_is_one() -> None:
    assert resolve(device="cuda") == resolve(device="auto") == CUDA
    assert resolve(device="auto", speculative_algorithm="NGRAM") == CUDA


@pytest.mark.usefixtures("cuda")
def test_gpu_without_flashinfer_is_refused_unless_the_reference_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        device.flashinfer_loader, "find_obstacle", lambda: "it cannot be imported; install it"
    )
    with pytest.raises(
        ConfigError,
        match="--device cuda: flashinfer cannot be used: it cannot be imported; install",
    ):
        resolve(device="cuda")
    assert resolve(device="auto") == torch.device("cpu")
    assert resolve(device="cuda", attention_backend="torch") == CUDA


def test_no_cuda_reason_differs_for_build_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in str(device.no_cuda())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device; check nvidia-smi" in str(device.no_cuda())

    def too_old() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver is too old (found version 11040). Please …",
            stacklevel=1,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    assert (
        "no CUDA device (CUDA initialization: The NVIDIA driver is too old (found version 11040));"
        in str(device.no_cuda())
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.no_cuda() is None


class DeviceCheck:
    """An attention backend that computes nothing and notes where everything lies."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def plan(self, batch: ForwardBatch) -> None:
        for name in ForwardBatch.__slots__:
            value = getattr(batch, name)
            if isinstance(value, Tensor):
                self.seen.add((name, value.device.type))

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert {x.device.type for x in (q, k, v)} == {"cuda"}
        return q.new_empty(len(q), q.shape[1] * q.shape[2])


def plan_of(tokens: int) -> StepPlan:
    """One decode row and one prompt chunk."""
    ids = array("i", range(tokens))
    params = (SamplingParams(top_p=0.5, logprobs=2), SamplingParams(frequency_penalty=1.0))
    admitted = tuple(AdmittedSeq(slot, slot, params[slot], 1, array("i", [1])) for slot in (0, 1))
    rows = (
        Row(0, 0, 4, 1, True, array("i", [UNKNOWN_TOKEN]), 0, array("i", [3, 1])),
        Row(1, 1, 0, tokens, True, ids, 0, array("i", [2])),
    )
    return StepPlan(0, rows, 1, admitted, array("i", [1, 2, 3]), StopReason.QUEUE_EMPTY)


class FakeStream:
    """As stream.CudaStream, for tensors without data."""

    def put(self, x: np.ndarray) -> Tensor:
        return torch.empty(x.shape, dtype=torch.from_numpy(x).dtype, device=CUDA)

    def put_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [self.put(x) for x in arrays]

    def put_into(self, target: Tensor, x: np.ndarray) -> None:
        assert target.device.type == "cuda"
        assert target.shape == x.shape

    def fetch(self, x: Tensor) -> Tensor:
        assert x.device.type == "cuda"
        return torch.ones(x.shape, dtype=x.dtype)

    def mark(self) -> Any:
        return None


def make_runner(model: Decoder, check: DeviceCheck) -> DeviceRunner:
    kv = make_pool(model.spec.kv_spec(4), 8, device=CUDA)
    assert kv.native is None
    assert kv.data.device == CUDA
    return DeviceRunner(model, kv, check, max_slots=2, stream=FakeStream())


@pytest.mark.usefixtures("no_kernel")
def test_step_on_cuda_mixes_no_devices(tmp_path: Path) -> None:
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    check = DeviceCheck()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
        run = make_runner(model, check)
        launched = run.execute(plan_of(3))
        assert launched.drawn is not None
        assert launched.drawn.tokens.shape == (2,)
        step = run._make_step(plan_of(3), None)
        indices = run._make_indices(step)
        assert indices is not None
        forward_all(model, RunnerProbe(run).make_batch(step, indices), check)
    assert check.seen == {
        ("token_ids", "cuda"), ("positions", "cuda"), ("slot_mapping", "cuda"), ("sample_index", "cuda"),
        ("qo_indptr", "cpu"), ("kv_lens", "cpu"), ("page_indptr", "cpu"), ("page_indices", "cpu"),
    }  # fmt: skip


def drafted_plan() -> StepPlan:
    """A row with two drafts behind a row without."""
    params = SamplingParams(temperature=0.0)
    admitted = tuple(AdmittedSeq(slot, slot, params, 1, array("i", [1])) for slot in (0, 1))
    rows = (
        Row(0, 0, 4, 1, True, array("i", [7]), 0, array("i", [3, 1])),
        Row(1, 1, 2, 3, True, array("i", [5, 6, 7]), 0, array("i", [2, 4])),
    )
    pages = array("i", [1, 2, 3, 4])
    return StepPlan(1, rows, 1, admitted, pages, StopReason.DECODE_ONLY, drafted=(2,))


@pytest.mark.usefixtures("no_kernel")
def test_drafts_and_a_head_on_cuda_mix_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint("llama", tmp_path / "m", num_hidden_layers=EAGLE3_LAYERS)
    model = load_model(path)
    make_eagle3(path, tmp_path / "head")
    spec = read_eagle3_head(tmp_path / "head", model.spec, "auto")
    head = load_head(spec, tmp_path / "head", model)
    check = DeviceCheck()
    head_check = DeviceCheck()
    monkeypatch.setattr(head_runner, "MOST_WAITING_TOKENS", 5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
        head.to(CUDA)
        run = make_runner(model, check)
        scratch = ScratchSlots(32, 2)
        run.head = HeadRunner(head, model, head_check, 2, scratch, FakeStream().put)
        launched = run.execute(drafted_plan())
        assert launched.drawn is not None
        assert launched.drawn.tokens.shape == (4,)
        assert not head_check.seen, "which drafts count is not known yet"
        launched.ended = SimpleNamespace(wait=lambda: None)  # type: ignore[assignment]
        launched.result = StepResult((7, 8), runs=(1, 1))
        run.execute(plan_of(3))
        assert ("token_ids", "cuda") in head_check.seen
        rows = [DraftRow(slot, 1, 5, 2, np.arange(3, dtype=np.int32)) for slot in (0, 1)]
        # Tokens are read when all drafts are queued.
        with pytest.raises(DataDependentOutputException):
            run.head.draft(rows)
    for seen in (check.seen, head_check.seen):
        assert seen == {
            ("token_ids", "cuda"), ("positions", "cuda"), ("slot_mapping", "cuda"),
            ("sample_index", "cuda"), ("qo_indptr", "cpu"), ("kv_lens", "cpu"),
            ("page_indptr", "cpu"), ("page_indices", "cpu"),
        }  # fmt: skip


@pytest.mark.usefixtures("no_kernel")
def test_no_step_is_launched_before_it_is_known_which_drafts_count(tmp_path: Path) -> None:
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
        run = make_runner(model, DeviceCheck())
        run.execute(drafted_plan())
        with pytest.raises(AssertionError, match="which drafts count"):
            run.execute(plan_of(3))


@pytest.mark.usefixtures("no_kernel")
def test_steps_time_begins_when_its_inputs_are_queued(tmp_path: Path) -> None:
    """Else a device that waits for the host would count as busy."""
    calls: list[str] = []

    class NotingStream(FakeStream):
        def put_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
            calls.append("put")
            return super().put_all(arrays)

        def mark(self) -> Any:
            calls.append("mark")

    class NotingCheck(DeviceCheck):
        def plan(self, batch: ForwardBatch) -> None:
            calls.append("plan")

        def forward(
            self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            calls.append("kernel")
            return super().forward(layer, q, k, v, sinks)

    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
        kv = make_pool(model.spec.kv_spec(4), 8, device=CUDA)
        DeviceRunner(model, kv, NotingCheck(), max_slots=2, stream=NotingStream()).execute(
            plan_of(3)
        )
    assert calls[:4] == ["put", "plan", "mark", "kernel"]


@pytest.mark.usefixtures("no_kernel")
def test_states_and_their_copies_are_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode row whose state is loaded, a prompt that leaves a snapshot inside and its state at
    the end, and a state that is parked."""
    calls: list[str] = []

    def kernel(name: str) -> Any:
        def check(*args: Any, **more: Any) -> None:
            calls.append(name)
            tensors = [x for x in tree_leaves((args, more)) if isinstance(x, Tensor)]
            assert {x.device.type for x in tensors} == {"cuda"}

        return check

    names = ("copy_states", "causal_conv", "gated_delta")
    stub = SimpleNamespace(**{name: kernel(name) for name in names})
    monkeypatch.setattr(kernels, "recurrent", stub, raising=False)
    monkeypatch.setitem(sys.modules, "baton.layers.kernels.recurrent", stub)
    variant_config("qwen3.5").save_pretrained(tmp_path)
    model = load_model(tmp_path, load_format="dummy")
    num_layers = len(model.spec.states)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
        spec = model.spec.kv_spec(4).with_states(model.spec.states, 4)
        assert spec.snapshots is not None
        width = spec.snapshots.width
        pages = [array("i", range(first, first + width)) for first in (10, 40, 70)]
        kv = make_pool(spec, 100, device=CUDA)
        runner = DeviceRunner(model, kv, DeviceCheck(), max_slots=3, stream=FakeStream())
        plan = plan_of(7)
        loads = (StateCopy("load", 0, 4, pages[0]), StateCopy("save", 1, 7, pages[1]))
        further = (FurtherGrowth(1, 0, 0, pages[2]),)
        plan = replace(plan, states=loads, further=further)
        assert runner.execute(plan).drawn is not None
        layer = ["causal_conv", "copy_states", "causal_conv"]
        layer += ["gated_delta", "copy_states", "gated_delta"]
        assert calls == ["copy_states", *layer * num_layers, "copy_states"]
        calls.clear()
        parked = (StateCopy("park", 1, 7, pages[1]),)
        runner.execute(replace(plan, rows=(), states=parked, further=()))
    assert calls == ["copy_states"]


def test_check_itself_works(tmp_path: Path) -> None:
    """Were fake tensors lenient, a weight left behind would pass."""
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    with FakeTensorMode(allow_non_fake_inputs=True):
        left_behind = torch.ones(model.spec.hidden_size)
        model.to(CUDA)
        model.weights.norm.weight = left_behind
        with pytest.raises(FakeTensorDeviceMismatchError, match="at least two devices"):
            make_runner(model, DeviceCheck()).execute(plan_of(3))


def test_tied_weights_stay_one_object(tmp_path: Path) -> None:
    model = load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")
    model.weights.lm_head = model.weights.embed
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to(CUDA)
    assert model.weights.lm_head is model.weights.embed
    assert model.weights.embed.device == CUDA
