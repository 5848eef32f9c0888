"""Recorded decode steps on CPU tensors: graphs on = graphs off = the CPU's own kernels, token for token.

The recorder (tests.support.devices.tape) does again what was recorded and nothing else, flashinfer's stand-in reads its
arrays from the fixed buffers and notices a plan that was made for other rows, and results are garbage until waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton.layers.attention.paged_indices import capture_sizes
from baton.runtime.runner import capture
from baton.sched.types.request import SamplingParams
from tests.parity.conftest import Reference
from tests.parity.test_device_runner import PARAMS, PLAIN, SMALL, mixed, prompts
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import answer, make_engine
from tests.support.probes import RunnerProbe

FLAGS: list[dict[str, object]] = [
    {},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"disable_overlap_schedule": True, "page_size": 16, "chunked_prefill_size": 16},
    {"max_running_requests": 3, "chunked_prefill_size": 12},
    {"kv_cache_dtype": "fp8_e4m3"},
    SMALL,
    {**SMALL, "host_kv_gib": 0.01, "preemption_mode": "offload"},
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


CASES = [
    *((flags, "greedy") for flags in FLAGS),
    *(({}, kind) for kind in PARAMS if kind != "greedy"),
    *(pytest.param(SMALL, kind, marks=pytest.mark.slow) for kind in PARAMS if kind != "greedy"),
]
"""Flags and kinds of parameters. That preempted rows are replayed is shown by greedy ones."""


@pytest.mark.parametrize(("flags", "kind"), CASES, ids=str)
def test_graphs_on_off_and_the_cpu(
    reference: Callable[[str], Reference], device: Device, flags: dict[str, object], kind: str
) -> None:
    """Rows join and leave, are padded, hit prefixes, are preempted; steps with prompts come between."""
    path, params = reference("llama").path, PARAMS[kind]

    def answers(engine: object) -> list[list[list[int]]]:
        together = [answer(engine, prompts(), params)]  # type: ignore[arg-type]
        together += [answer(engine, prompts()[::-1], params, stagger=n) for n in (1, 3)]  # type: ignore[arg-type]
        return together

    cpu = make_engine(path, **flags)
    want = answers(cpu)
    eager = device.recorded(path, 0, **flags)
    assert answers(eager) == want
    assert device.recorder.replays == 0
    replayed = device.recorded(path, 5, poison=True, head_kernel=True, **flags)
    assert answers(replayed) == want
    assert device.recorder.replays > 20
    if "max_total_tokens" in flags:
        assert replayed.sched.report.counters()["retractions_total"] > 0, (
            "the pool was meant to be too small"
        )
    for engine in (cpu, eager, replayed):
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
        engine.close()


@pytest.mark.parametrize(
    ("variant", "graph_rows"),
    [
        ("qwen3", 0),
        ("qwen3", 5),
        ("qwen3-bias", 0),
        ("qwen3-bias", 5),
        # Heads that the kernel lacks pass plain torch.
        ("gemma2", 5),
        ("olmo2", 5),
        ("phi3-partial", 5),
        ("smollm3", 5),
        # Pages behind windows and chunks are left behind.
        ("gemma3", 0),
        ("gemma3", 5),
        # Their experts in recorded steps: tests/unit/layers/kernels/test_experts.py.
        ("gpt-oss", 0),
        ("llama4", 0),
    ],
)
def test_heads_of_every_kind_are_stored(
    reference: Callable[[str], Reference],
    device: Device,
    variant: str,
    graph_rows: int,
) -> None:
    path = reference(variant).path
    # Llama 4's chunks of 11 tokens are whole pages.
    flags: dict[str, object] = {"page_size": 1} if variant == "llama4" else {}
    host = make_engine(path, **flags)
    want = answer(host, prompts(), PARAMS["greedy"])
    engine = device.recorded(path, graph_rows, head_kernel=True, **flags)
    assert answer(engine, prompts(), PARAMS["greedy"]) == want
    for made in (host, engine):
        made.close()


@pytest.mark.parametrize("variant", ["gemma3", "smollm3-window"])
def test_pages_behind_windows_go_to_other_rows(
    reference: Callable[[str], Reference], device: Device, variant: str
) -> None:
    """Rows are preempted and hit prefixes; a page that a window has passed is another row's by then."""
    path = reference(variant).path
    flags = SMALL | {"max_total_tokens": 68, "max_running_requests": 12}
    asked = [*prompts(), *(prompt[::-1] for prompt in prompts())]
    host = make_engine(path, **flags)
    want = [answer(host, asked, PARAMS["greedy"], stagger=n) for n in (0, 2)]
    engine = device.recorded(path, 5, poison=True, **flags)
    assert [answer(engine, asked, PARAMS["greedy"], stagger=n) for n in (0, 2)] == want
    assert engine.sched.limits.page_groups, "the pool was meant to have several groups"
    assert engine.sched.report.counters()["retractions_total"] > 0
    assert device.recorder.replays > 20
    for made in (host, engine):
        made.sched.ledger().check_idle(made.sched.limits.num_pages)
        made.close()


