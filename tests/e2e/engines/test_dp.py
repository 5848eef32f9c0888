"""Data-parallel ranks behind a router that knows them: each is a candidate, serves its own, and is lost alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.support.processes.cluster import (
    Cluster,
    eventually,
    family,
    get,
    metric,
    metrics,
    settled,
)
from tests.support.processes.router import Router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = 16
RANKS = 8
EVENTS = json.dumps({"enable_kv_cache_events": True, "publisher": "null"})
KNOWN = ("--kv-events-config", EVENTS, "--router-args", f"--kv-events on --block-size {PAGE}")


@pytest.fixture(scope="module")
def wide() -> Iterator[Cluster]:
    """One engine of eight ranks."""
    with Cluster.up(
        "--workers", "1", "--dp-size", str(RANKS), "--max-total-tokens", "4096", *KNOWN
    ) as cluster:
        eventually("all caches are known", lambda: states(cluster) == ["exact"] * RANKS)
        yield cluster


@pytest.fixture(scope="module")
def wide_pair() -> Iterator[Cluster]:
    """A prefill node of four ranks and a decode node of two: eight each would need 6 GB."""
    flags = ["--max-total-tokens", "4096", *KNOWN]
    first = free_ports(2 * (4 + 2))
    for role, ranks in (("prefill", 4), ("decode", 2)):
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{first}",
        }
        config["replay_endpoint"] = f"tcp://127.0.0.1:{first + ranks}"
        flags += [f"--{role}-args", f"--dp-size {ranks} --kv-events-config '{json.dumps(config)}'"]
        first += 2 * ranks
    with Cluster.up(*flags) as cluster:
        eventually("all caches are known", lambda: states(cluster) == ["exact"] * 6)
        yield cluster


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, looked for from another one in each process."""
    starts = list(range(20000, 30000, count))
    begin = os.getpid() % len(starts)
    for first in starts[begin:] + starts[:begin]:
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError):
            for port in range(first, first + count):
                taken.enter_context(socket.socket()).bind(("", port))
            return first
    raise AssertionError(f"there are no {count} free ports in a row")


def workers(router: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(get(f"{router}/workers") or '{"workers": []}')[
        "workers"
    ]
    return found


def feeds(cluster: Cluster) -> list[dict[str, Any]]:
    return [feed for worker in workers(cluster.url) for feed in worker["kv_events"]]


def states(cluster: Cluster) -> list[str]:
    return [str(feed["state"]) for feed in feeds(cluster)]


def prompt(number: int, pages: int = 4) -> list[int]:
    return [1 + (number * 37 + i * (1 + number % 5)) % 250 for i in range(pages * PAGE + 3)]


def by_rank(url: str, name: str, **labels: str) -> dict[int, float]:
    found = [s for s in metrics(url) if s.name == name and labels.items() <= s.labels.items()]
    return {int(s.labels["dp_rank"]): s.value for s in found}


def ended_request(cluster: Cluster, rid: str) -> dict[str, Any]:
    """The request's timeline, once its last leg has ended."""

    def ended() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(get(f"{cluster.url}/v1/requests/{rid}") or "{}")
        return found if found.get("state") == "ended" else None

    found = eventually(f"{rid} has ended", ended)
    assert found is not None
    return found


def rank_of(leg: dict[str, Any]) -> int:
    url, _, rank = leg["worker"].partition("@")
    assert url.startswith("http")
    return int(rank)


def generate(cluster: Cluster, rid: str, ids: list[int], new: int = 4) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.url}/generate",
        json={"input_ids": ids, "sampling_params": sampling},
        headers={"x-request-id": rid},
        timeout=60,
    )
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def legs(cluster: Cluster, rid: str) -> dict[str, dict[str, Any]]:
    request = ended_request(cluster, rid)
    assert not request["failed_attempts"]
    return {leg["role"]: leg for leg in request["legs"]}


def no_load(cluster: Cluster) -> bool:
    """True if the router counts no load for any candidate."""
    loads = [s.value for s in metrics(cluster.url) if s.name == "baton_router_worker_load"]
    return bool(loads) and not any(loads)


def blocks(url: str, rank: int) -> int:
    """Blocks in a rank's own tree."""
    text = httpx.get(
        f"{url}/v1/kv_events", params={"follow": "false", "dp_rank": rank}, timeout=20
    ).text
    events = json.loads(text.splitlines()[0])["events"]
    return sum(len(event.get("block_hashes", ())) for event in events)


def index_follows(router: str, engine: Callable[[str], str] = lambda url: url) -> bool:
    """Has the router as many blocks of each rank as the rank? `engine`: where a worker of the router's really is."""
    counts = [
        (feed["state"], feed["blocks"], blocks(engine(worker["url"]), rank))
        for worker in workers(router)
        for rank, feed in enumerate(worker["kv_events"])
    ]
    return bool(counts) and all(state == "exact" and known == held for state, known, held in counts)


