"""`baton doctor --fleet` and `baton top` on a real router, P and D: a healthy fleet passes, each fault is named.

The engines simulate their devices. Those whose ranks do not matter for a fault are real fronts with
the ranks of tests/support/processes/fake_rank.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest

from baton.server.worker.transfer_setup import source_address
from baton_ops.doctor.main import main
from tests.support.processes.cluster import eventually, family
from tests.support.processes.front import REPO, fake_engine, model
from tests.support.processes.http_server import QuietHandler, serve_requests, url_of
from tests.support.processes.router import Router

CLUSTER_KEY, API_KEY = "doctor-cluster-key", "doctor-api-key"
KEYS = {"BATON_CLUSTER_KEY": CLUSTER_KEY, "BATON_API_KEY": API_KEY}
AUTH = {"authorization": f"Bearer {API_KEY}"}
SIMULATED = ("--simulate", "reference")
ODD_SITE = REPO / "tests" / "support" / "processes" / "odd_site"
FINDS_SECS = 90.0


@dataclass
class Engine:
    process: subprocess.Popen[str]
    url: str
    bootstrap_port: int | None


@contextlib.contextmanager
def engine(mode: str, *flags: str) -> Iterator[Engine]:
    """An engine that is ready."""
    command = [
        sys.executable,
        "-m",
        "baton_ops.cli",
        "engine",
        "--port",
        "0",
        "--disaggregation-mode",
        mode,
        *SIMULATED,
    ]
    if mode == "prefill":
        command += ["--disaggregation-bootstrap-port", "0"]
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, text=True, env={**os.environ, **KEYS}
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("READY "), f"the {mode} engine ended before it was ready"
        ready = json.loads(line.removeprefix("READY "))
        yield Engine(process, ready["url"], ready["bootstrap_port"])
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        # Both load at the same time; each is entered in a thread and left here.
        managers = [engine("prefill"), engine("decode")]
        started = [pool.submit(manager.__enter__) for manager in managers]
        for manager in managers:
            stack.push(manager.__exit__)
        yield started[0].result(), started[1].result()


def workers(*prefill: Engine, decode: tuple[str, ...] = ()) -> list[str]:
    """Router flags that name these engines."""
    flags = ["--pd-disaggregation", "--api-key", API_KEY]
    for one in prefill:
        flags += ["--prefill", one.url, str(one.bootstrap_port)]
    return flags + [word for url in decode for word in ("--decode", url)]


def examine(*routers: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and checks of the command, in this process: each start would take half a second."""
    output = io.StringIO()
    errors = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        for name, value in KEYS.items():
            patch.setenv(name, value)
        code = main(["--fleet", "--json", "--router", ",".join(routers)])
    said = output.getvalue() + errors.getvalue()
    checks: list[dict[str, str]] = json.loads(output.getvalue())["checks"]
    assert CLUSTER_KEY not in said
    assert API_KEY not in said
    return code, checks


def await_ready(router: str, *urls: str) -> None:
    """Until the router has probed these workers with success."""

    def ready() -> bool:
        listed = httpx.get(f"{router}/workers", headers=AUTH).json()["workers"]
        return set(urls) <= {
            worker["url"].rstrip("/") for worker in listed if worker["state"] == "ready"
        }

    eventually(f"{urls} are ready", ready, FINDS_SECS)


def finds(router: str, name: str, status: str, *words: str) -> None:
    """Until the doctor names the fault: one result of this name and status, whose sentence has all `words`."""
    seen: list[Any] = []

    def named() -> bool:
        code, checks = examine(router)
        seen[:] = [code, [check for check in checks if check["status"] in ("warn", "fail")]]
        hit = [
            c
            for c in seen[1]
            if c["name"] == name
            and c["status"] == status
            and all(w in c["sentence"] for w in words)
        ]
        assert all(check["remedy"] for check in seen[1])
        return bool(hit) and code == (
            2 if any(check["status"] == "fail" for check in seen[1]) else 1
        )

    try:
        eventually(f"{name} is {status}: {words}", named, FINDS_SECS)
    except AssertionError as err:
        raise AssertionError(f"{err}; the last run found {seen}") from err


