"""A decode node is killed in the middle of answers: another one goes on, and clients get what they would have got."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest

from tests.support.processes.cluster import Cluster, eventually, metric

pytestmark = pytest.mark.timeout(240)
AT_ONCE = 20
SLOW = {"greedy", "chat", "generate", "responses", "messages", "drawn"}
"""Forms that tests of the router cut at every event, with workers made for them: `failover.rs` and
`dialect_failover.rs`. Drawn streams are among those that are resumed at once."""
MAX_TRIES = 10

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 300}
DRAWN: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.1,
    "min_tokens": 250, "max_tokens": 300, "stop": ["zzz"],
}  # fmt: skip
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "demo", "prompt": "Baton is", "logprobs": 1, **GREEDY, **USAGE}),
    ("/v1/completions", {"model": "demo", "prompt": "Baton is", **DRAWN, **USAGE}),
    ("/v1/chat/completions", {
        "model": "demo", "messages": [{"role": "user", "content": "What is a page? \u00e9\U0001f3c3"}],
        "logprobs": True, **DRAWN, **USAGE,
    }),
    ("/generate", {
        "text": "Baton is", "stream": True,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 800},
    }),
    ("/v1/responses", {
        "model": "demo", "input": "What is a page?", "stream": True, "temperature": 0, "ignore_eos": True,
        "max_output_tokens": 300,
    }),
    ("/v1/messages", {
        "model": "demo", "messages": [{"role": "user", "content": "What is a page?"}], "stream": True, **GREEDY,
    }),
]  # fmt: skip


async def events_of(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], under_way: asyncio.Semaphore
) -> list[dict[str, Any]]:
    """Events of a stream that ends well; `under_way` is released when some of them have come."""
    events: list[dict[str, Any]] = []
    ends = 0
    async with session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for raw in answer.content:
            line = raw.decode().rstrip("\n")
            assert not line.startswith(": baton"), line
            if line == "data: [DONE]":
                ends += 1
            elif line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                assert "error" not in events[-1], events[-1]
                if len(events) == 8:
                    under_way.release()
    assert ends == 1
    return events


def shown_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of /v1/responses, whose events are numbered without gaps."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    response = events[-1]["response"]
    assert len({e["response"]["id"] for e in events if "response" in e}) == 1
    (item,) = response["output"]
    assert item["content"][0]["text"] == "".join(deltas)
    usage = response["usage"]
    return {
        "text": "".join(deltas),
        "finish": (events[-1]["type"], response["incomplete_details"]),
        "counts": (usage["input_tokens"], usage["output_tokens"]),
    }


def shown_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of /v1/messages."""
    kinds = [event["type"] for event in events]
    around = ["message_start", "ping", "content_block_start"]
    assert kinds[:3] == around
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    usage = events[-2]["usage"]
    return {
        "text": "".join(event["delta"]["text"] for event in events[3:-3]),
        "finish": events[-2]["delta"],
        "counts": (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["output_tokens"],
        ),
    }


