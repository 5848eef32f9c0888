"""The rank's end of KV events: each turn's batch to the ZMQ subscribers and to the front, and
replays on request.

1. `publish` after each turn: one message [topic, sequence number (8 bytes, big-endian), payload] on
   the PUB socket, and the payload for the front;
2. a client that missed some sends [first number wanted, 8 bytes big-endian] from a REQ or DEALER
   socket to the ROUTER socket, `serve_replays` answers with [number, payload] for each batch that
   is kept, then [-1, empty].

Wire format, numbering and sockets as vLLM's ZMQ event publisher; here the scheduler's thread sends
(a PUB socket drops instead of waiting), so that there is no queue between the tree and the wire.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from baton.cache.kv_events import Stored
from baton.config import kv_events
from baton.config.kv_events import FLAG, KvEventsConfig
from baton.errors import ConfigError
from baton.sched.scheduler import Scheduler
from baton.server.worker.kv_events import codec
from baton.server.worker.messages import KvEvents

log = logging.getLogger("baton.kv_events")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAYS_PER_TURN = 4
REPLAY_SPARE = 1000
"""Room in the replay socket's queue beside one whole replay."""


@dataclass(eq=False)
class KvPublisher:
    """Owns the two sockets of one DP rank. All methods are called from the rank's thread."""

    config: KvEventsConfig
    sched: Scheduler
    dp_rank: int
    group_kind: str
    """Kind of the first page group."""
    context: zmq.Context[Any]
    to_front: Callable[[KvEvents], None]

    def __post_init__(self) -> None:
        """Opens the sockets. Raises ConfigError naming the endpoint that cannot be had."""
        assert self.sched.kv_events is not None, "only made when events are enabled"
        self._log = self.sched.kv_events
        self._topic = self.config.topic.encode()
        self.epoch = os.urandom(8).hex()
        """Drawn at each start: sequence numbers of another epoch mean nothing here."""
        self._pub: zmq.Socket[bytes] | None = None
        self.replay: zmq.Socket[bytes] | None = None
        """To be polled; `serve_replays` when it has something."""
        mine = self.config.of_rank(self.dp_rank)
        if mine.uses_zmq:
            self._pub = self.context.socket(zmq.PUB)
            self._pub.set_hwm(mine.hwm)
            _attach(
                self._pub, "endpoint", mine.endpoint, bind=kv_events.is_bind_endpoint(mine.endpoint)
            )
            if mine.replay_endpoint is not None:
                self.replay = self.context.socket(zmq.ROUTER)
                self.replay.set_hwm(
                    mine.buffer_steps + REPLAY_SPARE
                )  # a ROUTER drops what exceeds it
                _attach(self.replay, "replay_endpoint", mine.replay_endpoint, bind=True)

    def info(self) -> dict[str, Any]:
        """For Ready: where the events are, free ports resolved."""
        return {
            "epoch": self.epoch,
            "endpoint": None if self._pub is None else _where(self._pub),
            "replay_endpoint": None if self.replay is None else _where(self.replay),
        }

    @property
    def batches(self) -> int:
        return self._log.next_seq

    def publish(self) -> None:
        """Send what happened since the last call, if anything."""
        batch = self._log.take_batch(time.time())
        if batch is None:
            return
        payload = self._encode(batch.events, batch.ts)
        if self._pub is not None:
            self._pub.send_multipart(
                (self._topic, batch.seq.to_bytes(8, "big"), payload), zmq.DONTWAIT
            )
        self.to_front(KvEvents(self.dp_rank, batch.seq, payload))

    def snapshot(self) -> dict[str, Any]:
        """Everything cached, and the number of the first batch that is not in it."""
        self.publish()
        blocks: list[Stored] = self.sched.report.cached_blocks()
        payload = self._encode(blocks, time.time())
        return {"epoch": self.epoch, "seq": self._log.next_seq, "payload": payload}

    def serve_replays(self) -> None:
        """Answer the requests that are there, a few per turn: running requests come first."""
        assert self.replay is not None
        for _ in range(REPLAYS_PER_TURN):
            try:
                frames = self.replay.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            client = frames[0]
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.warning(
                    "replay request of %d frames; send an empty one and one of 8 bytes",
                    len(frames) - 1,
                )
            else:
                for batch in self._log.batches_since(int.from_bytes(frames[2], "big")):
                    payload = self._encode(batch.events, batch.ts)
                    self.replay.send_multipart(
                        (client, b"", batch.seq.to_bytes(8, "big"), payload), zmq.DONTWAIT
                    )
            self.replay.send_multipart((client, b"", END_OF_REPLAY, b""), zmq.DONTWAIT)

    def _encode(self, events: Any, ts: float) -> bytes:
        return codec.encode(events, self.sched.limits.page_size, ts, self.dp_rank, self.group_kind)


def _attach(socket: zmq.Socket[bytes], key: str, endpoint: str, *, bind: bool) -> None:
    attach, how = (socket.bind, "bound") if bind else (socket.connect, "connected to")
    try:
        attach(endpoint)
    except zmq.ZMQError as err:
        raise ConfigError(
            f"{FLAG}: {key} {endpoint} cannot be {how} ({err}); choose another"
        ) from err


def _where(socket: zmq.Socket[bytes]) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