# ---- one engine ----------------------------------------------------------------------------------------------------


def test_every_rank_is_a_candidate_and_the_chosen_one_serves(wide: Cluster) -> None:
    url = wide.node("worker")["url"]
    shown = {s.labels["worker"] for s in metrics(wide.url) if s.name == "baton_router_worker_load"}
    assert shown == {f"{url}@{rank}" for rank in range(RANKS)}
    before = settled(lambda: by_rank(url, "baton_generated_tokens_total"))
    chosen = dict.fromkeys(range(RANKS), 0)
    for number in range(3 * RANKS):
        generate(wide, f"spread-{number}", prompt(number))
        chosen[rank_of(legs(wide, f"spread-{number}")["regular"])] += 4
    assert all(chosen.values()), f"a rank was never chosen: {chosen}"

    def served() -> dict[int, float]:
        now = by_rank(url, "baton_generated_tokens_total")
        return {rank: now[rank] - before.get(rank, 0) for rank in range(RANKS)}

    eventually("each rank has generated what was sent to it", lambda: served() == chosen)
    eventually("no load is left", lambda: no_load(wide))
    wide.assert_nothing_is_held()


def test_chat_stays_where_its_beginning_is_cached(wide: Cluster) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": "What is Baton? " * 12}]
    ranks, cached = [], []
    for turn in range(3):
        rid = f"chat-{turn}"
        with wide.client() as client:
            answer = client.chat.completions.create(
                model="demo",
                messages=messages,
                max_tokens=24,
                temperature=0,
                extra_headers={"x-request-id": rid},
            )
        ranks.append(rank_of(legs(wide, rid)["regular"]))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": "And then?"},
        ]
        for number in range(5):  # others are spread meanwhile
            generate(wide, f"other-{turn}-{number}", prompt(100 + 5 * turn + number))
    assert len(set(ranks)) == 1, ranks
    assert 0 < cached[1] < cached[2]


def test_index_follows_each_rank(wide: Cluster) -> None:
    eventually("the router knows each rank's cache", lambda: index_follows(wide.url))
    url = wide.node("worker")["url"]
    ids = prompt(200)
    generate(wide, "first", ids)
    first = rank_of(legs(wide, "first")["regular"])
    eventually("the router knows each rank's cache", lambda: index_follows(wide.url))
    again = generate(wide, "again", ids)
    leg = legs(wide, "again")["regular"]
    assert (rank_of(leg), leg["cached_tokens"]) == (first, 4 * PAGE), "it was expected where it is"
    assert again["meta_info"]["cached_tokens"] == 4 * PAGE
    httpx.post(f"{url}/flush_cache").raise_for_status()
    eventually(
        "the router knows that all are empty",
        lambda: [feed["blocks"] for feed in feeds(wide)] == [0] * RANKS,
    )


# ---- a pair --------------------------------------------------------------------------------------------------------


def test_both_chosen_ranks_serve_and_the_room_names_the_prefill_rank(wide_pair: Cluster) -> None:
    p, d = wide_pair.node("prefill")["url"], wide_pair.node("decode")["url"]

    def counted() -> tuple[dict[int, float], dict[int, float]]:
        return by_rank(p, "baton_prompt_tokens_computed_total"), by_rank(
            d, "baton_generated_tokens_total"
        )

    before = settled(counted)
    computed, generated = dict.fromkeys(range(4), 0), dict.fromkeys(range(2), 0)
    for number in range(16):
        ids = prompt(300 + number)
        generate(wide_pair, f"pair-{number}", ids)
        sent = legs(wide_pair, f"pair-{number}")
        rank = rank_of(sent["prefill"])
        assert sent["prefill"]["room"] == sent["decode"]["room"]
        assert sent["prefill"]["room"] % 4 == rank, "unmodified SGLang nodes place by it"
        computed[rank] += len(ids)
        generated[rank_of(sent["decode"])] += 3  # the first token is P's
    assert all(computed.values()), computed
    assert all(generated.values()), generated

    def grown() -> list[dict[int, float]]:
        sides = zip(counted(), before, strict=True)
        return [
            {rank: value - then.get(rank, 0) for rank, value in now.items()} for now, then in sides
        ]

    eventually(
        "each rank has computed and generated what was sent to it",
        lambda: grown() == [computed, generated],
    )
    eventually("no load is left", lambda: no_load(wide_pair))
    wide_pair.assert_nothing_is_held()


def test_index_follows_each_rank_of_both_roles(wide_pair: Cluster) -> None:
    ids = prompt(400)
    generate(wide_pair, "pair-first", ids)
    first = {role: rank_of(leg) for role, leg in legs(wide_pair, "pair-first").items()}
    eventually("the router knows each rank's cache", lambda: index_follows(wide_pair.url))
    again = generate(wide_pair, "pair-again", ids)
    sent = legs(wide_pair, "pair-again")
    assert rank_of(sent["prefill"]) == first["prefill"]
    assert sent["prefill"]["cached_tokens"] == 4 * PAGE
    assert again["meta_info"]["cached_tokens"] == 4 * PAGE
    for role in ("prefill", "decode"):
        httpx.post(f"{wide_pair.node(role)['url']}/flush_cache").raise_for_status()
    eventually(
        "the router knows that all are empty",
        lambda: [feed["blocks"] for feed in feeds(wide_pair)] == [0] * 6,
    )


