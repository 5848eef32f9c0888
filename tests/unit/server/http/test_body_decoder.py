"""Large bodies: what stays JSON, and that nothing else changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.config import build_config
from baton.errors import BadRequest, EngineError, InvalidJson, PayloadTooLarge, QueueFull
from baton.server import fields
from baton.server.fields import encode_exact
from baton.server.http import body_decoder
from baton.server.http.body_decoder import (
    MAX_MEMBER_BYTES,
    BodyDecoder,
    decode_large_object,
)
from baton.server.http.http_utils import INLINE_BYTES, decode_object
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.schema import SamplingFields
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support.goldens import token_goldens

LONG = "a" * 2000
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": LONG}},
    "required": ["a"],
}
MESSAGES = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "é"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
STRICT_TOOL = {"type": "function", "function": {"name": "g", "strict": True, "parameters": SCHEMA}}
UNKNOWN = {"metadata": {"x": [LONG, {}]}, "né": 1}

CHATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "unknown members": {"messages": MESSAGES, **UNKNOWN},
    "response format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    },
    "schema as text": {"json_schema": json.dumps(SCHEMA)},
    "choice": {"structured_outputs": {"choice": [LONG, "b"]}},
    "regex": {"regex": LONG},
    "free format": {"response_format": {"type": "text", "unknown": LONG}},
    "two constraints": {"regex": LONG, "guided_json": SCHEMA},
    "schema of a wrong type": {"guided_json": [LONG]},
    "tools": {"messages": MESSAGES, "tools": [TOOL]},
    "strict tools": {"messages": MESSAGES, "tools": [TOOL, STRICT_TOOL]},
    "required call": {"tools": [TOOL], "tool_choice": "required"},
    "functions": {"functions": [TOOL["function"]], "function_call": {"name": "f"}},
    "tool that is no object": {"tools": [TOOL, LONG]},
    "function that is no object": {"tools": [{"type": "function", "function": LONG}]},
    "parameters that are no object": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": [LONG]}}]
    },
    "too many tools": {"tools": [TOOL] * 129},
    "tools that are no array": {"tools": {"a": LONG}},
    "long name of a tool": {"tools": [{"type": "function", "function": {"name": LONG}}]},
    "refused member": {"logit_bias": {"a": LONG}},
}
NATIVE: dict[str, dict[str, Any]] = {
    "nested schema": {
        "text": "a",
        "sampling_params": {"json_schema": json.dumps(SCHEMA), "seed": 1},
    },
    "nested unknown": {"text": "a", "sampling_params": {"unknown": LONG, "seed": 1}},
    "parameters that are no object": {"text": "a", "sampling_params": [LONG]},
}


@pytest.fixture(scope="module")
def validator() -> Iterator[RequestValidator]:
    config = build_config({"model_path": str(token_goldens.DEMO)})
    facts = model_info.load(config)
    tokenizer = Tokenizer(facts.tokenizer_path)
    made = RequestValidator(config, facts, tokenizer)
    made.context_length = 100_000
    yield made
    made.grammars.close()
    tokenizer.close()


def accept(
    validator: RequestValidator, form: str, body: dict[str, Any]
) -> tuple[AcceptedRequest, Any] | tuple[str, str, str | None]:
    """The request and its tools, or the refusal."""
    validate = validator.chat if form == "chat" else validator.generate
    try:
        accepted = asyncio.run(validate(body))
    except EngineError as err:
        return err.code, err.message, err.param
    reading = accepted.answer.reading
    tools = "[]" if reading is None else reading.tools
    return accepted.with_options(reading=None), json.loads(tools)


@pytest.mark.parametrize(
    ("form", "body"),
    [
        *(pytest.param("chat", body, id=name) for name, body in CHATS.items()),
        *(pytest.param("generate", body, id=name) for name, body in NATIVE.items()),
    ],
)
def test_large_body_is_accepted_or_refused_as_a_small_one(
    validator: RequestValidator, form: str, body: dict[str, Any]
) -> None:
    given = {"messages": MESSAGES[:1], "max_tokens": 3, "seed": 1} if form == "chat" else {}
    raw = json.dumps({**given, **body}, ensure_ascii=False).encode()
    expected = accept(validator, form, decode_object(raw))
    assert accept(validator, form, decode_large_object(raw)) == expected


def test_members_that_no_check_reads_stay_json() -> None:
    schema = json.dumps(SCHEMA)
    text = (
        f'{{"messages": [1, 2.0], "unknown": {{"a": "\\u00e9"}}, "temperature": 0.5, "regex": "a", "guided_json": '
        f'{schema}, "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]}}'
    )
    body = decode_large_object(text.encode())
    function = body["tools"][0]["function"]
    kept = (body["messages"], body["unknown"], body["guided_json"], function["parameters"])
    assert [bytes(part).decode() for part in kept] == [
        "[1, 2.0]",
        '{"a": "\\u00e9"}',
        schema,
        schema,
    ]
    assert body["temperature"] == 0.5
    assert body["regex"] == "a"
    assert function["name"] == "f"
    assert msgspec.json.decode(encode_exact(body)) == json.loads(text)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[1]", "must be a JSON object"),
        (b"{", "is not JSON"),
        (b'{"a": tru}', "is not JSON"),
        (b'{"a": 1} x', "is not JSON"),
        (b'{"temperature": 1e99999999999999999999}', "is not JSON"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        (b'{"a": ' + b"[" * 100_000, "is not JSON"),
    ],
)
def test_text_that_is_no_json_object_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidJson, match=message):
        decode_large_object(raw)


def test_number_beyond_doubles_is_refused_by_its_field() -> None:
    body = decode_object(b'{"temperature": 1e999, "top_p": 0.5, "n": 2.0}')
    with pytest.raises(BadRequest) as caught:
        fields.read(SamplingFields, body)
    assert caught.value.param == "temperature"
    read = fields.read(SamplingFields, {**body, "temperature": None})
    assert (read.top_p, read.n) == (0.5, 2)


def test_large_members_are_bounded_but_for_prompts_and_unknown_ones() -> None:
    value = json.dumps("a" * MAX_MEMBER_BYTES)
    for name in ("guided_json", "tools", "chat_template_kwargs", "sampling_params"):
        with pytest.raises(PayloadTooLarge) as caught:
            decode_large_object(f'{{"{name}": {value}}}'.encode())
        assert caught.value.param == name
    for name in ("text", "prompt", "messages", "unknown"):
        decode_large_object(f'{{"{name}": {value}}}'.encode())


def large_body(number: int) -> bytes:
    return json.dumps({"seed": number, "padding": "a" * INLINE_BYTES}).encode()


def test_each_large_body_has_a_turn_of_the_event_loop_in_order_of_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = 0
    turns = []

    def decode(raw: bytes) -> dict[str, Any]:
        found = decode_large_object(raw)
        turns.append((turn, found["seed"]))
        return found

    monkeypatch.setattr(body_decoder, "decode_large_object", decode)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def go() -> None:
        decoder = BodyDecoder()
        counter = asyncio.create_task(count_turns())
        tasks = [asyncio.create_task(decoder.decode(large_body(i))) for i in range(8)]
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        counter.cancel()

    asyncio.run(go())
    assert [number for _, number in turns] == [0, 1, 2, 4, 5, 6, 7]
    assert len({each for each, _ in turns}) == len(turns)


def test_waiting_large_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_decoder, "MAX_WAITING", 2)

    async def go() -> list[Any]:
        decoder = BodyDecoder()
        bodies = [large_body(i) for i in range(3)]
        found = await asyncio.gather(*map(decoder.decode, bodies), return_exceptions=True)
        found.append(await decoder.decode(large_body(3)))
        return found

    first, second, refused, later = asyncio.run(go())
    assert (first["seed"], second["seed"], later["seed"]) == (0, 1, 3)
    assert isinstance(refused, QueueFull)


def test_small_body_is_decoded_whole() -> None:
    found = asyncio.run(BodyDecoder().decode(b'{"messages": [1], "unknown": {"a": 1}}'))
    assert found == {"messages": [1], "unknown": {"a": 1}}
