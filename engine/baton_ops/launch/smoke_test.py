"""`baton up --smoke`: real requests through a running cluster, each checked, and their table.

Needs nothing but a base URL and a model name; asserts on what a client can see.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from baton_ops.clients.instance import is_answered_by

REQUEST_TIMEOUT_SECS = 120
CONCURRENT = 8
QUESTION = [{"role": "user", "content": "What is Baton?"}]
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": CITY_SCHEMA,
    },
}
"""The demo model is taught this one (tools/demo_model/weather.py)."""


class SmokeFailure(Exception):
    """The cluster answered, but not as it should. The message says what came."""


def expect_that(ok: bool, text: str) -> None:
    if not ok:
        raise SmokeFailure(text)


@dataclass(frozen=True, slots=True)
class SmokeClient:
    """JSON over HTTP to one base URL."""

    session: aiohttp.ClientSession
    model: str

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        async with self.session.post(
            path, json={"model": self.model, "temperature": 0, **body}
        ) as response:
            text = await response.text()
            expect_that(
                response.status == status,
                f"POST {path} answered {response.status}, not {status}: {text[:300]}",
            )
            expect_that("x-request-id" in response.headers, "the answer has no x-request-id header")
            answer: dict[str, Any] = json.loads(text)
            return answer

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream; checks that it ends with [DONE]."""
        async with self.session.post(
            path, json={"model": self.model, "temperature": 0, "stream": True, **body}
        ) as response:
            if response.status != 200:
                raise SmokeFailure(
                    f"POST {path} answered {response.status}: {(await response.text())[:300]}"
                )
            last = ""
            async for raw in response.content:
                line = raw.decode().strip()
                if not line.startswith("data: "):
                    continue
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    yield json.loads(last)
            expect_that(
                last == "[DONE]",
                f"the stream ended without [DONE]; its last event was {last[:200]!r}",
            )


async def _check_models(client: SmokeClient) -> str:
    async with client.session.get("/v1/models") as response:
        listed = [entry["id"] for entry in (await response.json())["data"]]
    expect_that(client.model in listed, f"{client.model} is not among {listed}")
    return ", ".join(listed)


async def _check_chat(client: SmokeClient) -> str:
    answer = await client.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 32})
    choice = answer["choices"][0]
    expect_that(
        choice["finish_reason"] in ("stop", "length"),
        f"finish_reason is {choice['finish_reason']!r}",
    )
    usage = answer["usage"]
    tokens = usage["completion_tokens"]
    expect_that(0 < tokens <= 32, f"{tokens} completion tokens, asked for at most 32")
    expect_that(
        usage["total_tokens"] == usage["prompt_tokens"] + tokens, f"usage does not add up: {usage}"
    )
    message = choice["message"]
    return _shorten_text(message["content"] or message.get("reasoning_content") or "")


async def _check_completion(client: SmokeClient) -> str:
    answer = await client.post(
        "/v1/completions", {"prompt": "Baton serves large language", "max_tokens": 16}
    )
    expect_that(bool(answer["choices"][0]["text"]), "the answer is empty")
    return _shorten_text(answer["choices"][0]["text"])


async def _stream_equals_whole(client: SmokeClient) -> str:
    body = {"messages": QUESTION, "max_tokens": 24}
    whole_choice = (await client.post("/v1/chat/completions", body))["choices"][0]
    text = ""
    finishes = []
    events = 0
    async for event in client.stream("/v1/chat/completions", body):
        expect_that("error" not in event, f"the stream carried an error: {event}")
        events += 1
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                finishes.append(choice["finish_reason"])
    expect_that(
        finishes == [whole_choice["finish_reason"]],
        f"finish reasons {finishes}, not one {whole_choice['finish_reason']!r}",
    )
    whole_text = whole_choice["message"]["content"] or ""
    expect_that(text == whole_text, f"streamed {text!r}, whole {whole_text!r}")
    return f"{events} events"


async def _check_concurrent(client: SmokeClient) -> str:
    async def ask_model(i: int) -> tuple[str, int]:
        body = {
            "prompt": f"{i}: a router, a prefill node and",
            "max_tokens": 16,
            "ignore_eos": True,
        }
        answer = await client.post("/v1/completions", body)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    alone = await ask_model(0)
    answers = await asyncio.gather(*(ask_model(i) for i in range(CONCURRENT)))
    counts = [tokens for _, tokens in answers]
    expect_that(set(counts) == {16}, f"completion tokens {counts}, asked for 16 each")
    expect_that(answers[0] == alone, f"answered {answers[0]!r} among {CONCURRENT}, {alone!r} alone")
    return f"{CONCURRENT} answers"


