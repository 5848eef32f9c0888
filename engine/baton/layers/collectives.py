"""How tensor-parallel ranks put their parts together: the one seam between a model and the other
processes.

1. `ALONE` is the group of one: it returns what it is given;
2. `init_group` meets the other processes of the group (a file of this engine's private directory is
the meeting point:
   no port is opened for it) and returns a `ProcessGroup`: gloo on the CPU, NCCL on CUDA devices;
3. the model calls `all_reduce` and `gather`; all ranks make the same calls in the same order;
4. a rank that dies breaks the connections of the others, whose calls raise `PeerLost`; one that
hangs does so after a
   deadline.

On the CPU partial sums are added in the order of the ranks, so that a row has the same bits alone
and in any batch, as without tensor parallelism. NCCL adds in an order of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from baton.layers.shard import Shard


class PeerLost(Exception):
    """Another tensor-parallel process of this rank is gone or does not answer. The group cannot be
    used any more."""


class Collectives:
    """Operations of a tensor-parallel group, called from one thread. By itself the group of one."""

    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on every rank. Takes x over: it may be overwritten, and
        returned."""
        return x

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """Shares of columns (Shard.slice_of) side by side: [S, columns] on the first rank, [0,
        columns] elsewhere."""
        return x


ALONE = Collectives()


@dataclass(frozen=True, slots=True)
class TpContext:
    """Where a process stands among the tensor-parallel ranks of its DP rank."""

    shard: Shard
    meeting_point: Path
    """See `init_group`."""
    broadcast: Callable[[bytes], None] | None = None
    """Sends a step to all other ranks; set on the first rank."""
    receive: Callable[[], bytes] | None = None
    """Waits for the next step; set on the other ranks."""


class ProcessGroup(Collectives):
    """torch.distributed's default group, as `init_group` made it.

    `calls` and `seconds` count since the start; CUDA's calls return before they are done, so their
    time says little.
    """

    def __init__(self, shard: Shard, device: torch.device, timeout_secs: float) -> None:
        self._shard = shard
        self.size = shard.size
        self._timeout_secs = timeout_secs
        self._device = device
        self._adds_in_any_order = device.type != "cpu" or shard.size == 2  # a + b = b + a
        self.calls = 0
        self.seconds = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        x = x.contiguous()
        if self._adds_in_any_order:
            self._run_collective(lambda: dist.all_reduce(x))
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run_collective(lambda: dist.all_gather(parts, x))
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor, columns: int) -> Tensor:
        widths = [
            (share.stop - share.start)
            for share in (Shard(r, self.size).slice_of(columns) for r in range(self.size))
        ]
        # gloo and NCCL gather equal shapes; shares differ by one column at most
        padded = functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        if self._shard.rank:
            self._run_collective(lambda: dist.gather(padded, dst=0))
            return x.new_empty(0, columns)
        parts = [torch.empty_like(padded) for _ in widths]
        self._run_collective(lambda: dist.gather(padded, parts, dst=0))
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def all_reduce_min(self, n: int) -> int:
        """The smallest of all ranks' n, on every rank."""
        value = torch.tensor(n, dtype=torch.int64, device=self._device)
        self._run_collective(lambda: dist.all_reduce(value, op=dist.ReduceOp.MIN))
        return int(value)

    def _run_collective(self, collective: Callable[[], object]) -> None:
        started = time.monotonic()
        try:
            collective()
        except RuntimeError as err:  # gloo raises it for broken connections and for timeouts
            raise PeerLost(
                f"tensor-parallel rank {self._shard.rank} of {self.size} lost another one, or waited longer than "
                f"--dist-timeout {self._timeout_secs:g} s for it; the log of the other one says why ({err})"
            ) from err
        self.calls += 1
        self.seconds += time.monotonic() - started


def init_group(
    shard: Shard, device: torch.device, meeting_point: Path, timeout_secs: float
) -> ProcessGroup:
    """Meet the other ranks. Raises PeerLost when they are not all there in time.

    Args:
        meeting_point: a file that does not exist yet, the same for all ranks and only for them.
        timeout_secs: for this, and later for every single call.
    """
    # All ranks are processes of one machine. Without this gloo listens where the host's name leads
    # to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=timeout_secs)
    is_cuda = device.type == "cuda"
    try:
        store = dist.FileStore(str(meeting_point), shard.size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        dist.init_process_group(
            backend="nccl" if is_cuda else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=limit,
            device_id=device if is_cuda else None,
        )
    except RuntimeError as err:
        raise PeerLost(
            f"tensor-parallel rank {shard.rank} did not meet all {shard.size} within {timeout_secs:g} s "
            f"(--dist-timeout); see the log of the others ({err})"
        ) from err
    return ProcessGroup(shard, device, timeout_secs)


def leave_group() -> None:
    """Close the connections of `init_group`, so that the process can end in any order with the
    others."""
    if dist.is_initialized():
        dist.destroy_process_group()