def test_healthy_fleet_exits_with_0_and_names_the_transport(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    with Router.up(*workers(prefill, decode=(decode.url,))) as router:
        await_ready(router, prefill.url, decode.url)
        body = {"model": "demo", "prompt": "Baton is", "max_tokens": 2}
        assert (
            httpx.post(f"{router}/v1/completions", json=body, headers=AUTH, timeout=60).status_code
            == 200
        )
        code, checks = examine(router)
    problems = [check for check in checks if check["status"] in ("warn", "fail")]
    assert (code, problems) == (0, [])
    sentences = {check["name"]: check["sentence"] for check in checks}
    assert sentences["pair.transport"] == f"{prefill.url} -> {decode.url}: shm"
    assert sentences["pair.cluster_key"] == "2 engines have the same cluster key"
    assert sentences["router.keys"].startswith("routers with a key: 1,")


def test_top_shows_every_node(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    with Router.up(*workers(prefill, decode=(decode.url,))) as router:
        await_ready(router, prefill.url, decode.url)
        command = [
            sys.executable,
            "-m",
            "baton_ops.cli",
            "top",
            "--once",
            "--json",
            "--router",
            router,
        ]
        env = {**os.environ, **KEYS}
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    nodes = {node["url"].rstrip("/"): node for node in json.loads(done.stdout)["nodes"]}
    assert nodes.keys() == {prefill.url, decode.url}
    assert {(node["role"], node["state"]) for node in nodes.values()} == {
        ("prefill", "ready"),
        ("decode", "ready"),
    }


def test_two_routers_are_compared(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    with (
        Router.up(*workers(prefill, decode=(decode.url,))) as first,
        Router.up(*workers(prefill)) as second,
    ):
        await_ready(first, prefill.url, decode.url)
        _, checks = examine(first, second)
    named = {check["name"]: check["sentence"] for check in checks if check["status"] == "warn"}
    assert f"{second} does not know {decode.url}" in named["router.agreement"]
    assert "without KV events" in named["router.kv_events"]


def test_router_without_prefill_is_named(pair: tuple[Engine, Engine]) -> None:
    with Router.up(*workers(decode=(pair[1].url,))) as router:
        finds(router, "router.ready", "fail", "prefill")


def run_drain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton_ops.cli", "drain", *words]
    env = {**os.environ, **KEYS}
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )


def test_drain_of_the_last_decode_node_needs_force_and_is_then_named(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    often = ("--health-check-interval-secs", "1")
    with Router.up(*workers(prefill, decode=(decode.url,)), *often) as router:
        await_ready(router, prefill.url, decode.url)

        def ready_peers() -> bool:
            report = httpx.get(f"{decode.url}/drain", headers=AUTH).json()
            return bool(report["ready_peers"] == 0)

        eventually("the engine knows that it is the last one", ready_peers, FINDS_SECS)
        place = f"{router}/workers/{decode.url.replace('/', '%2F')}"
        for target in (decode.url, place):
            refused = run_drain(target)
            assert refused.returncode == 4, refused.stderr
            assert f"{target} is the last ready decode node" in refused.stderr
        assert run_drain(place, "--force").returncode == 0
        try:
            finds(router, "router.serves", "fail", "can serve no request", "decode")
        finally:
            undone = run_drain(place, "--undo")
        assert undone.stdout.split("  ")[1] == "ready", undone
        await_ready(router, decode.url)


def test_open_router_is_named(pair: tuple[Engine, Engine]) -> None:
    if source_address(socket.AF_INET, "192.0.2.1") is None:
        pytest.skip(
            "this machine has no address but loopback, so no router is reachable from others"
        )
    with Router.up("--worker-urls", pair[1].url, "--host", "0.0.0.0") as router:
        url = f"http://127.0.0.1:{urlsplit(router).port}"
        finds(
            url,
            "router.keys",
            "warn",
            f"{url} changes its fleet without a key for anyone who reaches",
        )


def test_router_that_is_away_is_named() -> None:
    code, checks = examine("http://127.0.0.1:1")
    assert code == 2
    assert [check["name"] for check in checks] == ["router.reachable"]
    assert "connection refused" in checks[0]["sentence"]


def test_drained_engine_is_named_until_it_returns(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    with Router.up(*workers(prefill, decode=(decode.url,))) as router:
        await_ready(router, prefill.url, decode.url)
        assert httpx.post(f"{decode.url}/drain", headers=AUTH).status_code == 200
        try:
            finds(router, "engine.state", "warn", f"decode {decode.url} is draining")
        finally:
            assert httpx.post(f"{decode.url}/undrain", headers=AUTH).status_code == 200
        await_ready(router, prefill.url, decode.url)


def test_stale_discovery_is_named(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    prefill, decode = pair
    listed = tmp_path / "workers.json"
    entries = [
        {"url": prefill.url, "role": "prefill", "bootstrap_port": prefill.bootstrap_port},
        {"url": decode.url, "role": "decode"},
    ]
    listed.write_text(json.dumps(entries))
    with Router.up(*workers(), "--discovery-file", str(listed)) as router:
        await_ready(router, prefill.url, decode.url)
        listed.write_text("workers: [broken")
        finds(router, "router.discovery", "fail", "cannot read its workers from file")


class Foreign(QuietHandler):
    """A worker of another make that is healthy and exports no metrics."""

    ANSWERS: ClassVar[dict[str, dict[str, str]]] = {
        "/health": {},
        "/get_server_info": {"disaggregation_mode": "decode", "version": "0.5"},
    }

    def do_GET(self) -> None:
        found = self.ANSWERS.get(self.path)
        self.answer(json.dumps(found or {}).encode(), 404 if found is None else 200)

    do_POST = do_GET


def test_engine_without_metrics_is_named(pair: tuple[Engine, Engine]) -> None:
    with serve_requests(Foreign) as server:
        url = url_of(server)
        with Router.up(*workers(pair[0], decode=(url,))) as router:
            finds(router, "engine.metrics", "warn", f"{url}/metrics cannot be scraped: status 404")


# ---- faults of one decode node ---------------------------------------------------------------------------------


@contextlib.contextmanager
def decode_front(
    pair: tuple[Engine, Engine], *flags: str, **options: Any
) -> Iterator[tuple[str, str, Any]]:
    """A router with the healthy pair and one more decode node: the router's URL, the node's, and the node."""
    prefill, decode = pair
    own = ("--model-path", model(), "--disaggregation-mode", "decode", *flags)
    env = {**KEYS, **options.pop("env", {})}
    with fake_engine(*own, env=env, **options) as front:
        port = urlsplit(front.url).port
        url = f"http://127.0.0.1:{port}"
        with Router.up(*workers(prefill, decode=(decode.url, url))) as router:
            await_ready(router, prefill.url, decode.url, url)
            yield router, url, front


def test_other_cluster_key_is_named(pair: tuple[Engine, Engine]) -> None:
    with decode_front(pair, "--cluster-key", "another") as (router, url, _):
        finds(router, "pair.cluster_key", "fail", f"decode {url}: the cluster key differs")
        finds(
            router,
            "pair.reachable",
            "fail",
            f"decode {url} cannot fetch KV",
            "bootstrap refused",
            "the cluster keys differ",
        )


def test_dead_engine_is_named(pair: tuple[Engine, Engine]) -> None:
    with decode_front(pair) as (router, url, front):
        for process in reversed(family(front.process.pid)):  # its fake rank would outlive it
            process.kill()
        front.process.wait(30)
        finds(
            router,
            "engine.reachable",
            "fail",
            f"decode {url} does not answer: connection refused",
            "unhealthy",
        )


def test_other_version_and_wrong_clock_are_named(pair: tuple[Engine, Engine]) -> None:
    with decode_front(pair, env={"PYTHONPATH": str(ODD_SITE)}) as (router, url, _):
        finds(router, "engine.versions", "warn", f"9.9.9: decode {url}")
        finds(router, "engine.clock", "fail", f"the clock of decode {url} is", "ahead")
        finds(
            router,
            "pair.reachable",
            "fail",
            f"decode {url} cannot fetch KV",
            "compare the hosts' clocks",
        )


def test_few_open_files_are_named(pair: tuple[Engine, Engine]) -> None:
    wrapper = ("bash", "-c", 'ulimit -n 200; exec "$@"', "bash")
    with decode_front(pair, wrapper=wrapper) as (router, url, _):
        finds(
            router,
            "engine.open_files",
            "fail",
            f"decode {url}: only 200 files can be open, 384 are wanted",
        )


def test_small_dev_shm_is_named(pair: tuple[Engine, Engine]) -> None:
    mount = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    if subprocess.run(
        ["unshare", "--mount", "bash", "-c", mount], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a small /dev/shm needs root and mount namespaces")
    wrapper = ("unshare", "--mount", "bash", "-c", f'{mount} && exec "$@"', "bash")
    with decode_front(pair, wrapper=wrapper) as (router, url, _):
        finds(router, "engine.shm", "warn", f"decode {url}: /dev/shm has 16 MiB")


def test_open_engine_is_named(pair: tuple[Engine, Engine]) -> None:
    with decode_front(pair, "--host", "0.0.0.0", env={"BATON_API_KEY": ""}) as (router, url, _):
        finds(router, "engine.keys", "warn", f"decode {url} listens on all addresses without a key")


def test_contradicting_time_limits_are_named(pair: tuple[Engine, Engine]) -> None:
    flags = ("--request-timeout-secs", "30", "--queue-timeout-secs", "60")
    with decode_front(pair, *flags) as (router, url, _):
        finds(
            router,
            "engine.time_limits",
            "warn",
            f"decode {url}: --queue-timeout-secs 60 is never reached",
        )


# ---- faults that need ranks ------------------------------------------------------------------------------------


def named_with(pair: tuple[Engine, Engine], mode: str, *flags: str) -> Callable[..., None]:
    """Start one more real engine, and judge the fleet with it instead of the healthy one of its mode."""

    def judge(name: str, status: str, *words: str) -> None:
        with engine(mode, *flags) as other:
            prefill, decode = (other, pair[1]) if mode == "prefill" else (pair[0], other)
            with Router.up(*workers(prefill, decode=(decode.url,))) as router:
                await_ready(router, prefill.url, decode.url)
                finds(
                    router,
                    name,
                    status,
                    *(word.format(p=prefill.url, d=decode.url) for word in words),
                )

    return judge


def test_fingerprints_that_do_not_pair_are_named_with_the_field(
    pair: tuple[Engine, Engine],
) -> None:
    judge = named_with(pair, "decode", "--page-size", "32")
    judge(
        "pair.fingerprint",
        "fail",
        "decode {d} pairs with none of 1 prefill nodes: page_size 16 / 32",
    )


def test_transfer_port_that_decode_nodes_do_not_reach_is_named(pair: tuple[Engine, Engine]) -> None:
    judge = named_with(pair, "prefill", "--kv-advertise-host", "127.0.0.77")
    words = (
        "decode {d} cannot fetch KV from prefill {p}",
        "transfer port of rank 0 unreachable",
        "127.0.0.77",
    )
    judge("pair.reachable", "fail", *words)
