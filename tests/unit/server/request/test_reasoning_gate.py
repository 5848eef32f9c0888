"""Gates of answers that reason, and the fields that limit their reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import BadRequest, EngineError, UnsupportedParameter
from baton.runtime.grammar.reasoning_tracker import tokens_of_answer
from baton.sched.types.reasoning import ReasoningGate, ReasoningPhase
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer

THINK, THINK_END, CALL = 3072, 3073, 3074
SCHEMA = {"response_format": {"type": "json_object"}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
OFF = {"enable_thinking": False}
MESSAGE = {"role": "user", "content": "hello"}
BEGUN = [MESSAGE, {"role": "assistant", "content": "<think>\nThe user"}]
Make = Callable[..., RequestValidator]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RequestValidator] = []

    def validator(**flags: Any) -> RequestValidator:
        config = build_config({"model_path": "demo", **flags})
        facts = model_info.load(config)
        made.append(RequestValidator(config, facts, Tokenizer(facts.path)))
        return made[-1]

    yield validator
    for each in made:
        each.grammars.close()


def chat(validator: RequestValidator, **body: Any) -> AcceptedRequest:
    return asyncio.run(validator.chat({"messages": [MESSAGE], **body}))


def generate(validator: RequestValidator, **sampling: Any) -> AcceptedRequest:
    return asyncio.run(validator.generate({"text": ["a", "b<think>"], "sampling_params": sampling}))


def gate_of(accepted: AcceptedRequest) -> ReasoningGate | None:
    return accepted.items[0].params.reasoning


def test_plain_answers_have_no_gate(make: Make) -> None:
    validator = make()
    assert gate_of(chat(validator)) is None
    assert gate_of(generate(validator, regex="a")) is None
    accepted = asyncio.run(validator.completion({"prompt": "<think>", "regex": "a"}))
    assert gate_of(accepted) is None


@pytest.mark.parametrize(
    ("body", "start", "has_text"),
    [
        (SCHEMA, ReasoningPhase.UNDECIDED, False),
        ({**SCHEMA, **OFF}, ReasoningPhase.BEHIND, False),
        ({"thinking_token_budget": 7}, ReasoningPhase.UNDECIDED, False),
        (
            {**SCHEMA, "messages": BEGUN, "continue_final_message": True},
            ReasoningPhase.INSIDE,
            True,
        ),
    ],
)
def test_gate_begins_where_the_prompt_ends(
    make: Make, body: dict[str, Any], start: ReasoningPhase, has_text: bool
) -> None:
    gate = gate_of(chat(make(), **body))
    assert gate is not None
    assert (gate.start, gate.has_text) == (start, has_text)
    assert [marker.ids for marker in gate.begins] == [(THINK,)]
    assert [marker.ids for marker in gate.ends] == [(THINK_END,)]
    assert gate.call_ids == (CALL,)
    assert not gate.is_ended_by_calls
    assert gate.budget == body.get("thinking_token_budget")


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": 0}, 0),
        ({"custom_params": {"thinking_budget": 6}}, 6),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ({"thinking_token_budget": 5, "custom_params": {"thinking_budget": 6}}, 5),
        ({"thinking_token_budget": -1}, None),
        ({"custom_params": {}}, None),
    ],
    ids=str,
)
def test_fields_of_the_limit(make: Make, fields: dict[str, Any], budget: int | None) -> None:
    accepted = chat(make(), **fields)
    gate = gate_of(accepted)
    assert accepted.ignored == ()
    if budget is None:
        assert gate is None
        return
    assert gate is not None
    assert gate.budget == budget
    tokenizer = Tokenizer(model_info.resolve("demo"))
    assert tokenizer.decode(gate.forced_end, skip_special_tokens=False) == "\n</think>\n\n"


def test_each_prompt_of_generate_has_its_own_start(make: Make) -> None:
    accepted = generate(make(), custom_params={"thinking_budget": 3})
    gates = [item.params.reasoning for item in accepted.items]
    starts = [gate.start for gate in gates if gate is not None]
    assert starts == [ReasoningPhase.UNDECIDED, ReasoningPhase.INSIDE]


@pytest.mark.parametrize(
    "flags", [{"reasoning_parser": "none"}, {"grammar": "off"}, {"simulate": "reference"}], ids=str
)
def test_limit_without_effect_is_named(make: Make, flags: dict[str, Any]) -> None:
    validator = make(**flags)
    accepted = chat(validator, thinking_token_budget=5)
    assert gate_of(accepted) is None
    assert accepted.ignored == ("thinking_token_budget",)
    sampling = {"custom_params": {"thinking_budget": 3}}
    assert generate(validator, **sampling).ignored == (
        "sampling_params.custom_params.thinking_budget",
    )


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({"thinking_token_budget": -2}, BadRequest, "thinking_token_budget"),
        ({"thinking_token_budget": "5"}, BadRequest, "thinking_token_budget"),
        ({"custom_params": 5}, BadRequest, "custom_params"),
        (
            {"custom_params": {"thinking_budget": -2}},
            BadRequest,
            "custom_params.thinking_budget",
        ),
        ({"custom_params": {"x": 1}}, UnsupportedParameter, "custom_params.x"),
        ({"thinking": {"budget_tokens": True}}, BadRequest, "thinking.budget_tokens"),
    ],
    ids=str,
)
def test_wrong_limits_are_named(
    make: Make, body: dict[str, Any], kind: type[EngineError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        chat(make(), **body)
    assert caught.value.param == param


def test_gpt_oss_answers_in_the_final_channel(make: Make) -> None:
    """Everything in front of that channel's header counts as reasoning."""
    validator = make(reasoning_parser="gpt_oss", tool_parser="gpt_oss")
    gate = gate_of(chat(validator, **SCHEMA))
    assert gate is not None
    assert gate.start is ReasoningPhase.INSIDE
    tokenizer = Tokenizer(model_info.resolve("demo"))
    (end,) = gate.ends
    assert tokenizer.decode(end.ids) == "<|channel|>final<|message|>"


