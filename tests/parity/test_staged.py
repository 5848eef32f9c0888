"""gloo between two engines when it goes wrong: the tokens come all the same, over tcp, and nothing is left behind."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.disagg.calls import (
    FinishCall,
    GrantCall,
    GroupGrant,
    GroupPages,
    OfferCall,
    OpenCall,
    PublishCall,
)
from baton.disagg.events import RoomFailed
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.support.engines.engine_run import greedy

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)
STEPS = 8
WAITS = {
    "transports": ["gloo", "tcp"],
    "comm_open_ms": 3000,
    "comm_op_ms": 500,
    "comm_abort_ms": 800,
}


class Stuck:
    """A gloo whose receives and aborts do not return before `free` is set."""

    def __init__(self, backend: Any) -> None:
        self.name = backend.name
        self.works_on_device = backend.works_on_device
        self.free = threading.Event()
        self._backend = backend

    def unique_id(self) -> bytes:
        return bytes(self._backend.unique_id())

    def open(
        self, unique_id: bytes, rank: int, slabs: Sequence[memoryview], *timeouts: float
    ) -> Any:
        comm = self._backend.open(unique_id, rank, slabs, *timeouts)
        stuck = self

        class Communicator:
            def send(self, slab: int, nbytes: int) -> None:
                comm.send(slab, nbytes)

            def recv(self, slab: int, nbytes: int) -> None:
                stuck.free.wait()
                comm.recv(slab, nbytes)

            def abort(self) -> None:
                stuck.free.wait()
                comm.abort()

        return Communicator()


def counters(half: Any) -> dict[str, float]:
    return dict(json.loads(half.node.stats_json())["counters"])


def gauges(half: Any) -> dict[str, float]:
    return dict(json.loads(half.node.stats_json())["gauges"])


def comm_threads() -> int:
    """Threads of communicators in this process."""
    import pathlib

    names = (path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("kv-comm") for name in names)


def check(pair: Any, reference: Reference) -> None:
    prompts = prompts_of(random.Random(11), [3, 17, 70])
    want = reference.answers(prompts, STEPS)
    assert pair.answer(prompts, greedy(STEPS)) == want
    assert counters(pair.d)['kv_pull_bytes_total{transport="tcp"}'] > 0
    assert counters(pair.d)["kv_transport_fallbacks_total"] == 1
    assert counters(pair.d)['kv_communicators_ended_total{end="failed"}'] == 1


def test_peer_that_never_posts_its_receive(reference: Callable[[str], Reference]) -> None:
    """P's SLAB_SEND is lost: its send is posted, no peer receives it, and gloo ends it at its timeout."""
    lost = {"fault": {"rules": [{"on": "SLAB_SEND", "do": "drop"}]}}
    pair = pair_module.Pair(
        reference("llama").path, "gloo", {"settings": {**WAITS, **lost}}, {"settings": WAITS}
    )
    try:
        check(pair, reference("llama"))
        pair.until(lambda: not any(v for k, v in gauges(pair.p).items() if "communicators" in k))
    finally:
        pair.close()
    assert comm_threads() == 0


def test_abort_that_hangs(reference: Callable[[str], Reference]) -> None:
    stuck: list[Stuck] = []

    def wrap(backend: Any) -> Stuck:
        stuck.append(Stuck(backend))
        return stuck[0]

    ref = reference("llama")
    pair = pair_module.Pair(
        ref.path, "gloo", {"settings": WAITS}, {"settings": WAITS, "wrap": wrap}
    )
    try:
        check(pair, ref)
        pair.until(lambda: gauges(pair.d)['kv_communicators{state="abandoned"}'] == 1)
        stuck[0].free.set()
        pair.until(lambda: gauges(pair.d)['kv_communicators{state="abandoned"}'] == 0)
    finally:
        stuck[0].free.set()
        pair.close()
    assert comm_threads() == 0


def test_peer_that_closes_in_the_middle(reference: Callable[[str], Reference]) -> None:
    """P's node closes while its send waits for a receive that will not come: D's room ends, with a reason, at once."""
    slow = {"fault": {"rules": [{"on": "SLAB_SEND", "do": "drop"}]}, "comm_op_ms": 20_000}
    ref = reference("llama")
    pair = pair_module.Pair(
        ref.path,
        "gloo",
        {"settings": {**WAITS, **slow}},
        {"settings": {**WAITS, "comm_op_ms": 20_000}},
    )
    pair.p.node.call(OfferCall(5, 0, b"h", 20_000))
    pages = b"".join(page.to_bytes(4, "little") for page in range(4))
    pair.d.node.call(OpenCall(5, 0, "127.0.0.1", pair.bootstrap.port, 0, b"h", 20_000))
    pair.d.node.call(GrantCall(5, (GroupGrant(0, 0, pages),)))
    pair.p.node.call(PublishCall(5, 0, 0, pages))
    pair.p.node.call(FinishCall(5, (GroupPages(0, 0, 4, 1),), b""))
    pair.until(lambda: gauges(pair.p)['kv_communicators{state="open"}'] == 1)
    pair.p.node.close()
    pair.wait()
    (failed,) = pair.d.node.poll(9)
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.code, failed.is_retryable) == (5, "PEER_DEAD", True)
    pair.until(lambda: not any(v for k, v in gauges(pair.d).items() if "communicators" in k))
    pair.close()
