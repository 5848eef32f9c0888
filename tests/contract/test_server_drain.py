"""Drain and state of an engine over HTTP: what is refused, what finishes, what is left. Ranks are scripted."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes.front import FakeEngine, end, fake_engine, model, spawn
from tests.support.processes.ports import reserve_port

STATES = ("starting", "loading", "ready", "draining", "dead")


@pytest.fixture(scope="module")
def path() -> str:
    return model()


@pytest.fixture
def engine(path: str) -> Iterator[FakeEngine]:
    with fake_engine("--model-path", path, "--dp-size", "2") as started:
        yield started


@pytest.fixture
def port() -> int:
    return reserve_port()


def wait_until(fact: Callable[[], Any], secs: float = 60.0) -> None:
    deadline = time.monotonic() + secs
    while not fact():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)  # polls another process; the deadline decides, not the pause


def in_background(url: str, results: list[httpx.Response], **body: Any) -> threading.Thread:
    """A completion in its own thread; the response is appended to `results`."""
    whole = {"prompt": "a", "ignore_eos": True, **body}
    run = lambda: results.append(httpx.post(url + "/v1/completions", json=whole, timeout=60))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def complete(url: str) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)


def readyz(url: str) -> dict[str, Any]:
    """Status, state and reason; empty while nothing listens."""
    try:
        answer = httpx.get(url + "/readyz")
    except httpx.TransportError:
        return {}
    return {
        "status": answer.status_code,
        **{name: answer.json().get(name) for name in ("state", "reason")},
    }


def gauges(url: str) -> dict[str, float]:
    """baton_state by state, and baton_load_progress_ratio as `progress`."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(url + "/metrics").text):
        if family.name == "baton_state":
            found.update({sample.labels["state"]: sample.value for sample in family.samples})
        if family.name == "baton_load_progress_ratio":
            found["progress"] = family.samples[0].value
    return found


def only(state: str) -> dict[str, float]:
    return {name: float(name == state) for name in STATES}


