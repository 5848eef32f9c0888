"""Two-rank communicators for the staged KV transports: `gloo` over CPU memory, `nccl` over a GPU.

The transfer runtime (crate kv_transfer, `transport::comm`) calls these objects from threads of its own, one per
communicator; they know slabs of memory and nothing of pages, rooms or the scheduler. An exception ends the communicator
and is its reason. Waits release the GIL.

    P: id = backend.unique_id()  ── the control connection ──▶  D
    both: comm = backend.open(id, rank, slabs, ...)             P is rank 0 and sends, D is rank 1 and receives
    k-th comm.send(slab, nbytes)  meets  k-th comm.recv(slab, nbytes), of the same size
    comm.abort() from another thread: the blocked call is to return soon
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.config import EngineConfig
from baton.errors import ConfigError


class Communicator(Protocol):
    def send(self, slab: int, nbytes: int) -> None: ...
    def recv(self, slab: int, nbytes: int) -> None: ...
    def abort(self) -> None: ...


class Backend(Protocol):
    @property
    def name(self) -> str: ...
    def unique_id(self) -> bytes: ...
    def open(
        self,
        unique_id: bytes,
        rank: int,
        slabs: Sequence[memoryview],
        open_timeout_secs: float,
        op_timeout_secs: float,
    ) -> Communicator: ...


def make_backend(config: EngineConfig, host: str) -> Backend | None:
    """The backend of --disaggregation-transfer-backend; None for those that need none. `host`: where peers reach us.

    Raises ConfigError when it cannot work here.
    """
    name = config.disaggregation_transfer_backend
    if name not in ("gloo", "nccl"):
        return None
    if config.simulate is not None:
        raise ConfigError(
            f"--disaggregation-transfer-backend {name} needs torch, which --simulate does without: use auto, shm or tcp"
        )
    if name == "gloo":
        from baton.runtime.comm.gloo import GlooBackend

        return GlooBackend(host)
    from baton.runtime.comm.nccl import NcclBackend, unusable

    if (reason := unusable()) is not None:
        raise ConfigError(
            f"--disaggregation-transfer-backend nccl: {reason}; "
            "use auto (shm or tcp), or gloo for the same code path without a GPU"
        )
    return NcclBackend()
