"""Text of a constrained answer: what its grammar has counted, in every API, streamed and whole, resumed too."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from baton.server.text.answer_spec import Dialect
from tests.support.engines.local_engine import LocalEngine, ReadAnswer, read_stream
from tests.support.models.chain_model import IDS, PLAIN_TEMPLATE, TEMPLATE, make_chain_checkpoint

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"guided_choice": [" Paris", " Rome"]}, r" (Paris|Rome)"),
    "choice_with_and_without": ({"guided_choice": [" yes", "no-no", "yes_"]}, r" yes|no-no|yes_"),
    "regex": ({"guided_regex": "  ?(yes|no)"}, r"  ?(yes|no)"),
    "blanks": ({"guided_regex": " {3,5}Rome"}, r" {3,5}Rome"),
    "grammar": ({"guided_grammar": 'root ::= " " [a-z]{1,9} "."'}, r" [a-z]{1,9}\."),
    "newlines": ({"guided_choice": ["\nyes", "\n\nno", "\n\n\nyes"]}, r"\n(yes|\nno|\n\nyes)"),
    "no_blank": ({"guided_choice": ["Paris", "Rome"]}, r"Paris|Rome"),
}
"""A constraint, and a regular expression for the whole content."""
SEEDS = range(4)
CHATS = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=["plain", "reasons", "reasons, special markers"])
def local(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    """Models like Llama 2: one that does not reason, and two that do."""
    path = make_chain_checkpoint(
        tmp_path_factory.mktemp("chain") / "chain",
        template=PLAIN_TEMPLATE if request.param == "plain" else TEMPLATE,
        are_markers_special="special" in request.param,
    )
    engine = LocalEngine(path)
    yield engine
    engine.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("api", [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.GENERATE])
def test_content_matches_its_constraint(local: LocalEngine, api: Dialect, form: str) -> None:
    constraint, pattern = FORMS[form]
    for seed in SEEDS:
        answer = local.read(api, body_of(api, constraint, seed=seed, temperature=1.5))
        assert answer.finish == "stop"
        assert re.fullmatch(pattern, answer.content), answer


def body_of(api: Dialect, constraint: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 60, **sampling}
    if api is Dialect.CHAT:
        return {"messages": CHATS, **sampling, **constraint}
    if api is Dialect.COMPLETIONS:
        return {"prompt": [1], **sampling, **constraint}  # <s> alone: a context without text
    sampling["sampling_seed"] = sampling.pop("seed", 0)
    names = {"guided_regex": "regex", "guided_grammar": "ebnf"}
    if "guided_choice" in constraint:
        choices = constraint["guided_choice"]
        constraint = {"guided_regex": "|".join(map(re.escape, choices))}
    nested = {names[key]: value for key, value in constraint.items()}
    return {"text": "go", "sampling_params": {**sampling, **nested}}


def test_free_chat_answer_is_decoded_as_transformers_does(local: LocalEngine) -> None:
    """Alone: without the blank of its first token, unless a reasoning stands in front."""
    body = {"messages": CHATS, "temperature": 0, "max_tokens": 20}
    answer = local.read(Dialect.CHAT, body)
    assert answer.reasoning in ("", "ha bb")
    assert answer.content.removeprefix(" " if answer.reasoning else "") == "alpha beta gamma"
    limited = local.read(Dialect.CHAT, {**body, "thinking_token_budget": 1})
    assert limited.content.endswith("alpha beta gamma")


def test_reasoning_in_front_of_a_constraint_is_read_as_a_free_one(local: LocalEngine) -> None:
    body = {"messages": CHATS, "temperature": 0, "max_tokens": 60}
    free = local.read(Dialect.CHAT, body)
    constrained = local.read(Dialect.CHAT, {**body, "guided_regex": "[a-z ]{6}"})
    assert constrained.reasoning == free.reasoning
    assert constrained.content == " alpha"
    limit = {"thinking_token_budget": 0, "guided_choice": [" yes", "\n\nno"]}
    assert re.fullmatch(r" yes|\n\nno", local.read(Dialect.CHAT, {**body, **limit}).content)


@pytest.mark.parametrize("form", ["choice", "blanks", "newlines"])
def test_resumed_answer_goes_on_where_it_was(local: LocalEngine, form: str) -> None:
    """At every token: what the client has, and what the second engine sends, is the whole answer."""
    constraint, pattern = FORMS[form]
    body = {
        **body_of(Dialect.CHAT, constraint, seed=3, temperature=1.5),
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    steps = list(steps_of(local.ask(Dialect.CHAT, body)))
    ids = [token for tokens, _ in steps for token in tokens]
    content = "".join(text for _, text in steps)
    assert re.fullmatch(pattern, content)
    for count in range(1, len(ids)):
        sent = "".join(
            text
            for (_, text), before in zip(
                steps, itertools.accumulate(len(tokens) for tokens, _ in steps), strict=True
            )
            if before <= count
        )
        resume = {"ids": ids[:count], "seed": 3, "created": 1}
        rest = read_stream(
            Dialect.CHAT, local.ask(Dialect.CHAT, {**body, "baton_resume": resume})
        ).content
        assert sent + rest == content


def steps_of(stream: bytes) -> Iterator[tuple[list[int], str]]:
    """Token ids and content of each event of a chat's stream."""
    for line in stream.decode().split("\n"):
        data = line.removeprefix("data: ")
        if data not in ("", "[DONE]"):
            for choice in json.loads(data)["choices"]:
                yield choice.get("token_ids") or [], choice["delta"].get("content") or ""


