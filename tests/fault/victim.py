"""A cluster under abuse: what honest clients see meanwhile, and whether everything is given back afterwards."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import openai

from tests.support.processes.cluster import Cluster, eventually, family

PROMPTS = ["Baton is", "A page is", "The router", "KV pages travel"]
MAX_TOKENS = 24
BASELINE_REQUESTS = 40
SPARE_DESCRIPTORS = 24
"""Pooled connections and the like; the cases open hundreds."""
SETTLE_SECS = 90.0


@dataclass
class Honest:
    """Requests of an ordinary client, one after the other, while something else goes on."""

    victim: Victim
    texts: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.is_set():
            for prompt in PROMPTS:
                try:
                    self.texts.append((prompt, self.victim.complete(prompt)))
                except openai.APIError as err:
                    self.errors.append(repr(err))


class Victim:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.expected = {prompt: self.complete(prompt) for prompt in PROMPTS}
        self.undisturbed_ms = self.slowest_ms()
        self.restarts = self._restarts()
        self._settled()
        self.descriptors = self._descriptors()

    def complete(self, prompt: str) -> str:
        with self.cluster.client() as client:
            answer = client.completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        return answer.choices[0].text

    def slowest_ms(self) -> float:
        """Longest time of an answer among a few dozen, one after the other."""
        took = []
        for i in range(BASELINE_REQUESTS):
            begin = time.perf_counter()
            self.complete(PROMPTS[i % len(PROMPTS)])
            took.append((time.perf_counter() - begin) * 1000)
        return max(took)

    @contextlib.contextmanager
    def honest_clients(self) -> Iterator[Honest]:
        """Two clients that ask all the while and must get exactly the undisturbed answers."""
        honest = Honest(self)
        threads = [threading.Thread(target=honest.run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield honest
        finally:
            honest.stop.set()
            for thread in threads:
                thread.join()
        wrong = [(prompt, text) for prompt, text in honest.texts if text != self.expected[prompt]]
        assert not wrong, f"{len(wrong)} of {len(honest.texts)} answers are wrong: {wrong[:3]}"

    def assert_recovered(self) -> None:
        """Pages, requests and descriptors are back, no node was restarted, answers are as fast as before."""
        assert self._restarts() == self.restarts, "a node died"
        self._settled()
        try:
            # A pool closes connections that have been idle for too long when the next request ends.
            eventually(
                "descriptors are closed",
                lambda: self.complete(PROMPTS[0]) and not self._open_descriptors(),
                SETTLE_SECS,
            )
        except AssertionError as err:
            raise AssertionError(f"still open: {self._open_descriptors()}") from err
        limit = 2 * max(self.undisturbed_ms, 50.0)
        eventually(
            f"answers within {limit:.0f} ms", lambda: self.slowest_ms() <= limit, SETTLE_SECS
        )

    def _settled(self) -> None:
        eventually("all nodes are ready", lambda: len(self.cluster.ready()) == 2, SETTLE_SECS)
        self.cluster.assert_nothing_is_held(SETTLE_SECS)

    def _restarts(self) -> list[int]:
        return [int(node["restarts"]) for node in self.cluster.state["nodes"]]

    def _descriptors(self) -> dict[str, int]:
        found = {}
        for process in family(self.cluster.process.pid):
            with contextlib.suppress(OSError):
                name = " ".join(Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[2:6])
                found[f"{process.pid} {name}"] = len(
                    list(Path(f"/proc/{process.pid}/fd").iterdir())
                )
        return found

    def _open_descriptors(self) -> dict[str, tuple[int, int]]:
        """Processes with more descriptors than before, and both numbers."""
        now = self._descriptors()
        return {
            name: (count, now[name])
            for name, count in self.descriptors.items()
            if now.get(name, 0) > count + SPARE_DESCRIPTORS
        }

    def node_ports(self) -> list[int]:
        """Ports of the nodes on which KV pages are arranged and moved."""
        ports = [
            node["bootstrap_port"] for node in self.cluster.state["nodes"] if node["bootstrap_port"]
        ]
        for node in self.cluster.state["nodes"]:
            for process in family(node["pid"]):
                listening = [
                    c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"
                ]
                ports += [port for port in listening if str(port) not in node["url"]]
        return sorted(set(ports))

    def body(self, **changes: object) -> bytes:
        return json.dumps(
            {"model": "demo", "prompt": "abuse", "max_tokens": 4, "temperature": 0, **changes}
        ).encode()