async def _check_logprobs(client: SmokeClient) -> str:
    body = {"messages": QUESTION, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    content = (await client.post("/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    expect_that(1 <= len(content) <= 4, f"{len(content)} entries for at most 4 tokens")
    for entry in content:
        top = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        expect_that(len(top) == 3 and top == sorted(top, reverse=True), f"top_logprobs are {top}")
        expect_that(
            abs(top[0] - entry["logprob"]) < 1e-3,
            f"greedy took {entry['logprob']}, the best is {top[0]}",
        )
    return f"first token {content[0]['logprob']:.3f}"


async def _check_tool_call(client: SmokeClient) -> str:
    """A model may answer without a call, and without reasoning; what it calls must be a call."""
    message = await _ask_weather(client)
    calls = message.get("tool_calls") or []
    if not calls:
        return f"no call: {_shorten_text(message['content'] or '')}"
    function = calls[0]["function"]
    expect_that(
        function["name"] == "get_weather", f"{function['name']!r} is called, which was not offered"
    )
    arguments = json.loads(function["arguments"])
    expect_that(isinstance(arguments, dict), f"the arguments are {function['arguments']!r}")
    return _shorten_text(f"get_weather({function['arguments']})")


async def _check_reasoning(client: SmokeClient) -> str:
    message = await _ask_weather(client)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message["content"] or ""
    expect_that("<think>" not in content, f"the reasoning is part of the content: {content!r}")
    return _shorten_text(reasoning) or "none"


async def _ask_weather(client: SmokeClient) -> dict[str, Any]:
    body = {"messages": WEATHER_QUESTION, "tools": [WEATHER_TOOL], "max_tokens": 96}
    answer = await client.post("/v1/chat/completions", body)
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


async def _check_json(client: SmokeClient) -> str:
    schema = {"name": "place", "strict": True, "schema": CITY_SCHEMA}
    body = {
        "messages": WEATHER_QUESTION,
        "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    choice = (await client.post("/v1/chat/completions", body))["choices"][0]
    content = choice["message"]["content"] or ""
    expect_that(
        choice["finish_reason"] == "stop",
        f"finish_reason is {choice['finish_reason']!r}: {content}",
    )
    answer = json.loads(content)
    expect_that(
        set(answer) == {"city"} and isinstance(answer["city"], str),
        f"the answer does not have the schema's form: {content}",
    )
    return _shorten_text(content)


async def _bad_request(client: SmokeClient) -> str:
    answer = await client.post(
        "/v1/chat/completions", {"messages": QUESTION, "max_tokens": -1}, status=400
    )
    error = answer["error"]
    expect_that(
        set(error) == {"message", "type", "param", "code"},
        f"the error has the fields {sorted(error)}",
    )
    return f"{error['code']}: {_shorten_text(error['message'])}"


async def _unknown_model(client: SmokeClient) -> str:
    answer = await client.post(
        "/v1/completions", {"prompt": "x", "model": "no-such-model"}, status=404
    )
    return str(answer["error"]["code"])


CHECKS: tuple[tuple[str, Callable[[SmokeClient], Awaitable[str]]], ...] = (
    ("models", _check_models),
    ("chat", _check_chat),
    ("completion", _check_completion),
    ("stream = whole", _stream_equals_whole),
    (f"{CONCURRENT} at once", _check_concurrent),
    ("logprobs", _check_logprobs),
    ("tool call", _check_tool_call),
    ("reasoning", _check_reasoning),
    ("JSON", _check_json),
    ("bad request", _bad_request),
    ("unknown model", _unknown_model),
)


async def run_smoke(
    url: str, model: str, incarnation: str | None, api_key: str | None = None
) -> bool:
    """Run all checks in order, print one row each; whether all passed.

    `incarnation`: that of the router; answers of another process at `url` do not count.
    """
    passed = 0
    async with _make_session(url, api_key) as session:
        client = SmokeClient(session, model)
        for name, check in CHECKS:
            started = time.perf_counter()
            try:
                detail = await check(client)
                ok = True
            except (
                SmokeFailure,
                aiohttp.ClientError,
                asyncio.TimeoutError,
                KeyError,
                ValueError,
            ) as err:
                detail = f"{type(err).__name__}: {err}"
                ok = False
            passed += ok
            ms = (time.perf_counter() - started) * 1000
            print(f"  {'ok  ' if ok else 'FAIL'}  {name:<15} {ms:8.0f} ms  {detail}", flush=True)
    # The address was the router's before the first request: all answers were its own.
    is_own = await is_answered_by(url, incarnation)
    print(f"{passed} of {len(CHECKS)} checks passed", flush=True)
    if not is_own:
        print(f"{url} is not answered by the router that was started: the checks do not count")
    return is_own and passed == len(CHECKS)


async def served_model(url: str, api_key: str | None = None) -> str:
    """The name of the first model that `url` serves."""
    async with _make_session(url, api_key) as session, session.get("/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def _make_session(url: str, api_key: str | None) -> aiohttp.ClientSession:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECS)
    return aiohttp.ClientSession(url, headers=headers, timeout=timeout)


def _shorten_text(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:59] + "…"
