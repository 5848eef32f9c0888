"""A rank's model in memory with its pool, and the engine (runtime.engine_loop) made of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from baton.config import EngineConfig
from baton.disagg.transfer_driver import TransferDriver
from baton.errors import ConfigError
from baton.layers import ops
from baton.layers.attention import make_backend
from baton.layers.attention.base import AttentionBackend
from baton.layers.collectives import ALONE, ProcessGroup, TpContext, init_group
from baton.layers.flashinfer_loader import summarize_error
from baton.layers.host_pool import HostPool, host_pool_pages
from baton.layers.kv_pool import KvTensors, asked_pages, make_pool
from baton.layers.kv_spec import KVSpec
from baton.layers.shard import WHOLE, Shard
from baton.models.checkpoint import (
    CPU_POOL_MIB,
    DraftModelSizes,
    check_draft_vocabulary,
    check_files,
    draft_directory,
    read_draft_spec,
)
from baton.models.decoder import Decoder
from baton.models.load import OnProgress, load_weights
from baton.models.served import ServedModel, ServedSpec
from baton.models.spec.model import ModelSpec, share_of, weight_bytes
from baton.models.spec_reader import read_spec
from baton.models.transformers_backend.choice import choose_impl
from baton.runtime import device
from baton.runtime.draft_model import (
    DraftModel,
    LoadedDraft,
    LoadedHead,
    load_draft,
    make_draft_head,
    make_draft_model,
)
from baton.runtime.engine_loop import DeviceThread, EngineLoop, PoolSizes, make_engine
from baton.runtime.expert_load import ExpertLoad
from baton.runtime.grammar.waiting import GrammarQueue
from baton.runtime.memory.device_memory import GIB, DeviceMemory
from baton.runtime.memory.profile import DraftProfile, check_weights, no_room, profile_memory
from baton.runtime.model_limits import ModelLimits
from baton.runtime.runner.capture import CudaRecorder, rows_to_record
from baton.runtime.runner.cuda_runner import DeviceRunner, make_runner
from baton.runtime.runner.head_runner import HeadRunner
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.speculation.ngram import NgramDrafter
from baton.runtime.speculation.speculator import Speculator
from baton.sched.setup import from_config
from baton.sched.setup.limits import Limits
from baton.sched.state.report import SchedulerReport

log = logging.getLogger("baton.engine")


def device_thread() -> DeviceThread:
    """For torch's work.

    OpenMP keeps its number of threads per thread: without this, MKL takes all cores, and spins.
    """
    threads = torch.get_num_threads()
    return DeviceThread(lambda: torch.set_num_threads(threads))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory with its pool, before scheduler and transfer are attached."""

    config: EngineConfig
    runner: ModelRunner
    kv: KvTensors
    layout: dict[str, Any]
    info: dict[str, object]
    max_context: int
    """Longest prompt + answer that the model was made for [tokens]."""
    host_pages: int = 0
    group: ProcessGroup | None = None
    """The tensor-parallel ranks that compute together; None: this process alone."""
    draft_model: DraftModel | LoadedHead | None = None

    def make_engine_loop(
        self,
        driver: TransferDriver | None = None,
        trace: Callable[[str], None] | None = None,
        grammars: GrammarQueue | None = None,
    ) -> EngineLoop:
        """`trace` gets every input of the scheduler as a line (sched.recording).

        Args:
            grammars: None: requests with a grammar are refused.
        """
        if grammars is not None:
            self.runner.grammars = grammars.store
        kv = self.kv
        config = self.config
        sizes = PoolSizes(kv.num_pages, self.host_pages, kv.page_bytes, kv.spec.rules)
        limits = ModelLimits(self.vocab_size, self.max_context)
        return make_engine(
            config,
            sizes,
            self.runner,
            driver,
            trace,
            device_thread(),
            model_limits=limits,
            grammars=grammars,
            model_gauges=ExpertLoad(self.runner.expert_counts, config.ep_size).gauges,
            make_speculator=None if config.speculative_algorithm is None else self._make_speculator,
        )

    def _make_speculator(self, report: SchedulerReport, device: DeviceThread) -> Speculator:
        config = self.config
        most = config.most_drafts
        if self.draft_model is not None:
            return self.draft_model.make_speculator(most, self.runner, report, device)
        drafter = NgramDrafter(
            config.speculative_ngram_min_match_window_size, config.speculative_ngram_capacity
        )
        return Speculator(drafter, most, self.runner)

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def kv_spec(self) -> KVSpec:
        return self.kv.spec

    @property
    def native_pool(self) -> Any:
        """Pool whose pages a TransferNode serves; None for plain memory."""
        return self.kv.native


