"""`transformers serve` behind our router: APIs that it has and that it lacks, and its death in mid-answer.

What is compared is always the same: the answer to a chat request that the server is asked directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import run_script
from tests.clients.foreign_servers.chat_server import MODEL, ChatServer, chat_server
from tests.clients.routers.cases import CHAT, COMPLETION
from tests.clients.routers.wire import answer, ask, events, texts
from tests.support.processes.cluster import count, eventually, get
from tests.support.processes.router import Router

HERE = Path(__file__).parent
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
QUESTION = [{"role": "user", "content": "What is a lease?"}]
GREEDY = {"model": MODEL, "temperature": 0}
ASKED = {**GREEDY, "messages": QUESTION, "max_tokens": 24}
ENDLESS = {"logit_bias": {"1": -100.0}}
"""Member that forbids the end of an answer: 1 is the end's token."""
LATE_TOKENS = 300
"""Length of an answer that its worker does not live to end."""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """The server as it is."""
    with chat_server(tmp_path_factory.mktemp("full") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def chat_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """The same without responses."""
    with chat_server(tmp_path_factory.mktemp("chat-only") / "log", RESPONSES) as server:
        yield server


@pytest.fixture(scope="module")
def native(full: ChatServer) -> Iterator[str]:
    """A router in front of the whole server."""
    with Router.up("--worker-urls", full.url) as url:
        eventually("the worker is ready", lambda: get(f"{url}/readiness"))
        yield url


@pytest.fixture(scope="module")
def translating(chat_only: ChatServer) -> Iterator[str]:
    """A router in front of the server without responses."""
    with Router.up("--worker-urls", chat_only.url) as url:
        eventually("the worker is ready", lambda: get(f"{url}/readiness"))
        yield url


@pytest.fixture(scope="module")
def expected(full: ChatServer) -> str:
    """The chat answer of the server itself."""
    return texts(CHAT, answer(full.url, CHAT, ASKED))[0]


@pytest.fixture(scope="module")
def counts(full: ChatServer) -> list[int]:
    """Tokens of the prompt and of the answer, as the server itself counts them."""
    usage = answer(full.url, CHAT, ASKED)["usage"]
    return [usage["prompt_tokens"], usage["completion_tokens"]]


def response_counts(usage: dict[str, Any]) -> list[int]:
    return [usage["input_tokens"], usage["output_tokens"]]


class TestOpenai:
    @pytest.fixture(scope="class", params=["native", "translating"])
    @classmethod
    def said(cls, request: pytest.FixtureRequest) -> dict[str, Any]:
        url: str = request.getfixturevalue(request.param)
        said: dict[str, Any] = run_script("openai-3", HERE / "ask_openai.py", url)
        is_translated = count(url, "baton_router_translated_requests_total", route=RESPONSES) > 0
        assert is_translated == (request.param == "translating")
        return {**said, "is_translated": is_translated}

    def test_responses(self, said: dict[str, Any], expected: str, counts: list[int]) -> None:
        found = said["responses"]
        assert (found["whole"], found["streamed"], found["last"]) == (expected,) * 3
        assert found["deltas"] > 1
        assert [response_counts(usage) for usage in found["usage"]] == [counts, counts]

    def test_limit_makes_a_translated_response_incomplete(self, said: dict[str, Any]) -> None:
        """The server itself calls such a response completed."""
        ends = ["completed", "response.completed"]
        if said["is_translated"]:
            ends = ["incomplete", "response.incomplete"]
        assert said["responses"]["ends"] == ends

    def test_chat(self, said: dict[str, Any], expected: str) -> None:
        found = said["chat"]
        assert (found["whole"], found["streamed"]) == (expected, expected)
        assert found["ends"] == ["length", "length"]

    def test_completions(self, said: dict[str, Any], full: ChatServer) -> None:
        asked = {**GREEDY, "prompt": "Baton is", "max_tokens": 24}
        text = texts(COMPLETION, answer(full.url, COMPLETION, asked))[0]
        found = said["completions"]
        assert (found["whole"], found["streamed"]) == (text, text)

    def test_models(self, said: dict[str, Any]) -> None:
        assert said["models"] == [MODEL]

    def test_errors_keep_their_message(self, said: dict[str, Any]) -> None:
        status, code, message = said["mistakes"]["model"]
        assert status == 400
        assert "Server is pinned to 'demo'; requested 'other'." in message
        member_status, member_code, member_message = said["mistakes"]["unknown member"]
        assert member_status == 422
        assert "top_k" in member_message
        if said["is_translated"]:
            assert (code, member_code) == ("invalid_value", "invalid_value")


@pytest.fixture(scope="module")
def messages(translating: str) -> dict[str, Any]:
    said: dict[str, Any] = run_script("anthropic", HERE / "ask_anthropic.py", translating)
    assert count(translating, "baton_router_translated_requests_total", route=MESSAGES) > 0
    return said


def test_messages(messages: dict[str, Any], expected: str, counts: list[int]) -> None:
    assert messages["whole"] == messages["final"] == [expected]
    assert messages["streamed"] == expected
    assert messages["ends"] == ["max_tokens", "max_tokens"]
    assert messages["usage"] == [counts, counts]


def test_tokens_are_not_counted(messages: dict[str, Any]) -> None:
    name, status, message = messages["count"]
    assert (name, status) == ("NotFoundError", 404)
    assert "usage.input_tokens" in message


def test_errors_of_messages_keep_their_message(messages: dict[str, Any]) -> None:
    pinned = "Server is pinned to 'demo'; requested 'other'."
    assert messages["model"] == ["BadRequestError", 400, pinned]
    name, status, message = messages["unknown member"]
    assert (name, status) == ("UnprocessableEntityError", 422)
    assert "top_k" in message


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[ChatServer]:
    """A server that a test kills."""
    with chat_server(tmp_path / "log", RESPONSES) as server:
        yield server


def add_worker(url: str, server: ChatServer) -> None:
    """Register another worker at the router, and wait until it is ready."""
    added = ask(url, "/workers", {"url": server.url})
    assert added.status < 300, added.body
    worker = added.json["id"]
    eventually(
        "the other worker is ready",
        lambda: ask(url, f"/workers/{worker}").json["state"] == "ready",
    )


LONG: dict[str, dict[str, Any]] = {
    CHAT: {**GREEDY, **ENDLESS, "messages": QUESTION, "max_tokens": 1500},
    MESSAGES: {**GREEDY, **ENDLESS, "messages": QUESTION, "max_tokens": 1500},
    RESPONSES: {**GREEDY, **ENDLESS, "input": "What is a lease?", "max_output_tokens": 1500},
}


def test_killed_worker_ends_its_streams_with_an_error(
    doomed: ChatServer, chat_only: ChatServer, expected: str
) -> None:
    """Streams of other makes are not resumed: each ends with an error of its API. The next request is answered."""
    with Router.up("--worker-urls", doomed.url) as url:
        eventually("the worker is ready", lambda: get(f"{url}/readiness"))
        with (
            events(url, CHAT, LONG[CHAT]) as chat,
            events(url, MESSAGES, LONG[MESSAGES]) as message,
            events(url, RESPONSES, LONG[RESPONSES]) as response,
        ):
            streams = {CHAT: chat, MESSAGES: message, RESPONSES: response}
            for stream in streams.values():
                next(stream)
                next(stream)
            add_worker(url, chat_only)
            doomed.kill()
            last = {path: list(stream)[-1] for path, stream in streams.items()}
        assert last[CHAT]["error"]["code"] == "upstream_error"
        assert last[MESSAGES]["type"] == "error"
        assert last[MESSAGES]["error"]["code"] == "upstream_error"
        assert last[RESPONSES]["type"] == "response.failed"
        assert last[RESPONSES]["response"]["error"]["type"] == "upstream_error"
        eventually(
            "the other worker answers",
            lambda: ask(url, CHAT, ASKED).status == 200,
        )
        assert texts(CHAT, answer(url, CHAT, ASKED)) == [expected]


def test_killed_worker_whose_answer_has_not_begun_is_replaced(
    doomed: ChatServer, chat_only: ChatServer
) -> None:
    """An answer that is no stream begins when it is whole: another worker is asked instead."""
    asked = {**LONG[CHAT], "max_tokens": LATE_TOKENS}
    with Router.up("--worker-urls", doomed.url) as url, ThreadPoolExecutor() as pool:
        eventually("the worker is ready", lambda: get(f"{url}/readiness"))
        asking = pool.submit(answer, url, CHAT, asked)
        eventually("the worker has the request", lambda: "Request received" in doomed.log_text())
        add_worker(url, chat_only)
        doomed.kill()
        text = texts(CHAT, asking.result())
        assert count(url, "baton_router_retries_total") > 0
    assert text == texts(CHAT, answer(chat_only.url, CHAT, asked))
