"""Starting, draining and dying: the process as a supervisor and `baton up` see it. Ranks are scripted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.processes.front import REPO, FakeEngine, end, fake_engine, model, spawn
from tests.support.processes.ports import reserve_port


@pytest.fixture(scope="module")
def path() -> str:
    return model()


@pytest.fixture
def port() -> int:
    return reserve_port()


def post(url: str, results: list[Any], **body: Any) -> threading.Thread:
    """A request in its own thread; the response or exception is appended to `results`."""

    def run() -> None:
        try:
            results.append(
                httpx.post(url + "/v1/completions", json={"prompt": "a", **body}, timeout=60)
            )
        except httpx.HTTPError as err:
            results.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def wait_until(fact: Any, secs: float = 60.0) -> None:
    deadline = time.monotonic() + secs
    while not fact():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)  # polls another process; the deadline decides, not the pause


def status(url: str, path: str = "/health") -> int | None:
    try:
        return httpx.get(url + path).status_code
    except httpx.TransportError:
        return None


def rank_processes(engine: FakeEngine) -> list[psutil.Process]:
    return psutil.Process(engine.process.pid).children()


def test_port_answers_while_the_model_loads(path: str, port: int, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    engine = spawn("--model-path", path, "--port", str(port), script={"ready_when": str(loaded)})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: status(url) == 503)
        assert status(url, "/livez") == 200
        r = httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=60)
        assert (r.status_code, r.json()["error"]["code"]) == (503, "not_ready")
        assert int(r.headers["retry-after"]) >= 1
        assert "0 of 1 ranks are ready" in r.json()["error"]["message"]
        loaded.touch()
        assert engine.process.stdout is not None
        line = json.loads(engine.process.stdout.readline().removeprefix("READY "))
        assert line.pop("incarnation")
        assert line == {"url": url, "pid": engine.process.pid, "bootstrap_port": None}
        assert status(url) == 200
    finally:
        end(engine)


def test_port_in_use_is_one_clear_line_and_exit_2(path: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        engine = spawn("--model-path", path, "--port", str(number))
        try:
            assert engine.process.wait(timeout=60) == 2
            place = f"--host 127.0.0.1 --port {number}"
            assert (
                engine.log
                == f"baton engine: {place} is already in use; choose another, or 0 for a free port\n"
            )
        finally:
            end(engine)


def test_rank_that_cannot_start_ends_the_engine_with_its_message(path: str) -> None:
    engine = spawn("--model-path", path, script={"fail_start": "no such dtype"})
    try:
        assert engine.process.wait(timeout=60) == 1
        assert "rank 0: no such dtype" in engine.log
        assert engine.log.count("no such dtype") == 1
    finally:
        end(engine)


def test_bytes_other_than_http_are_refused_in_one_log_line(path: str) -> None:
    """sglang-router and smg greet every worker with an HTTP/2 preface, to see whether it speaks gRPC."""
    with fake_engine("--model-path", path) as engine:
        address = httpx.URL(engine.url)
        with socket.create_connection((address.host, address.port or 80), timeout=10) as s:
            s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert s.recv(64).startswith(b"HTTP/1.")
        wait_until(lambda: "this is no HTTP/1.1 request" in engine.log)
        assert "Traceback" not in engine.log
        assert "ERROR" not in engine.log
        assert status(engine.url) == 200


def test_sigterm_drains(path: str, tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    with fake_engine("--model-path", path) as engine:
        results: list[Any] = []
        thread = post(
            engine.url,
            results,
            max_tokens=20,
            ignore_eos=True,
            cache_salt=json.dumps({"hold": str(go_on)}),
        )
        wait_until(lambda: engine.ledger()["running"] == 1)
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(engine.url) == 503)
        refused = httpx.post(engine.url + "/v1/completions", json={"prompt": "a"}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        go_on.touch()
        thread.join()
        assert results[0].json()["usage"]["completion_tokens"] == 20, (
            "the running request was finished"
        )
        assert engine.process.wait(timeout=60) == 0


def test_drain_waits_for_the_ranks_ledgers(path: str, tmp_path: Path) -> None:
    """A P node's leases outlive its answers."""
    looks = tmp_path / "looks"
    with fake_engine("--model-path", path, script={"leased": [5, str(looks)]}) as engine:
        assert engine.stop() == 0
        assert looks.read_text().count("looked") > 5, "until a look has shown no lease"


