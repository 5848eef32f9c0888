"""Logprobs of prompts against transformers: in chunks, behind cached prefixes, and on the runner of GPUs."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from baton.runtime.engine_loop import EngineLoop
from baton.sched.recording import replay
from baton.sched.types.plan import PromptLogprobs, TokenLogprobs
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest
from tests.parity.conftest import Reference
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import make_engine
from tests.support.engines.executor_ranks import ExecutorProcesses

TOP = 3
IDS = (7, 2, 5)
TOLERANCE = 1e-4
EVERYTHING = SamplingParams(
    max_new_tokens=1, temperature=0.0, logprobs=TOP, prompt_logprobs=TOP, logprob_token_ids=IDS
)
SMALL: dict[str, object] = {"max_total_tokens": 120, "schedule_conservativeness": 0.05}
FLAGS: list[dict[str, object]] = [
    {},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"page_size": 8, "chunked_prefill_size": 16, "disable_overlap_schedule": True},
    {**SMALL, "chunked_prefill_size": 8, "max_running_requests": 3},
]

_handles = itertools.count(1)


@dataclass
class Asked:
    """A request, and the output of the engine for it."""

    prompt: Sequence[int]
    parts: list[PromptLogprobs] = field(default_factory=list)
    answer: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0


def ask(
    engine: EngineLoop,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    disturb: Callable[[list[int]], None] = lambda handles: None,
) -> list[Asked]:
    """Run requests together, and collect their logprobs."""
    asked = {next(_handles): Asked(prompt) for prompt in prompts}
    for (handle, request), wanted in zip(asked.items(), params, strict=True):
        engine.submit(
            ValidatedRequest(
                handle, f"r{handle}", array("i", request.prompt), wanted, arrival=time.monotonic()
            )
        )
    running = set(asked)
    while running:
        disturb(sorted(running))
        outputs, _ = engine.step(time.monotonic())
        for out in outputs:
            assert out.finish is not FinishReason.ERROR, out.error
            request = asked[out.handle]
            request.cached_tokens = out.cached_tokens
            request.tokens.extend(out.tokens)
            if out.prompt_logprobs is not None:
                assert not request.tokens, "prompt logprobs come before the first token"
                request.parts.append(out.prompt_logprobs)
            if out.logprobs is not None:
                request.answer.append(out.logprobs)
            if out.finish is not None:
                running.discard(out.handle)
    while engine.step(time.monotonic())[1]:
        pass
    engine.gauges()
    assert engine.not_accepting_reason is None
    return list(asked.values())


@dataclass
class Table:
    """Records of consecutive positions, column by column."""

    positions: list[int]
    chosen: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray
    of_ids: np.ndarray


def read_parts(parts: list[PromptLogprobs], num_ids: int) -> Table:
    positions = [p for part in parts for p in range(part.position, part.position + part.count)]
    top = parts[0].top
    width = 2 + 2 * top + num_ids
    whole = b"".join(part.records for part in parts)
    integers = np.frombuffer(whole, "<i4").reshape(-1, width)
    floats = np.frombuffer(whole, "<f4").reshape(-1, width)
    return Table(
        positions,
        floats[:, 0],
        integers[:, 1],
        integers[:, 2 : 2 + top],
        floats[:, 2 + top : 2 + 2 * top],
        floats[:, 2 + 2 * top :],
    )


def reference_logprobs(model: Reference, prompt: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(torch.tensor([list(prompt)])).logits[0].float().log_softmax(-1)


def check(asked: Asked, params: SamplingParams, expected: torch.Tensor) -> None:
    """Compare all that was said with transformers' rows."""
    prompt = asked.prompt
    first = params.prompt_logprobs_start
    if len(prompt) <= first:
        assert not asked.parts
        return
    ids = params.logprob_token_ids
    table = read_parts(asked.parts, len(ids))
    assert table.positions == list(range(first, len(prompt))), "each position once, in order"
    rows = expected[first - 1 : len(prompt) - 1]
    targets = torch.tensor(prompt[first:])
    own = rows.gather(1, targets[:, None])
    np.testing.assert_allclose(table.chosen, own[:, 0], atol=TOLERANCE)
    assert (table.ranks == (rows > own).sum(1).numpy() + 1).all()
    top = rows.topk(params.prompt_logprobs)
    np.testing.assert_allclose(table.top, top.values, atol=TOLERANCE)
    assert (table.top_ids == top.indices.numpy()).all()
    np.testing.assert_allclose(table.of_ids, rows[:, list(ids)], atol=TOLERANCE)
    is_best = table.ranks == 1
    if params.prompt_logprobs:
        assert (table.chosen[is_best] == table.top[is_best, 0]).all(), "float-equal"
        assert (table.chosen[~is_best] < table.top[~is_best, 0]).all()
    if params.logprobs >= 0:
        first_answer = asked.answer[0]
        last = expected[len(prompt) - 1]
        assert first_answer.chosen == pytest.approx(float(last[asked.tokens[0]]), abs=TOLERANCE)
        assert list(first_answer.id_logprobs) == pytest.approx(
            last[list(ids)].tolist(), abs=TOLERANCE
        )


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_logprobs_of_transformers(
    reference: Callable[[str], Reference], variant: str, flags: dict[str, object]
) -> None:
    model = reference(variant)
    engine = make_engine(model.path, **flags)
    wanted = [
        EVERYTHING,
        EVERYTHING,
        SamplingParams(
            max_new_tokens=5, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=21
        ),
    ]
    for _ in range(2):
        answers = ask(engine, model.prompts, wanted)
        for asked, params in zip(answers, wanted, strict=True):
            check(asked, params, reference_logprobs(model, asked.prompt))


