"""A model tried out on a CUDA device before it serves: which attention backend runs there, how
large its pool may be.

1. A small pool and a runner are made; 2. the warm-up steps run on them, which compiles and loads
every kernel; a flashinfer that cannot do that ends the start; 3. the same for a draft model; a head
takes part in the steps of the model; 4. their memory sizes the real pools; 5. the small ones are
dropped.

Tensor-parallel ranks go through this together: the first one tells its steps to the others as it
does later, and all take the pool of the one that has the least room.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.config import EngineConfig
from baton.errors import ConfigError, EngineError
from baton.layers.attention import make_backend
from baton.layers.attention.base import GraphAttention
from baton.layers.attention.paged_indices import capture_sizes
from baton.layers.collectives import ProcessGroup, TpContext
from baton.layers.flashinfer_loader import SLOWER, summarize_error
from baton.layers.kv_pool import make_pool
from baton.layers.kv_spec import KVSpec
from baton.models.checkpoint import NO_DRAFT_MODEL, DraftModelSizes
from baton.models.decoder import Decoder
from baton.models.served import ServedModel
from baton.runtime.memory import warmup
from baton.runtime.memory.device_memory import (
    GIB,
    DeviceMemory,
    MemoryNeeds,
    as_gib,
    describe_needs,
    size_pool,
)
from baton.runtime.runner.capture import BYTES_EACH, rows_to_record
from baton.runtime.runner.cuda_runner import make_runner
from baton.runtime.runner.head_runner import HeadRunner
from baton.runtime.speculation.head_drafter import NO_ENTRIES, DraftRow
from baton.runtime.speculation.model_drafter import LONGEST_ROW, MOST_CATCH_UP_TOKENS

log = logging.getLogger("baton.memory")


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """What drafts, as far as the pool's size depends on it."""

    sizes: DraftModelSizes = NO_DRAFT_MODEL
    model: Decoder | None = None
    """A draft model, which has steps of its own."""
    make_head: Callable[[int], HeadRunner] | None = None
    """A head for a pool of so many pages."""


NO_DRAFTS = DraftProfile()


class BackendNeeds(NamedTuple):
    """Fields of `MemoryNeeds` that depend on a model and its attention backend."""

    workspace: int
    activations: int
    graphs: int

    def beside(self, other: BackendNeeds) -> BackendNeeds:
        """Of two models, of which one computes at a time."""
        return BackendNeeds(
            self.workspace + other.workspace,
            max(self.activations, other.activations),
            self.graphs + other.graphs,
        )


def check_weights(needed: int, memory: DeviceMemory, owner: str = "the model") -> None:
    """Raises ConfigError when a model of so many bytes cannot be loaded: before minutes are spent
    on it.

    Args: `owner`: whose weights they are.
    """
    free, total = memory.free_bytes()
    if needed > free:
        raise ConfigError(
            f"{owner}'s weights take {needed / GIB:.2f} GiB and of the GPU's {total / GIB:.2f} "
            f"GiB {free / GIB:.2f} are free; end other processes on it, use a smaller model, or "
            "divide it among more GPUs by --tp-size"
        )


def check_states(states: int, config: EngineConfig, memory: DeviceMemory) -> None:
    """Raises ConfigError when states of so many bytes cannot be there beside the weights."""
    free, _ = memory.free_bytes()
    if states > free:
        raise ConfigError(
            f"states of --max-running-requests {config.max_running_requests} sequences take "
            f"{as_gib(states)}, {as_gib(states // config.max_running_requests)} each, and "
            f"{as_gib(free)} are free beside the model's weights; lower --max-running-requests"
            + (" or --speculative-num-draft-tokens" if config.most_drafts else "")
        )