@pytest.mark.parametrize("api", [Dialect.RESPONSES, Dialect.MESSAGES])
def test_translated_answers_match_their_constraint(local: LocalEngine, api: Dialect) -> None:
    for form in ("choice", "newlines"):
        constraint, pattern = FORMS[form]
        for seed in SEEDS:
            body: dict[str, Any] = {
                "model": "chain",
                "seed": seed,
                "temperature": 1.5,
                **constraint,
            }
            if api is Dialect.RESPONSES:
                body |= {"input": "hi", "max_output_tokens": 60}
            else:
                body |= {"messages": CHATS, "max_tokens": 60}
            answer = local.read(api, body)
            assert re.fullmatch(pattern, answer.content), answer


TOOL_TEMPLATE = PLAIN_TEMPLATE.replace(
    "{% for", "{% if tools %}{{ tools | tojson }}{% endif %}{% for"
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """A model like Llama 2 that calls tools."""
    path = make_chain_checkpoint(tmp_path_factory.mktemp("calls") / "chain", template=TOOL_TEMPLATE)
    engine = LocalEngine(path, tool_parser="json")
    yield engine
    engine.close()


def tool(*, is_strict: bool) -> dict[str, Any]:
    city = {"type": "string", "enum": [" Paris", "Rome "]}
    parameters = {
        "type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    return {
        "type": "function",
        "function": {"name": "f", "parameters": parameters, "strict": is_strict},
    }


def test_arguments_of_forced_calls_are_what_their_schema_counts(caller: LocalEngine) -> None:
    for seed in SEEDS:
        body = {
            "messages": CHATS, "tools": [tool(is_strict=True)], "tool_choice": "required", "seed": seed,
            "temperature": 1.5, "max_tokens": 90, "parallel_tool_calls": False,
        }  # fmt: skip
        answer = json.loads(caller.ask(Dialect.CHAT, body))["choices"][0]["message"]
        (call,) = answer["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in (" Paris", "Rome ")


@pytest.mark.parametrize("is_strict", [False, True])
def test_text_beside_strict_calls_is_what_their_grammar_counts(
    caller: LocalEngine, is_strict: bool
) -> None:
    body = {
        "messages": CHATS,
        "tools": [tool(is_strict=is_strict)],
        "temperature": 0,
        "max_tokens": 20,
    }
    expected = ReadAnswer(
        " alpha beta gamma" if is_strict else "alpha beta gamma", "", "stop", IDS["</s>"]
    )
    assert caller.read(Dialect.CHAT, body) == expected
