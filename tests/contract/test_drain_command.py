"""`baton drain` against real engine processes with scripted ranks, and pods behind a stand-in for kubectl."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.front import REPO, FakeEngine, fake_engine, model
from tests.support.processes.http_server import QuietHandler, serve_requests

KUBECTL = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(words) + "\\n")
words = words[words.index("-n") + 2:]
if words[0] == "get":
    sys.stdout.write(open({pods!r}).read())
else:
    command = words[words.index("--") + 1:]
    assert command[0] == "baton", command
    env = dict(os.environ, BATON_API_KEY="inside")
    sys.exit(subprocess.run([sys.executable, "-m", "baton_ops.cli", *command[1:]], env=env).returncode)
"""


@pytest.fixture(scope="module")
def path() -> str:
    return model()


def wait_until(fact: Callable[[], Any], secs: float = 60.0) -> None:
    deadline = time.monotonic() + secs
    while not fact():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)  # polls another process; the deadline decides, not the pause


def environment(key: str | None = None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "BATON_API_KEY"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(REPO / "engine"), str(REPO), env.get("PYTHONPATH", "")]
    )
    return env | ({} if key is None else {"BATON_API_KEY": key})


def baton_drain(*words: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton_ops.cli", "drain", *words]
    return subprocess.run(
        command, env=environment(key), capture_output=True, text=True, timeout=120, check=False
    )


def start_drain(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "baton_ops.cli", "drain", *words]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def hold_stream(engine: FakeEngine, go_on: Path, results: list[str]) -> threading.Thread:
    """A stream that gets its tokens when the file exists."""
    body = {"prompt": "a", "max_tokens": 7, "ignore_eos": True, "stream": True}
    body["cache_salt"] = json.dumps({"hold": str(go_on)})

    def run() -> None:
        results.append(httpx.post(engine.url + "/v1/completions", json=body, timeout=60).text)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: engine.ledger()["running"] == 1)
    return thread


def state(engine: FakeEngine, **headers: str) -> str:
    return str(httpx.get(engine.url + "/get_server_info", headers=headers).json()["state"])


def test_wait_shows_what_is_left_and_ends_when_it_is_safe_to_stop(
    path: str, tmp_path: Path
) -> None:
    with fake_engine("--model-path", path) as engine:
        results: list[str] = []
        thread = hold_stream(engine, tmp_path / "go_on", results)
        process = start_drain(engine.url, "--wait")
        assert process.stdout is not None
        looks = [process.stdout.readline() for _ in range(2)]
        for look in looks:
            assert look.startswith(
                f"{engine.url}  draining  1 request, 1 stream, 1 running, oldest "
            ), look
        (tmp_path / "go_on").touch()
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert rest.splitlines()[-2:] == [
            f"{engine.url}  draining  nothing left", f"safe to stop: {engine.url}",
        ]  # fmt: skip
        assert engine.stop() == 0
        thread.join()
        assert results[0].endswith("data: [DONE]\n\n")
        assert results[0].count('"finish_reason":"length"') == 1, (
            "stopping it after the drain lost nothing"
        )


def test_timeout_names_what_remains_and_undo_returns_the_engine(path: str, tmp_path: Path) -> None:
    with fake_engine("--model-path", path) as engine:
        thread = hold_stream(engine, tmp_path / "go_on", [])
        done = baton_drain(engine.url, "--wait", "--timeout", "0")
        assert done.returncode == 3
        assert f"not drained after 0 s: {engine.url}: 1 request, 1 stream, 1 running" in done.stdout
        as_json = baton_drain(engine.url, "--wait", "--timeout", "0", "--json")
        report = json.loads(as_json.stdout.splitlines()[-1])
        assert (as_json.returncode, report["is_drained"]) == (3, False)
        assert (report["targets"][0]["state"], report["targets"][0]["left"]["streams"]) == (
            "draining",
            1,
        )
        assert "not drained after 0 s" in as_json.stderr
        assert state(engine) == "draining", "a timeout does not undo the drain"
        back = baton_drain(engine.url, "--undo")
        assert (back.returncode, back.stdout.split("  ")[1]) == (0, "ready")
        assert state(engine) == "ready"
        assert baton_drain(engine.url, "--status").returncode == 0
        assert state(engine) == "ready", "--status changes nothing"
        (tmp_path / "go_on").touch()
        thread.join()