def test_rows_of_all_kinds_in_one_recorded_step(
    reference: Callable[[str], Reference], device: Device
) -> None:
    path = reference("llama").path
    host, replayed = make_engine(path), device.recorded(path, 8)
    (tokens, logprobs), (found, found_logprobs) = mixed(host), mixed(replayed)
    assert device.recorder.replays > 0
    assert found == tokens
    assert found_logprobs == [pytest.approx(x, abs=1e-4) for x in logprobs]
    for engine in (host, replayed):
        engine.close()


def test_every_capture_size_and_beyond(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """As many rows at once as 1, 2, … 20, captured sizes 1, 2, 4, 8, 16 and 18: each is used, larger steps are not."""
    path = reference("llama").path
    flags: dict[str, object] = {"max_running_requests": 20, "chunked_prefill_size": 512}
    params = SamplingParams(**{**PLAIN, "max_new_tokens": 4})  # type: ignore[arg-type]
    host, replayed = make_engine(path, **flags), device.recorded(path, 18, **flags)
    assert capture_sizes(18) == (1, 2, 4, 8, 16, 18)
    sizes: set[int] = set()
    eager_rows: set[int] = set()
    made = device.runner
    assert made is not None
    probe = RunnerProbe(made)
    assert probe.graphs is not None
    replay = probe.graphs.replay_step

    def noted(size, n):  # type: ignore[no-untyped-def]
        sizes.add(size)
        return replay(size, n)

    def note_eager(step):  # type: ignore[no-untyped-def]
        if step.num_decode == len(step.slots):
            eager_rows.add(len(step.slots))

    probe.graphs.replay_step = noted
    probe.watch_eager_steps(note_eager)
    for rows in range(1, 21):
        asked = [[rows, i, i + 1] for i in range(rows)]
        assert answer(replayed, asked, params) == answer(host, asked, params)
    assert sizes == {1, 2, 4, 8, 16, 18}
    assert eager_rows == {19, 20}
    for engine in (host, replayed):
        engine.close()


def test_step_whose_pages_do_not_fit_the_buffers_runs_eagerly(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """Rows that share a long prefix name more pages than the pool has twice over."""
    path = reference("llama").path
    flags: dict[str, object] = {"page_size": 1, "max_total_tokens": 400, "max_running_requests": 8}
    shared = [(7 * i) % 250 for i in range(300)]
    asked = [[*shared, i] for i in range(8)]
    params = SamplingParams(**{**PLAIN, "max_new_tokens": 6})  # type: ignore[arg-type]
    host, replayed = make_engine(path, **flags), device.recorded(path, 8, **flags)
    assert device.runner is not None
    graphs = RunnerProbe(device.runner).graphs
    assert graphs is not None
    too_long: list[int] = []
    size_for = graphs.size_for

    def noted(step, indices):  # type: ignore[no-untyped-def]
        size = size_for(step, indices)
        if size is None and step.num_decode == len(step.slots):
            too_long.append(len(indices.page_indices))
        return size

    graphs.size_for = noted
    assert answer(replayed, asked, params) == answer(host, asked, params)
    assert too_long
    assert min(too_long) > 800
    for engine in (host, replayed):
        engine.close()


def test_padding_that_is_written_elsewhere_would_be_noticed(
    reference: Callable[[str], Reference], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the KV of padding rows to overwrite a row's last token, its answer would change."""
    path = reference("llama").path
    params = SamplingParams(**PLAIN)  # type: ignore[arg-type]
    want = answer(make_engine(path), prompts()[:3], params)

    def misplaced(slots: Any, size: int, dummy_page: int, page_size: int) -> Any:
        return np.concatenate((slots, np.full(size - len(slots), slots[0] if len(slots) else 0)))

    assert answer(device.recorded(path, 4), prompts()[:3], params) == want
    monkeypatch.setattr(capture, "pad_slots", misplaced)
    assert answer(device.recorded(path, 4), prompts()[:3], params) != want
