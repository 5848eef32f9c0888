"""Ends of answers: each pair of conditions and settings, streamed and whole, against a naive model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BadRequest
from baton.server.text.answer_spec import Dialect
from tests.support.engines.local_engine import LocalEngine, ReadAnswer
from tests.support.engines.naive_calls import call_body, call_cases, naive_call_answer
from tests.support.engines.naive_ends import (
    GRAMMAR,
    LONG,
    OPEN_GRAMMAR,
    api_body,
    chat_cases,
    naive_answer,
    prompt_end_of,
    settings_of,
    text_cases,
)
from tests.support.models.chain_model import (
    CALL_CHAIN,
    CALL_TEMPLATE,
    EOS,
    IDS,
    make_chain_checkpoint,
)
from tests.support.pairwise import Case


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    engine = LocalEngine(make_chain_checkpoint(tmp_path_factory.mktemp("chain") / "chain"))
    yield engine
    engine.close()


def check_case(local: LocalEngine, api: Dialect, case: Case) -> None:
    settings = settings_of(case)
    end = case.get("end", "")
    body = api_body(api, settings, end)
    assert local.read(api, body) == naive_answer(settings, prompt_end_of(api, end)), body


def check_all(local: LocalEngine, texts: list[Case], chats: list[Case]) -> None:
    for number, case in enumerate(texts):
        check_case(local, (Dialect.COMPLETIONS, Dialect.GENERATE)[number % 2], case)
    for case in chats:
        check_case(local, Dialect.CHAT, case)


def test_pairs_of_conditions_and_settings(local: LocalEngine) -> None:
    """Every pair of values, in few answers."""
    check_all(local, text_cases(), chat_cases())


def test_pairs_of_conditions_and_settings_with_drafts(tmp_path: Path) -> None:
    """Answers end inside runs of tokens where they end without drafts."""
    local = LocalEngine(make_chain_checkpoint(tmp_path / "chain"), speculative_algorithm="NGRAM")
    sched = local.engine.sched
    # Without measured times each draft counts as free.
    sched.observe = lambda *_: None  # type: ignore[method-assign]
    check_all(local, text_cases(), chat_cases())
    assert sched.stats.counters()["spec_decode_num_accepted_tokens_total"] > 0
    local.close()


@pytest.mark.slow
def test_all_conditions_and_settings(local: LocalEngine) -> None:
    check_all(local, text_cases(is_whole=True), chat_cases(is_whole=True))


def text(content: str, finish: str, matched: int | str | None) -> ReadAnswer:
    return ReadAnswer(content, "", finish, matched)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # vLLM 0.33: `check_stop_strings` looks at what the tokens behind min_tokens complete.
        ({"stop": ["ha b"], "min_tokens": 2}, text(" alp", "stop", "ha b")),
        ({"stop": ["ha b"], "min_tokens": 3}, text(" alpha beta gamma", "stop", EOS)),
        ({"stop": ["a be", "ta"], "min_tokens": 3}, text(" alpha be", "stop", "ta")),
        # vLLM 0.33, `check_stop`: a stop id goes before the limit, and min_tokens before both.
        ({"stop_token_ids": [IDS["ta"]], "max_tokens": 4}, text(" alpha be", "stop", IDS["ta"])),
        ({"stop": ["ta"], "max_tokens": 4}, text(" alpha be", "stop", "ta")),
        ({"max_tokens": 4}, text(" alpha beta", "length", None)),
        ({"min_tokens": 7}, text(" alpha beta gamma delta alpha beta gamma", "stop", EOS)),
        ({"ignore_eos": True, "max_tokens": 8}, text(" alpha beta gamma de", "length", None)),
        # A grammar's end ends, whatever else would go on.
        ({"pattern": GRAMMAR, "ignore_eos": True, "min_tokens": 9}, text(GRAMMAR, "stop", None)),
        ({"pattern": OPEN_GRAMMAR, "ignore_eos": True, "min_tokens": 9, "skip_special_tokens": False},
         text(" alpha beta gamma", "stop", EOS)),
        ({"pattern": GRAMMAR, "stop": ["a b"]}, text(" alph", "stop", "a b")),
        ({"pattern": GRAMMAR, "stop_token_ids": [IDS["ta"]]}, text(" alpha be", "stop", IDS["ta"])),
        ({"pattern": GRAMMAR, "stop_token_ids": [IDS["ta"]], "min_tokens": 9}, text(GRAMMAR, "stop", None)),
        ({"pattern": GRAMMAR, "max_tokens": 3}, text(" alpha be", "length", None)),
    ],
)  # fmt: skip
def test_peers_results(local: LocalEngine, settings: dict[str, Any], expected: ReadAnswer) -> None:
    settings = {"max_tokens": LONG, **settings}
    for api in (Dialect.COMPLETIONS, Dialect.GENERATE):
        assert local.read(api, api_body(api, settings, "o")) == expected
    assert naive_answer(settings, "o") == expected


def test_limit_below_the_least_length_is_refused(local: LocalEngine) -> None:
    body = api_body(Dialect.COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}, "o")
    with pytest.raises(BadRequest, match="min_tokens"):
        local.ask(Dialect.COMPLETIONS, body)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    path = make_chain_checkpoint(
        tmp_path_factory.mktemp("calls") / "chain", template=CALL_TEMPLATE, chain=CALL_CHAIN
    )
    engine = LocalEngine(path, tool_parser="hermes", reasoning_parser="think_tags")
    yield engine
    engine.close()


def check_calls(caller: LocalEngine, cases: list[Case]) -> None:
    for case in cases:
        body = call_body(case)
        assert caller.read(Dialect.CHAT, body) == naive_call_answer(case), case


def test_pairs_of_conditions_with_a_call(caller: LocalEngine) -> None:
    """Every pair of values, of which one may be that of the only call."""
    check_calls(caller, call_cases())


@pytest.mark.slow
def test_many_conditions_with_a_call(caller: LocalEngine) -> None:
    """A sample of the 52,800 combinations, which take 25 ms each."""
    cases = random.Random(11).sample(call_cases(is_whole=True), 3000)
    check_calls(caller, cases)