def compute_threads(config: EngineConfig) -> int:
    """Compute threads of one process: --cpu-threads, else this machine's cores shared among this
    engine's processes.
    """
    return config.cpu_threads or max(
        1, len(os.sched_getaffinity(0)) // (config.dp_size * config.tp_size)
    )


def load_rank(
    config: EngineConfig,
    model_dir: str,
    place: TpContext | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> LoadedModel:
    """Load the model, or a tensor-parallel rank's share of it, and allocate the pool.

    Raises ConfigError for what this engine cannot run, PeerLost when other ranks do not come.
    """
    started = time.monotonic()
    threads = compute_threads(config)
    ops.set_threads(threads)
    shard = WHOLE if place is None else place.shard
    shard = replace(shard, divides_experts=config.ep_size > 1)
    impl = choose_impl(config, Path(model_dir))
    if impl == "transformers":
        placed = _load_module(config, model_dir, on_progress)
    else:
        placed = _load_native(config, model_dir, shard, place, on_progress)
    model = placed.model
    compute = placed.device
    spec = model.spec
    context = _context_length(config, spec)
    root = Path(model_dir)
    draft, draft_sizes = _load_draft(config, root, placed, shard)
    pages = _requested_pages(config, spec, compute, draft_sizes)
    memory = placed.memory
    if memory is not None:
        profile = _profile_draft(config, draft, draft_sizes, model, compute)
        kv_spec = _kv_spec(config, spec)
        pages = profile_memory(
            model, kv_spec, config, context, pages, memory, place, placed.group, profile
        )
    assert pages is not None, "a pool in host memory has a default size"
    kv, attn = _make_pool(config, spec, pages, compute)
    host_pages = host_pool_pages(kv.spec, config.host_kv_gib, config.dp_size * config.tp_size)
    runner = make_runner(
        model,
        kv,
        attn,
        config.max_running_requests,
        announces_writes=config.disaggregation_mode == "prefill",
        host=HostPool(kv, host_pages, placed.group or ALONE) if host_pages else None,
        broadcast=None if place is None else place.broadcast,
    )
    runner.reserve_drafts(config.most_drafts)
    draft_model = None
    if draft is not None:
        draft_model = _attach_draft(config, draft, pages, runner, model, compute)
    if memory is not None:
        _record_runners(config, runner, draft_model, context, memory)
    log.info(
        "loaded %s: %.1f M parameters (%s), pool of %d pages x %d tokens (%s) = %.0f MiB, "
        "%d thread(s), %.1f s",
        model_dir, placed.num_parameters / 1e6, spec.dtype, pages, config.page_size,
        kv.spec.page_dtype, pages * kv.page_bytes / 2**20, threads, time.monotonic() - started,
    )  # fmt: skip
    limits = from_config.limits(config, pages, page_groups=kv.spec.rules)
    layout = kv.spec.layout(spec.model_hash)
    if shard.size > 1:
        layout["tp_size"] = shard.size
    info: dict[str, object] = {
        "num_parameters": placed.num_parameters,
        "model_impl": impl,
        "cpu_threads": threads,
        "device": str(compute),
        "context_length": context,
        "dtype": spec.dtype,
        "layout": layout,
        **_pool_info(kv, pages, host_pages, limits),
    }
    if spec.states:
        info["state_bytes_per_sequence"] = runner.state_bytes
        info["state_tokens"] = limits.state_pages * limits.page_size
    if draft_model is not None:
        info["draft_model"] = draft_model.info
    longest = spec.max_context
    return LoadedModel(
        config, runner, kv, layout, info, longest, host_pages, placed.group, draft_model
    )


def _load_draft(
    config: EngineConfig, root: Path, placed: _PlacedModel, shard: Shard
) -> tuple[LoadedDraft | None, DraftModelSizes]:
    """What drafts, if anything does and it is computed here; every rank knows its size."""
    model = placed.model
    target = model.spec if isinstance(model.spec, ModelSpec) else None
    spec = read_draft_spec(config, root, target, on_cpu=placed.device.type == "cpu")
    sizes = DraftModelSizes.of(config, spec, root)
    if spec is None:
        return None, sizes
    check_draft_vocabulary(config, spec, model.spec.vocab_size)
    # The first of several tensor-parallel ranks draws all tokens.
    if shard.rank > 0:
        return None, sizes
    if placed.memory is not None:
        check_weights(sizes.weights, placed.memory, "what drafts")
    draft = load_draft(config, spec, draft_directory(config, root), model, placed.device)
    return draft, sizes


def _profile_draft(
    config: EngineConfig,
    draft: LoadedDraft | None,
    sizes: DraftModelSizes,
    model: ServedModel,
    compute: torch.device,
) -> DraftProfile:
    """What drafts, as far as the pool's size depends on it."""
    if draft is None:
        return DraftProfile(sizes)
    if draft.model.spec.head is None:
        return DraftProfile(sizes, model=draft.model)

    def make_head(pages: int) -> HeadRunner:
        return make_draft_head(config, draft, pages, model, compute).runner

    return DraftProfile(sizes, make_head=make_head)


def _attach_draft(
    config: EngineConfig,
    draft: LoadedDraft,
    pages: int,
    runner: ModelRunner,
    model: ServedModel,
    compute: torch.device,
) -> DraftModel | LoadedHead:
    """What drafts for a model, with its pages; a head reads along with the model's runner from now
    on.
    """
    with no_room(
        "what drafts",
        "another process took memory meanwhile: start again, or lower --mem-fraction-static",
    ):
        if draft.model.spec.head is None:
            return make_draft_model(config, draft, pages, compute)
        head = make_draft_head(config, draft, pages, model, compute)
    runner.head = head.runner
    return head


def _pool_info(kv: KvTensors, pages: int, host_pages: int, limits: Limits) -> dict[str, object]:
    """The KV pool, for GET /get_server_info."""
    return {
        "host_pages": host_pages,
        "kv_cache_dtype": kv.spec.page_dtype,
        "page_groups": kv.spec.summary,
        "max_total_num_tokens": limits.capacity_tokens,
        "kv_pool_bytes": pages * kv.page_bytes,
        "num_pages": pages,
    }


def _read_spec(
    config: EngineConfig, model_dir: str, compute: torch.device, shard: Shard
) -> ModelSpec:
    """Spec of the whole model. Raises ConfigError where it cannot be divided among the ranks."""
    on_cpu = compute.type == "cpu"
    spec = read_spec(
        model_dir,
        config.dtype,
        config.load_format,
        config.random_seed,
        context_length=config.context_length,
        on_cpu=on_cpu,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    if on_cpu and spec.dtype == "float16":
        log.warning(
            "--dtype float16: the native CPU kernels do not compute it, slow torch code does; "
            "bfloat16 is faster"
        )
    share_of(spec, shard)  # what cannot be divided is reported before any rank waits for another
    return spec


@dataclass(frozen=True, slots=True)
class _PlacedModel:
    """A model, or a rank's share of it, on its device."""

    model: ServedModel
    device: torch.device
    num_parameters: int
    """Those of the whole model."""
    group: ProcessGroup | None = None
    memory: DeviceMemory | None = None
    """None on the CPU."""


def _load_module(config: EngineConfig, model_dir: str, on_progress: OnProgress) -> _PlacedModel:
    """transformers' module, which computes on the CPU in one process."""
    from baton.models.transformers_backend.model import load_module

    model = load_module(
        model_dir,
        config.dtype,
        config.load_format,
        config.random_seed,
        on_progress,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return _PlacedModel(model, torch.device("cpu"), model.spec.num_parameters)


def _load_native(
    config: EngineConfig,
    model_dir: str,
    shard: Shard,
    place: TpContext | None,
    on_progress: OnProgress,
) -> _PlacedModel:
    """Blocks of our own, of which a rank computes its share."""
    compute = device.resolve_device(config, shard.rank)
    whole_spec = _read_spec(config, model_dir, compute, shard)
    group = None
    if place is not None:
        group = init_group(shard, compute, place.meeting_point, config.dist_timeout)
    memory = None if compute.type == "cpu" else DeviceMemory(compute)
    if memory is not None:
        needed = weight_bytes(whole_spec, shard)
        if config.load_format != "dummy":
            stored = check_files(whole_spec, Path(model_dir), shard)
            needed = stored.memory(whole_spec, on_cpu=False)
        check_weights(needed, memory)
    model = _load_share(config, model_dir, whole_spec, shard, group, compute, on_progress)
    if memory is not None:
        shapes = model.spec.kernel_shapes
        ops.choose_cuda([shapes], compute, required=config.attention_backend != "torch")
    with no_room("the experts of a layer a second time", NO_ROOM_REMEDY):
        model.pack()
    return _PlacedModel(model, compute, whole_spec.num_parameters, group, memory)


NO_ROOM_REMEDY = "use a smaller one, a GPU with more memory, or more of them by --tp-size"


def _load_share(
    config: EngineConfig,
    model_dir: str,
    whole_spec: ModelSpec,
    shard: Shard,
    group: ProcessGroup | None,
    compute: torch.device,
    on_progress: OnProgress,
) -> Decoder:
    """This rank's share of the weights, on its device."""
    with no_room("the model", NO_ROOM_REMEDY):
        return load_weights(
            whole_spec,
            model_dir,
            config.load_format,
            config.random_seed,
            shard,
            group or ALONE,
            compute,
            on_progress,
        )


def _context_length(config: EngineConfig, spec: ServedSpec) -> int:
    context = config.context_length or spec.max_context
    if context > spec.max_context:
        raise ConfigError(
            f"--context-length {context}: the model was made for {spec.max_context} tokens; lower "
            "it"
        )
    return context


def _requested_pages(
    config: EngineConfig, spec: ServedSpec, compute: torch.device, draft: DraftModelSizes
) -> int | None:
    """Pages of the KV pool by the flags; None: as many as the device has room for."""
    default_mib = CPU_POOL_MIB if compute.type == "cpu" else None
    mib = config.kv_pool_mib or default_mib
    kv_spec = _kv_spec(config, spec)
    pages = asked_pages(
        kv_spec, config.max_total_tokens, mib, draft.page_bytes, draft.scratch_bytes
    )
    if config.max_total_tokens and pages is not None and kv_spec.rules:
        # So far they are those of group 0; a sequence of so many tokens takes others beside them,
        # and its state where it travels.
        limits = from_config.limits(config, pages, page_groups=kv_spec.rules)
        pages = limits.most_pages(pages) + limits.state_pages
    return pages


def _kv_spec(config: EngineConfig, spec: ServedSpec) -> KVSpec:
    """The page groups of the pool."""
    kv_spec = spec.kv_spec(config.page_size).divide(spec.attention)
    if not spec.states:
        return kv_spec
    return kv_spec.with_states(spec.states, config.state_snapshot_tokens)


def _make_pool(
    config: EngineConfig, spec: ServedSpec, pages: int, compute: torch.device
) -> tuple[KvTensors, AttentionBackend]:
    recorded_rows = 0 if compute.type == "cpu" else rows_to_record(config)
    disaggregated = config.disaggregation_mode != "null"
    with no_room(
        "the KV pool",
        "another process took memory meanwhile: start again, or lower --mem-fraction-static",
    ):
        kv = make_pool(
            _kv_spec(config, spec),
            pages,
            native=disaggregated or None,
            device=compute,
            dummy_page=recorded_rows > 0,
        )
        attn = make_backend(config.attention_backend, spec.attention, kv)
    return kv, attn


def _record_runners(
    config: EngineConfig,
    runner: ModelRunner,
    draft: DraftModel | LoadedHead | None,
    context: int,
    memory: DeviceMemory,
) -> None:
    """Record steps of the model, and of a draft model."""
    rows = rows_to_record(config)
    _record_graphs(config, runner, memory, rows, context, config.most_drafts)
    if isinstance(draft, DraftModel):
        rows = min(rows, config.max_running_requests)
        _record_graphs(config, draft.runner, memory, rows, draft.limits.max_context)


def _record_graphs(
    config: EngineConfig,
    runner: ModelRunner,
    memory: DeviceMemory,
    rows: int,
    context: int,
    most_drafts: int = 0,
) -> None:
    """Record decode steps of up to `rows` rows as CUDA graphs, or say why not."""
    assert isinstance(runner, DeviceRunner), "steps are recorded on a GPU"
    if not rows:
        if config.disaggregation_mode == "prefill":
            log.info("CUDA graphs: none, a prefill node runs no decode steps")
            return
        reason = (
            "--disable-cuda-graph" if config.disable_cuda_graph else f"--tp-size {config.tp_size}"
        )
        log.info("CUDA graphs: none with %s; every kernel is launched by itself", reason)
        return
    if not runner.can_record:
        log.warning(
            "CUDA graphs: none, the torch attention backend cannot be recorded; steps "
            "are launched in pieces"
        )
        return
    started = time.monotonic()
    before = memory.reserved_bytes()
    with no_room(
        "CUDA graphs",
        "lower --cuda-graph-max-bs or --mem-fraction-static, or give --disable-cuda-graph",
    ):
        try:
            runner.record_graphs(CudaRecorder(memory.device), rows, context, most_drafts)
        except torch.OutOfMemoryError:
            raise
        except Exception as err:  # noqa: BLE001 - of flashinfer or torch
            # Steps run without graphs then, as they were warmed up.
            log.warning(
                "CUDA graphs: none, recording failed (%s); every kernel is launched by itself",
                summarize_error(err),
            )
            return
    log.info(
        "CUDA graphs: decode steps of up to %d rows are replayed; they took %.2f GiB and %.1f s",
        rows, (memory.reserved_bytes() - before) / GIB, time.monotonic() - started,
    )  # fmt: skip
