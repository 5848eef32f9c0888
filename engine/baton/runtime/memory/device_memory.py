"""Size of the KV pool of a CUDA device: measurements and arithmetic.

1. The weights are on the device; 2. `run_warmup` runs the largest steps on a small pool and notes
the memory that they took on top (`MemoryNeeds`); 3. `size_pool` divides the rest:

    |<-------------------------- total ---------------------------->|
    | weights | workspace | states |  pool   | activations | graphs | … |
    |<- at most --mem-fraction-static ---->|

The fraction bounds the memory that stays allocated, as SGLang's flag of that name does, and is of
the device's whole memory, so that two engines on one GPU can be given 0.4 each. The free memory
bounds the pool too, because another process may use the device.

`DeviceMemory` is the only place that asks torch and the driver; the rest is arithmetic on bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
MARGIN_BYTES = 256 * MIB
"""Left free: kernels that the driver loads at their first use, NCCL's buffers, blocks that torch
cannot reuse.
"""
LEAST_PAGES = 2


class DeviceMemory:
    """Memory of a CUDA device as torch and the driver report it, in bytes. Torch's part is what it
    has reserved, not what it has allocated: what its allocator cannot fill is gone for the pool as
    well.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free_bytes(self) -> tuple[int, int]:
        """Bytes any process could still allocate, and the whole memory; unused blocks are given
        back first.
        """
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    def reserved_bytes(self) -> int:
        """Bytes this process's torch has reserved; blocks without a tensor in them are given back
        first.
        """
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Most that torch had reserved since `reset_peak`."""
        return torch.cuda.max_memory_reserved(self.device)


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Device memory of a process besides the pool. All in bytes."""

    total: int
    """The device's whole memory."""
    free: int
    """Free when only the weights were there (and what torch and the driver need for themselves)."""
    weights: int
    workspace: int
    """Buffers of the attention backend."""
    activations: int
    """Most that one step took."""
    graphs: int
    """Kept for CUDA graphs that will be captured once the pool is there."""
    states: int = 0
    """States of as many sequences as run at once, of models that keep some."""

    @property
    def room(self) -> int:
        """Bytes that can be allocated for the pool without a step failing later."""
        kept = self.workspace + self.states + self.graphs
        return self.free - kept - self.activations - MARGIN_BYTES


class MemoryPlan(NamedTuple):
    pages: int
    why: str
    """Limit that bounded the pages, for the log."""


def size_pool(
    needs: MemoryNeeds, page_bytes: int, fraction: float, wanted_pages: int | None = None
) -> MemoryPlan:
    """Pages of the pool: `wanted` when the user said how many, else what `fraction` of the device's
    memory leaves.

    Raises ConfigError when `wanted` pages, or else two, do not fit.
    """
    if wanted_pages is not None:
        if wanted_pages * page_bytes > needs.room:
            raise ConfigError(
                f"the KV pool asked for has {as_gib(wanted_pages * page_bytes)}, and "
                f"{as_gib(max(needs.room, 0))} are left for it "
                f"({describe_needs(needs)}); lower --max-total-tokens or --kv-pool-mib, or "
                f"{_MAKE_ROOM}"
            )
        return MemoryPlan(wanted_pages, "as asked for")
    allowed = int(needs.total * fraction) - needs.weights - needs.workspace - needs.states
    pages = min(allowed, needs.room) // page_bytes
    if pages >= LEAST_PAGES:
        return MemoryPlan(
            pages,
            f"--mem-fraction-static {fraction:g}" if allowed <= needs.room else "all that is free",
        )
    least_pool = f"{LEAST_PAGES} KV pages of {page_bytes / MIB:.2f} MiB"
    # The fraction is the tighter limit: raising it helps, freeing memory does not.
    if allowed < needs.room:
        raise ConfigError(
            f"--mem-fraction-static {fraction:g} leaves no room for {least_pool} beside the "
            f"weights ({describe_needs(needs)}); raise it"
        )
    raise ConfigError(
        f"the device has no room for {least_pool} ({describe_needs(needs)}); {_MAKE_ROOM}"
    )


_MAKE_ROOM = (
    "lower --chunked-prefill-size or --max-running-requests, end other processes on this "
    "GPU, or use more GPUs"
)


def describe_needs(needs: MemoryNeeds) -> str:
    """All numbers, for the log and for errors."""
    states = f"states of sequences {as_gib(needs.states)}, " if needs.states else ""
    return (
        f"GPU memory of {as_gib(needs.total)}: free {as_gib(needs.free)} beside weights of "
        f"{as_gib(needs.weights)}; a step takes {as_gib(needs.activations)}, the attention "
        f"backend {as_gib(needs.workspace)}, CUDA graphs {as_gib(needs.graphs)}, "
        f"{states}margin {as_gib(MARGIN_BYTES)}"
    )


def as_gib(n: int) -> str:
    """A size for people."""
    return f"{n / GIB:.2f} GiB"
