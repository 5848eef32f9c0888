"""How large a CUDA device's pool gets: arithmetic for all numbers, and the whole way with a device that only counts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.config import EngineConfig, build_config
from baton.errors import ConfigError
from baton.layers.attention.reference import TorchAttention
from baton.layers.collectives import TpContext, init_group, leave_group
from baton.layers.shard import Shard
from baton.models.checkpoint import DraftModelSizes
from baton.runtime.memory import profile as fitting
from baton.runtime.memory import warmup
from baton.runtime.memory.device_memory import (
    GIB,
    LEAST_PAGES,
    MARGIN_BYTES,
    MIB,
    MemoryNeeds,
    size_pool,
)
from baton.runtime.memory.profile import DraftProfile, check_weights, profile_memory
from baton.runtime.memory.warmup import SAMPLINGS, WarmupLimits, pages_needed, warmup_steps
from baton.runtime.runner.capture import BYTES_EACH
from baton.runtime.sampling import sampler, step_sampler
from baton.sched.types.plan import ForwardMode, StepPlan
from baton.sched.types.request import SamplingParams
from tests.support.models import tiny_model
from tests.support.models.checkpoints import variant_config
from tests.support.models.whole_model import load_model

CPU = torch.device("cpu")
sizes = st.integers(0, 200 * GIB)


@given(
    total=st.integers(GIB, 200 * GIB), free_share=st.floats(0, 1), weights=sizes, workspace=st.integers(0, GIB),
    activations=sizes, graphs=st.integers(0, 4 * GIB), states=sizes,
    page_bytes=st.integers(1, 64 * MIB), fraction=st.floats(0.01, 0.99),
)  # fmt: skip
def test_pool_keeps_to_the_fraction_and_to_what_is_free(
    total: int, free_share: float, weights: int, workspace: int, activations: int, graphs: int,
    states: int, page_bytes: int, fraction: float,
) -> None:  # fmt: skip
    needs = MemoryNeeds(
        total, int(total * free_share), weights, workspace, activations, graphs, states
    )

    def fits(pages: int) -> bool:
        kept = workspace + states + pages * page_bytes
        static = weights + kept
        taken = kept + activations + graphs + MARGIN_BYTES
        return static <= int(total * fraction) and taken <= needs.free

    try:
        pages = size_pool(needs, page_bytes, fraction).pages
    except ConfigError:
        assert not fits(LEAST_PAGES)
    else:
        assert pages >= LEAST_PAGES
        assert fits(pages)
        assert not fits(pages + 1), "no page less than possible"


@given(
    free=st.integers(0, 80 * GIB),
    wanted=st.integers(2, 100_000),
    page_bytes=st.integers(1, 4 * MIB),
)
def test_wanted_pool_is_taken_as_it_is_or_refused(free: int, wanted: int, page_bytes: int) -> None:
    needs = MemoryNeeds(80 * GIB, free, 10 * GIB, 128 * MIB, GIB, 0)
    if wanted * page_bytes <= needs.room:
        assert size_pool(needs, page_bytes, 0.01, wanted) == (wanted, "as asked for"), (
            "whatever the fraction"
        )
    else:
        with pytest.raises(ConfigError, match="the KV pool asked for has"):
            size_pool(needs, page_bytes, 0.99, wanted)


def test_two_engines_share_a_device_by_its_whole_memory() -> None:
    """P takes 0.4 of 80 GiB; D, which starts when P's are gone, gets as much."""
    page, needs = MIB, MemoryNeeds(80 * GIB, 62 * GIB, 16 * GIB, 0, 2 * GIB, GIB)
    prefill = size_pool(needs, page, 0.4)
    beside = MemoryNeeds(
        80 * GIB, needs.free - 16 * GIB - prefill.pages * page, 16 * GIB, 0, 2 * GIB, GIB
    )
    assert size_pool(beside, page, 0.4).pages == prefill.pages == 16 * 1024
    assert size_pool(beside, page, 0.6).why == "all that is free"


def test_pool_that_does_not_fit_is_refused_with_numbers_and_the_flag_to_lower() -> None:
    full = MemoryNeeds(80 * GIB, 3 * GIB, 70 * GIB, 128 * MIB, 4 * GIB, 0)
    said = r"no room for 2 KV pages of 2\.00 MiB .*free 3\.00 GiB beside weights of 70.*a step takes 4\.00 GiB.*lower "
    with pytest.raises(ConfigError, match=said + "--chunked-prefill-size"):
        size_pool(full, 2 * MIB, 0.95)
    small = MemoryNeeds(80 * GIB, 63 * GIB, 16 * GIB, 128 * MIB, GIB, 0)
    with pytest.raises(
        ConfigError, match=r"--mem-fraction-static 0\.2 leaves no room .*weights of 16.*; raise it"
    ):
        size_pool(small, 2 * MIB, 0.2)


