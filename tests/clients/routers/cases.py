"""Behavior wanted behind any router: `class TestX(Behind)` with fixtures `front` (its URL), `nodes` (who is behind)."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.routers.wire import answer, ask, assert_same, events, streamed, texts
from tests.support.processes.cluster import Cluster, count, eventually, settled

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
GENERATE = "/generate"

IN_FLIGHT = 16
QUESTION = [{"role": "user", "content": "What is Baton?"}]
LONG = "A page of the relay, number 7, is handed on. " * 60
"""More tokens than one prefill chunk holds."""


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 16, **more}


def completion(prompt: Any = "What is Baton?", **more: Any) -> tuple[str, dict[str, Any]]:
    body = {
        "model": "demo",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
    }
    return COMPLETION, {**body, **more}


def generate(prompt: dict[str, Any], n: int = 1, **more: Any) -> tuple[str, dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "n": n}
    return GENERATE, {**prompt, "sampling_params": sampling, **more}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(),
    "chat, several turns": chat(
        messages=[
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": [{"type": "text", "text": "What is a room?"}]},
            {"role": "assistant", "content": "A place to meet."},
            {"role": "user", "content": "And a lease?"},
        ]
    ),
    "chat, n": chat(n=2),
    "chat, sampled": chat(n=3, temperature=1.2, top_p=0.9, seed=5),
    "chat, logprobs": chat(logprobs=True, top_logprobs=2, max_tokens=5),
    "chat, stop": chat(stop=[" prefill"], max_tokens=40),
    "chat, to its end": chat(max_tokens=300),
    "chat, one token": chat(max_tokens=1),
    "completion": completion(),
    "completion, long": completion(LONG),
    "completion, batch": completion(["What is Baton?", "A lease ends", "Pages " * 40]),
    "completion, batch and n": completion(["What is Baton?", "A lease ends"], n=2),
    "completion, logprobs": completion(logprobs=2, max_tokens=6),
    "completion, echo": completion(echo=True),
    "generate": generate({"text": "What is Baton?"}),
    "generate, ids": generate({"input_ids": list(range(5, 60))}),
    "generate, batch": generate({"input_ids": [[5, 6, 7], [8, 9], list(range(10, 50))]}),
    "generate, batch and n": generate({"input_ids": [[5, 6, 7], [8, 9]]}, n=2),
    "generate, logprobs": generate(
        {"text": "What is Baton?"}, return_logprob=True, top_logprobs_num=2
    ),
}

MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "too long": completion("word " * 3000),
    "too many tokens": chat(max_tokens=300_000),
    "two that exclude each other": completion(guided_regex="[a-z]+", guided_choice=["a", "b"]),
}
"""Requests a router passes on and an engine refuses."""


def is_pair(nodes: Cluster) -> bool:
    return any(node["role"] == "decode" for node in nodes.state["nodes"])


def pulled(pair: Cluster) -> float:
    """Bytes of KV pages that D has fetched from P."""
    return count(pair.node("decode")["url"], "baton_kv_pull_bytes_total")


def check_many_at_once(front: str, reference: str, nodes: Cluster) -> None:
    """Prompts of all lengths, every other one streamed: the answers of the reference, and nothing held afterwards."""
    asked = [completion(f"Runner {i} says: " + "hand it on. " * (i * 5)) for i in range(IN_FLIGHT)]

    def text(url: str, i: int) -> str:
        path, body = asked[i]
        return (
            streamed(url, path, body)[0].text if i % 2 else texts(path, answer(url, path, body))[0]
        )

    expected = [text(reference, i) for i in range(IN_FLIGHT)]
    before = settled(lambda: pulled(nodes)) if is_pair(nodes) else -1.0
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        assert list(pool.map(lambda i: text(front, i), range(IN_FLIGHT))) == expected
    eventually(
        "a KV page traveled: not one node did it all", lambda: before < 0 or pulled(nodes) > before
    )
    nodes.assert_nothing_is_held()


def check_two_ranks(front: str, reference: str, wide: Cluster) -> None:
    """P and D with two DP ranks each: the same answers, and every rank had its part."""
    work = {
        "prefill": "baton_prompt_tokens_computed_total",
        "decode": "baton_generated_tokens_total",
    }

    def done() -> dict[tuple[str, str], float]:
        return {
            (r, k): count(wide.node(r)["url"], name, dp_rank=k)
            for r, name in work.items()
            for k in "01"
        }

    before = settled(done)
    check_many_at_once(front, reference, wide)

    def idle() -> list[tuple[str, str]]:
        return [rank for rank, value in done().items() if not value > before[rank]]

    eventually("every rank had its part", lambda: not idle())


def generated(nodes: Cluster) -> float:
    """Tokens made so far by the nodes that decode."""
    return sum(
        count(n["url"], "baton_generated_tokens_total")
        for n in nodes.state["nodes"]
        if n["role"] != "prefill"
    )


class Behind:
    """Inherit, and define the fixtures `front` and `nodes`."""

    @pytest.mark.parametrize("name", CASES)
    def test_whole_answer(self, front: str, reference: str, name: str) -> None:
        path, body = CASES[name]
        assert_same(answer(front, path, body), answer(reference, path, body))

    @pytest.mark.parametrize("name", CASES)
    def test_streamed_answer(self, front: str, reference: str, name: str) -> None:
        path, body = CASES[name]
        found, expected = streamed(front, path, body), streamed(reference, path, body)
        assert found.keys() == expected.keys()
        for i in expected:
            assert_same(
                dataclasses.asdict(found[i]), dataclasses.asdict(expected[i]), f"choice {i}"
            )
        whole = texts(path, answer(reference, path, body))
        assert [found[i].text for i in range(len(whole))] == whole

    def test_usage_of_a_stream(self, front: str) -> None:
        path, body = chat(stream_options={"include_usage": True})
        with events(front, path, body) as stream:
            last = list(stream)[-1]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 16

    def test_many_at_once(self, front: str, reference: str, nodes: Cluster) -> None:
        check_many_at_once(front, reference, nodes)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("name", MISTAKES)
    def test_mistake(self, front: str, reference: str, name: str, stream: bool) -> None:
        path, body = MISTAKES[name]
        found, expected = (ask(url, path, {**body, "stream": stream}) for url in (front, reference))
        assert found.status == expected.status == 400
        error = expected.json["error"]
        assert error["message"].encode() in found.body, (
            "the engine's message does not reach the client"
        )
        self.check_error(found.body, error, stream)

    def check_error(self, body: bytes, expected: dict[str, Any], stream: bool) -> None:
        """Compare with the engine's error: a router in regular mode changes nothing."""
        assert_same(json.loads(body), {"error": expected})

    def test_mistakes_cost_no_worker_its_place(self, front: str, nodes: Cluster) -> None:
        """A circuit breaker that counted 4xx would open."""
        path, body = MISTAKES["too many tokens"]
        assert {ask(front, path, body).status for _ in range(12)} == {400}
        assert texts(CHAT, answer(front, *chat()))
        nodes.assert_nothing_is_held()

    @pytest.mark.parametrize("events_read", [1, 5])
    def test_client_that_leaves_holds_nothing(
        self, front: str, nodes: Cluster, events_read: int
    ) -> None:
        """The request ends where it was, and not because it had come to its end."""
        path, body = completion("one that is not read to its end", max_tokens=2000)
        before = settled(lambda: generated(nodes))
        with events(front, path, body) as stream:
            for _ in range(events_read):
                assert "error" not in next(stream)
        eventually(
            "the tokens it got are counted", lambda: generated(nodes) > before
        )  # ranks report now and then
        nodes.assert_nothing_is_held()
        made = settled(lambda: generated(nodes)) - before
        assert made < 2000, f"{made:g} tokens: the engine did not learn that the client had left"

    def test_request_id_comes_back(self, front: str) -> None:
        path, body = chat(max_tokens=1)
        assert (
            ask(front, path, body, {"x-request-id": "baton-1"}).headers["x-request-id"] == "baton-1"
        )

    def test_models(self, front: str) -> None:
        assert [model["id"] for model in ask(front, "/v1/models").json["data"]] == ["demo"]

    def test_nodes_log_no_traceback(self, front: str, nodes: Cluster) -> None:
        """Peers greet workers with probes of their own: nothing of that is an error."""
        for log in sorted((nodes.folder / "logs").glob("*.log")):
            assert "Traceback" not in log.read_text(errors="replace"), log.name
