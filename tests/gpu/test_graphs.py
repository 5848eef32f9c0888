"""Recorded decode steps and steps launched ahead, on the device: the same answers, no wait, little idle time."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.runtime.engine_loop import EngineLoop
from baton.runtime.runner.cuda_runner import DeviceRunner
from baton.sched.types.plan import (
    UNKNOWN_TOKEN,
    AdmittedSeq,
    ForwardMode,
    Row,
    StepPlan,
    StopReason,
)
from baton.sched.types.request import SamplingParams, ValidatedRequest
from tests.support.engines.engine_run import make_engine
from tests.support.models import shapes
from tests.support.models.checkpoints import VOCAB, make_checkpoint
from tests.support.probes import RunnerProbe

pytestmark = pytest.mark.timeout(600)  # kernels are compiled at their first use
NEAR = 0.2
"""Two tokens this near in log-probability may change places: kernels round differently for other batch sizes."""
STEPS = 40
FLAGS: dict[str, object] = {
    "device": "cuda", "dtype": "bfloat16", "page_size": 16, "max_total_tokens": 8192, "max_running_requests": 24,
    "attention_backend": "flashinfer",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _flashinfer() -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


@pytest.fixture(scope="module")
def demo() -> str:
    from baton.server.text.model_info import resolve

    return str(resolve("demo"))


def prompts(count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    lengths = itertools.islice(itertools.cycle((1, 3, 16, 17, 33, 70)), count)
    return [
        shared[: n // 2] + [rng.randrange(3, vocab) for _ in range(n - n // 2)] for n in lengths
    ]


Answer = list[tuple[int, float]]
"""Tokens, each with how far the second likeliest was behind."""


def answers(engine: EngineLoop, count: int, vocab: int = 3000, **params: object) -> list[Answer]:
    """One request more every other turn, so that batches of every size come and go."""
    wanted = SamplingParams(max_new_tokens=STEPS, logprobs=2, **params)  # type: ignore[arg-type]
    got: dict[int, Answer] = {i: [] for i in range(1, count + 1)}
    todo, turn = list(enumerate(prompts(count, vocab), 1)), 0
    while True:
        if todo and turn % 2 == 0:
            handle, prompt = todo.pop(0)
            engine.submit(
                ValidatedRequest(
                    handle, f"r{handle}", array("i", prompt), wanted, arrival=time.monotonic()
                )
            )
        outputs, busy = engine.step(time.monotonic())
        turn += 1
        for out in outputs:
            assert out.error is None, out.error
            if out.tokens:
                assert out.logprobs is not None
                first, second = out.logprobs.top_logprobs
                got[out.handle].append((out.tokens[0], first - second))
        if not busy and not todo:
            return [got[i] for i in sorted(got)]


def agree(a: list[Answer], b: list[Answer]) -> None:
    """Token for token up to a near tie, after which two answers go their own ways; half of all tokens at least."""
    same = 0
    for one, other in zip(a, b, strict=True):
        assert len(one) == len(other) == STEPS
        for at, ((x, lead), (y, _)) in enumerate(zip(one, other, strict=True)):
            if x != y:
                assert lead < NEAR, f"token {at}: {x} led by {lead:.3f}, yet {y} came"
                break
            same += 1
    assert same >= 0.5 * STEPS * len(a)


def test_graphs_and_overlap_on_and_off(demo: str) -> None:
    greedy = {"temperature": 0.0, "ignore_eos": True}
    found = {}
    for graphs, overlap in itertools.product((True, False), (True, False)):
        engine = make_engine(
            demo, **FLAGS, disable_cuda_graph=not graphs, disable_overlap_schedule=not overlap
        )
        runner = engine.runner
        assert isinstance(runner, DeviceRunner)
        assert (RunnerProbe(runner).graphs is not None) == graphs
        found[graphs, overlap] = answers(engine, 30, **greedy)
        engine.close()
    agree(found[True, True], found[True, False])
    agree(found[False, True], found[True, True])
    agree(found[False, False], found[False, True])


def test_states_with_graphs_and_without(tmp_path: Path) -> None:
    """Heads of 64, which flashinfer takes."""
    path = make_checkpoint("qwen3.5", tmp_path, dtype="bfloat16", head_dim=64)
    flags = {**FLAGS, "state_snapshot_tokens": 32, "max_total_tokens": 16384}
    found = {}
    for graphs in (True, False):
        engine = make_engine(path, **flags, disable_cuda_graph=not graphs)
        assert isinstance(engine.runner, DeviceRunner)
        assert (RunnerProbe(engine.runner).graphs is not None) == graphs
        found[graphs] = answers(engine, 30, VOCAB, temperature=0.0, ignore_eos=True)
        engine.close()
    agree(found[True], found[False])


def test_every_capture_size_computes_the_same_as_the_eager_step(demo: str) -> None:
    """Logits of one plan, both ways; NaN in the dummy page reaches no row."""
    engine = make_engine(demo, **FLAGS)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    probe = RunnerProbe(runner)
    graphs = probe.graphs
    assert graphs is not None
    kv_pool = probe.kv_pool
    kv_pool.data.normal_()
    assert kv_pool.dummy_page is not None
    kv_pool.data[kv_pool.dummy_page].fill_(torch.nan)
    for rows in range(1, 25):
        plan = decode_plan(rows, first=True)
        step, indices, _ = probe.begin_step(plan)
        assert indices is not None
        size = graphs.size_for(step, indices)
        assert size is not None
        with torch.inference_mode():
            graphs.load_step(size, step, indices)
            replayed, best, _ = graphs.replay_step(size, len(step.slots))
            replayed, best = replayed.clone(), best.clone()
            eager = probe.model.forward(probe.make_batch(step, indices), probe.attention)
        assert torch.isfinite(replayed).all()
        assert torch.equal(replayed.argmax(-1), best)
        spread = eager.std()
        assert ((replayed - eager).abs().max() / spread).item() < 0.1, (
            f"{rows} rows in a graph of {size}"
        )
    engine.close()


def decode_plan(
    rows: int, *, first: bool, step: int = 0, params: SamplingParams | None = None
) -> StepPlan:
    """Rows at positions 5, 26, 47, …, with two to many pages each; `first` brings the pages, tokens are known then."""
    params = params or SamplingParams(temperature=0.0)
    made, admitted, page = [], [], 0
    for slot in range(rows):
        start = 5 + 21 * slot
        count = -(-(start + STEPS) // 16)
        pages = array("i", range(page, page + count))
        page += count
        token = 10 + slot if first else UNKNOWN_TOKEN
        at = (0, pages) if first else (count, array("i"))
        made.append(Row(slot, slot, start + step, 1, True, array("i", [token]), *at))
        admitted.append(AdmittedSeq(slot, slot, params, start + 1, array("i", [7]) * (start + 1)))
    return StepPlan(
        step,
        tuple(made),
        rows,
        tuple(admitted) if first else (),
        array("i"),
        StopReason.QUEUE_EMPTY,
    )


@contextmanager
def no_wait() -> Iterator[None]:
    """Raises when torch makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "head": SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    "unfiltered": SamplingParams(temperature=0.8),
    "sorted": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01),
    "edited": SamplingParams(
        temperature=0.0, logit_bias=((5, 1.0),), min_new_tokens=30, stop_token_ids=(1,)
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
}


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "eager"])
def runner(request: pytest.FixtureRequest, demo: str) -> Iterator[DeviceRunner]:
    engine = make_engine(demo, **FLAGS, disable_cuda_graph=not request.param)
    assert isinstance(engine.runner, DeviceRunner)
    yield engine.runner
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_launching_a_decode_step_waits_for_nothing(runner: DeviceRunner, kind: str) -> None:
    """Four steps ahead of any result; then all of them arrive, in order."""
    plans = [decode_plan(11, first=n == 0, step=n, params=KINDS[kind]) for n in range(6)]
    launched = [
        runner.execute(plan) for plan in plans[:2]
    ]  # caches of pinned memory and of the allocator fill
    with no_wait():
        launched += [runner.execute(plan) for plan in plans[2:]]
    results = [step.wait() for step in launched]
    assert all(len(result.tokens) == 11 and seconds > 0 for result, seconds in results)
    if kind == "logprobs":
        assert all(len(result.logprobs) == 11 for result, _ in results)