def test_draining_engine_finishes_what_runs_refuses_the_rest_and_returns(
    engine: FakeEngine, tmp_path: Path
) -> None:
    url, go_on = engine.url, tmp_path / "go_on"
    held = json.dumps({"hold": str(go_on)})
    results: list[httpx.Response] = []
    threads = [
        in_background(
            url, results, max_tokens=9, cache_salt=held, data_parallel_rank=0, stream=True
        ),
        in_background(url, results, max_tokens=9, cache_salt=held, data_parallel_rank=1),
    ]
    wait_until(lambda: [engine.ledger(rank)["running"] for rank in (0, 1)] == [1, 1])
    before = httpx.get(url + "/drain").json()
    assert (before["state"], before["is_drained"], before["draining_secs"]) == (
        "ready",
        False,
        None,
    )

    first = httpx.post(url + "/drain")
    assert first.status_code == 200
    again = httpx.post(url + "/drain").json()
    for answer in (first.json(), again, httpx.get(url + "/drain").json()):
        assert (answer["state"], answer["reason"], answer["is_final"]) == (
            "draining",
            "draining",
            False,
        )
        assert answer["is_drained"] is False
        left = answer["left"]
        assert (left["requests"], left["streams"], left["running"], left["leases"]) == (2, 1, 2, 0)
        assert left["oldest_secs"] > 0
    assert again["draining_secs"] >= first.json()["draining_secs"], (
        "asking again does not begin again"
    )

    refused = complete(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1
    assert readyz(url) == {"status": 503, "state": "draining", "reason": "draining"}
    assert httpx.get(url + "/readyz").json()["error"]["code"] == "draining"
    assert httpx.get(url + "/get_server_info").json()["state"] == "draining"
    assert gauges(url) == {**only("draining"), "progress": 1.0}
    assert httpx.get(url + "/livez").status_code == 200

    go_on.touch()
    for thread in threads:
        thread.join()
    assert [r.status_code for r in results] == [200, 200]
    assert sum("[DONE]" in r.text for r in results) == 1, "the stream has its end"
    wait_until(lambda: httpx.get(url + "/drain").json()["is_drained"])
    assert httpx.get(url + "/drain").json()["left"]["oldest_secs"] is None
    assert engine.process.poll() is None, "a drain alone ends no process"

    back = [httpx.post(url + "/undrain").json() for _ in range(2)]
    assert [(b["state"], b["reason"], b["is_drained"]) for b in back] == [
        ("ready", None, False)
    ] * 2
    assert complete(url).status_code == 200
    assert readyz(url) == {"status": 200, "state": "ready", "reason": None}
    assert gauges(url) == {**only("ready"), "progress": 1.0}


def test_leases_keep_a_drain_open(path: str, tmp_path: Path) -> None:
    """A P node's leases outlive its answers."""
    looks = tmp_path / "looks"
    with fake_engine("--model-path", path, script={"leased": [2, str(looks)]}) as engine:
        answers = [httpx.post(engine.url + "/drain").json() for _ in range(3)]
    assert [(a["left"]["leases"], a["is_drained"]) for a in answers] == [
        (1, False),
        (1, False),
        (0, True),
    ]


def test_signal_makes_the_drain_final(path: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    with fake_engine("--model-path", path) as engine:
        results: list[httpx.Response] = []
        thread = in_background(
            engine.url, results, max_tokens=9, cache_salt=json.dumps({"hold": str(go_on)})
        )
        wait_until(lambda: engine.ledger()["running"] == 1)
        assert httpx.post(engine.url + "/drain").json()["is_final"] is False
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(engine.url + "/drain").json()["is_final"])
        refused = httpx.post(engine.url + "/undrain")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong_state")
        assert "it got a signal to end" in refused.json()["error"]["message"]
        assert complete(engine.url).json()["error"]["code"] == "draining"
        go_on.touch()
        thread.join()
        assert results[0].json()["usage"]["completion_tokens"] == 9
        assert engine.process.wait(timeout=60) == 0


def test_signal_ends_a_drained_engine_at_once(path: str) -> None:
    with fake_engine("--model-path", path, "--drain-timeout-secs", "600") as engine:
        assert httpx.post(engine.url + "/drain").json()["is_drained"] is True
        assert engine.stop() == 0


@pytest.mark.parametrize("loading", [None, [25, 100]])
def test_state_while_the_model_loads(
    path: str, port: int, tmp_path: Path, loading: list[int] | None
) -> None:
    loaded = tmp_path / "loaded"
    script = {"ready_when": str(loaded)} | ({} if loading is None else {"loading": loading})
    state, url = "starting" if loading is None else "loading", f"http://127.0.0.1:{port}"
    engine = spawn("--model-path", path, "--port", str(port), script=script)
    try:
        wait_until(lambda: readyz(url) == {"status": 503, "state": state, "reason": "loading 0/1"})
        assert gauges(url) == {**only(state), "progress": 0.0 if loading is None else 0.25}
        assert httpx.get(url + "/get_server_info").json()["state"] == state

        drained = httpx.post(url + "/drain").json()
        assert (drained["state"], drained["is_drained"]) == ("draining", True)
        loaded.touch()
        assert engine.process.stdout is not None
        assert engine.process.stdout.readline().startswith("READY ")
        assert readyz(url)["state"] == "draining", "loading does not end a drain"
        assert httpx.post(url + "/undrain").json()["state"] == "ready"
        assert gauges(url) == {**only("ready"), "progress": 1.0}
    finally:
        end(engine)


def test_rank_that_died_makes_the_state_dead(engine: FakeEngine, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    results: list[httpx.Response] = []
    held = json.dumps({"hold": str(go_on)})
    thread = in_background(engine.url, results, max_tokens=3, cache_salt=held, data_parallel_rank=0)
    wait_until(lambda: engine.ledger(0)["running"] == 1)
    psutil.Process(int(engine.ledger(1)["pid"])).kill()
    wait_until(
        lambda: readyz(engine.url) == {"status": 503, "state": "dead", "reason": "rank_dead"}
    )
    assert gauges(engine.url)["dead"] == 1.0
    wait_until(lambda: httpx.get(engine.url + "/drain").json()["is_final"])
    assert httpx.post(engine.url + "/undrain").status_code == 409
    go_on.touch()
    thread.join()
    assert results[0].status_code == 200
    assert engine.process.wait(timeout=60) == 1


def test_drain_needs_the_key(path: str) -> None:
    with fake_engine("--model-path", path, "--api-key", "secret") as engine:
        for method, route in (("GET", "/drain"), ("POST", "/drain"), ("POST", "/undrain")):
            assert httpx.request(method, engine.url + route).status_code == 401
        assert readyz(engine.url)["status"] == 200
        first = httpx.post(engine.url + "/drain", headers={"authorization": "Bearer secret"})
        assert first.json()["state"] == "draining"
