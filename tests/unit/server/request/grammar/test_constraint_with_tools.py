"""Constraints of the answer in a request that also has tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import BadRequest, EngineError, UnsupportedParameter
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer

MESSAGE = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
STRUCTURES = {
    "triggers": ["<a>"],
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
}
CONSTRAINTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "regex": ({"regex": "a+"}, "regex", "regular expression"),
    "guided_regex": ({"guided_regex": "a+"}, "guided_regex", "regular expression"),
    "ebnf": ({"ebnf": 'root ::= "a"'}, "ebnf", "grammar"),
    "choice": (
        {"structured_outputs": {"choice": ["a", "b"]}},
        "structured_outputs.choice",
        "choice",
    ),
    "structural_tag": ({"structural_tag": STRUCTURES}, "structural_tag", "structural tag"),
    "response_format": (
        {"response_format": {"type": "structural_tag", **STRUCTURES}},
        "response_format",
        "structural tag",
    ),
}
"""Fields of the request, the one that errors name, and the kind of its constraint."""
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def validator() -> Iterator[RequestValidator]:
    config = build_config({"model_path": "demo"})
    facts = model_info.load(config)
    made = RequestValidator(config, facts, Tokenizer(facts.path))
    yield made
    made.grammars.close()


def chat(validator: RequestValidator, **body: Any) -> AcceptedRequest:
    return asyncio.run(validator.chat({"messages": [MESSAGE], "tools": TOOLS, **body}))


def refusal_of(validator: RequestValidator, **body: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        chat(validator, **body)
    return caught.value


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraint_holds_where_no_tool_may_be_called(
    validator: RequestValidator, name: str
) -> None:
    body, _, _ = CONSTRAINTS[name]
    with_tools = chat(validator, **body, tool_choice="none").items[0].params.grammar
    without = chat(validator, **body, tools=None).items[0].params.grammar
    assert with_tools == without != ""


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraint_of_an_answer_that_may_call_is_refused(
    validator: RequestValidator, name: str
) -> None:
    body, param, kind = CONSTRAINTS[name]
    for choice in (None, "auto"):
        refused = refusal_of(validator, **body, tool_choice=choice)
        assert isinstance(refused, UnsupportedParameter)
        assert refused.param == param
        assert str(refused) == (
            f"{param} together with tools is not supported: an answer that follows a {kind} has no calls; "
            "send a JSON Schema, or tool_choice none"
        )


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraint_of_an_answer_that_must_call_is_refused(
    validator: RequestValidator, name: str, choice: Any
) -> None:
    body, param, _ = CONSTRAINTS[name]
    refused = refusal_of(validator, **body, tool_choice=choice)
    assert isinstance(refused, BadRequest)
    assert refused.param == param
    assert str(refused) == (
        f"{param} and tool_choice exclude each other: the answer is a call; leave one of them out"
    )
