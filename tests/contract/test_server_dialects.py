"""/v1/responses and /v1/messages of the front with a scripted rank: openai-python, and HTTP for Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.processes.front import FakeEngine, fake_engine, model, script_fields

HELLO: list[Any] = [{"role": "user", "content": "hello world"}]
REPLY = "Grüße 😀 the relay"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with fake_engine("--model-path", model(), "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(engine: FakeEngine, body: dict[str, Any], path: str = "/v1/messages") -> httpx.Response:
    return httpx.post(engine.url + path, json=body, timeout=30)


def message(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 64, "messages": HELLO, **more}


def events_of(stream: str) -> list[dict[str, Any]]:
    """Data of each event of a stream, which ends properly."""
    assert stream.endswith("data: [DONE]\n\n")
    lines = [
        line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


def test_error_behind_the_first_event_has_the_form_of_its_api(engine: FakeEngine) -> None:
    broken = script_fields(
        reply=REPLY, step=0.01, error=["engine_dead", "a rank ended"], error_after=2
    )
    reply = ask(engine, message(stream=True, **broken))
    *before, last = events_of(reply.text)
    assert before[0]["type"] == "message_start"
    assert last["error"]["type"] == "overloaded_error"
    assert last["error"]["code"] == "engine_dead"
    body = {"model": "tiny", "input": "hello", "stream": True, **broken}
    *before, last = events_of(ask(engine, body, "/v1/responses").text)
    assert (last["type"], last["sequence_number"]) == ("response.failed", len(before))
    response = last["response"]
    assert (response["error"]["code"], response["error"]["type"]) == ("server_error", "engine_dead")
    assert response["output"][0]["status"] == "incomplete"


class TestResponses:
    def test_whole_answer(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(
            model="tiny", input="hello world", extra_body=script_fields(reply=REPLY, cached=8)
        )
        assert answer.id.startswith("resp_")
        assert (answer.status, answer.output_text) == ("completed", REPLY)
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 8

    def test_stream(self, client: openai.OpenAI) -> None:
        with client.responses.stream(
            model="tiny", input="hello world", extra_body=script_fields(reply=REPLY, step=0.001)
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert final.output_text == REPLY
        assert [event.sequence_number for event in events] == sorted(
            event.sequence_number for event in events
        )

    def test_limit_above_the_context_is_clamped(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(
            model="tiny",
            input="hello",
            max_output_tokens=10**6,
            extra_body=script_fields(reply=REPLY),
        )
        assert answer.output_text == REPLY

    def test_short_limit_makes_the_answer_incomplete(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(
            model="tiny", input="hello", max_output_tokens=2, extra_body=script_fields(reply=REPLY)
        )
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"

    def test_refusals_name_the_clients_own_members(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = {"model": "tiny", "input": "x"}
        cases: list[tuple[dict[str, Any], str]] = [
            ({"temperature": -1}, "temperature"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ]
        for more, param in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**{**asked, **more})
            assert caught.value.param == param
            assert caught.value.body is not None

    def test_resumed_stream_continues_the_numbers(self, engine: FakeEngine) -> None:
        body = {"model": "tiny", "input": "hello", "stream": True, "seed": 5}
        body |= script_fields(reply=REPLY, step=0.01)
        headers = {"x-baton-emit-tokens": "1", "x-request-id": "r1"}
        whole = httpx.post(
            engine.url + "/v1/responses", json=body, headers=headers, timeout=30
        ).text
        comments = [line for line in whole.splitlines() if line.startswith(": baton ")]
        first = json.loads(comments[0].removeprefix(": baton "))
        assert first["events"] > 2
        resume = {name: first[name] for name in ("ids", "seed", "created", "events")}
        rest = httpx.post(
            engine.url + "/v1/responses",
            json={**body, "baton_resume": resume},
            headers=headers,
            timeout=30,
        ).text
        assert events_of(rest)[0]["sequence_number"] == first["events"]


class TestMessages:
    def test_whole_answer(self, engine: FakeEngine) -> None:
        reply = ask(engine, message(**script_fields(reply=REPLY, cached=8)))
        answer = reply.json()
        assert answer["content"] == [{"type": "text", "text": REPLY}]
        assert (answer["type"], answer["stop_reason"]) == ("message", "end_turn")
        assert answer["usage"]["cache_read_input_tokens"] == 8
        assert reply.headers["request-id"] == reply.headers["x-request-id"]

    def test_stream(self, engine: FakeEngine) -> None:
        reply = ask(engine, message(stream=True, **script_fields(reply=REPLY, step=0.001)))
        events = events_of(reply.text)
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        texts = [
            event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
        ]
        assert "".join(texts) == REPLY

    def test_stop_sequence_is_reported(self, engine: FakeEngine) -> None:
        body = message(stop_sequences=["lay"], **script_fields(reply="the relay", step=0.01))
        answer = ask(engine, body).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "lay")

    def test_limit_is_reported_as_the_clients_or_the_contexts(self, engine: FakeEngine) -> None:
        short = ask(engine, message(max_tokens=2, **script_fields(reply=REPLY))).json()
        assert short["stop_reason"] == "max_tokens"
        clamped = ask(engine, message(max_tokens=10**6, **script_fields(reply=REPLY))).json()
        assert clamped["stop_reason"] == "end_turn"

    def test_tokens_are_counted(self, engine: FakeEngine) -> None:
        used = ask(engine, message(**script_fields(reply=REPLY))).json()["usage"]
        counted = ask(
            engine, {"model": "tiny", "messages": HELLO}, "/v1/messages/count_tokens"
        ).json()
        assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}

    @pytest.mark.parametrize(
        ("more", "status", "kind", "param"),
        [
            ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
            ({"stop_sequences": ["x" * 2000]}, 400, "invalid_request_error", "stop_sequences"),
            ({"model": "other"}, 404, "not_found_error", "other"),
        ],
    )
    def test_errors_have_anthropics_form(
        self, engine: FakeEngine, more: dict[str, Any], status: int, kind: str, param: str
    ) -> None:
        reply = ask(engine, message(**more))
        body = reply.json()
        assert (reply.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert param in body["error"]["message"]
        assert body["request_id"] == reply.headers["request-id"]

    @pytest.mark.parametrize(
        ("method", "path", "status", "kind"),
        [
            ("POST", "/batches", 404, "not_found_error"),
            ("GET", "/batches/msgbatch_1/results", 404, "not_found_error"),
            ("GET", "", 405, "invalid_request_error"),
            ("GET", "/", 405, "invalid_request_error"),
            ("DELETE", "/count_tokens", 405, "invalid_request_error"),
        ],
    )
    def test_errors_of_all_paths_below_have_anthropics_form(
        self, engine: FakeEngine, method: str, path: str, status: int, kind: str
    ) -> None:
        """anthropic-python parses each error as its ErrorResponse."""
        reply = httpx.request(method, f"{engine.url}/v1/messages{path}", timeout=30)
        body = reply.json()
        assert (reply.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == reply.headers["request-id"]
        other = httpx.request(method, f"{engine.url}/v1/messages2{path}", timeout=30).json()
        assert "type" not in other, "another path, which no API of Anthropic's has"

    def test_prompt_that_is_too_long_is_said_in_the_words_that_clients_know(
        self, engine: FakeEngine
    ) -> None:
        long = [{"role": "user", "content": "hello world " * 20_000}]
        body = ask(engine, message(messages=long)).json()
        assert body["error"]["message"].startswith("prompt is too long: ")
        assert body["error"]["message"].endswith(" maximum")


def test_token_ids_take_the_place_of_the_conversation(engine: FakeEngine) -> None:
    own = httpx.get(engine.url + "/get_server_info", timeout=30).json()["tokenizer_fingerprint"]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"model": "tiny", "input": HELLO},
        "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": 8},
    }
    for path, body in bodies.items():
        ids = {"input_ids": [5, 6, 7], "tokenizer_fingerprint": own}
        answer = ask(engine, {**body, **ids, **script_fields(reply=REPLY)}, path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["input_tokens"] == 3
        assert "x-ignored-params" not in answer.headers
        refused = ask(engine, {**body, **ids, "tokenizer_fingerprint": "f00"}, path)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "fingerprint_mismatch"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "resp_1"),
        ("DELETE", "resp_1"),
        ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"),
        ("POST", "compact"),
    ],
)
def test_stored_responses_are_refused(engine: FakeEngine, method: str, path: str) -> None:
    reply = httpx.request(method, f"{engine.url}/v1/responses/{path}", timeout=30)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["message"].endswith("send the conversation in input")


def test_models_have_the_form_of_the_clients_api(engine: FakeEngine) -> None:
    def ask_for(path: str, **headers: str) -> Any:
        return httpx.get(engine.url + path, headers=headers, timeout=30).json()

    assert ask_for("/v1/models")["object"] == "list"
    version = {"anthropic-version": "2023-06-01"}
    listed = ask_for("/v1/models", **version)
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "tiny", "tiny")
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "tiny", False)
    assert ask_for("/v1/models/tiny", **version) == model
