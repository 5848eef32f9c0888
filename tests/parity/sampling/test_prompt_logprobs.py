"""Logprobs of prompts against transformers: in chunks, behind cached prefixes, and on the runner of GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from baton.sched.recording import replay
from baton.sched.types.request import SamplingParams
from tests.parity.conftest import Reference
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import make_engine
from tests.support.engines.executor_ranks import ExecutorProcesses
from tests.support.engines.prompt_logprobs import (
    EVERYTHING,
    TOP,
    ask,
    check_logprobs,
    reference_logprobs,
)
from tests.support.probes import RunnerProbe

SMALL: dict[str, object] = {"max_total_tokens": 120, "schedule_conservativeness": 0.05}
FLAGS: list[dict[str, object]] = [
    {},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"page_size": 8, "chunked_prefill_size": 16, "disable_overlap_schedule": True},
    {**SMALL, "chunked_prefill_size": 8, "max_running_requests": 3},
]


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
            check_logprobs(asked, params, reference_logprobs(model.model, asked.prompt))


def test_cached_prefix_ends_before_first_logprob(reference: Callable[[str], Reference]) -> None:
    model = reference("llama")
    engine = make_engine(model.path)
    prompt = model.prompts[2]
    plain = SamplingParams(max_new_tokens=1, temperature=0.0)
    ask(engine, [prompt], [plain])
    expected = reference_logprobs(model.model, prompt)
    for start, cached in ((1, 0), (4, 0), (5, 4), (22, 20), (49, 48), (50, 48), (51, 48)):
        params = SamplingParams(
            max_new_tokens=1,
            temperature=0.0,
            prompt_logprobs=TOP,
            prompt_logprobs_start=start,
        )
        (asked,) = ask(engine, [prompt], [params])
        assert asked.cached_tokens == cached, start
        check_logprobs(asked, params, expected)


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
        check_logprobs(asked, wanted, reference_logprobs(model.model, asked.prompt))
    assert engine.sched.report.counters()["suspensions_total"] >= 4
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
        check_logprobs(asked, params, reference_logprobs(model.model, asked.prompt))


@pytest.mark.timeout(300)
def test_tensor_parallel_ranks(reference: Callable[[str], Reference]) -> None:
    model = reference("llama")
    executors = ExecutorProcesses(1)
    try:
        with executors.engine(model.path, 2, chunked_prefill_size=16) as engine:
            wanted = [EVERYTHING] * len(model.prompts)
            for asked in ask(engine, model.prompts, wanted):
                check_logprobs(asked, EVERYTHING, reference_logprobs(model.model, asked.prompt))
        assert executors.endings == ["stopped"]
    finally:
        executors.close()


def test_logits_of_a_prompt_come_in_slices(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference("llama")
    engine = make_engine(model.path, chunked_prefill_size=512)
    most_rows = []
    decoder = RunnerProbe(engine.runner).model
    compute = decoder.compute_logits

    def count_rows(hidden: torch.Tensor) -> torch.Tensor:
        most_rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(decoder, "compute_logits", count_rows)
    prompt = (model.prompts[2] * 8)[:300]
    (asked,) = ask(engine, [prompt], [EVERYTHING])
    check_logprobs(asked, EVERYTHING, reference_logprobs(model.model, prompt))
    assert most_rows == [1, 128, 128, 43]