def shown(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer a client makes of the events, however the tokens are grouped."""
    if path == "/v1/responses":
        return shown_response(events)
    if path == "/v1/messages":
        return shown_message(events)
    if path == "/generate":
        texts = [event["text"] for event in events]
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        meta = events[-1]["meta_info"]
        counts = meta["prompt_tokens"], meta["completion_tokens"]
        return {
            "ids": events[-1]["output_ids"],
            "text": texts[-1],
            "finish": meta["finish_reason"],
            "counts": counts,
        }
    assert (
        len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    )
    choices = [choice for event in events for choice in event["choices"]]
    deltas = [choice.get("delta", choice) for choice in choices]
    columns: list[Any] = []
    for found in (choice["logprobs"] for choice in choices if choice.get("logprobs")):
        rows = found.get("content") or zip(
            found["tokens"], found["text_offset"], found["token_logprobs"], strict=True
        )
        columns += [
            (row["token"], row["logprob"]) if isinstance(row, dict) else row for row in rows
        ]
    return {
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "text": "".join(delta.get("content", delta.get("text", "")) for delta in deltas),
        "finishes": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [
            (e["usage"]["prompt_tokens"], e["usage"]["completion_tokens"])
            for e in events
            if e.get("usage")
        ],
        "logprobs": [
            tuple(round(x, 4) if isinstance(x, float) else x for x in row) for row in columns
        ],
    }


def resumed(cluster: Cluster) -> float:
    count = metric(cluster.url, "baton_router_failovers_total", outcome="resumed")
    return count if count >= 0 else 0.0  # no sample before the first one


def decode_count(cluster: Cluster) -> int:
    return sum(node["role"] == "decode" for node in cluster.state["nodes"])


def kill_busy(cluster: Cluster) -> int | None:
    """Kill the decode node with most requests, and return which it was; None: all answers are complete already."""
    loads = cluster.loads()
    index = max(range(decode_count(cluster)), key=lambda i: loads[cluster.node("decode", i)["url"]])
    if not loads[cluster.node("decode", index)["url"]]:
        return None
    cluster.kill("decode", index)
    return index


def assert_kills_change_nothing(
    cluster: Cluster, asked: list[tuple[str, dict[str, Any]]], streams: int = 1
) -> None:
    """A decode node dies while at least so many of these answers are under way; they are as undisturbed.

    On a loaded machine the engines may be done before the kill: ask again until that many streams were resumed.
    """
    undisturbed = ask_all(cluster, asked, kills=False)
    for _ in range(MAX_TRIES):
        before = resumed(cluster)
        assert ask_all(cluster, asked, kills=True) == undisturbed
        count = resumed(cluster) - before
        assert count <= len(asked)
        if count >= streams:
            return
    raise AssertionError(
        f"in {MAX_TRIES} tries fewer than {streams} answers were under way at the kill"
    )


def ask_all(
    cluster: Cluster, asked: list[tuple[str, dict[str, Any]]], kills: bool
) -> list[dict[str, Any]]:
    """All of it at once; with `kills`, the busier decode node dies when three of four have come some way."""

    async def work() -> list[dict[str, Any]]:
        under_way = asyncio.Semaphore(0)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(cluster.url, timeout=timeout) as session:
            tasks = [
                asyncio.ensure_future(events_of(session, path, body, under_way))
                for path, body in asked
            ]
            if kills:
                for _ in range(-(-3 * len(asked) // 4)):
                    await asyncio.wait_for(under_way.acquire(), 60)
                if (index := await asyncio.to_thread(kill_busy, cluster)) is not None:
                    killed.append(index)
            answers = await asyncio.gather(*tasks)
        return [shown(path, events) for (path, _), events in zip(asked, answers, strict=True)]

    killed: list[int] = []
    restarts = [cluster.node("decode", i)["restarts"] for i in range(decode_count(cluster))]
    answers = asyncio.run(work())
    for index in killed:
        cluster.await_restart("decode", index, restarts[index] + 1)
        eventually(
            "the router has all again",
            lambda: {node["url"] for node in cluster.state["nodes"]} <= cluster.ready(),
        )
    cluster.assert_nothing_is_held()
    return answers


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, id=kind, marks=pytest.mark.slow if kind in SLOW else [])
        for at, kind in enumerate(("greedy", "drawn", "chat", "generate", "responses", "messages"))
    ],
)
def test_killed_decode_node_in_mid_stream_changes_nothing(
    two_decode_nodes: Cluster, at: int
) -> None:
    assert_kills_change_nothing(two_decode_nodes, [ASKED[at]])


def test_many_streams_are_resumed_at_once(two_decode_nodes: Cluster) -> None:
    asked = [
        ("/v1/completions", {**ASKED[i % 2][1], "prompt": f"{i} Baton is"}) for i in range(AT_ONCE)
    ]
    assert_kills_change_nothing(two_decode_nodes, asked, streams=2)


def test_only_decode_node_is_killed_and_resumes_its_stream_when_it_is_back(pair: Cluster) -> None:
    assert_kills_change_nothing(pair, [ASKED[3]])