def test_cached_prefix_ends_before_first_logprob(reference: Callable[[str], Reference]) -> None:
    model = reference("llama")
    engine = make_engine(model.path)
    prompt = model.prompts[2]
    plain = SamplingParams(max_new_tokens=1, temperature=0.0)
    ask(engine, [prompt], [plain])
    expected = reference_logprobs(model, prompt)
    for start, cached in ((1, 0), (4, 0), (5, 4), (22, 20), (49, 48), (50, 48), (51, 48)):
        params = SamplingParams(
            max_new_tokens=1,
            temperature=0.0,
            prompt_logprobs=TOP,
            prompt_logprobs_start=start,
        )
        (asked,) = ask(engine, [prompt], [params])
        assert asked.cached_tokens == cached, start
        check(asked, params, expected)


def test_prompt_suspended_between_chunks_says_each_position_once(
    reference: Callable[[str], Reference],
) -> None:
    model = reference("llama")
    lines: list[str] = []
    engine = make_engine(model.path, trace=lines.append, chunked_prefill_size=8)
    prompts = [model.prompts[2], model.prompts[0]]
    params = [EVERYTHING, SamplingParams(max_new_tokens=3, temperature=0.0, prompt_logprobs=1)]
    turns = itertools.count()

    def suspend_and_resume(handles: list[int]) -> None:
        turn = next(turns)
        if turn % 4 == 2:
            engine.sched.suspend(handles)
        if turn % 4 == 3:
            engine.sched.resume(handles)

    for asked, wanted in zip(ask(engine, prompts, params, suspend_and_resume), params, strict=True):
        check(asked, wanted, reference_logprobs(model, asked.prompt))
    assert engine.sched.counters()["suspensions_total"] >= 4
    replayed = replay(lines)
    assert replayed.difference is None, "logprobs, which recordings leave out, decide nothing"


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_runner_of_gpus(
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, object],
) -> None:
    model = reference("llama")
    engine = Device(monkeypatch).late(model.path, **flags)
    wanted = [EVERYTHING] * len(model.prompts)
    for asked, params in zip(ask(engine, model.prompts, wanted), wanted, strict=True):
        check(asked, params, reference_logprobs(model, asked.prompt))


@pytest.mark.timeout(300)
def test_tensor_parallel_ranks(reference: Callable[[str], Reference]) -> None:
    model = reference("llama")
    executors = ExecutorProcesses(1)
    try:
        with executors.engine(model.path, 2, chunked_prefill_size=16) as engine:
            wanted = [EVERYTHING] * len(model.prompts)
            for asked in ask(engine, model.prompts, wanted):
                check(asked, EVERYTHING, reference_logprobs(model, asked.prompt))
        assert executors.endings == ["stopped"]
    finally:
        executors.close()


def test_logits_of_a_prompt_come_in_slices(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference("llama")
    engine = make_engine(model.path, chunked_prefill_size=512)
    most_rows = []
    decoder = engine.runner._model  # type: ignore[attr-defined]
    compute = decoder.compute_logits

    def count_rows(hidden: torch.Tensor) -> torch.Tensor:
        most_rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(decoder, "compute_logits", count_rows)
    prompt = (model.prompts[2] * 8)[:300]
    (asked,) = ask(engine, [prompt], [EVERYTHING])
    check(asked, EVERYTHING, reference_logprobs(model, prompt))
    assert most_rows == [1, 128, 128, 43]