def test_gpt_oss_ends_its_analysis_at_the_limit(make: Make) -> None:
    """In front of a possible call, the header of the next message is the model's."""
    validator = make(reasoning_parser="gpt_oss", tool_parser="gpt_oss")
    tokenizer = Tokenizer(model_info.resolve("demo"))
    header = "<|channel|>final<|message|>"
    forms: list[tuple[dict[str, Any], str]] = [(SCHEMA, header), ({}, header), (TOOLS, "")]
    for more, end in forms:
        accepted = chat(validator, thinking_token_budget=5, **more)
        gate = gate_of(accepted)
        assert accepted.ignored == ()
        assert gate is not None
        assert gate.message is not None
        assert not gate.message.starts_inside
        assert tokenizer.decode(gate.message.header) == "<|channel|>analysis<|message|>"
        assert gate.budget == 5
        assert tokenizer.decode(gate.forced_end) == f"<|end|><|start|>assistant{end}"


@pytest.mark.parametrize(
    "text", ["<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>so"]
)
def test_generate_begins_within_the_analysis_of_gpt_oss(make: Make, text: str) -> None:
    validator = make(reasoning_parser="gpt_oss", tool_parser="gpt_oss")
    body = {
        "text": [text, text + "<|end|>"],
        "sampling_params": {"custom_params": {"thinking_budget": 3}},
    }
    accepted = asyncio.run(validator.generate(body))
    gates = [item.params.reasoning for item in accepted.items]
    messages = [gate.message for gate in gates if gate is not None]
    assert [message.starts_inside for message in messages if message] == [True, False]


def test_calls_of_gpt_oss_that_follow_a_grammar_have_no_limit(make: Make) -> None:
    validator = make(reasoning_parser="gpt_oss", tool_parser="gpt_oss")
    accepted = chat(validator, thinking_token_budget=5, **TOOLS, tool_choice="required")
    assert gate_of(accepted) is None
    assert accepted.ignored == ("thinking_token_budget",)


@pytest.mark.parametrize("parser", ["think_tags", "mistral", "granite"])
def test_forced_end_is_the_end_of_a_reasoning(make: Make, parser: str) -> None:
    gate = gate_of(chat(make(reasoning_parser=parser), thinking_token_budget=2))
    assert gate is not None
    tokenizer = Tokenizer(model_info.resolve("demo"))
    begin = tokenizer.encode("reasoning so far")
    inside = replace(gate, start=ReasoningPhase.INSIDE)
    tokens = [*begin[:2], *gate.forced_end, 17]
    assert tokens_of_answer(inside, tokenizer.token_bytes, tokens) == [17]


def test_text_markers_have_their_tokens(make: Make) -> None:
    gate = gate_of(chat(make(reasoning_parser="granite"), **SCHEMA))
    assert gate is not None
    assert "Here is my thought process:" in [marker.text for marker in gate.begins]
    tokenizer = Tokenizer(model_info.resolve("demo"))
    for marker in (*gate.begins, *gate.ends):
        assert tokenizer.decode(marker.ids) == marker.text
