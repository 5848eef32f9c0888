"""Transfer nodes without engines: real pools, sockets and shared memory, in this process or in ones that can be killed.

    rank = TransferRank("decode", {"transports": ["tcp"]})
    with Killable.processes() as start:
        p = start("prefill", {"transports": ["tcp"]})
        p.call("offer", 1)
        p.kill()

Processes are forked from one that has imported the native module and started no thread: that takes milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from baton._native import BootstrapServer, KvPool, TransferNode, start_logs

from baton.layers.kv_spec import KVSpec, describe_heads

PAGE_BYTES = 4096
POOL_PAGES = 256
HASH = b"prompt"
GROUP = 0
"""The id of a described group."""
DEADLINE_MS = 20_000
WAIT_SECS = 30.0
HOST = "127.0.0.1"


def packed(pages: Sequence[int]) -> bytes:
    return array("i", pages).tobytes()


def page_content(seed: int, index: int, page_bytes: int) -> bytes:
    """Bytes of the prompt page `index` of the prompt `seed`."""
    word = ((seed << 32) + index * 2_654_435_761 + 1) & (2**64 - 1)
    return word.to_bytes(8, "little") * (page_bytes // 8)


class TransferRank:
    """One node with its pool. A prompt is named by its room, its pages have content that depends on it."""

    def __init__(
        self, role: str, settings: dict[str, Any] | None = None, page_bytes: int = PAGE_BYTES,
        pool_pages: int = POOL_PAGES,
    ) -> None:  # fmt: skip
        self.page_bytes = page_bytes
        self.pool: Any = KvPool(pool_pages, page_bytes)
        group = describe_heads([0], [0], page_bytes // 8, dtype="float32", page_tokens=1)
        config = {
            "role": role, "host": HOST, "port": 0, "transports": ["tcp"], "lease_ms": 20_000, "heartbeat_ms": 1000,
            "layout": KVSpec((group,)).layout("m"), **(settings or {}),
        }  # fmt: skip
        self._server: Any = None
        self.node: Any = TransferNode(self.pool, json.dumps(config))
        self._memory = self.pool.buffer().cast("B")
        self._ends: dict[int, list[str]] = {}

    def port(self) -> int:
        return int(self.node.port)

    def register(self, bootstrap_port: int, host: str = HOST) -> None:
        self.node.register(host, bootstrap_port, 10_000)

    def serve_bootstrap(self, host: str, cluster_key: str) -> int:
        """Start a bootstrap server of its own and register there; the port."""
        self._server = BootstrapServer(host, 0, cluster_key)
        self.register(self._server.port, host)
        return int(self._server.port)

    # ---- P

    def offer(self, room: int) -> None:
        self.node.offer(room, 0, HASH, DEADLINE_MS)

    def publish(self, room: int, pages: Sequence[int], first: int = 0) -> None:
        """Write prompt pages from `first` on into these pages of the pool, and announce them."""
        self.pool.begin_write(packed(pages))
        for index, page in enumerate(pages, first):
            at = page * self.page_bytes
            self._memory[at : at + self.page_bytes] = page_content(room, index, self.page_bytes)
        self.node.publish(room, GROUP, first, packed(pages))

    def finish(self, room: int, total: int) -> None:
        self.node.finish(room, [(GROUP, 0, total, 1, None)], b"first token")

    def prefill(self, room: int, pages: Sequence[int]) -> None:
        self.offer(room)
        self.publish(room, pages)
        self.finish(room, len(pages))

    # ---- D

    def open(self, room: int, bootstrap_port: int, host: str = HOST) -> None:
        self.node.open(room, 0, host, bootstrap_port, 0, HASH, DEADLINE_MS)

    def grant(self, room: int, pages: Sequence[int]) -> None:
        self.node.grant(room, [(GROUP, 0, packed(pages), None)])

    def holds(self, room: int, pages: Sequence[int]) -> bool:
        """True if these pages of the pool have the content of the room's prompt."""
        return all(
            bytes(self._memory[page * self.page_bytes : (page + 1) * self.page_bytes])
            == page_content(room, index, self.page_bytes)
            for index, page in enumerate(pages)
        )

    def time_pull(
        self, room: int, pages: Sequence[int], bootstrap_port: int, host: str = HOST
    ) -> tuple[float, bool]:
        """Fetch a prompt that P has finished: seconds from the request to the end, and whether the pages are right."""
        started = time.monotonic()
        self.open(room, bootstrap_port, host)
        self.grant(room, pages)
        end = self.end(room)
        took = time.monotonic() - started
        return took, end == "committed" and self.holds(room, pages)

    # ---- both

    def state(self, room: int) -> str:
        live = json.loads(self.node.rooms_json(room))["live"]
        return str(live[0]["state"]) if live else ""

    def ends(self, room: int) -> list[str]:
        """How the room has ended, each end once: "committed", "DONE", or a reason code."""
        for event in self.node.poll(256):
            kind = event[0]
            number = event[1]
            if kind in ("announced", "revoked"):
                continue
            end = event[2] if kind in ("failed", "released") else kind
            self._ends.setdefault(number, []).append(str(end))
        return self._ends.get(room, [])

    def end(self, room: int) -> str:
        """Wait for the end of the room."""
        deadline = time.monotonic() + WAIT_SECS
        while not (found := self.ends(room)):
            assert time.monotonic() < deadline, (
                f"room {room} has no end: {self.node.rooms_json(room)}"
            )
            select.select([self.node.event_fd], [], [], 0.2)
        return found[0]

    def counter(self, name: str) -> float:
        return float(json.loads(self.node.stats_json())["counters"][name])

    def held(self) -> dict[str, float]:
        """Rooms and leases that it still has."""
        gauges = json.loads(self.node.stats_json())["gauges"]
        return {
            key: value
            for key, value in gauges.items()
            if value and key.startswith(("kv_rooms", "kv_leases"))
        }

    def close(self) -> None:
        self.node.close()