class Disguise(ThreadingHTTPServer):
    """In front of one of our engines: passes everything on but its name. A router then takes it for SGLang's."""

    def __init__(self, target: str) -> None:
        self.target = target
        super().__init__(("127.0.0.1", 0), Passing)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass(httpx.get(self._target, timeout=60))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {"content-type": "application/json"}
        self._pass(httpx.post(self._target, content=body, headers=headers, timeout=60))

    @property
    def _target(self) -> str:
        assert isinstance(self.server, Disguise)
        return self.server.target + self.path

    def _pass(self, answer: httpx.Response) -> None:
        data = answer.content
        if self.path in ("/get_server_info", "/server_info"):
            data = json.dumps({k: v for k, v in answer.json().items() if k != "engine"}).encode()
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_sockets_of_each_rank_are_followed_too(wide_pair: Cluster) -> None:
    """Our engines serve events as SGLang's do: one socket per rank, the batches before it came by replay."""
    p, d = wide_pair.node("prefill"), wide_pair.node("decode")
    generate(wide_pair, "before", prompt(600))
    with Disguise(p["url"]) as prefill, Disguise(d["url"]) as decode:
        real = {prefill.url: p["url"], decode.url: d["url"]}
        with Router.up(
            "--pd-disaggregation", "--prefill", prefill.url, str(p["bootstrap_port"]), "--decode", decode.url,
            "--dp-aware", "--kv-events", "on", "--block-size", str(PAGE),
        ) as url:  # fmt: skip
            eventually(
                "the router knows each rank's cache", lambda: index_follows(url, real.__getitem__)
            )
            sources = [feed["source"] for worker in workers(url) for feed in worker["kv_events"]]
            assert len(set(sources)) == 6
            assert all(source.startswith("tcp://127.0.0.1:") for source in sources), sources
            body = {
                "input_ids": prompt(601),
                "sampling_params": {"temperature": 0, "max_new_tokens": 4},
            }
            first, again = (
                httpx.post(f"{url}/generate", json=body, timeout=60).json() for _ in range(2)
            )
            assert first["output_ids"] == again["output_ids"]
            eventually(
                "the router knows each rank's cache", lambda: index_follows(url, real.__getitem__)
            )
            for node in (p, d):
                httpx.post(f"{node['url']}/flush_cache").raise_for_status()
            eventually("it knows that all are empty", lambda: index_follows(url, real.__getitem__))
            assert not any(
                feed["blocks"] for worker in workers(url) for feed in worker["kv_events"]
            )


# ---- the end of a rank ---------------------------------------------------------------------------------------------


def test_killed_rank_costs_its_own_requests_and_the_engine_starts_again(wide: Cluster) -> None:
    """Last in this module: the cluster is another one after it."""
    node = wide.node("worker")
    results: dict[int, tuple[int, str]] = {}
    is_over = threading.Event()

    def ask(number: int) -> None:
        """Ask again and again, so that every rank has work until the kill; the last result counts."""
        body = {
            "input_ids": prompt(500 + number),
            "stream": True,
            "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
        }
        while not is_over.is_set():
            with httpx.stream("POST", f"{wide.url}/generate", json=body, timeout=120) as answer:
                lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
            results[number] = (answer.status_code, lines[-1] if lines else "")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2 * RANKS)]
    for thread in threads:
        thread.start()
    running = lambda: by_rank(node["url"], "baton_requests", state="running")  # noqa: E731
    eventually("every rank has work", lambda: len(running()) == RANKS and all(running().values()))
    ranks = [
        p for p in family(node["pid"])[1:] if "baton.server.worker.process" in " ".join(p.cmdline())
    ]
    assert len(ranks) == RANKS
    is_over.set()
    os.kill(ranks[3].pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    whole = [text for status, text in results.values() if status == 200 and '"length"' in text]
    failed = [(status, text) for status, text in results.values() if '"length"' not in text]
    assert len(whole) >= 2 * RANKS - 4, "the other ranks finish what they have"
    expected = (
        "engine_dead",
        "upstream_error",
        "no_worker",
    )  # the last: a stream waited in vain for another worker
    assert all(
        status == 503 or any(code in text for code in expected) for status, text in failed
    ), failed
    wide.await_restart("worker")
    eventually("all caches are known", lambda: states(wide) == ["exact"] * RANKS)
    eventually("no load is left", lambda: no_load(wide))
    wide.assert_nothing_is_held()
    assert metric(node["url"], "baton_ranks_alive") == RANKS
