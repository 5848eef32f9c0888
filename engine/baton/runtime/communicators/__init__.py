"""Two-rank communicators for the staged KV transports: `gloo` over host memory, `nccl` over a GPU.

The transfer runtime (crate kv_transfer, `transport::comm`) calls these objects from threads of its
own, one per communicator; they know slabs of memory and nothing of pages, rooms or the scheduler.
An exception ends the communicator and is its reason. Waits release the GIL.

    P: id = backend.unique_id()  ── the control connection ──▶  D
    both: comm = backend.open(id, rank, slabs, ...)
          P is rank 0 and sends, D is rank 1 and receives
    k-th comm.send(slab, nbytes)  meets  k-th comm.recv(slab, nbytes), of the same size
    comm.abort() from another thread: the blocked call is to return soon

Slabs are staging memory on the host; a backend with `works_on_device` takes them on the device too
(tensors of uint8), and gets those when the pages are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.config import EngineConfig
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.runtime.communicators.gloo import GlooBackend
    from baton.runtime.communicators.nccl import NcclBackend


def make_backend(
    config: EngineConfig, host: str, transports: Sequence[str]
) -> GlooBackend | NcclBackend | None:
    """The backend of the staged transport among `transports`; None when there is none. `host`:
    where peers reach us.

    Raises ConfigError when it cannot work here.
    """
    name = next((name for name in transports if name in ("gloo", "nccl")), None)
    if name is None:
        return None
    if config.simulate is not None:
        raise ConfigError(
            f"--disaggregation-transfer-backend {name} needs torch, which --simulate does without: "
            "use auto, shm or tcp"
        )
    if name == "gloo":
        from baton.runtime.communicators.gloo import GlooBackend

        return GlooBackend(host)
    from baton.runtime.communicators.nccl import NcclBackend, find_obstacle

    if (reason := find_obstacle()) is not None:
        raise ConfigError(
            f"--disaggregation-transfer-backend nccl: {reason}; use auto, or gloo for the same "
            "code path without a GPU"
        )
    return NcclBackend(config.nccl_max_ctas)
