"""A draft model or head in memory with its pages, and the speculator made of it.

It is computed by the process that draws tokens, alone and undivided, on a runner of its own, on the
device of the model that it drafts for; its steps run on the device thread, between those of that
model.

1. `load_draft` loads the weights, before the pool of the model is sized; 2. `make_draft_model` or
`make_draft_head` allocates pages beside those of the pool; 3. `make_speculator`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import EngineConfig
from baton.layers import ops
from baton.layers.attention import make_backend
from baton.layers.cuda.stream import CudaStream
from baton.layers.kv_pool import KvTensors, make_pool
from baton.models.checkpoint import draft_scratch_pages
from baton.models.decoder import Decoder
from baton.models.draft_head import DraftHead, load_head
from baton.models.load import load_weights
from baton.models.served import ServedModel
from baton.models.spec.model import ModelSpec
from baton.runtime.engine_loop import DeviceThread
from baton.runtime.memory.profile import no_room
from baton.runtime.runner.capture import rows_to_record
from baton.runtime.runner.cuda_runner import make_runner
from baton.runtime.runner.head_runner import HeadRunner, ScratchSlots
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep, HeadDrafter
from baton.runtime.speculation.model_drafter import DraftLimits, ModelDrafter, TimedResult
from baton.runtime.speculation.model_speculator import ModelSpeculator
from baton.runtime.speculation.speculator import Constraints
from baton.sched.state.report import SchedulerReport
from baton.sched.types.plan import StepPlan, StepResult

log = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model or head on its device, which has no pages yet."""

    model: Decoder
    path: Path


@dataclass(frozen=True, slots=True)
class DraftModel:
    runner: ModelRunner
    limits: DraftLimits
    info: dict[str, object]
    """For GET /get_server_info."""

    def make_speculator(
        self,
        most_drafts: int,
        constraints: Constraints,
        report: SchedulerReport,
        device: DeviceThread,
    ) -> ModelSpeculator:
        """The model is tried out on the way."""

        def run_plans(plans: Sequence[StepPlan]) -> list[TimedResult]:
            return device.call(lambda: self._run_all(plans))

        pages = DraftPages(self.limits.page_size, report.page_generations)
        drafter = ModelDrafter(run_plans, pages, self.limits)
        drafter.warm_up()
        return ModelSpeculator(drafter, most_drafts, constraints)

    def _run_all(self, plans: Sequence[StepPlan]) -> list[TimedResult]:
        """Run plans in order, with the time that each took: of its launch, and of the wait for
        it. All are launched first, so that a GPU does not wait for the host between them.
        """
        launched = []
        for plan in plans:
            started = time.monotonic()
            outcome = self.runner.execute(plan)
            launched.append((outcome, time.monotonic() - started))
        results = []
        for outcome, launch_seconds in launched:
            started = time.monotonic()
            result = outcome if isinstance(outcome, StepResult) else outcome.wait()[0]
            results.append((result, launch_seconds + time.monotonic() - started))
        return results


@dataclass(frozen=True, slots=True)
class LoadedHead:
    runner: HeadRunner
    page_size: int
    """Of the model that it drafts for [tokens]."""
    max_context: int
    info: dict[str, object]
    """For GET /get_server_info."""

    def make_speculator(
        self,
        most_drafts: int,
        constraints: Constraints,
        report: SchedulerReport,
        device: DeviceThread,
    ) -> ModelSpeculator:
        """The head is tried out on the way."""

        def run_drafts(rows: Sequence[DraftRow]) -> list[DraftStep]:
            return device.call(lambda: self.runner.draft(rows))

        pages = DraftPages(self.page_size, report.page_generations)
        drafter = HeadDrafter(run_drafts, pages, self.page_size, self.max_context)
        drafter.warm_up()
        return ModelSpeculator(drafter, most_drafts, constraints)


def load_draft(
    config: EngineConfig, spec: ModelSpec, path: Path, target: ServedModel, device: torch.device
) -> LoadedDraft:
    """Load the weights of a draft model or head.

    Args:
        target: the model that it drafts for, on `device`.
    Raises ConfigError for missing or malformed files, and where it does not fit the GPU.
    """
    if device.type != "cpu":
        assert isinstance(target, Decoder), "modules of transformers compute on the CPU"
        shapes = (target.spec.kernel_shapes, spec.kernel_shapes)
        ops.choose_cuda(shapes, device, required=config.attention_backend != "torch")
    with no_room("what drafts", "use a smaller one, or leave --speculative-algorithm out"):
        draft: Decoder
        if spec.head is None:
            draft = load_weights(spec, path, config.load_format, config.random_seed, device=device)
        else:
            assert isinstance(target, Decoder), "only blocks of our own give hidden states"
            draft = load_head(spec, path, target, config.load_format, config.random_seed, device)
        draft.pack()
    return LoadedDraft(draft, path)


def make_draft_head(
    config: EngineConfig,
    draft: LoadedDraft,
    num_pages: int,
    model: ServedModel,
    device: torch.device,
) -> LoadedHead:
    """Allocate the pages of a head.

    Args:
        num_pages: of the pool of the model that it drafts for.
    """
    head = draft.model
    assert isinstance(head, DraftHead), "a model drafts on a runner of its own"
    assert isinstance(model, Decoder), "only blocks of our own give hidden states"
    spec = head.spec
    slots = config.max_running_requests
    scratch = ScratchSlots(num_pages * config.page_size, config.most_drafts)
    num_slots = scratch.first + slots * scratch.per_row
    kv = make_pool(spec.kv_spec(page_size=1), num_slots, native=False, device=device)
    attn = make_backend(config.attention_backend, spec.attention, kv)
    put = torch.from_numpy if device.type == "cpu" else CudaStream(device).put
    runner = HeadRunner(head, model, attn, slots, scratch, put)
    return LoadedHead(runner, config.page_size, spec.max_context, _describe(draft, kv))


def make_draft_model(
    config: EngineConfig, draft: LoadedDraft, num_pages: int, device: torch.device
) -> DraftModel:
    """Allocate the pages of a draft model.

    Args:
        num_pages: of the pool of the model that it drafts for.
    """
    spec = draft.model.spec
    scratch = draft_scratch_pages(config)
    slots = config.max_running_requests
    # One page group: the model's windows are computed, but leave no page behind.
    kv = make_pool(
        spec.kv_spec(config.page_size),
        num_pages + slots * scratch,
        native=False,
        device=device,
        dummy_page=device.type != "cpu" and rows_to_record(config) > 0,
    )
    attn = make_backend(config.attention_backend, spec.attention, kv)
    runner = make_runner(draft.model, kv, attn, slots)
    limits = DraftLimits(config.page_size, num_pages, scratch, spec.max_context)
    return DraftModel(runner, limits, _describe(draft, kv))


def _describe(draft: LoadedDraft, kv: KvTensors) -> dict[str, object]:
    """What drafts, for GET /get_server_info; it is logged on the way."""
    spec = draft.model.spec
    pool_bytes = kv.num_pages * kv.page_bytes
    kind = "model" if spec.head is None else "head"
    log.info(
        "draft %s %s: %.1f M parameters (%s), pages of %.0f MiB beside the KV pool",
        kind, draft.path, spec.num_parameters / 1e6, spec.dtype, pool_bytes / 2**20,
    )  # fmt: skip
    return {
        "path": str(draft.path),
        "architecture": spec.architecture,
        "num_parameters": spec.num_parameters,
        "dtype": spec.dtype,
        "context_length": spec.max_context,
        "kv_pool_bytes": pool_bytes,
    }
