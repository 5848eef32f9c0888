"""The processes of a DP rank that compute together (--tp-size): TP rank 0 plans and broadcasts, the
others execute.

1. The front starts all of them alike; those with a `tp_rank` above 0 call `process.run_executor`
   instead of running a scheduler.
2. They meet (layers.collectives.init_group), each loads its share of the model, and the executors
   (ranks 1 and up) report that they did.
3. Per step the first rank sends one message (runtime.runner.step_inputs) to each executor, then
   computes its own part; they meet again in the model's collectives. Between steps an executor
   sleeps on its socket: no process waits in a collective for work to come.
4. On P and D nodes every rank has a transfer runtime for its heads of each page, and executors do
   with theirs what the first rank does with its own (server.worker.tensor_parallel.transfer_node),
   in one order with the steps, and report the events of their runtimes.
5. An empty message ends an executor. Signals do not: a group ends together, and the front kills
   what is left of one.

Channel: one PUSH socket per executor, bound by the first rank in the engine's private directory
(ADR 0009).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from baton.disagg.events import NodeEvent
from baton.server.worker.tensor_parallel.calls import TpCall, encode_call

if TYPE_CHECKING:
    from baton.layers.collectives import ProcessGroup
    from baton.runtime.build import LoadedModel

log = logging.getLogger("baton.tp")

QUEUE = 1024
"""Messages an executor may be behind by: calls about many requests come while it computes a
step.
"""
EVENTS_AT_ONCE = 256
ALIVE_EVERY_MS = 1000


class OrderKind(Enum):
    """First byte of a message to an executor; the empty message is STOP."""

    STEP = b"s"
    CALL = b"n"
    """A call of the transfer runtime."""
    STOP = b""


class ExecutorStuck(Exception):
    """A live executor takes no more messages, or ends no more rooms."""


@dataclass(frozen=True, slots=True)
class TpGroup:
    """The tensor-parallel ranks of one DP rank, as the front's order to a process names them."""

    tp_rank: int
    tp_size: int
    folder: Path
    dp_rank: int

    @property
    def meeting_point(self) -> Path:
        return self.folder / f"meet{self.dp_rank}"

    def address(self, tp_rank: int) -> str:
        """Where the socket of this rank listens: executors' orders, or at 0 their reports."""
        return f"ipc://{self.folder}/tp{self.dp_rank}.{tp_rank}"


class TransferEvents(msgspec.Struct, tag="events"):
    """Events of an executor's transfer runtime, as `poll` gives them; those of committed rooms
    without P's payload.
    """

    tp_rank: int
    events: Sequence[NodeEvent]
    failure: str | None = None
    """Why the executor's transfer runtime does not work any more."""


class LoadedReport(msgspec.Struct, tag="loaded"):
    """An executor has its share of the model in memory. Pools must be equal: page ids mean the same
    everywhere.
    """

    tp_rank: int
    pid: int
    num_pages: int
    host_pages: int


encode_report = msgspec.msgpack.Encoder().encode
report_decoder: msgspec.msgpack.Decoder[LoadedReport | TransferEvents] = msgspec.msgpack.Decoder(
    LoadedReport | TransferEvents
)


class TpExecutors:
    """The first rank's side. Any thread may send; all other methods belong to one thread."""

    def __init__(self, context: zmq.Context[Any], group: TpGroup, timeout_secs: float) -> None:
        self.group = group
        self.pids: list[int] = []
        """Process ids in the order of TP ranks, from rank 1 on; known after `await_loaded`."""
        self._timeout_secs = timeout_secs
        self._process_group: ProcessGroup | None = None
        self._lock = threading.Lock()
        """Guards the order sockets: steps come from the device thread, calls of transfer runtimes
        from the other.
        """
        self.reports = context.socket(zmq.PULL)
        """Readable while `take_reports` has something."""
        self.reports.bind(group.address(0))
        self._orders = [context.socket(zmq.PUSH) for _ in range(1, group.tp_size)]
        for tp_rank, socket in enumerate(self._orders, 1):
            socket.set_hwm(QUEUE)
            socket.setsockopt(zmq.SNDTIMEO, int(timeout_secs * 1000))
            socket.bind(group.address(tp_rank))

    def await_loaded(self, own: LoadedModel) -> None:
        """Wait until all have loaded. No deadline: the front ends us when one of them dies.

        Raises ValueError when one has another pool than ours.
        """
        reports = {}
        for _ in self._orders:
            report = report_decoder.decode(self.reports.recv())
            assert isinstance(report, LoadedReport), "nothing happens before all have loaded"
            if (report.num_pages, report.host_pages) != (own.kv.num_pages, own.host_pages):
                raise ValueError(
                    f"tensor-parallel rank {report.tp_rank} has {report.num_pages} pages and "
                    f"{report.host_pages} on "
                    f"the host, the first rank {own.kv.num_pages} and {own.host_pages}; they must "
                    "be equal"
                )
            reports[report.tp_rank] = report
        self.pids = [reports[tp_rank].pid for tp_rank in sorted(reports)]
        self._process_group = own.group

    def send_step(self, order: bytes) -> None:
        self._broadcast(OrderKind.STEP, order)

    def send_call(self, call: TpCall) -> None:
        """Have all executors make this call on their transfer runtime."""
        self._broadcast(OrderKind.CALL, encode_call(call))

    def take_reports(self) -> list[TransferEvents]:
        """Reports of executors since the last call."""
        found: list[TransferEvents] = []
        while True:
            try:
                report = report_decoder.decode(self.reports.recv(zmq.DONTWAIT))
            except zmq.Again:
                return found
            assert isinstance(report, TransferEvents), "an executor loads once"
            found.append(report)

    def stop(self) -> None:
        """Let them end. Nothing may be sent afterwards. One that has ended already, or is stuck,
        takes no message.
        """
        from baton.layers import collectives

        with self._lock:
            for socket in self._orders:
                with contextlib.suppress(zmq.Again):
                    socket.send(OrderKind.STOP.value, zmq.DONTWAIT)
        collectives.leave_group()

    def _broadcast(self, kind: OrderKind, body: bytes) -> None:
        """Raises ExecutorStuck when an executor has not taken `QUEUE` messages in
        --dist-timeout.
        """
        message = kind.value + body
        with self._lock:
            for tp_rank, socket in enumerate(self._orders, 1):
                try:
                    socket.send(message)
                except zmq.Again:
                    raise ExecutorStuck(
                        f"tensor-parallel rank {tp_rank} is {QUEUE} messages behind and took none "
                        "for "
                        f"--dist-timeout {self._timeout_secs:g} s"
                    ) from None

    def counters(self) -> dict[str, float]:
        """For messages.StatsMessage: what the collectives of the first rank's process cost."""
        assert self._process_group is not None, "await_loaded comes first"
        return {
            "tp_collectives_total": self._process_group.calls,
            "tp_collective_seconds_total": self._process_group.seconds,
        }
