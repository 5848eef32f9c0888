"""A draft model or head in memory with its pages, and the speculator made of it.

It is computed by the process that draws tokens, alone and undivided, on a runner of its own; its
steps run on the device thread, between those of the model that it drafts for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.config import EngineConfig
from baton.layers.attention import make_backend
from baton.layers.kv_pool import KvTensors, make_pool
from baton.models.checkpoint import draft_scratch_pages
from baton.models.decoder import Decoder
from baton.models.draft_head import load_head
from baton.models.load import load_weights
from baton.models.served import ServedModel
from baton.models.spec.model import ModelSpec
from baton.runtime.engine_loop import DeviceThread
from baton.runtime.runner.head_runner import HeadRunner, ScratchSlots
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep, HeadDrafter
from baton.runtime.speculation.model_drafter import DraftLimits, ModelDrafter, TimedResult
from baton.runtime.speculation.model_speculator import ModelSpeculator
from baton.runtime.speculation.speculator import Constraints
from baton.sched.state.report import SchedulerReport
from baton.sched.types.plan import StepPlan

log = logging.getLogger("baton.engine")


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
            return device.call(lambda: [self._run_timed(plan) for plan in plans])

        pages = DraftPages(self.limits.page_size, report.page_generations)
        drafter = ModelDrafter(run_plans, pages, self.limits)
        drafter.warm_up()
        return ModelSpeculator(drafter, most_drafts, constraints)

    def _run_timed(self, plan: StepPlan) -> TimedResult:
        started = time.monotonic()
        result = self.runner.run_to_end(plan)
        return result, time.monotonic() - started


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


def load_draft_head(
    config: EngineConfig, spec: ModelSpec, num_pages: int, model: ServedModel, path: Path
) -> LoadedHead:
    """Load the head that drafts for `model`, and allocate its pages.

    Args:
        num_pages: of the model's pool.
    Raises ConfigError for missing or malformed files.
    """
    assert isinstance(model, Decoder), "only blocks of our own give hidden states"
    head = load_head(spec, path, model, config.load_format, config.random_seed)
    head.pack()
    slots = config.max_running_requests
    scratch = ScratchSlots(num_pages * config.page_size, config.most_drafts)
    kv_spec = spec.kv_spec(page_size=1)
    kv = make_pool(kv_spec, scratch.first + slots * scratch.per_row, native=False)
    attn = make_backend(config.attention_backend, spec.attention, kv)
    runner = HeadRunner(head, model, attn, slots, scratch)
    info = _describe(spec, path, kv)
    return LoadedHead(runner, config.page_size, spec.max_context, info)


def load_draft_model(config: EngineConfig, spec: ModelSpec, num_pages: int) -> DraftModel:
    """Load the model of --speculative-draft-model-path, and allocate its pages.

    Args:
        num_pages: of the pool of the model that it drafts for.
    Raises ConfigError for missing or malformed files.
    """
    path = Path(str(config.speculative_draft_model_path))
    model = load_weights(spec, path, config.load_format, config.random_seed)
    model.pack()
    scratch = draft_scratch_pages(config)
    slots = config.max_running_requests
    # One page group: the model's windows are computed, but leave no page behind.
    kv = make_pool(spec.kv_spec(config.page_size), num_pages + slots * scratch, native=False)
    attn = make_backend(config.attention_backend, spec.attention, kv)
    runner = ModelRunner(model, kv, attn, slots)
    limits = DraftLimits(config.page_size, num_pages, scratch, spec.max_context)
    return DraftModel(runner, limits, _describe(spec, path, kv))


def _describe(spec: ModelSpec, path: Path, kv: KvTensors) -> dict[str, object]:
    """What drafts, for GET /get_server_info; it is logged on the way."""
    pool_bytes = kv.num_pages * kv.page_bytes
    kind = "model" if spec.head is None else "head"
    log.info(
        "draft %s %s: %.1f M parameters (%s), pages of %.0f MiB beside the KV pool",
        kind, path, spec.num_parameters / 1e6, spec.dtype, pool_bytes / 2**20,
    )  # fmt: skip
    return {
        "path": str(path),
        "architecture": spec.architecture,
        "num_parameters": spec.num_parameters,
        "dtype": spec.dtype,
        "context_length": spec.max_context,
        "kv_pool_bytes": pool_bytes,
    }
