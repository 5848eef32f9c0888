"""A small language for end-to-end tests: a real cluster of processes, what it says, and what is done to it.

    with Cluster.up("--transport", "tcp") as cluster:
        answer = cluster.complete("Baton is", max_tokens=8)
        cluster.kill("decode")
        cluster.await_restart("decode")
        cluster.assert_nothing_is_held()

Every wait is on something that can be seen (a line, a file, a metric) and has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil

from baton_ops.launch.cluster_plan import CONTROL_KEYS_ENV
from baton_ops.launch.holdings import is_holding

T = TypeVar("T")

START_SECS = 90.0
STOP_SECS = 30.0
RECOVER_SECS = 60.0
POLL_SECS = 0.02
SETTLED_SECS = 2.5
"""Longer than two reports of a rank: what a node shows of its ranks is their last report, one a second."""

_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def eventually(what: str, look: Callable[[], T], secs: float = RECOVER_SECS) -> T:
    """Look again and again until the result is true, and return it; after `secs` fail, naming `what`."""
    deadline = time.monotonic() + secs
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, (
            f"after {secs:g} s still not: {what}; last seen: {seen!r}"
        )
        time.sleep(POLL_SECS)


def settled(read: Callable[[], T]) -> T:
    """Value of `read` once it has stayed the same for SETTLED_SECS: no report of earlier work is on its way."""
    seen, begun = read(), time.monotonic()
    since = begun
    while time.monotonic() < since + SETTLED_SECS:
        time.sleep(POLL_SECS)
        if (now := read()) != seen:
            seen, since = now, time.monotonic()
            assert since < begun + RECOVER_SECS, (
                f"after {RECOVER_SECS:g} s it still changes: {seen!r}"
            )
    return seen


def get(url: str, timeout: float = 5.0) -> str | None:
    """Body of GET `url`, or None when no server answers or the status is an error."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=timeout) as response:
        return str(response.read().decode())
    return None


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def metrics(url: str) -> list[Sample]:
    """All samples of `url`/metrics; empty when no server answers."""
    found = []
    for line in (get(f"{url}/metrics") or "").splitlines():
        if match := _SAMPLE.match(line):
            found.append(Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found


def metric(url: str, name: str, **labels: str) -> float:
    """Sum over all samples of that name whose labels include `labels`; NaN when there is none, see `count`."""
    values = [
        s.value for s in metrics(url) if s.name == name and labels.items() <= s.labels.items()
    ]
    return sum(values) if values else float("nan")


def count(url: str, name: str, **labels: str) -> float:
    """`metric` of a counter; one that does not exist yet counts 0."""
    value = metric(url, name, **labels)
    return 0.0 if math.isnan(value) else value


def family(pid: int) -> list[psutil.Process]:
    """The process and all its descendants that live."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Cluster:
    """A running `baton up`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    @contextlib.contextmanager
    def up(
        cls,
        *flags: str,
        env: dict[str, str] | None = None,
        start_secs: float = START_SECS,
        makes_control_key: bool = False,
    ) -> Iterator[Cluster]:
        """Start with `flags`, wait until it is ready, stop it at the end; on a failure its logs are printed.

        Its control paths need no key, unless `makes_control_key`: tests ask them as they ask others.
        """
        no_control_key = {} if makes_control_key else {CONTROL_KEYS_ENV: ""}
        with tempfile.TemporaryDirectory(prefix="baton-e2e-") as name:
            folder = Path(name)
            command = [
                sys.executable,
                "-m",
                "baton_ops.cli",
                "up",
                "--port",
                "0",
                "--log-dir",
                str(folder / "logs"),
            ]
            command += ["--state-file", str(folder / "state.json"), *flags]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **no_control_key, **(env or {})},
                start_new_session=True,
            )
            cluster = cls(process, folder)
            try:
                cluster.await_line("Baton is up at", start_secs)
                yield cluster
            except BaseException:
                cluster.print_logs()
                raise
            finally:
                cluster.stop()

    # ---- what it says ------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        return state

    @property
    def url(self) -> str:
        return str(self.state["router"]["url"])

    def node(self, role: str, index: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = [n for n in self.state["nodes"] if n["role"] == role][index]
        return found

    def client(self, **changes: Any) -> openai.OpenAI:
        """openai-python without retries of its own: what it raises is what the cluster answered."""
        options = {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 60,
            **changes,
        }
        return openai.OpenAI(**options)

    def complete(self, prompt: str, max_tokens: int = 16, **body: Any) -> str:
        """Greedy completion of exactly `max_tokens` tokens."""
        extra = {"ignore_eos": True, **body}
        with self.client() as client:
            answer = client.completions.create(
                model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=extra
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens
        return answer.choices[0].text

    def post(
        self, path: str, body: dict[str, Any], url: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and JSON of POST `path` to the router or the node at `url`, errors too."""
        request = urllib.request.Request(
            f"{url or self.url}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as err:
            with err:
                return err.code, json.loads(err.read())

    def generate_ids(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy token ids through the native endpoint."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        status, answer = self.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        assert status == 200, answer
        ids: list[int] = answer["output_ids"]
        return ids

    def loads(self) -> dict[str, float]:
        """Requests in flight per worker, as the router counts them."""
        workers = json.loads(get(f"{self.url}/workers") or "{}").get("workers", [])
        return {worker["url"]: worker["load"] for worker in workers}

    def ready(self) -> set[str]:
        """Workers the router may choose."""
        workers = json.loads(get(f"{self.url}/workers") or "{}").get("workers", [])
        return {worker["url"] for worker in workers if worker["state"] == "ready"}

    # ---- what is done to it ------------------------------------------------------------------------------------

    def kill(self, role: str, index: int = 0) -> None:
        """SIGKILL the front process of a node (or 'router'); its ranks die with it."""
        pid = self.state["router"]["pid"] if role == "router" else self.node(role, index)["pid"]
        os.kill(pid, signal.SIGKILL)

    def await_restart(self, role: str, index: int = 0, restarts: int = 1) -> None:
        """Until the node was restarted that often and answers again, and the router can serve a request."""
        eventually(
            f"{role} {index} restarted", lambda: self.node(role, index)["restarts"] >= restarts, 180
        )
        eventually(
            f"{role} {index} healthy",
            lambda: get(f"{self.node(role, index)['url']}/health") is not None,
        )
        self.await_service()

    def await_service(self) -> None:
        """Until a request through the router is answered."""

        def answered() -> bool:
            try:
                self.complete("ready?", max_tokens=1)  # its one token may well have no text
                return True
            except openai.APIError:
                return False

        eventually("a request is answered", answered)

    def holdings(self) -> dict[str, float]:
        """Gauges of what requests hold that are not zero: pages, pins, requests, rooms and leases of the nodes, and
        loads of the router."""
        found = {}
        for node in self.state["nodes"]:
            for sample in metrics(node["url"]):
                state = sample.labels.get("state")
                if sample.value and is_holding(sample.name.removeprefix("baton_"), state):
                    found[f"{node['role']} {sample.name}[{state}]"] = sample.value
        return found | {url: load for url, load in self.loads().items() if load}

    def assert_nothing_is_held(self, secs: float = 20.0) -> None:
        """Soon no node holds a page or a request, and the router counts no load."""
        busy = self.holdings

        def reported() -> bool:
            pages = [metric(n["url"], "baton_kv_pages", state="free") for n in self.state["nodes"]]
            return bool(pages) and all(free > 0 for free in pages)  # NaN is not

        eventually("every node reports its pages", reported, secs)
        try:
            eventually("idle", lambda: not busy(), secs)
        except AssertionError as err:
            raise AssertionError(f"after {secs:g} s still in use: {busy()}") from err

    def await_line(self, text: str, secs: float = START_SECS) -> str:
        """The next line of its output that contains `text`."""
        deadline = time.monotonic() + secs
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no line with {text!r} in {secs:g} s; output:\n{''.join(self.output)}"
                ) from None
            if line is None:
                raise AssertionError(
                    f"it ended before saying {text!r}; output:\n{''.join(self.output)}"
                )
            if text in line:
                return line

    def interrupt(self) -> int:
        """Ctrl-C: returns its exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(STOP_SECS)
        self._reader.join(STOP_SECS)
        return code

    def stop(self) -> None:
        """Ctrl-C if it still runs; never leaves a process."""
        try:
            if self.process.poll() is None:
                self.interrupt()
        except subprocess.TimeoutExpired:
            for process in family(self.process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            raise
        finally:
            self.process.wait(STOP_SECS)
            self._reader.join(STOP_SECS)
            if self.process.stdout is not None:
                self.process.stdout.close()

    def print_logs(self) -> None:
        print("".join(self.output))
        for log in sorted((self.folder / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    def _read(self) -> None:
        assert self.process.stdout is not None, "stdout is a pipe"
        for line in self.process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)
