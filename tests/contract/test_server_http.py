"""The wire itself: frames, headers, errors, native endpoints, disconnects."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.server.http.openapi.document import openapi_document
from baton.server.http.routes.docs import version as front_version
from baton.server.http.routes.route import Server
from tests.support.processes.front import FakeEngine, fake_engine, model

HI = [{"role": "user", "content": "hi"}]
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with fake_engine(
        "--model-path", model(), "--served-model-name", "tiny", "--dp-size", "2"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, timeout=20) as client:
        yield client


def script(**options: Any) -> str:
    return json.dumps(options)


def frames(text: str) -> list[Any]:
    """The events of an SSE body; fails on anything that is not one."""
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(e.startswith("data: ") and "\n" not in e for e in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(e.removeprefix("data: ")) for e in events[:-1]]


def wait_until(fact: Any, secs: float = 60.0) -> None:
    deadline = time.monotonic() + secs
    while not fact():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)  # polls another process; the deadline decides, not the pause


# ---- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        (
            "chat",
            "/v1/chat/completions",
            {"messages": HI, "stream_options": {"include_usage": True}},
        ),
        ("completion", "/v1/completions", {"prompt": "hi", "max_tokens": 9, "logprobs": 1}),
        ("generate", "/generate", {"text": "hi"}),
    ],
)
def test_streams_match_the_golden_frames(
    http: httpx.Client, name: str, path: str, body: dict[str, Any]
) -> None:
    """Every field of every frame; ids and clocks are replaced."""
    file = GOLDEN / f"stream_{name}.json"
    for step in (
        0.05,
        0.2,
        1.0,
        3.0,
    ):  # a busy machine puts tokens that come soon after each other in one frame
        salt = script(reply="the 😀", step=step, cached=1)
        r = http.post(path, json=body | {"rid": "r1", "stream": True, "cache_salt": salt})
        assert r.status_code == 200
        assert r.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert r.headers["cache-control"] == "no-cache"
        assert r.headers["x-accel-buffering"] == "no"
        assert "content-length" not in r.headers
        got = frames(r.text)
        for event in got:
            if "created" in event:
                event["created"] = 0
            if "meta_info" in event:
                event["meta_info"]["e2e_latency"] = 0
        if os.environ.get("UPDATE_GOLDEN"):
            file.write_text(json.dumps(got, indent=1, ensure_ascii=False) + "\n")
        wanted = json.loads(file.read_text())
        if len(got) == len(wanted):
            break
    assert got == wanted


def test_each_stream_ends_in_exactly_one_way(http: httpx.Client) -> None:
    """finish_reason or error, then [DONE]."""
    for options in (
        {"reply": "a b c"},
        {"error": ["prefill_failed", "x"], "error_after": 2, "step": 0.005},
    ):
        body = {"prompt": "hi", "max_tokens": 9, "stream": True, "cache_salt": script(**options)}
        events = frames(http.post("/v1/completions", json=body).text)
        ends = [e for e in events if "error" in e or e["choices"][0]["finish_reason"]]
        assert len(ends) == 1
        assert ends[0] is events[-1]


def test_error_event_has_the_error_object(http: httpx.Client) -> None:
    options = {
        "reply": "a b",
        "error": ["prefill_failed", "P says no"],
        "error_after": 1,
        "step": 0.005,
    }
    body = {"prompt": "hi", "stream": True, "cache_salt": script(**options)}
    last = frames(http.post("/v1/completions", json=body).text)[-1]
    assert last == {
        "error": {
            "message": "P says no",
            "type": "server_error",
            "param": None,
            "code": "prefill_failed",
        }
    }


def test_one_failing_item_fails_the_request_and_frees_the_others(
    http: httpx.Client, engine: FakeEngine
) -> None:
    body: dict[str, Any] = {"prompt": ["a", "b", "c"], "max_tokens": 400, "ignore_eos": True}
    body |= {"cache_salt": script(error=["kv_transfer_failed", "x"], error_after=2, step=0.01)}
    r = http.post("/v1/completions", json=body)
    assert (r.status_code, r.json()["error"]["code"]) == (502, "kv_transfer_failed")
    wait_until(lambda: all(engine.ledger(rank)["running"] == 0 for rank in (0, 1)))


def test_keepalive_comments_while_a_request_waits(engine: FakeEngine) -> None:
    with fake_engine("--model-path", model(), script={"delay": 1.5}, keepalive_secs=0.1) as slow:
        with httpx.stream(
            "POST",
            slow.url + "/v1/completions",
            json={"prompt": "a", "stream": True, "max_tokens": 2},
        ) as r:
            text = "".join(r.iter_text())
        assert text.startswith(": waiting\n\n: waiting\n\n")
        assert text.endswith("data: [DONE]\n\n")


# ---- leaving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_the_rank(
    engine: FakeEngine, http: httpx.Client, stream: bool
) -> None:
    async def leave() -> None:
        body = {
            "prompt": "a",
            "stream": stream,
            "max_tokens": 400,
            "ignore_eos": True,
            "rid": f"leaver-{stream}",
        }
        body["cache_salt"] = script(step=1.0)  # alone it would take 400 s, longer than wait_until
        async with httpx.AsyncClient(base_url=engine.url) as client:
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            while not any(
                s["rid"] == body["rid"] for rank in (0, 1) for s in engine.ledger(rank)["submits"]
            ):
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(leave())
    wait_until(lambda: engine.ledger(0)["running"] + engine.ledger(1)["running"] == 0)
    handles = [
        s["handle"]
        for rank in (0, 1)
        for s in engine.ledger(rank)["submits"]
        if s["rid"] == f"leaver-{stream}"
    ]
    assert set(handles) <= {h for rank in (0, 1) for h in engine.ledger(rank)["aborts"]}


def test_client_that_does_not_read_does_not_hold_the_rank(engine: FakeEngine) -> None:
    """The rank runs at its own speed; what the client has not read piles up in the front, bounded by max_tokens."""
    with socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1]))) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(
            {"prompt": "a", "stream": True, "max_tokens": 400, "ignore_eos": True}
        ).encode()
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        deaf.recv(1)
        wait_until(lambda: engine.ledger(0)["running"] + engine.ledger(1)["running"] == 0)


def test_abort_request_by_rid(engine: FakeEngine, http: httpx.Client) -> None:
    async def run(named: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=engine.url, timeout=20) as client:
            body = {"prompt": "a", "rid": "victim", "cache_salt": script(silent=True)}
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            while (await client.post("/abort_request", json={"rid": named})).json()["aborted"] == 0:
                await asyncio.sleep(0.01)
            return await task

    for named in ("victim", "cmpl-victim"):
        r = asyncio.run(run(named))
        assert (r.status_code, r.json()["error"]["code"]) == (499, "aborted")
    assert http.post("/abort_request", json={"abort_all": True}).json() == {
        "success": True,
        "aborted": 0,
    }
    assert http.post("/abort_request", json={}).json()["error"]["param"] == "rid"


def test_abort_request_by_room_asks_every_rank(http: httpx.Client) -> None:
    r = http.post("/abort_request", json={"bootstrap_room": [7, 8]})
    assert r.json() == {
        "success": True,
        "aborted": 2 * http.get("/get_server_info").json()["dp_size"],
    }
    assert http.post("/abort_request", json={"bootstrap_room": 7}).json()["aborted"] > 0
    for wrong in (-1, "seven", [1.5]):
        assert (
            http.post("/abort_request", json={"bootstrap_room": wrong}).json()["error"]["param"]
            == "bootstrap_room"
        )


def test_timeout_is_enforced_by_the_front_when_the_rank_does_not(engine: FakeEngine) -> None:
    flags = ("--model-path", model(), "--request-timeout-secs", "0.2")
    with fake_engine(*flags, script={"silent": True}, grace_secs=0.1) as deaf:
        r = httpx.post(deaf.url + "/v1/completions", json={"prompt": "a"}, timeout=20)
        assert (r.status_code, r.json()["error"]["code"]) == (504, "timeout")
        wait_until(lambda: deaf.ledger()["running"] == 0)


# ---- errors ------------------------------------------------------------------------------------------------------


def test_unknown_path_and_method(http: httpx.Client) -> None:
    r = http.get("/nope")
    assert (r.status_code, r.json()["error"]["code"]) == (404, "not_found")
    r = http.get("/v1/chat/completions")
    assert (r.status_code, r.json()["error"]["code"], r.headers["allow"]) == (
        405,
        "method_not_allowed",
        "POST",
    )
    assert http.request("TRACE", "/health").status_code == 405


def test_paths_take_one_trailing_slash_and_head(http: httpx.Client) -> None:
    for path in ("/version", "/openapi.json", "/docs", "/v1/models", "/v1/models/tiny", "/health"):
        plain = http.get(path)
        assert plain.status_code == 200, path
        assert http.get(path + "/").content == plain.content
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == plain.headers["content-type"]
        assert http.get(path + "//").status_code == 404
    body = {"prompt": "hi", "max_tokens": 2}
    assert http.post("/v1/completions/", json=body).json()["usage"]["completion_tokens"] == 2
    assert http.get("/get_load/").json() == http.get("/get_load").json()
    refused = http.post("/v1/messages/", json={})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_description_is_that_of_the_engine(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == openapi_document(Server.ENGINE)
    version = http.get("/version").json()
    assert (version["engine"], version["version"]) == ("baton", front_version())
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"a":\xff}',
        b"[" * 5000,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_bodies_that_are_no_json_objects(http: httpx.Client, raw: bytes) -> None:
    r = http.post("/v1/completions", content=raw)
    assert (r.status_code, r.json()["error"]["code"]) == (400, "invalid_json")
    assert r.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("content-encoding", "gzip"), ("content-type", "multipart/form-data; boundary=x")],
)
def test_bodies_in_another_form_are_refused_by_name(
    http: httpx.Client, name: str, value: str
) -> None:
    body = b'{"prompt": "x"}'
    r = http.post(
        "/v1/completions",
        content=gzip.compress(body) if value == "gzip" else body,
        headers={name: value},
    )
    assert (r.status_code, r.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert value.split(";")[0] in r.json()["error"]["message"]


def test_answers_that_end_in_nan_make_the_node_unhealthy_until_one_does_not() -> None:
    with (
        fake_engine("--model-path", model(), "--served-model-name", "tiny") as engine,
        httpx.Client(base_url=engine.url, timeout=20) as http,
    ):
        bad = {"prompt": "hi", "cache_salt": script(error=["nonfinite_logits", "NaN"])}
        for _ in range(3):
            assert http.get("/health").status_code == 200
            r = http.post("/v1/completions", json=bad)
            assert (r.status_code, r.json()["error"]["code"]) == (500, "nonfinite_logits")
        assert http.get("/health").json()["error"]["code"] == "engine_dead"
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "content", [b"a" * (33 * 2**20), b"," * (2**21 + 1)], ids=["bytes", "values"]
)
def test_body_over_the_limit_is_refused_unparsed(http: httpx.Client, content: bytes) -> None:
    r = http.post("/v1/completions", content=content)  # which is no JSON either
    assert (r.status_code, r.json()["error"]["code"]) == (413, "payload_too_large")


def test_prompt_of_20_mib_is_refused_by_its_bytes_as_by_its_text(http: httpx.Client) -> None:
    """Both refusals are one: routers refuse by what this engine announces."""
    info = http.get("/get_server_info").json()
    chars, context = info["max_prompt_chars"], info["context_length"]
    large = "word and more " * (20 * 2**20 // 14)
    refused = http.post("/v1/completions", json={"prompt": large})
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    tokens = -(-len(large) // (chars // context))
    assert refused.json()["error"]["message"] == (
        f"this model's maximum context length is {context} tokens here, but the prompt has {len(large)} characters, "
        f"at least {tokens} tokens; shorten it, or start the engine with a larger --context-length or "
        "--max-total-tokens"
    )
    assert refused.json()["error"]["param"] == "prompt"
    messages = [{"role": "user", "content": "x"}] * (20 * 2**20 // 34)
    refused = http.post("/v1/chat/completions", json={"messages": messages})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    refused = http.post("/v1/chat/completions", json={"messages": HI, "tools": [large]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "payload_too_large")


def test_request_ids_come_back(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "id-1"}).headers["x-request-id"] == "id-1"
    made = http.get("/nope").headers["x-request-id"]
    assert len(made) == 32
    strange = http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert strange != "a b"


def test_ignored_parameters_are_listed_safely(http: httpx.Client) -> None:
    r = http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1, "weird": 1, "ev\r\nil: x": 2}
    )
    assert r.headers["x-ignored-params"] == "weird,ev??il:?x"


def test_api_key() -> None:
    with (
        fake_engine("--model-path", model(), "--api-key", "secret") as guarded,
        httpx.Client(base_url=guarded.url) as client,
    ):
        for path in ("/health", "/livez", "/readyz", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.get("/health_generate").status_code == 401
        right = {"authorization": "Bearer secret"}
        assert client.get("/health_generate", headers=right).status_code == 200
        named = {**right, "host": "evil.example", "origin": "http://evil.example"}
        assert client.post("/undrain", headers=named).status_code == 200, "a page has no key"
        r = client.get("/v1/models")
        assert (r.status_code, r.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (
            client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        )
        assert (
            client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        )
        assert (
            "secret"
            not in client.get("/get_server_info", headers={"authorization": "Bearer secret"}).text
        )


def test_pages_of_other_sites_and_unknown_names_are_refused(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        for path in ("/v1/completions", "/v1/messages", "/drain", "/flush_cache"):
            r = http.post(path, json=body, headers=headers)
            error = r.json()["error"]
            assert (r.status_code, error["type"]) == (403, "permission_error")
            assert error["code"] == "foreign_origin"
        assert http.get("/flush_cache", headers=headers).status_code == 403
        assert http.get("/v1/models", headers=headers).status_code == 200
    renamed = {"host": "evil.example"}
    for path in ("/v1/models", "/get_server_info", "/debug/ledger"):
        r = http.get(path, headers=renamed)
        assert (r.status_code, r.json()["error"]["code"]) == (403, "host_not_allowed")
    for path in ("/health", "/metrics"):
        assert http.get(path, headers=renamed).status_code == 200, "open to all, as with a key"
    own = {"origin": str(http.base_url).rstrip("/")}
    assert http.post("/v1/completions", json=body, headers=own).status_code == 200


def test_control_paths_read_declared_json_alone(http: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        headers = {"content-type": kind}
        for path in ("/abort_request", "/debug/diagnosis"):
            r = http.post(path, content=b'{"abort_all": true}', headers=headers)
            assert (r.status_code, r.json()["error"]["code"]) == (415, "unsupported_media_type")
        r = http.post(
            "/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
        )
        assert r.status_code == 200, "curl -d calls it a form"


# ---- native endpoints --------------------------------------------------------------------------------------------


def test_generate_whole_and_batched(http: httpx.Client) -> None:
    options = {
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    r = http.post("/generate", json={"text": "hello", "rid": "g", **options}).json()
    assert r["meta_info"]["id"] == "g"
    assert r["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert len(r["output_ids"]) == len(r["meta_info"]["output_token_logprobs"]) == 3
    assert len(r["meta_info"]["output_top_logprobs"][0]) == 2
    many = http.post("/generate", json={"input_ids": [[5, 6], [7]], **options}).json()
    assert [m["output_ids"] for m in many] == [[5, 6, 5], [7, 7, 7]]


def test_generate_streams_the_text_so_far(http: httpx.Client) -> None:
    body = {"text": "x", "stream": True, "cache_salt": script(reply="the relay race", step=0.005)}
    texts = [e["text"] for e in frames(http.post("/generate", json=body).text)]
    assert texts[-1] == "the relay race"
    assert all(b.startswith(a) for a, b in pairwise(texts))


def test_tokenize_and_back(http: httpx.Client) -> None:
    for prefix in ("", "/v1"):
        r = http.post(prefix + "/tokenize", json={"prompt": "the relay 😀"}).json()
        assert r["count"] == len(r["tokens"])
        assert r["max_model_len"] == 512
        back = http.post(prefix + "/detokenize", json={"tokens": r["tokens"]}).json()
        assert back["text"] == back["prompt"] == "the relay 😀"
    named = http.post("/tokenize", json={"prompt": "the relay", "return_token_strs": True}).json()
    assert "".join(named["token_strs"]).replace("\u0120", " ") == "<s>the relay"
    assert len(named["token_strs"]) == named["count"]
    many = http.post("/tokenize", json={"prompt": ["a", "the relay"]}).json()
    assert many["count"] == [len(row) for row in many["tokens"]]
    messages = [{"role": "user", "content": "hi"}]
    assert http.post("/tokenize", json={"messages": messages}).json()["count"] > 3
    assert http.post("/detokenize", json={"tokens": [10**9]}).json()["error"]["param"] == "tokens"


def test_facts(http: httpx.Client) -> None:
    info = http.get("/get_server_info").json()
    assert (info["dp_size"], info["page_size"], info["disaggregation_mode"]) == (2, 16, "null")
    assert info["max_total_num_tokens"] == 100_000
    assert info["served_model_name"] == "tiny"
    assert (info["engine"], info["layout"]["groups"][0]["page_tokens"]) == ("baton", 16)
    assert (info["schedule_policy"], info["schedule_policy_resolved"]) == ("auto", "fcfs")
    assert sorted(info["fingerprint"]) == [
        "answer_format",
        "chat_template",
        "dtype",
        "grammar",
        "kv_layout",
        "model",
        "page_size",
        "tokenizer",
    ]
    assert (info["fingerprint"]["page_size"], info["fingerprint"]["model"]) == ("16", "test")
    assert [s["ready"] for s in info["internal_states"]] == [True, True]
    assert http.get("/server_info").json()["version"] == info["version"]
    assert http.get("/model_info").json() == http.get("/get_model_info").json()
    loads = http.get("/v1/loads").json()["loads"]
    assert [(load["dp_rank"], load["num_reqs"], load["num_waiting_reqs"]) for load in loads] == [
        (0, 0, 2),
        (1, 0, 2),
    ]
    assert loads[0]["load"]["bands"] == {"4": {"requests": 2, "tokens": 300}}
    assert loads[0]["age_ms"] >= 0
    assert (loads[0]["prefilled_tokens"], loads[0]["generated_tokens"]) == (80, 7)
    short = http.get("/get_load").json()
    assert [set(load) for load in short] == [
        {"dp_rank", "num_reqs", "num_running_reqs", "num_waiting_reqs", "num_tokens", "token_usage"}
    ] * 2, "SGLang's list"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_answers_carry_the_load_of_their_rank(http: httpx.Client, path: str, stream: bool) -> None:
    body = {
        "prompt": "a",
        "text": "a",
        "max_tokens": 2,
        "sampling_params": {"max_new_tokens": 2},
        "stream": stream,
    }
    del body["text" if path.startswith("/v1") else "prompt"]
    answer = http.post(path, json={**body, "data_parallel_rank": 1})
    assert answer.status_code == 200, answer.text
    values = dict(part.split("=") for part in answer.headers["x-baton-load"].split(";"))
    assert (values["rank"], values["bands"], values["queued_tokens"]) == ("1", "4:300", "300")
    assert (values["running"], values["pages_free"], values["pages"]) == ("1", "9", "12")
    assert (values["prefilled"], values["generated"]) == ("80", "7")
    numbers = [number for name, number in values.items() if name not in ("bands", "inc")]
    assert all(number.lstrip("-").isdigit() for number in numbers)
    stages = "queue_us=1500;transport=shm;pages=3;bytes=12288;pull_us=250"
    assert answer.headers["x-baton-stages"] == stages, (
        "as the rank reported them with the first token"
    )


def test_every_answer_for_routers_states_one_incarnation(http: httpx.Client) -> None:
    incarnation = http.get("/get_server_info").json()["incarnation"]
    assert len(bytes.fromhex(incarnation)) == 8
    for path in ("/health", "/readyz", "/livez", "/v1/loads"):
        assert http.get(path).json()["incarnation"] == incarnation
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert f"inc={incarnation}" in answer.headers["x-baton-load"].split(";")
    for body in ({"prompt": "a", "max_tokens": -1}, {"prompt": "a", "model": "another"}):
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code in (400, 404)
        assert refused.headers["x-baton-load"] == f"inc={incarnation}"


def test_health(http: httpx.Client) -> None:
    for path in ("/health", "/livez", "/readyz", "/ping", "/health_generate"):
        assert http.get(path).status_code == 200
    assert http.head("/health").status_code == 200


def test_flush_cache(http: httpx.Client) -> None:
    assert http.get("/flush_cache").json()["success"] is True
    assert [r["dp_rank"] for r in http.post("/flush_cache").json()["ranks"]] == [0, 1]


def test_scheduler_steps_are_asked_of_every_rank(http: httpx.Client) -> None:
    answer = http.get("/v1/scheduler/steps", params={"n": 3}).json()
    assert [(r["dp_rank"], r["steps"]) for r in answer["ranks"]] == [
        (0, [{"asked": 3}]),
        (1, [{"asked": 3}]),
    ]
    assert http.get("/v1/scheduler/steps").json()["ranks"][0]["steps"] == [{"asked": 256}]
    for n in ("0", "257", "x", "-1"):
        error = http.get("/v1/scheduler/steps", params={"n": n})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "n")


def test_dp_ranks_are_applied_and_balanced(http: httpx.Client, engine: FakeEngine) -> None:
    for rank in (1, 1, 0):
        http.post(
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 1, "rid": "pinned", "data_parallel_rank": rank},
        )
    pinned = [sum(s["rid"] == "pinned" for s in engine.ledger(rank)["submits"]) for rank in (0, 1)]
    assert pinned == [1, 2]
    before = [len(engine.ledger(rank)["submits"]) for rank in (0, 1)]
    http.post("/v1/completions", json={"prompt": ["a"] * 6, "max_tokens": 1})
    after = [len(engine.ledger(rank)["submits"]) for rank in (0, 1)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 3]


def test_metrics(http: httpx.Client) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    http.post("/v1/completions", json={"prompt": ""})
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    answered = {
        tuple(sorted(s.labels.items())): s.value for s in families["baton_http_requests"].samples
    }
    assert answered[(("code", "ok"), ("endpoint", "completions"))] >= 1
    assert answered[(("code", "invalid_value"), ("endpoint", "completions"))] >= 1
    pages = families["baton_kv_pages"].samples
    assert [(s.labels["dp_rank"], s.labels["state"], s.value) for s in pages] == [
        ("0", "free", 7.0),
        ("1", "free", 7.0),
    ]
    assert [s.value for s in families["sglang:num_queue_reqs"].samples] == [2.0, 2.0]
    assert families["baton_engine_steps"].type == "counter"
    assert families["baton_ready"].samples[0].value == 1
    assert all(s.value == 0 for s in families["baton_requests_in_flight"].samples)
