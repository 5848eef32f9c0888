"""`gloo`: torch's process group for CPU tensors, two ranks per communicator, without
torch.distributed's default group.

P makes a TCPStore per communicator; its address is the unique id. gloo shares the properties of
NCCL that the state machine copes with: two sides, one order, and a pair that never works again
after its first error. It lacks an abort that interrupts an operation: the operation ends by its
timeout, or when the peer closes its sockets.

Neither the store nor the sockets authenticate: like NCCL's, they belong on a trusted network.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]


class GlooBackend:
    name = "gloo"
    works_on_device = False

    def __init__(self, host: str) -> None:
        self._host = host
        self._hosted: dict[bytes, TCPStore] = {}
        """Stores made by `unique_id` and not yet opened: at most one per communicator's thread."""
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        store = TCPStore(self._host, 0, 2, True, timedelta(seconds=30), wait_for_workers=False)
        unique_id = json.dumps({"host": self._host, "port": store.port}).encode()
        with self._lock:
            self._hosted[unique_id] = store
        return unique_id

    def open(
        self,
        unique_id: bytes,
        rank: int,
        slabs: Sequence[memoryview],
        open_timeout_secs: float,
        op_timeout_secs: float,
    ) -> GlooCommunicator:
        timeout = timedelta(seconds=open_timeout_secs)
        with self._lock:
            store = self._hosted.pop(unique_id, None)
        # Only the side that made the unique id has the store; the other one connects to it.
        if store is None:
            where = json.loads(unique_id)
            store = TCPStore(
                where["host"], where["port"], 2, False, timeout, wait_for_workers=False
            )
        store.set_timeout(timeout)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        group = ProcessGroupGloo(store, rank, 2, options)
        return GlooCommunicator(group, 1 - rank, slabs, op_timeout_secs)


class GlooCommunicator:
    def __init__(
        self,
        group: Any,
        peer: int,
        slabs: Sequence[memoryview],
        op_timeout_secs: float,
    ) -> None:
        """`group`: a ProcessGroupGloo, of whose methods torch's types know few."""
        self._group = group
        self._peer = peer
        self._slabs = [torch.frombuffer(slab, dtype=torch.uint8) for slab in slabs]
        self._timeout = timedelta(seconds=op_timeout_secs)

    def send(self, slab: int, nbytes: int) -> None:
        self._group.send([self._slabs[slab][:nbytes]], self._peer, 0).wait(self._timeout)

    def recv(self, slab: int, nbytes: int) -> None:
        self._group.recv([self._slabs[slab][:nbytes]], self._peer, 0).wait(self._timeout)

    def abort(self) -> None:
        self._group.abort()  # no later operation succeeds; a waiting one runs into its timeout