def probe(engine: FakeEngine, ready_peers: int) -> None:
    """A router's health probe that carries the number of its other ready workers."""
    headers = {"x-baton-ready-peers": str(ready_peers)}
    assert httpx.get(engine.url + "/health", headers=headers).status_code == 200


def test_last_ready_node_is_drained_with_force_only(path: str) -> None:
    with fake_engine("--model-path", path) as engine, fake_engine("--model-path", path) as other:
        probe(engine, 1)
        assert baton_drain(engine.url, "--status").returncode == 0
        probe(other, 1)
        both = baton_drain(engine.url, other.url)
        assert both.returncode == 4, "each counts the other"
        assert f"{engine.url}, {other.url} are the last ready nodes" in both.stderr
        probe(engine, 0)
        refused = baton_drain(engine.url, "--wait")
        assert (refused.returncode, refused.stdout) == (4, "")
        assert f"{engine.url} is the last ready node" in refused.stderr
        assert "give --force" in refused.stderr
        assert state(engine) == "ready"
        forced = baton_drain(engine.url, "--wait", "--force")
        assert forced.returncode == 0
        assert f"safe to stop: {engine.url}" in forced.stdout
        assert baton_drain(engine.url).returncode == 0, "it drains already: nothing to ask"
        probe(other, 0)
        assert baton_drain(other.url).returncode == 4


def test_engine_that_got_sigterm_ends_while_it_is_waited_for(path: str, tmp_path: Path) -> None:
    with fake_engine("--model-path", path) as engine:
        thread = hold_stream(engine, tmp_path / "go_on", [])
        engine.process.send_signal(signal.SIGTERM)
        wait_until(lambda: state(engine) == "draining")
        process = start_drain(engine.url, "--wait")
        assert process.stdout is not None
        assert "1 stream" in process.stdout.readline()
        (tmp_path / "go_on").touch()
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert rest.splitlines()[-1] == f"safe to stop: {engine.url}"
        thread.join()
        refused = baton_drain(engine.url, "--undo")
        assert refused.returncode == 1


def test_engine_returned_to_service_meanwhile_is_reported(path: str, tmp_path: Path) -> None:
    with fake_engine("--model-path", path) as engine:
        thread = hold_stream(engine, tmp_path / "go_on", [])
        process = start_drain(engine.url, "--wait")
        assert process.stdout is not None
        process.stdout.readline()
        httpx.post(engine.url + "/undrain").raise_for_status()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "it was returned to service meanwhile" in errors
        (tmp_path / "go_on").touch()
        thread.join()


def test_key_and_unreachable_targets(path: str) -> None:
    with fake_engine("--model-path", path, "--api-key", "secret") as engine:
        refused = baton_drain(engine.url)
        assert refused.returncode == 1
        assert "401" in refused.stderr
        assert "give --key, or BATON_API_KEY" in refused.stderr
        assert baton_drain(engine.url, "--key", "secret").returncode == 0
        assert baton_drain(engine.url, "--undo", key="secret").returncode == 0
        assert state(engine, authorization="Bearer secret") == "ready"
        strange = baton_drain(engine.url + "/v1", key="secret")
        assert "404" in strange.stderr
        assert "ROUTER/workers/ID" in strange.stderr
        url = engine.url
    gone = baton_drain(url)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "nothing listens there" in gone.stderr


