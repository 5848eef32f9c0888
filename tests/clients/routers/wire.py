"""Plain HTTP to any server, and answers in a form that can be compared."""

from __future__ import annotations

import contextlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPMessage
from typing import Any

TIMEOUT_SECS = 90.0
LOGPROB_TOLERANCE = 1e-4
"""Float sums differ a little with the company a row has in its batch."""
VOLATILE = {"id", "created", "cached_tokens", "prompt_tokens_details", "e2e_latency"}
"""Fields that two equal answers may differ in."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def _open(url: str, path: str, body: dict[str, Any] | None, headers: dict[str, str] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data, {"content-type": "application/json", **(headers or {})}
    )
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECS)
    except urllib.error.HTTPError as err:
        return err


def ask(
    url: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> Reply:
    """One request, one answer, whatever its status."""
    with _open(url, path, body, headers) as response:
        return Reply(response.status, response.headers, response.read())


def answer(url: str, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer that must be a success."""
    reply = ask(url, path, body)
    assert reply.status == 200, (reply.status, reply.body[:2000])
    return reply.json


@contextlib.contextmanager
def events(url: str, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream that must begin well and end with [DONE]; leaving early closes the connection."""

    def read(response: Any) -> Iterator[dict[str, Any]]:
        is_done = False
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            assert not is_done, f"after [DONE] came {line!r}"
            is_done = line == "data: [DONE]"
            if not is_done:
                yield json.loads(line.removeprefix("data: "))
        assert is_done, "the stream ended without [DONE]"

    with _open(url, path, {**body, "stream": True}, None) as response:
        assert response.status == 200, (response.status, response.read()[:2000])
        assert response.headers["content-type"].startswith("text/event-stream")
        yield read(response)


@dataclass
class Choice:
    """One answer of a stream, put together."""

    role: str | None = None
    text: str = ""
    finish: Any = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)


def streamed(url: str, path: str, body: dict[str, Any]) -> dict[int, Choice]:
    """The choices of a streamed answer, however its tokens were grouped into events."""
    choices: dict[int, Choice] = {}
    with events(url, path, body) as stream:
        for event in stream:
            assert "error" not in event, event
            if path == "/generate":  # each event carries all so far
                info = event["meta_info"]
                choices[event.get("index", 0)] = Choice(
                    text=event["text"], finish=info["finish_reason"], output_ids=event["output_ids"]
                )
                continue
            for part in event["choices"]:
                choice = choices.setdefault(part["index"], Choice())
                delta = part.get("delta") or {"content": part.get("text")}
                choice.role = delta.get("role") or choice.role
                choice.text += delta.get("content") or ""
                assert choice.finish is None, "something came after the finish reason"
                choice.finish = part["finish_reason"]
                logprobs = part.get("logprobs") or {}
                choice.tokens += [entry["token"] for entry in logprobs.get("content") or ()]
                choice.logprobs += [entry["logprob"] for entry in logprobs.get("content") or ()]
                choice.tokens += logprobs.get("tokens") or ()
                choice.logprobs += logprobs.get("token_logprobs") or ()
    return choices


def texts(path: str, body: Any) -> list[str]:
    """The texts of a whole answer, in order."""
    if path == "/generate":
        return [item["text"] for item in (body if isinstance(body, list) else [body])]
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in body["choices"]
    ]


def assert_same(found: Any, expected: Any, where: str = "answer") -> None:
    """Equal but for ids, times, cache hits, and the last digits of a logarithm."""
    if isinstance(expected, dict) and isinstance(found, dict):
        assert found.keys() - VOLATILE == expected.keys() - VOLATILE, where
        for key in expected.keys() - VOLATILE:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float) and isinstance(found, float):
        assert math.isclose(found, expected, rel_tol=0, abs_tol=LOGPROB_TOLERANCE), (
            where,
            found,
            expected,
        )
    else:
        assert found == expected, where
