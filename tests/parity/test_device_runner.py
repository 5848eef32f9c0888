"""The runner of GPUs on CPU tensors, before a device that is always behind: the tokens of the CPU's runner.

Until a step is waited for, its tokens on the host are garbage: reading too early computes something else.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable

import pytest
import torch

from baton.models.decoder import Decoder
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.runner.step_inputs import decode_step
from baton.sched.types.reasoning import ReasoningPhase
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest
from tests.parity.conftest import Reference
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.grammars.engines import follow_grammars, make_store, request, run_to_end
from tests.support.grammars.reasoning import FORCED_END, make_gate
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import VOCAB
from tests.support.probes import RunnerProbe

STEPS = 20
SMALL: dict[str, object] = {"max_total_tokens": 120, "schedule_conservativeness": 0.05}
FLAGS: list[dict[str, object]] = [
    {},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"disable_overlap_schedule": True},
    {"max_running_requests": 2, "chunked_prefill_size": 12},
    SMALL,
    {**SMALL, "host_kv_gib": 0.01, "preemption_mode": "offload"},
]
PLAIN: dict[str, object] = {"max_new_tokens": STEPS, "seed": 5}
PARAMS: dict[str, SamplingParams] = {
    "greedy": greedy(STEPS),
    "sampled": SamplingParams(**PLAIN, temperature=1.5, top_p=0.9),  # type: ignore[arg-type]
    "min new tokens": SamplingParams(
        max_new_tokens=STEPS, min_new_tokens=9, temperature=0.0, stop_token_ids=(1, 2, 3)
    ),
    "penalties": SamplingParams(
        **PLAIN, temperature=1.2, frequency_penalty=0.8, repetition_penalty=1.2
    ),  # type: ignore[arg-type]
    "bad words": SamplingParams(
        **PLAIN,  # type: ignore[arg-type]
        temperature=1.2,
        allowed_tokens=pack_ids(range(40, 46)),
        bad_words=((40,), (41, 42), (42, 43), (44, 45, 44)),
    ),
    "allowed tokens": SamplingParams(**PLAIN, temperature=1.2, allowed_tokens=pack_ids(range(99))),  # type: ignore[arg-type]
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    return [
        shared[: n // 2] + [rng.randrange(VOCAB) for _ in range(n - n // 2)]
        for n in (1, 4, 16, 17, 33, 64)
    ]


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        pytest.param(flags, kind, marks=[] if not flags or kind == "greedy" else pytest.mark.slow)
        for flags, kind in itertools.product(FLAGS, PARAMS)
    ],
    ids=str,
)
def test_tokens_of_the_cpu(
    reference: Callable[[str], Reference],
    device: Device,
    flags: dict[str, object],
    kind: str,
) -> None:
    """Each kind of parameters with the default flags, all flags with greedy answers; others are slow."""
    path, params = reference("llama").path, PARAMS[kind]
    host = make_engine(path, **flags)
    late = device.late(path, **flags)
    assert answer(late, prompts(), params) == answer(host, prompts(), params)
    for stagger in (1, 3):
        want = answer(host, prompts()[::-1], params, stagger=stagger)
        assert answer(late, prompts()[::-1], params, stagger=stagger) == want, (
            "with joins and prefix hits"
        )
    if "max_total_tokens" in flags:
        assert late.sched.report.counters()["retractions_total"] > 0, (
            "the pool was meant to be too small"
        )
    waits = bool(params.frequency_penalty or params.bad_words)
    assert bool(device.stream.held_up) == waits, (
        "launching waits for earlier tokens only where penalties or bad words look at them"
    )
    for engine in (host, late):
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
        engine.close()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_answers_that_follow_grammars_are_those_of_the_cpu(
    reference: Callable[[str], Reference], device: Device, flags: dict[str, object]
) -> None:
    """Beside free rows, and behind a reasoning that is cut at its limit; the draw of a step waits for the tokens
    before it, its model does not.
    """
    path = reference("llama").path
    store = make_store(path)
    grammar = "start: /[a-z]{2,12}(-[0-9]{1,5}){0,3}/"
    inside = make_gate(ReasoningPhase.INSIDE, budget=4)
    params = [
        SamplingParams(
            max_new_tokens=30, temperature=temperature, seed=seed, grammar=text, reasoning=gate
        )
        for seed, (temperature, text, gate) in enumerate(
            (
                (0.0, grammar, None),
                (1.0, grammar, inside),
                (1.0, "", inside),
                (0.0, "", None),
                (1.3, grammar, None),
                (1.0, grammar, make_gate(ReasoningPhase.UNDECIDED, budget=4)),
            )
        )
    ]
    asked = [prompts()[i] for i in range(len(params))]
    results = []
    for engine in (make_engine(path, **flags), device.late(path, **flags)):
        follow_grammars(engine, store)
        requests = [request(prompt, each) for prompt, each in zip(asked, params, strict=True)]
        results.append(run_to_end(engine, requests))
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
        engine.close()
    assert results[0] == results[1]
    stops = {i for i, answer in enumerate(results[0]) if answer.finish is FinishReason.STOP}
    assert stops >= {0, 4, 5}
    for i in (1, 2):
        assert tuple(results[0][i].tokens[4 : 4 + len(FORCED_END)]) == FORCED_END


def test_rows_with_penalties_beside_rows_without(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """Each request with parameters of its own, all at once; logprobs too."""
    path = reference("llama").path
    results = []
    for engine in (make_engine(path), device.late(path)):
        results.append(mixed(engine))
        engine.close()
    (tokens, logprobs), (device_tokens, device_logprobs) = results
    assert device_tokens == tokens
    assert len(logprobs) == 2 * STEPS
    assert device_logprobs == [pytest.approx(x, abs=1e-5) for x in logprobs]


@pytest.mark.parametrize("graph_rows", [0, 5])
def test_row_with_nan_ends_its_request_as_on_the_cpu(
    reference: Callable[[str], Reference],
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    graph_rows: int,
) -> None:
    path, params = reference("llama").path, greedy(STEPS)
    host = make_engine(path)
    want = answer(host, prompts(), params)
    bad, steps, poison = next(
        (i, k, token)
        for i, tokens in enumerate(want)
        for k, token in enumerate(tokens)
        if k > 2
        and token not in tokens[:k]
        and all(token not in x for x in (*prompts(), *want[:i], *want[i + 1 :]))
    )
    embed = Decoder._embed_tokens
    monkeypatch.setattr(
        Decoder,
        "_embed_tokens",
        lambda self, ids: embed(self, ids).masked_fill((ids == poison)[:, None], torch.nan),
    )
    host.sched.flush_cache()
    late = device.recorded(path, graph_rows) if graph_rows else device.late(path)
    for engine in (host, late):
        got, errors = until_idle(engine, prompts(), params)
        assert got == [*want[:bad], want[bad][: steps + 1], *want[bad + 1 :]]
        assert [(i, error.code) for i, error in errors.items()] == [(bad, "nonfinite_logits")]
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
        engine.close()
    assert host.counters["nonfinite_logits_total"] == late.counters["nonfinite_logits_total"] > 0


def until_idle(
    engine: EngineLoop, prompts: list[list[int]], params: SamplingParams
) -> tuple[list[list[int]], dict[int, tuple[str, str]]]:
    """Tokens of each prompt, and the errors of those that ended with one."""
    got: list[list[int]] = [[] for _ in prompts]
    errors = {}
    for i, prompt in enumerate(prompts):
        engine.submit(ValidatedRequest(i, f"r{i}", array("i", prompt), params))
    busy = True
    while busy:
        outputs, busy = engine.step(time.monotonic())
        for out in outputs:
            got[out.handle] += out.tokens
            if out.error is not None:
                errors[out.handle] = out.error
    return got, errors


def test_other_ranks_get_tokens_that_are_known(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """The first of several tensor-parallel ranks waits for a step's tokens to tell them; who follows computes alike."""
    path, orders = reference("llama").path, []
    first = device.late(path, broadcast=orders.append)
    assert answer(first, prompts(), greedy(STEPS)) == answer(
        make_engine(path), prompts(), greedy(STEPS)
    )
    assert device.stream.held_up > 0
    assert all((decode_step(order)[0].token_ids >= 0).all() for order in orders)
    leader = device.runner
    device.late(path)
    executor = device.runner
    assert leader is not None
    assert executor is not None
    for order in orders:
        executor.execute_remote(order)  # raises StepMismatch where its arrays differ
    assert torch.equal(RunnerProbe(executor).kv_pool.data, RunnerProbe(leader).kv_pool.data)


def mixed(engine: EngineLoop) -> tuple[dict[int, list[int]], list[list[float]]]:
    kinds = [
        {}, {"temperature": 0.0}, {"presence_penalty": 0.9}, {"top_k": 5}, {"temperature": 0.0, "logprobs": 3},
        {"min_p": 0.1, "temperature": 2.0}, {"temperature": 0.0, "repetition_penalty": 1.4}, {"logprobs": 0},
    ]  # fmt: skip
    got: dict[int, list[int]] = {}
    logprobs = []
    for handle, kind in enumerate(kinds, 1):
        params = SamplingParams(**{**PLAIN, **kind})  # type: ignore[arg-type]
        engine.submit(
            ValidatedRequest(handle, f"r{handle}", array("i", prompts()[handle % 6]), params)
        )
        got[handle] = []
    while True:
        outputs, busy = engine.step(time.monotonic())
        for out in outputs:
            got[out.handle] += out.tokens
            if out.logprobs is not None:
                logprobs.append(
                    [float(out.handle), out.logprobs.chosen, *out.logprobs.top_logprobs]
                )
        if not busy:
            return got, logprobs
