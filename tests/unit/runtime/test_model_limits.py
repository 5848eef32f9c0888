"""Requests that a model cannot compute end alone, with a typed error, before they join a batch."""

from __future__ import annotations

import dataclasses
import math
import time
from array import array
from typing import Any

import pytest

from baton.errors import BadRequest, EngineError, PromptTooLong
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.model_limits import ModelLimits
from baton.sched.types.request import Rendezvous, SamplingParams, ValidatedRequest
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import VOCAB, make_checkpoint

LIMITS = ModelLimits(vocab_size=VOCAB, max_context=512)
GOOD = ValidatedRequest(1, "r1", array("i", [5, VOCAB - 1]), SamplingParams(max_new_tokens=4))


def changed(prompt: list[int] | None = None, **params: Any) -> ValidatedRequest:
    return dataclasses.replace(
        GOOD,
        prompt=GOOD.prompt if prompt is None else array("i", prompt),
        params=dataclasses.replace(GOOD.params, **params),
    )


BAD = [
    changed([]),
    changed([5, VOCAB]),
    changed([5, 2**31 - 1]),
    changed([-1, 5]),
    changed([-(2**31)]),
    *(changed(temperature=value) for value in (-1.0, math.nan, math.inf)),
    *(changed(top_p=value) for value in (0.0, -1.0, 1.5, math.nan)),
    *(changed(min_p=value) for value in (-0.1, 2.0, math.nan)),
    *(changed(top_k=value) for value in (-1, 2**63)),
    *(changed(repetition_penalty=value) for value in (0.0, -1.0, math.nan, math.inf)),
    *(changed(presence_penalty=value) for value in (math.nan, math.inf)),
    *(changed(frequency_penalty=value) for value in (math.nan, -math.inf)),
    changed(max_new_tokens=0),
    changed(min_new_tokens=-1),
    changed(resumed=3),
    changed(stop_token_ids=(5, -1)),
    changed(logit_bias=((-1, 1.0),)),
    changed(logit_bias=((5, math.nan),)),
    changed(allowed_tokens=bytes(40)),
    changed(allowed_tokens=pack_ids([5, VOCAB])),
    changed(bad_words=((),)),
    changed(bad_words=((5,), (6, -1))),
]


@pytest.mark.parametrize("request_", BAD, ids=str)
def test_value_that_model_cannot_compute_is_refused(request_: ValidatedRequest) -> None:
    with pytest.raises(BadRequest) as caught:
        LIMITS.check_request(request_)
    assert caught.value.code == "invalid_value"


def test_prompt_and_answer_longer_than_model_are_refused() -> None:
    LIMITS.check_request(changed([5] * 508))
    with pytest.raises(PromptTooLong, match="513 tokens together, this model takes 512"):
        LIMITS.check_request(changed([5] * 509))


def test_values_at_the_bounds_are_accepted() -> None:
    for request in (
        changed(temperature=0.0, top_p=1e-30, top_k=2**63 - 1, min_p=1.0),
        changed(repetition_penalty=1e-300, presence_penalty=-2.0),
        changed(allowed_tokens=pack_ids([VOCAB - 1]), bad_words=((VOCAB - 1, 0), (VOCAB + 5,))),
        changed(stop_token_ids=(VOCAB + 5,), logit_bias=((0, -100.0),), resumed=2),
    ):
        LIMITS.check_request(request)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineLoop:
    return make_engine(make_checkpoint("llama", tmp_path_factory.mktemp("model")))


def test_refused_requests_leave_engine_and_others_unharmed(engine: EngineLoop) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    expected = answer(engine, prompts, greedy(6))

    def submit_bad(_: list[int]) -> None:
        for i, request in enumerate(BAD):
            now = time.monotonic()
            with pytest.raises(EngineError):
                engine.submit(dataclasses.replace(request, handle=10**6 + i, arrival=now))

    assert answer(engine, prompts, greedy(6), disturb=submit_bad) == expected
    assert engine.sched.is_idle


def test_extreme_parameters_that_requests_may_state_are_served(engine: EngineLoop) -> None:
    params = SamplingParams(
        max_new_tokens=4, repetition_penalty=1e-300, top_p=0.9, temperature=1.0, ignore_eos=True
    )
    assert [len(tokens) for tokens in answer(engine, [[5, 6], [7]], params)] == [4, 4]


class _Driver:
    """Records what the transfer runtime of a P node is asked for."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def accept(self, req: ValidatedRequest) -> None: ...

    def refuse(self, req: ValidatedRequest, error: EngineError) -> None:
        self.refused.append(error.code)


def test_refusal_reaches_the_other_node_of_the_pair(
    engine: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _Driver()
    monkeypatch.setattr(engine, "driver", driver)
    meet = Rendezvous("127.0.0.1", 1, 7)
    with pytest.raises(BadRequest):
        engine.submit(dataclasses.replace(BAD[1], rendezvous=meet))
    assert driver.refused == ["invalid_value"]
