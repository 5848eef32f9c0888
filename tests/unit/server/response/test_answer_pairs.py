"""Features of answers in pairs, with each other and with those of an engine, in one process: the answer of a pair has
what each of the two gives alone (tests/fault/promises/feature_pairs.py lists them).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.server.text.answer_spec import Dialect
from tests.support.engines.local_engine import LocalEngine
from tests.support.engines.naive_calls import TOOL
from tests.support.models.chain_model import (
    CALL_CHAIN,
    CALL_TEMPLATE,
    THINK,
    make_chain_checkpoint,
)
from tests.support.sched.kv_replay import Consumer, settled_prefixes

PAGE = 4
GRAMMAR: dict[str, Any] = {"guided_regex": " alpha( belta)?"}
TOOLS: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"end": THINK}}
CHOICES: dict[str, Any] = {"n": 3}
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
PROMPTS: dict[str, Any] = {"prompt_logprobs": 2}
FEATURES = {
    "grammar": GRAMMAR,
    "tools": TOOLS,
    "choices": CHOICES,
    "logprobs": LOGPROBS,
    "prompts": PROMPTS,
}
"""As feature_pairs.py names them."""
TENANTS = {"tenants": {"lab": {"weight": 2}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "chain"
    return make_chain_checkpoint(folder, template=CALL_TEMPLATE, chain=CALL_CHAIN)


def start(path: Path, **flags: Any) -> LocalEngine:
    return LocalEngine(path, tool_parser="hermes", reasoning_parser="think_tags", **flags)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LocalEngine]:
    engine = start(path)
    yield engine
    engine.close()


def body_of(*features: dict[str, Any], seed: int = 7) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "the relay race of the year"}],
        "chat_template_kwargs": {"end": "c"},
        "max_tokens": 12,
        "temperature": 2.5,
        "seed": seed,
        "return_token_ids": True,
    }
    for feature in features:
        body |= feature
    return body


def ask(local: LocalEngine, body: dict[str, Any]) -> dict[str, Any]:
    """The answer without what differs from one request to the next."""
    answer: dict[str, Any] = json.loads(local.ask(Dialect.CHAT, body))
    for name in ("id", "created", "usage"):
        del answer[name]
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]
    return answer


def answer_parts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What each choice says, without its logprobs."""
    names = ("message", "finish_reason", "matched_stop", "token_ids")
    return [{name: choice[name] for name in names} for choice in answer["choices"]]


# ---- two features of answers -------------------------------------------------------------------------------------

PAIRS = [
    pair for pair in itertools.combinations(FEATURES, 2) if pair != ("grammar", "tools")
]  # both at once: tests/e2e/api/test_forced_calls.py


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_answer_of_a_pair_has_what_each_gives_alone(
    plain: LocalEngine, first: str, second: str
) -> None:
    both = body_of(FEATURES[first], FEATURES[second])
    answer = ask(plain, both)
    is_of_several = "choices" in (first, second)
    for number, choice in enumerate(answer_parts(answer)):
        alone = {**both, "seed": both["seed"] + number}
        for name in ("n", "logprobs", "top_logprobs", "prompt_logprobs"):
            alone.pop(name, None)
        assert [choice] == answer_parts(ask(plain, alone))
    assert len(answer["choices"]) == (3 if is_of_several else 1)
    if "logprobs" in (first, second):
        for number, choice in enumerate(answer["choices"]):
            rows = choice["logprobs"]["content"]
            assert [len(row["top_logprobs"]) for row in rows] == [2] * len(choice["token_ids"])
            alone = {**body_of(LOGPROBS), "seed": both["seed"] + number}
            if first == "choices":
                assert rows == ask(plain, alone)["choices"][0]["logprobs"]["content"]
    if "prompts" in (first, second):
        rows = answer["prompt_logprobs"]
        assert len(rows) == len(answer["prompt_token_ids"])
        assert rows[0] is None
        assert all(len(row) in (2, 3) for row in rows[1:])
        if "tools" not in (first, second):
            assert rows == ask(plain, body_of(PROMPTS))["prompt_logprobs"]


def test_answers_of_the_features_differ(plain: LocalEngine) -> None:
    """Without this the test above could compare equal things."""
    answers = [ask(plain, body_of(feature)) for feature in (GRAMMAR, TOOLS, {})]
    assert len({json.dumps(answer_parts(answer)) for answer in answers}) == 3
    (called,) = ask(plain, body_of(TOOLS, {"temperature": 0}))["choices"]
    assert called["message"]["tool_calls"][0]["function"]["arguments"] == '{"x":7}'
    assert called["message"]["reasoning_content"] == "ha bb"
    texts = {choice["message"]["content"] for choice in ask(plain, body_of(CHOICES))["choices"]}
    assert len(texts) > 1


# ---- features of the engine ----------------------------------------------------------------------------------------