# ---------------------------------------------------------------------------------------------- warm-up


@st.composite
def limits(draw: st.DrawFn) -> WarmupLimits:
    tokens = draw(st.integers(1, 300))
    prompt_tokens, running, context = draw(
        st.tuples(st.integers(1, tokens), st.integers(1, 80), st.integers(1, 200))
    )
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    return WarmupLimits(
        tokens, prompt_tokens, running, context, page_size, drafts=draw(st.integers(0, 6))
    )


@given(limits())
def test_warmup_steps_are_steps_a_scheduler_could_plan(at: WarmupLimits) -> None:
    most = pages_needed(at)
    for _, plan in warmup_steps(at):
        pages = [page for row in plan.rows for page in row.pages]
        assert len(set(pages)) == len(pages), "no slot is written twice"
        assert all(0 <= page < most for page in pages)
        assert 1 <= len(plan.rows) <= at.running
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert plan.num_tokens <= max(at.tokens, at.running)
        assert [row.n - 1 for row in plan.rows[plan.num_decode :]][: len(plan.drafted)] == list(
            plan.drafted
        )
        for i, row in enumerate(plan.rows):
            assert (row.n == 1) or i >= plan.num_decode
            assert row.start >= 0
            assert len(row.tokens) == row.n >= 1
            assert row.start + row.n <= max(at.context, at.page_size)
            assert len(row.pages) == at.pages_for(row.start + row.n)


@given(limits())
def test_largest_step_cannot_be_exceeded(at: WarmupLimits) -> None:
    *_, (_, largest) = warmup_steps(at)
    (decode,) = [
        plan for name, plan in warmup_steps(at) if name == f"{at.running} sequences decoding"
    ]
    assert decode.mode is ForwardMode.DECODE
    assert len(decode.rows) == at.running, "every sequence decodes"
    with_drafts = [plan for _, plan in warmup_steps(at) if plan.drafted]
    drafts = min(at.drafts, at.context - 1)
    most = min(at.running * (1 + drafts), max(at.tokens, at.running))
    assert [plan.num_tokens for plan in with_drafts] == ([most] if most > at.running else [])
    assert all(row.sample for row in largest.rows)
    assert len(largest.rows) == at.running, "and each wants logits"
    if at.context >= at.prompt_tokens:  # one prompt can be as long as a step takes
        assert largest.num_tokens == min(
            at.running - 1 + at.prompt_tokens, max(at.tokens, at.running)
        )


def test_steps_without_a_draw_and_with_a_long_cached_prefix_are_in_the_warmup() -> None:
    plans = [
        plan
        for _, plan in warmup_steps(
            WarmupLimits(8192, 8192, running=256, context=40960, page_size=16)
        )
    ]
    assert any(not any(row.sample for row in plan.rows) for plan in plans), (
        "a chunk that is not a prompt's last"
    )
    assert any(row.start == 8192 and row.n == 16 for plan in plans for row in plan.rows), (
        "attention splits its KV"
    )