def test_no_wait_would_notice() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_wait():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("batch", [1, 32])
def test_idle_time_between_decode_steps(tmp_path: Path, batch: int) -> None:
    """Prints it; only a device that is idle more than half of the time fails. The target is 5 % (qwen3-0.6b)."""
    path = shapes.make("qwen3-0.6b", tmp_path / "m")
    flags = {
        **FLAGS,
        "load_format": "dummy",
        "max_running_requests": batch,
        "max_total_tokens": 40_000,
    }
    shares = {}
    for graphs in (True, False):
        engine = make_engine(path, **flags, disable_cuda_graph=not graphs)
        asked = SamplingParams(max_new_tokens=400, temperature=0.0, ignore_eos=True)
        for handle in range(1, batch + 1):
            prompt = array("i", [handle % 300 + 3] * 64)
            engine.submit(
                ValidatedRequest(handle, f"r{handle}", prompt, asked, arrival=time.monotonic())
            )
        for _ in range(60):
            engine.step(time.monotonic())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(100):
                engine.step(time.monotonic())
            torch.cuda.synchronize()
        shares[graphs] = idle_share(profile)
        engine.close()
    print(
        f"idle between decode steps, batch {batch}: {shares[True]:.1%} with graphs, {shares[False]:.1%} without"
    )
    assert shares[True] < 0.5


def idle_share(profile: torch.profiler.profile) -> float:
    """Idle share of the span from the first piece of device work to the end of the last one."""
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profile.events() or ()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start
    )
    assert len(spans) > 100, "the profiler saw no device work"
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1.0 - busy / (reached - spans[0][0])


def test_steps_with_prompts_run_eagerly_between_recorded_ones(demo: str) -> None:
    engine = make_engine(demo, **FLAGS)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    recorded = RunnerProbe(runner).graphs
    assert recorded is not None
    modes: list[ForwardMode] = []
    replayed: list[int] = []
    execute = runner.execute
    replay = recorded.replay_step
    runner.execute = lambda plan: (modes.append(plan.mode), execute(plan))[1]  # type: ignore[method-assign]
    recorded.replay_step = lambda size, *a: (replayed.append(size), replay(size, *a))[1]
    answers(engine, 10, temperature=0.0)
    assert {ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.EXTEND} <= set(modes)
    assert len(replayed) == modes.count(ForwardMode.DECODE)
    engine.close()