def await_state(what: str, look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not look():
        assert time.monotonic() < deadline, f"after {WAIT_SECS:g} s still not: {what}"
        time.sleep(0.002)


class Killable:
    """A TransferRank in a process of its own."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection = connection
        self._pid = pid

    @staticmethod
    @contextlib.contextmanager
    def processes(*prefix: str) -> Iterator[Callable[..., Killable]]:
        """A function that starts one, by the arguments of TransferRank; all of them end with the context.

        `prefix`: a command that runs another one, as `ip netns exec NAME`.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "forks")
            forker = subprocess.Popen(
                [*prefix, sys.executable, "-m", __name__, path],
                start_new_session=True,
                stdout=subprocess.PIPE,
            )
            assert forker.stdout is not None, "it is a pipe"
            assert forker.stdout.readline(), "the forking process has not begun to listen"

            def start(*args: Any) -> Killable:
                connection = Client(path)
                connection.send(args)
                return Killable(connection, connection.recv())

            try:
                yield start
            finally:
                os.killpg(forker.pid, signal.SIGKILL)
                forker.wait()
                forker.stdout.close()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the rank there."""
        self._connection.send((name, args))
        return self._connection.recv()

    def kill(self) -> None:
        """SIGKILL; returns when the process has left the system, and its ports are free."""
        os.kill(self._pid, signal.SIGKILL)
        await_state("the killed process is gone", lambda: not Path(f"/proc/{self._pid}").exists())
        self._connection.close()


def _serve(connection: Connection) -> None:
    args = connection.recv()
    start_logs("error", "text", args[0])
    rank = TransferRank(*args)
    connection.send(os.getpid())
    while True:
        name, args = connection.recv()
        connection.send(getattr(rank, name)(*args))


def _fork_forever(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their ends are not waited for
    with Listener(path) as listener:
        print("listening", flush=True)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                with contextlib.suppress(EOFError, OSError):  # the test has ended
                    _serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    _fork_forever(sys.argv[1])
