"""Lines that `baton up` prints for a first answer, and how it knows its own processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton_ops.clients.http_client import HttpClient
from baton_ops.clients.instance import is_answered_by, stated_incarnation, wait_until_well
from baton_ops.clients.local_keys import forget_control_key, known_control_key
from baton_ops.launch.cluster_node import ClusterNode
from baton_ops.launch.cluster_plan import parse_flags
from baton_ops.launch.local_cluster import (
    PORT_TAKEN,
    ROUTER_PORT_TRIES,
    LocalCluster,
)
from baton_ops.launch.preflight import living_cluster
from baton_ops.launch.screen import make_greeting
from baton_ops.launch.supervisor import ChildFailed, ChildProcess
from tests.support.processes.http_server import QuietHandler, serve_requests

URL = "http://127.0.0.1:8000"


def curl(text: str) -> list[str]:
    """Arguments of the curl line, as a shell splits them."""
    line = text[text.index("curl ") : text.index("from openai")]
    return shlex.split(line.removesuffix("import os\n"))


def test_greeting_sends_the_key_that_the_cluster_wants() -> None:
    header = "authorization: Bearer it's a $KEY"
    given = make_greeting(URL, "m", api_key="it's a $KEY")
    assert header in curl(given)
    assert """api_key="it's a $KEY")""" in given


def test_greeting_links_to_the_page_with_its_control_key() -> None:
    text = make_greeting(URL, "m", control_key="0af3")
    assert f"In a browser: {URL}/ui/#control-key=0af3\n" in text
    assert text.count("0af3") == 1, "clients need none"
    assert "authorization" not in text


CONTROL = "BATON_ROUTER_FLAG_CONTROL_PLANE_API_KEYS"


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No key comes from the environment; returns the folder of this user's keys."""
    for name in ("BATON_API_KEY", CONTROL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "baton"


def router_keys(cluster: LocalCluster) -> str | None:
    return cluster.router._env.get(CONTROL)


def test_cluster_makes_a_control_key_for_its_router_alone(no_keys: Path, tmp_path: Path) -> None:
    first, second = (LocalCluster(parse_flags([]), tmp_path, print) for _ in range(2))
    assert first.control_key
    assert first.control_key != second.control_key
    assert router_keys(first) == f"up:baton-up:admin:{first.control_key}"
    assert all(CONTROL not in node.child._env for node in first.nodes)
    assert first.control_key not in " ".join(first._router_argv())


def test_cluster_makes_no_control_key_where_the_user_has_decided(
    no_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(parse_flags(["--api-key", "k"]), tmp_path, print)
    assert (cluster.control_key, router_keys(cluster)) == (None, None)
    for given in ("a:b:admin:c", ""):
        monkeypatch.setenv(CONTROL, given)
        cluster = LocalCluster(parse_flags([]), tmp_path, print)
        assert (cluster.control_key, router_keys(cluster)) == (None, given or None)


def test_control_key_is_found_by_this_user_while_the_cluster_runs(
    no_keys: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    plan = parse_flags(["--state-file", str(state)])
    cluster = LocalCluster(plan, tmp_path, print)
    cluster.port = 8123
    cluster._keep_control_key()
    cluster.write_state()
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert known_control_key(f"http://{host}:8123") == cluster.control_key
    for other in (
        "http://127.0.0.1:8124",
        "http://10.0.0.1:8123",
        "http://127.0.0.1",
        "http://x:y",
    ):
        assert known_control_key(other) is None
    assert json.loads(state.read_text())["router"]["control_key"] == cluster.control_key
    for path, mode in ((state, 0o600), (no_keys, 0o700), (no_keys / "router-8123.key", 0o600)):
        assert path.stat().st_mode & 0o777 == mode
    no_keys.chmod(0o755)
    assert known_control_key("http://127.0.0.1:8123") is None, "others may have written it"
    no_keys.chmod(0o700)
    forget_control_key(8123, "another cluster's")
    assert known_control_key("http://127.0.0.1:8123") == cluster.control_key
    asyncio.run(cluster.stop())
    assert known_control_key("http://127.0.0.1:8123") is None
    assert not state.exists()


def test_folder_that_another_user_could_have_made_is_not_written_to(
    no_keys: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    no_keys.symlink_to(elsewhere)
    lines: list[str] = []
    cluster = LocalCluster(parse_flags([]), tmp_path, lines.append)
    cluster.port = 8123
    cluster._keep_control_key()
    assert "cannot be kept for baton top" in lines[0]
    assert list(elsewhere.iterdir()) == []


def test_greeting_leaves_a_key_of_the_environment_there() -> None:
    given = make_greeting(URL, "m", api_key="secret", key_in_environment=True)
    assert "secret" not in given
    assert '-H "authorization: Bearer $BATON_API_KEY"' in given
    assert (
        'import os\nfrom openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", '
        in given
    )
    assert 'api_key=os.environ["BATON_API_KEY"])' in given


def test_greeting_of_an_open_cluster_names_no_key() -> None:
    given = make_greeting(URL, "m", key_in_environment=True)
    assert "authorization" not in given
    assert 'api_key="none")' in given
    assert curl(given)[-1].startswith('{"model":"m"')


class StubRouter:
    """Ends with an error at its first starts."""

    def __init__(self, failures: int, error: str) -> None:
        self.failures, self.error, self.starts = failures, error, 0

    async def start(self) -> None:
        self.starts += 1

    async def until_ready(self, timeout_secs: float, ready: Awaitable[None]) -> None:
        ready.close()  # type: ignore[attr-defined]
        if self.starts <= self.failures:
            raise ChildFailed("router exited with code 2 before it was ready")

    def last_errors(self) -> str:
        return self.error


def started(router: StubRouter, port: int | None) -> LocalCluster:
    cluster = LocalCluster.__new__(LocalCluster)
    cluster.plan = SimpleNamespace(up=SimpleNamespace(port=port), start_timeout_secs=1.0)  # type: ignore[assignment]
    cluster.router = router  # type: ignore[assignment]
    cluster.host, cluster.port = "127.0.0.1", port or 1
    cluster._print_line = lambda _: None  # type: ignore[method-assign]
    asyncio.run(cluster._start_router_first())
    return cluster


@pytest.mark.parametrize("port", [0, None])
def test_router_takes_another_free_port_if_the_chosen_one_was_taken_meanwhile(
    port: int | None,
) -> None:
    router = StubRouter(2, f"baton-router: 127.0.0.1:1 {PORT_TAKEN}; stop what listens there")
    assert started(router, port).port > 1
    assert router.starts == 3


@pytest.mark.parametrize(
    ("port", "error", "starts"),
    [
        (8000, PORT_TAKEN, 1),
        (0, "baton-router: --workers is missing", 1),
        (0, PORT_TAKEN, ROUTER_PORT_TRIES),
    ],
)
def test_other_failures_and_a_port_that_was_asked_for_end_the_start(
    port: int, error: str, starts: int
) -> None:
    router = StubRouter(99, error)
    with pytest.raises(ChildFailed):
        started(router, port)
    assert router.starts == starts


# ---- another program at the address --------------------------------------------------------------


class AnyServer(QuietHandler):
    """Answers everything with 200, as many programs do."""

    def do_GET(self) -> None:
        self.answer(b'{"status": "ok", "data": [{"id": "foreign"}]}')


@pytest.fixture
def held_port() -> Iterator[int]:
    """Port of another program's HTTP server."""
    with serve_requests(AnyServer) as server:
        yield server.server_port


def router_process(tmp_path: Path, port: int) -> ChildProcess:
    """Real router of workers that are not there."""
    argv = [sys.executable, "-m", "baton_ops.cli", "router", "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--health-port", "0", "--worker-urls", "http://127.0.0.1:1"]
    return ChildProcess("router", lambda: argv, tmp_path / "router.log", os.environ)


def cluster_with(router: ChildProcess, port: int, **flags: Any) -> LocalCluster:
    cluster = LocalCluster.__new__(LocalCluster)
    up = SimpleNamespace(port=port, **flags)
    cluster.plan = SimpleNamespace(up=up, start_timeout_secs=60.0)  # type: ignore[assignment]
    cluster.router = router
    cluster.host, cluster.port = "127.0.0.1", port
    cluster._print_line = lambda _: None  # type: ignore[method-assign]
    return cluster


def test_router_on_a_held_port_ends_the_start_with_its_sentence(
    tmp_path: Path, held_port: int
) -> None:
    """The other program answers 200 all the while: readiness is not its word."""
    router = router_process(tmp_path, held_port)
    cluster = cluster_with(router, held_port)
    with pytest.raises(ChildFailed) as failed:
        asyncio.run(cluster._start_guarded(router, cluster._start_router_first()))
    assert failed.value.exit_code == 2
    assert f"127.0.0.1:{held_port} {PORT_TAKEN}" in str(failed.value)


def test_router_whose_address_leads_to_another_program_is_not_ready(
    tmp_path: Path, held_port: int
) -> None:
    """As localhost does where a router got 127.0.0.1 and another program has ::1."""

    async def work() -> None:
        router = router_process(tmp_path, 0)
        cluster = cluster_with(router, held_port)
        try:
            with pytest.raises(ChildFailed, match="another process answers at") as failed:
                await cluster._start_router("/readyz")
            assert failed.value.exit_code == 2
        finally:
            await router.stop(10)

    asyncio.run(work())


def test_started_router_states_what_its_ready_line_says(tmp_path: Path) -> None:
    async def work() -> None:
        router = router_process(tmp_path, 0)
        try:
            await router.start()
            ready = await router.until_ready(60)
            assert ready["pid"] == router.pid
            assert ready["incarnation"] == router.incarnation
            await asyncio.wait_for(
                wait_until_well(f"{ready['url']}/livez", str(router.incarnation)), 60
            )
            client = HttpClient()
            for path in ("/livez", "/liveness", "/readyz", "/readiness"):
                stated = stated_incarnation(client.get(ready["url"] + path).text)
                assert stated == router.incarnation, path
            for path in ("/health", "/ping"):
                assert stated_incarnation(client.get(ready["url"] + path).text) is None, path
            assert await is_answered_by(ready["url"], router.incarnation)
            assert not await is_answered_by(ready["url"], "0" * 16)
        finally:
            await router.stop(10)

    asyncio.run(work())


def test_ready_line_of_a_router_that_logs_json_is_an_object(tmp_path: Path) -> None:
    async def work() -> None:
        router = router_process(tmp_path, 0)
        argv = [*router._argv(), "--log-format", "json"]
        router = ChildProcess("router", lambda: argv, tmp_path / "json.log", os.environ)
        try:
            await router.start()
            ready = await router.until_ready(60)
            assert ready["incarnation"] == router.incarnation
        finally:
            await router.stop(10)
        assert all(line.startswith('{"') for line in router.log_path.read_text().splitlines())

    asyncio.run(work())


def test_state_file_of_a_cluster_that_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"

    async def work() -> None:
        router = router_process(tmp_path, 0)
        try:
            await router.start()
            ready = await router.until_ready(60)
            state = {"url": ready["url"], "incarnation": ready["incarnation"]}
            path.write_text(json.dumps({"router": state}))
            assert "is that of a cluster that runs" in str(living_cluster(path))
            state["incarnation"] = "0" * 16
            path.write_text(json.dumps({"router": state}))
            assert living_cluster(path) is None, "its port is another cluster's by now"
        finally:
            await router.stop(10)

    asyncio.run(work())
    assert living_cluster(path) is None, "nothing answers any more"
    for text in ("", "[]", '{"router": 1}'):
        path.write_text(text)
        assert living_cluster(path) is None
    path.unlink()
    assert living_cluster(path) is None
    os.mkfifo(path)
    assert "it is a pipe, not a regular file" in str(living_cluster(path))


def test_state_file_that_another_cluster_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    cluster = LocalCluster(parse_flags(["--state-file", str(path)]), tmp_path, print)
    cluster.write_state()
    assert json.loads(path.read_text())["router"]["incarnation"] is None
    path.write_text("of another cluster")
    cluster.write_state()
    asyncio.run(cluster.stop())
    assert path.read_text() == "of another cluster"
    path.unlink()
    cluster.write_state()
    asyncio.run(cluster.stop())
    assert not path.exists()


@pytest.mark.parametrize(
    "flags",
    [
        {"--speculative-algorithm": "NGRAM"},
        {"--speculative-algorithm": "STANDALONE", "--speculative-draft-model-path": "demo"},
    ],
)
def test_flags_about_answers_go_to_the_nodes_that_compute_them(flags: dict[str, str]) -> None:
    plan = parse_flags([*itertools.chain(*flags.items()), "--page-size", "8"])
    prefill, decode = (ClusterNode(role, role, plan).argv() for role in ("prefill", "decode"))
    assert set(flags) <= set(decode)
    assert set(flags).isdisjoint(prefill)
    assert "--page-size" in prefill