class DrainedNode(QuietHandler):
    """Answers every request as an idle engine that drains."""

    def do_POST(self) -> None:
        body = json.dumps({"state": "draining", "is_drained": True, "left": {}}).encode()
        self.answer(body)

    do_GET = do_POST


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_node_behind_tls_is_drained_with_the_authority_of_its_certificate(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    certificate = tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serve_requests(DrainedNode, tls=context) as server:
        url = f"https://127.0.0.1:{server.server_address[1]}"
        unknown = baton_drain(url)
        known = baton_drain(url, "--ca-cert", str(certificate))
    assert unknown.returncode == 1
    assert "give the authority of its certificate with --ca-cert FILE" in unknown.stderr
    assert (known.returncode, known.stderr) == (0, "")
    assert f"{url}  draining  nothing left" in known.stdout


def test_certificate_file_that_cannot_be_read_is_a_wrong_flag() -> None:
    ended = baton_drain("https://127.0.0.1:1", "--ca-cert", "/no-such-file")
    assert ended.returncode == 2
    assert "--ca-cert /no-such-file: No such file or directory" in ended.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no target; give the URL of an engine"),
        (("localhost:30000",), "localhost:30000: give http://HOST:PORT"),
        (("http://x", "--undo", "--wait"), "--undo goes with neither --wait nor --status"),
        (
            ("http://x", "--undo", "--status", "--wait"),
            "--undo goes with neither --wait nor --status",
        ),
        (("http://x", "--timeout", "-1"), "--timeout -1: give seconds from 0"),
        (("http://x", "--timeout", "soon"), "--timeout-secs soon: give a number"),
        (("http://x", "--waitt"), "there is no such flag; is it --wait?"),
    ],
)
def test_wrong_flags_are_refused(
    words: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from baton_ops.cli import main

    with pytest.raises(SystemExit) as ended:
        main.main(["drain", *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


# ---- pods ----------------------------------------------------------------------------------------------------------


def pod(
    name: str, engine: FakeEngine, *, container: str = "engine", **status: Any
) -> dict[str, Any]:
    url = httpx.URL(engine.url)
    ports = [{"name": "http", "containerPort": url.port}]
    containers = [{"name": "sidecar"}, {"name": container, "ports": ports}]
    shown = {"phase": "Running", "podIP": url.host, **status}
    return {"metadata": {"name": name}, "spec": {"containers": containers}, "status": shown}


class Cluster:
    """A stand-in for kubectl and what it finds."""

    def __init__(self, folder: Path) -> None:
        self._pods, self._calls = folder / "pods.json", folder / "calls"
        self.kubectl = folder / "kubectl"
        text = KUBECTL.format(python=sys.executable, calls=str(self._calls), pods=str(self._pods))
        self.kubectl.write_text(text)
        self.kubectl.chmod(0o755)

    def has(self, *pods: dict[str, Any]) -> None:
        self._pods.write_text(json.dumps({"kind": "List", "items": list(pods)}))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


def test_engines_of_a_kubernetes_node_are_drained_from_inside_their_pods(
    path: str, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path)
    flags = ("--kubectl", f"{cluster.kubectl} --context x", "--namespace", "prod")
    with (
        fake_engine("--model-path", path, "--api-key", "inside") as prefill,
        fake_engine("--model-path", path, "--api-key", "inside") as decode,
    ):
        inside = {"authorization": "Bearer inside"}
        ending = pod("decode-old", decode)
        ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        cluster.has(
            pod("prefill-0", prefill),
            pod("decode-0", decode),
            ending,
            pod("p", prefill, phase="Pending"),
        )
        done = baton_drain("node/a", "--wait", *flags)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "safe to stop: pod/prefill-0, pod/decode-0"
        assert [state(engine, **inside) for engine in (prefill, decode)] == ["draining", "draining"]
        first, *others = cluster.calls()
        assert first[:6] == ["--context", "x", "-n", "prod", "get", "pods"]
        assert "spec.nodeName=a" in first
        assert {tuple(call[4:8]) for call in others} == {
            ("exec", "prefill-0", "-c", "engine"), ("exec", "decode-0", "-c", "engine"),
        }  # fmt: skip
        assert baton_drain("node/a", "--undo", *flags).returncode == 0
        assert [state(engine, **inside) for engine in (prefill, decode)] == ["ready", "ready"]

        probe(decode, 0)
        refused = baton_drain("pod/decode-0", *flags)
        assert refused.returncode == 4
        assert "pod/decode-0 is the last ready node" in refused.stderr
        assert baton_drain("pod/decode-0", "--force", *flags).returncode == 0
        assert state(decode, **inside) == "draining"

        decode.stop()
        failed = baton_drain("node/a", *flags)
        assert failed.returncode == 1
        assert "baton drain: pod/decode-0: " in failed.stderr
        assert "nothing listens there" in failed.stderr
        assert state(prefill, **inside) == "draining", "the others were drained all the same"


def test_node_without_engines_is_refused(path: str, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.has()
    done = baton_drain("node/a", "--kubectl", str(cluster.kubectl))
    assert done.returncode == 1
    assert "node/a: no running pod of 0 has an engine" in done.stderr
    missing = baton_drain("pod/x", "--kubectl", str(tmp_path / "no-kubectl"))
    assert missing.returncode == 1
    assert "cannot be run" in missing.stderr