def test_drain_is_bounded(path: str) -> None:
    with fake_engine(
        "--model-path", path, "--drain-timeout-secs", "0.3", script={"silent": True}
    ) as engine:
        results: list[Any] = []
        thread = post(engine.url, results)
        wait_until(lambda: engine.ledger()["running"] == 1)
        assert engine.stop() == 0, "the request alone would never end"
        thread.join()
        assert (results[0].status_code, results[0].json()["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once(path: str, number: int) -> None:
    with fake_engine(
        "--model-path", path, "--drain-timeout-secs", "600", script={"silent": True}
    ) as engine:
        thread = post(engine.url, [])
        wait_until(lambda: engine.ledger()["running"] == 1)
        ranks = rank_processes(engine)
        engine.process.send_signal(number)
        wait_until(lambda: status(engine.url) == 503)
        engine.process.send_signal(number)
        assert engine.process.wait(timeout=60) == 0, "the request alone would never end"
        assert not any(r.is_running() for r in ranks)
        thread.join()


def test_dead_rank_fails_its_requests_the_other_finishes_its_own_and_all_start_again(
    path: str, tmp_path: Path
) -> None:
    go_on = tmp_path / "go_on"
    with fake_engine("--model-path", path, "--dp-size", "2", script={"silent": True}) as engine:
        results: list[Any] = []
        others: list[Any] = []
        held = json.dumps({"silent": False, "hold": str(go_on)})
        other = post(engine.url, others, data_parallel_rank=0, max_tokens=8, cache_salt=held)
        threads = [
            post(engine.url, results, data_parallel_rank=1),
            post(engine.url, results, data_parallel_rank=1, stream=True),
        ]
        wait_until(lambda: engine.ledger(1)["running"] == 2 and engine.ledger(0)["running"] == 1)
        victim = next(p for p in rank_processes(engine) if p.pid == rank_pid(engine, 1))
        victim.kill()
        for thread in threads:
            thread.join()
        assert [(r.status_code, r.json()["error"]["code"]) for r in results] == [
            (503, "engine_dead")
        ] * 2
        assert "was killed by SIGKILL" in results[0].json()["error"]["message"]
        assert status(engine.url) == 503
        refused = httpx.post(
            engine.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        go_on.touch()
        other.join()
        assert others[0].status_code == 200, "the living rank finishes what it has"
        assert others[0].json()["usage"]["completion_tokens"] == 8
        assert engine.process.wait(timeout=60) == 1
        assert "1 of 2 ranks are alive: exiting with 1" in engine.log


def rank_pid(engine: FakeEngine, rank: int) -> int:
    return int(engine.ledger(rank)["pid"])


def test_without_a_living_rank_the_process_exits_with_1(path: str) -> None:
    with fake_engine("--model-path", path, script={"silent": True}) as engine:
        results: list[Any] = []
        thread = post(engine.url, results, stream=True)
        wait_until(lambda: engine.ledger()["running"] == 1)
        (rank,) = rank_processes(engine)
        rank.kill()
        thread.join()
        assert results[0].json()["error"]["code"] == "engine_dead"
        assert engine.process.wait(timeout=60) == 1


def test_nothing_is_left_in_the_temporary_directory(
    path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        with fake_engine("--model-path", path) as engine:
            assert [p.name.split("-")[0] for p in folder.iterdir()] == ["baton"]
            assert engine.stop() == 0
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    assert list(folder.iterdir()) == []


def test_idle_front_uses_no_cpu_and_little_memory(path: str) -> None:
    with fake_engine("--model-path", path) as engine:
        httpx.post(
            engine.url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60
        )
        process = psutil.Process(engine.process.pid)

        def is_quiet() -> bool:
            before, began = sum(process.cpu_times()[:2]), time.monotonic()
            switches = process.num_ctx_switches().voluntary
            time.sleep(0.5)  # the thing measured is what happens while nothing does
            woken = (process.num_ctx_switches().voluntary - switches) / (time.monotonic() - began)
            return sum(process.cpu_times()[:2]) - before <= 0.02 and woken <= 20

        wait_until(is_quiet)
        assert process.memory_info().rss < 100 * 2**20


def test_front_imports_no_torch() -> None:
    heavy = ("torch", "transformers", "numpy")
    script = (
        f"import sys, baton.server.launch.engine; print([m for m in {heavy} if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO / "engine")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_without_the_native_extension_an_engine_says_what_to_do(path: str) -> None:
    script = (
        "import sys; sys.modules['baton._native'] = None\n"
        "from baton.config import parse_config; from baton.server.launch.engine import run_engine\n"
        "flags = ['--port', '0', '--load-format', 'dummy']\n"
        f"sys.exit(run_engine(parse_config(['--model-path', {path!r}, *flags])))"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO / "engine")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "an engine needs the native extension" in done.stderr


def test_prefill_node_runs_the_bootstrap_server(path: str) -> None:
    pytest.importorskip("baton._native", reason="the native extension is not built")
    flags = (
        "--disaggregation-mode",
        "prefill",
        "--disaggregation-bootstrap-port",
        "0",
        "--dp-size",
        "2",
    )
    with fake_engine("--model-path", path, *flags) as engine:
        port = engine.ready["bootstrap_port"]
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        assert (
            httpx.get(engine.url + "/get_server_info").json()["disaggregation_bootstrap_port"]
            == port
        )
        meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 7}
        r = httpx.post(
            engine.url + "/v1/completions",
            json={"prompt": "a", "max_tokens": 9, "stop": "a", **meet},
        )
        assert r.json()["usage"]["completion_tokens"] == 1
        books = engine.ledger(1)
        assert books["submits"][0]["rendezvous"]["room"] == 7, "room % dp_size is the rank"
        assert books["aborts"] == [], (
            "a P node's answer ends by itself; an abort would end the lease"
        )