FLAGS: dict[str, dict[str, Any]] = {
    "host": {"max_total_tokens": 160, "host_kv_gib": 0.002},
    "tenants": {"priority_classes": "gold:2,bronze:1", "tenant_config": json.dumps(TENANTS)},
    "events": {"kv_events_config": '{"enable_kv_cache_events": true, "publisher": "null"}'},
    "preempt": {},
}
OF_LAB = {"priority_class": "gold", "tenant": "lab"}


def flags_of(*features: str) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for feature in features:
        flags |= FLAGS[feature]
    return flags


def copied_in(local: LocalEngine) -> float:
    """Pages that came back from the host."""
    return local.engine.counters['kv_host_copies_total{direction="in"}']


def evict_pages(local: LocalEngine) -> None:
    """Let other prompts take the device's pages; those of the prompts before go to the host."""
    for letter in "abcdefgh":
        local.ask(Dialect.COMPLETIONS, {"prompt": letter * 100, "max_tokens": 1})


def suspend_always(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Suspend and resume all requests before each step; returns how many it were, step by step."""
    take_step = local.ranks.step
    suspended: list[int] = []

    def disturb() -> None:
        handles = list(local.ranks.ranks[0].items)
        suspended.append(local.engine.sched.suspend(handles))
        local.engine.sched.resume(handles)
        take_step()

    monkeypatch.setattr(local.ranks, "step", disturb)
    return suspended


def check_charge(local: LocalEngine, answer: dict[str, Any]) -> None:
    generated = sum(len(choice["token_ids"]) for choice in answer["choices"])
    counters = local.engine.sched.sharing.counters()
    assert counters['tenant_tokens_total{tenant="lab",kind="generated"}'] == generated


def check_events(local: LocalEngine) -> None:
    """All events so far, to a reader that knows nothing else, name what is cached."""
    log = local.engine.sched.kv_events
    assert log is not None
    consumer = Consumer(PAGE * 4)
    batch = log.take_batch(0.0)
    assert batch is not None
    for event in batch.events:
        consumer.apply(event)
    cached = settled_prefixes(local.engine.sched._state.memory.cache)
    assert consumer.prefixes == cached
    assert len(cached) >= len("the relay race") // PAGE


@pytest.mark.parametrize("feature", FEATURES)
def test_answer_behind_pages_of_the_host_is_the_plain_one(
    plain: LocalEngine, path: Path, feature: str
) -> None:
    local = start(path, **flags_of("host"))
    body = body_of(FEATURES[feature])
    expected = ask(plain, body)
    assert ask(local, body) == expected
    evict_pages(local)
    before = copied_in(local)
    assert ask(local, body) == expected
    used = copied_in(local) - before
    # A prompt whose logprobs are asked for is computed again.
    assert used > 0 if feature != "prompts" else used == 0
    local.close()


@pytest.mark.parametrize("feature", FEATURES)
def test_answer_that_is_suspended_again_and_again_is_the_plain_one(
    plain: LocalEngine, path: Path, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = start(path)
    suspended = suspend_always(local, monkeypatch)
    body = body_of(FEATURES[feature])
    assert ask(local, body) == ask(plain, body)
    assert sum(suspended) > 3
    local.close()


@pytest.mark.parametrize("feature", FEATURES)
def test_answer_of_a_tenants_class_is_the_plain_one_and_charged(
    plain: LocalEngine, path: Path, feature: str
) -> None:
    local = start(path, **flags_of("tenants"))
    body = body_of(FEATURES[feature])
    answer = ask(local, body | OF_LAB)
    assert answer == ask(plain, body)
    check_charge(local, answer)
    local.close()


@pytest.mark.parametrize("feature", FEATURES)
def test_events_of_an_answer_name_what_is_cached(
    plain: LocalEngine, path: Path, feature: str
) -> None:
    local = start(path, **flags_of("events"))
    body = body_of(FEATURES[feature])
    assert ask(local, body) == ask(plain, body)
    check_events(local)
    local.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [("host", "tenants"), ("host", "events"), ("tenants", "events"), ("preempt", "events")],
)
def test_engine_with_two_features_has_both(
    plain: LocalEngine, path: Path, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = (first, second)
    local = start(path, **flags_of(*features))
    suspended = suspend_always(local, monkeypatch) if "preempt" in features else [9]
    body = body_of()
    expected = ask(plain, body)
    if "host" in features:
        assert ask(local, body) == expected
        evict_pages(local)
    before = copied_in(local)
    assert ask(local, body | OF_LAB if "tenants" in features else body) == expected
    if "host" in features:
        assert copied_in(local) > before
    if "tenants" in features:
        check_charge(local, expected)
    if "events" in features:
        check_events(local)
    assert sum(suspended) > 3
    local.close()


def test_only_a_single_answer_is_resumable(plain: LocalEngine) -> None:
    """Several choices end with an error event where their node dies."""
    body = {**body_of(), "stream": True}
    alone = plain._loop.run_until_complete(plain.validator.chat(body))
    several = plain._loop.run_until_complete(plain.validator.chat({**body, **CHOICES}))
    assert alone.is_resumable(Dialect.CHAT)
    assert not several.is_resumable(Dialect.CHAT)