def profile_memory(
    model: ServedModel,
    kv_spec: KVSpec,
    config: EngineConfig,
    context: int,
    wanted_pages: int | None,
    memory: DeviceMemory,
    place: TpContext | None = None,
    group: ProcessGroup | None = None,
    draft: DraftProfile = NO_DRAFTS,
) -> int:
    """Pages of the pool.

    Args: `wanted_pages`: as the user said; None: as many as fit. `model` has its weights on the
    device, and so has what drafts.

    Raises ConfigError when the model, its steps and the pool do not fit, or the backend asked for
    cannot run here.
    """
    weights = memory.reserved_bytes()
    state_bytes = sum(state.state_bytes(model.spec.dtype) for state in model.spec.states.values())
    # Each drafted token of a row leaves a copy.
    states = state_bytes * config.max_running_requests * (1 + config.most_drafts)
    check_states(states, config, memory)
    most_tokens = (
        config.step_tokens if config.chunked_prefill_size > 0 else max(config.step_tokens, context)
    )
    limits = warmup.WarmupLimits(
        tokens=max(config.chunked_prefill_size, most_tokens),
        prompt_tokens=most_tokens,
        running=config.max_running_requests,
        context=context,
        page_size=config.page_size,
        state_pages=0 if kv_spec.snapshots is None else kv_spec.snapshots.width,
        drafts=config.most_drafts,
    )
    with no_room(
        "a step of the largest size", "lower --chunked-prefill-size or --max-running-requests"
    ):
        try:
            rows = rows_to_record(config)
            tried = _try_backend(
                model, kv_spec, config, limits, memory, rows, place=place, draft=draft
            )
            if draft.model is not None:
                tried = tried.beside(_try_draft_model(draft.model, config, memory))
        # `no_room` has the sentence for the first, and an EngineError has its own.
        except (torch.OutOfMemoryError, EngineError):
            raise
        except Exception as err:
            # of flashinfer: its compiler, its launches, arguments that another version has not
            # The advice below would name the backend that has just failed.
            if config.attention_backend == "torch":
                raise
            reason = (
                f"kernels for this GPU cannot run here ({summarize_error(err)}); use "
                f"--attention-backend {SLOWER}"
            )
            raise ConfigError(f"--attention-backend {config.attention_backend}: {reason}") from err
    free, total = memory.free_bytes()
    workspace = tried.workspace + draft.sizes.scratch_bytes
    needs = MemoryNeeds(total, free, weights, workspace, tried.activations, tried.graphs, states)
    page_bytes = kv_spec.page_bytes + draft.sizes.page_bytes
    sized = size_pool(needs, page_bytes, config.mem_fraction_static, wanted_pages)
    pages = sized.pages if group is None else group.all_reduce_min(sized.pages)
    log.info(
        "%s; KV pool %.2f GiB (%s): %d pages of %d tokens",
        describe_needs(needs), pages * page_bytes / GIB, sized.why, pages, config.page_size,
    )  # fmt: skip
    return pages


def _try_draft_model(model: Decoder, config: EngineConfig, memory: DeviceMemory) -> BackendNeeds:
    """Its steps catch up with prompts, and draft behind the last tokens of all answers."""
    running = config.max_running_requests
    tokens = max(MOST_CATCH_UP_TOKENS, running * LONGEST_ROW)
    context = model.spec.max_context
    limits = warmup.WarmupLimits(tokens, tokens, running, context, config.page_size)
    rows = min(rows_to_record(config), running)
    kv_spec = model.spec.kv_spec(config.page_size)
    return _try_backend(model, kv_spec, config, limits, memory, rows)


def _try_backend(
    model: ServedModel,
    kv_spec: KVSpec,
    config: EngineConfig,
    limits: warmup.WarmupLimits,
    memory: DeviceMemory,
    rows: int,
    *,
    place: TpContext | None = None,
    draft: DraftProfile = NO_DRAFTS,
) -> BackendNeeds:
    """Args: `rows`: of the largest step that will be recorded. `draft`: whose head reads along."""
    num_pages = warmup.pages_needed(limits)
    pool = make_pool(
        kv_spec,
        num_pages,
        native=False,
        device=memory.device,
    )
    before = memory.reserved_bytes()
    attn = make_backend(config.attention_backend, model.spec.attention, pool)
    workspace = memory.reserved_bytes() - before
    runner = make_runner(
        model,
        pool,
        attn,
        config.max_running_requests,
        broadcast=None if place is None else place.broadcast,
    )
    runner.reserve_drafts(config.most_drafts)
    if draft.make_head is not None:
        before = memory.reserved_bytes()
        runner.head = draft.make_head(num_pages)
        its_pages = num_pages * draft.sizes.page_bytes + draft.sizes.scratch_bytes
        workspace += max(memory.reserved_bytes() - before - its_pages, 0)
    receive = None if place is None else place.receive
    took = warmup.run_warmup(
        limits,
        runner.run_to_end if receive is None else lambda _: runner.execute_remote(receive()),
        memory,
    )
    if runner.head is not None:
        slots = range(config.max_running_requests)
        runner.head.draft([DraftRow(slot, 0, 1, 1, NO_ENTRIES) for slot in slots])
    graphs = 0
    if rows and isinstance(attn, GraphAttention):
        workspace += attn.capture_bytes(rows)
        graphs = took.largest_decode + len(capture_sizes(rows)) * BYTES_EACH
    return BackendNeeds(workspace, took.largest, graphs)


@contextlib.contextmanager
def no_room(purpose: str, do: str) -> Iterator[None]:
    """Turns a device that ran out of memory into a ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        raise ConfigError(
            f"{purpose} does not fit the GPU's memory ({summarize_error(err)}); {do}"
        ) from err