def parameters_read_by_the_sampler() -> set[str]:
    """Fields of SamplingParams that its sources mention as attributes."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    sources = [inspect.getsource(module) for module in (sampler, step_sampler)]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    return fields & {node.attr for node in nodes if isinstance(node, ast.Attribute)}


NO_WAY_OF_SAMPLING = {
    "resumed",  # where the answer begins: which tokens count as drawn
    "grammar",  # its masks are applied by torch's own kernels, which are compiled already
    "allowed_tokens",  # a mask, too
    "bad_words",  # bans, as those of min_new_tokens
}


def test_warmup_states_every_parameter_that_the_sampler_reads() -> None:
    """A parameter that no row of the warm-up has compiles its kernels in the first request that has it."""
    default = SamplingParams()
    stated = {
        field.name
        for field in dataclasses.fields(SamplingParams)
        if any(getattr(row, field.name) != getattr(default, field.name) for row in SAMPLINGS)
    }
    assert parameters_read_by_the_sampler() - NO_WAY_OF_SAMPLING <= stated
    assert {"top_k", "logit_bias", "min_new_tokens"} <= parameters_read_by_the_sampler()


def test_every_way_of_sampling_is_in_one_step_of_the_warmup() -> None:
    limits = WarmupLimits(8192, 8192, running=256, context=40960, page_size=16)
    (plan,) = [plan for name, plan in warmup_steps(limits) if name == "all ways of sampling"]
    assert tuple(each.params for each in plan.admitted) == SAMPLINGS
    assert all(row.sample for row in plan.rows)


def test_largest_step_fills_the_budget() -> None:
    *_, (_, largest) = warmup_steps(
        WarmupLimits(tokens=8192, prompt_tokens=8192, running=256, context=40960, page_size=16)
    )
    assert largest.num_tokens == 8192
    assert len(largest.rows) == 256


# ---------------------------------------------------------------------------------------------- the whole way


class Counted:
    """A device that reports scripted numbers, and notes when it is asked."""

    device = CPU

    def __init__(self, total: int = 80 * GIB, free: int = 70 * GIB) -> None:
        self.total = total
        self.left = free
        self.now = 2 * GIB
        self.steps = 0

    def free_bytes(self) -> tuple[int, int]:
        return self.left, self.total

    def reserved_bytes(self) -> int:
        return self.now

    def reset_peak(self) -> None:
        self.steps += 1

    def peak_bytes(self) -> int:
        return self.now + self.steps * GIB // 4


@pytest.fixture
def made(tmp_path: Path) -> Any:
    return load_model(tiny_model.make(tmp_path / "m"), load_format="dummy")


def config(**flags: Any) -> EngineConfig:
    return build_config(
        {
            "device": "auto",
            "page_size": 16,
            "max_running_requests": 4,
            "chunked_prefill_size": 64,
            **flags,
        }
    )


def test_pool_is_what_the_warmup_leaves(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory, asked = Counted(), config(mem_fraction_static=0.5)
    with caplog.at_level(logging.INFO):
        pages = profile_memory(made, made.spec.kv_spec(16), asked, 512, None, memory)
    page_bytes = made.spec.kv_spec(16).page_bytes
    needs = MemoryNeeds(80 * GIB, 70 * GIB, 2 * GIB, 0, 10 * GIB // 4, 0)
    assert pages == size_pool(needs, page_bytes, 0.5).pages
    lines = [line for line in caplog.messages if line.startswith("warm-up step")]
    assert len(lines) == memory.steps == 10
    assert caplog.messages[-1] == (
        "GPU memory of 80.00 GiB: free 70.00 GiB beside weights of 2.00 GiB; a step takes 2.50 GiB, the attention "
        "backend 0.00 GiB, CUDA graphs 0.00 GiB, margin 0.25 GiB; KV pool 38.00 GiB (--mem-fraction-static 0.5): "
        f"{pages} pages of 16 tokens"
    )


class Recordable(TorchAttention):
    """A backend that takes a MiB for each recorded row."""

    views = ()

    def capture_bytes(self, largest: int) -> int:
        return largest * MIB

    prepare_capture = plan_replay = use_capture = capture_bytes


def test_memory_for_graphs_is_kept_where_steps_will_be_recorded(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "make_backend", lambda _, spec, kv: Recordable(spec, kv))
    page_bytes = made.spec.kv_spec(16).page_bytes
    for flags, captures, graphs in (
        ({}, 4 * MIB, 9 * GIB // 4 + 3 * BYTES_EACH),
        ({"disable_cuda_graph": True}, 0, 0),
    ):
        needs = MemoryNeeds(80 * GIB, 70 * GIB, 2 * GIB, captures, 10 * GIB // 4, graphs)
        asked = config(mem_fraction_static=0.99, **flags)
        assert (
            profile_memory(made, made.spec.kv_spec(16), asked, 512, None, Counted())
            == size_pool(needs, page_bytes, 0.99).pages
        )


@pytest.fixture
def stateful(tmp_path: Path) -> Any:
    variant_config("qwen3.5").save_pretrained(tmp_path / "stateful")
    return load_model(tmp_path / "stateful", load_format="dummy")


def test_states_of_all_running_requests_are_kept_from_the_pool(
    stateful: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Warm-up rows that continue a sequence begin with a state, which the runner demands."""
    memory, asked = Counted(), config(mem_fraction_static=0.5)
    spec = stateful.spec
    kv_spec = spec.kv_spec(16).with_states(spec.states, 32)
    with caplog.at_level(logging.INFO):
        pages = profile_memory(stateful, kv_spec, asked, 512, None, memory)
    states = 4 * sum(state.state_bytes(spec.dtype) for state in spec.states.values())
    needs = MemoryNeeds(80 * GIB, 70 * GIB, 2 * GIB, 0, 10 * GIB // 4, 0, states)
    page_bytes = kv_spec.page_bytes
    assert pages == size_pool(needs, page_bytes, 0.5).pages
    without = dataclasses.replace(needs, states=0)
    assert size_pool(without, page_bytes, 0.5).pages - pages >= states // page_bytes
    assert "graphs 0.00 GiB, states of sequences 0.00 GiB, margin" in caplog.messages[-1]
    assert memory.steps == 10


def test_states_that_cannot_fit_are_refused_with_numbers(stateful: Any) -> None:
    memory = Counted(free=1 << 20)
    spec = stateful.spec
    kv_spec = spec.kv_spec(16).with_states(spec.states, 32)
    asked = config(max_running_requests=4000)
    said = r"--max-running-requests 4000 sequences take 0\.\d\d GiB, .* each, .*; lower --max-run"
    with pytest.raises(ConfigError, match=said):
        profile_memory(stateful, kv_spec, asked, 512, None, memory)
    assert memory.steps == 0


def test_steps_with_drafts_are_measured_for_activations_and_graphs(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "make_backend", lambda _, spec, kv: Recordable(spec, kv))
    asked = config(
        mem_fraction_static=0.99, speculative_algorithm="NGRAM", speculative_num_draft_tokens=5
    )
    memory = Counted()
    # The device takes a quarter more in each step: the last one of rows with drafts is the tenth
    # of eleven, and recordings of 1, 2, 4, 8, 16 and 24 rows are kept.
    needs = MemoryNeeds(
        80 * GIB, 70 * GIB, 2 * GIB, 24 * MIB, 11 * GIB // 4, 10 * GIB // 4 + 6 * BYTES_EACH
    )
    page_bytes = made.spec.kv_spec(16).page_bytes
    assert (
        profile_memory(made, made.spec.kv_spec(16), asked, 512, None, memory)
        == size_pool(needs, page_bytes, 0.99).pages
    )
    assert memory.steps == 11


def test_draft_model_is_warmed_up_too_and_has_its_share_of_each_page(made: Any) -> None:
    memory = Counted()
    sizes = DraftModelSizes(weights=GIB, page_bytes=3000, scratch_bytes=5 * MIB)
    draft = DraftProfile(sizes, model=made)
    asked = config(mem_fraction_static=0.5, speculative_algorithm="NGRAM")
    pages = profile_memory(made, made.spec.kv_spec(16), asked, 512, None, memory, draft=draft)
    # 11 steps of the model and 10 of what drafts, which has no drafts itself.
    assert memory.steps == 21
    needs = MemoryNeeds(80 * GIB, 70 * GIB, 2 * GIB, 5 * MIB, 21 * GIB // 4, 0)
    page_bytes = made.spec.kv_spec(16).page_bytes + 3000
    assert pages == size_pool(needs, page_bytes, 0.5).pages


def test_head_reads_along_with_the_warmup(made: Any) -> None:
    class Head:
        """Takes 8 MiB beside its pages."""

        def __init__(self) -> None:
            self.tokens = 0
            self.rows = 0

        def compute_model(self, batch: Any, attn: Any) -> Any:
            return made.compute_hidden(batch, attn), torch.zeros(len(batch.token_ids), 1)

        def extend(self, step: Any, arrays: Any, token_ids: Any, *_: object) -> None:
            self.tokens += len(token_ids)

        def draft(self, rows: Any) -> None:
            self.rows += len(rows)

    head = Head()
    memory = Counted()
    sizes = DraftModelSizes(weights=0, page_bytes=3000, scratch_bytes=5 * MIB)
    asked_pages: list[int] = []

    def make_head(pages: int) -> Any:
        asked_pages.append(pages)
        memory.now += pages * sizes.page_bytes + sizes.scratch_bytes + 8 * MIB
        return head

    asked = config(mem_fraction_static=0.5, speculative_algorithm="NGRAM")
    draft = DraftProfile(sizes, make_head=make_head)
    pages = profile_memory(made, made.spec.kv_spec(16), asked, 512, None, memory, draft=draft)
    needs = MemoryNeeds(80 * GIB, 70 * GIB, 2 * GIB, 13 * MIB, 11 * GIB // 4, 0)
    page_bytes = made.spec.kv_spec(16).page_bytes + 3000
    assert pages == size_pool(needs, page_bytes, 0.5).pages
    assert len(asked_pages) == 1
    assert head.tokens > 64
    assert head.rows == 4


def test_weights_that_cannot_fit_are_not_loaded(made: Any) -> None:
    check_weights(70 * GIB, Counted())
    with pytest.raises(
        ConfigError,
        match=r"weights take 70\.50 GiB and of the GPU's 80\.00 GiB 70\.00 are free; .*--tp-size",
    ):
        check_weights(70 * GIB + GIB // 2, Counted())


def test_requested_pool_is_warmed_up_too_and_checked(made: Any) -> None:
    memory = Counted()
    assert profile_memory(made, made.spec.kv_spec(16), config(), 512, 100, memory) == 100
    assert memory.steps == 10
    with pytest.raises(ConfigError, match="asked for"):
        profile_memory(made, made.spec.kv_spec(16), config(), 512, 100, Counted(free=GIB))


class Broken:
    """A backend whose kernels do not compile."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def plan(self, batch: Any) -> None:
        raise self.error


def backends(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[str]:
    asked: list[str] = []
    real: Callable[..., Any] = fitting.make_backend

    def make(name: str, spec: Any, kv: Any) -> Any:
        asked.append(name)
        return real("torch", spec, kv) if name == "torch" else Broken(error)

    monkeypatch.setattr(fitting, "make_backend", make)
    return asked


NINJA = "Ninja build failed. Ninja output:\n[1/2] nvcc …\nfatal error: cuda_fp8.h: No such file\nninja: stopped"


def test_flashinfer_that_cannot_run_ends_the_start(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends(monkeypatch, RuntimeError(NINJA))
    for name in ("auto", "flashinfer"):
        with pytest.raises(
            ConfigError,
            match=rf"--attention-backend {name}: .* cannot run here \(fatal error: cuda_fp8.*; use .* torch",
        ):
            profile_memory(
                made, made.spec.kv_spec(16), config(attention_backend=name), 512, None, Counted()
            )
    assert (
        profile_memory(
            made, made.spec.kv_spec(16), config(attention_backend="torch"), 512, None, Counted()
        )
        > 0
    )


def test_flashinfer_with_another_interface_ends_the_start_too(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends(monkeypatch, TypeError("plan() got an unexpected keyword argument 'window_left'"))
    with pytest.raises(
        ConfigError,
        match=r"cannot run here \(TypeError: plan\(\) got an unexpected keyword argument",
    ):
        profile_memory(made, made.spec.kv_spec(16), config(), 512, None, Counted())


def test_device_that_runs_out_of_memory_is_no_reason_for_another_backend(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = backends(
        monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    )
    with pytest.raises(
        ConfigError, match=r"a step of the largest size does not fit .*20.00 GiB.*lower --chunk"
    ):
        profile_memory(made, made.spec.kv_spec(16), config(), 512, None, Counted())
    assert asked == ["auto"]


def test_error_of_the_reference_is_not_hidden(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(limits: WarmupLimits, execute: Callable[[StepPlan], object], memory: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(warmup, "run_warmup", execute)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        profile_memory(
            made, made.spec.kv_spec(16), config(attention_backend="torch"), 512, None, Counted()
        )


def test_tensor_parallel_ranks_warm_up_together_and_take_the_smallest_pool(made: Any) -> None:
    class Least:
        def all_reduce_min(self, n: int) -> int:
            return min(n, 1234)

    orders: list[bytes] = []
    first = TpContext(Shard(0, 2), Path(), broadcast=orders.append)
    other = TpContext(Shard(1, 2), Path(), receive=lambda: orders.pop(0))
    group: Any = Least()
    assert (
        profile_memory(made, made.spec.kv_spec(16), config(), 512, None, Counted(), first, group)
        == 1234
    )
    assert len(orders) == 10
    assert (
        profile_memory(made, made.spec.kv_spec(16), config(), 512, None, Counted(), other, group)
        == 1234
    )
    assert orders == []


def test_least_of_a_group(tmp_path: Path) -> None:
    group = init_group(Shard(0, 1), CPU, tmp_path / "meet", 30)
    try:
        assert group.all_reduce_min(1 << 40) == 1 << 40
    finally:
        leave_group()
