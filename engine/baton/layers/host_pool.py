"""Host memory behind a KV pool (`--host-kv-gib`): whole pages go there and come back.

A page's checksum is taken when it leaves the device and compared when it returns, because its next
owner computes tokens from it: memory that has changed meanwhile, or a copy that went wrong, would
give a request the tokens of another one.

On a CPU the native module copies and hashes in one pass (XXH3). On a GPU copies and sums
(`layers.cuda.device_pages`) are queued on the stream of the steps, the checksums stay on the
device, and the host reads with the step's result which pages are damaged. Of tensor-parallel ranks
each checks its share of a page; a page is damaged on all of them when it is on one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.cache.host import CopyRun
from baton.errors import ConfigError
from baton.layers.collectives import ALONE, Collectives
from baton.layers.cuda import ipc
from baton.layers.cuda.device_pages import PageSums
from baton.layers.kv_pool import KvTensors
from baton.layers.kv_spec import KVSpec

try:
    from baton._native import copy_pages as copy_native_pages
except ImportError:  # plain torch copies and sums
    copy_native_pages = None

GIB = 1 << 30


def host_pool_pages(spec: KVSpec, host_kv_gib: float, ranks: int) -> int:
    """How many pages --host-kv-gib holds. Raises ConfigError when that is none, or more than this
    machine has."""
    page_bytes = spec.page_bytes
    pages = int(host_kv_gib * GIB) // page_bytes
    if host_kv_gib and not pages:
        raise ConfigError(
            f"--host-kv-gib {host_kv_gib:g} holds no page of {page_bytes} bytes; raise it to "
            f"{page_bytes / GIB:.6f}"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * page_bytes * ranks > memory:
        raise ConfigError(
            f"--host-kv-gib {host_kv_gib:g}: {ranks} rank(s) would take {host_kv_gib * ranks:g} "
            f"GiB of the {memory / GIB:.1f} GiB of this machine; lower it"
        )
    return pages


def make_host_memory(kv: KvTensors, num_pages: int) -> Tensor:
    """Host memory for `num_pages` pages of kv's shape, taken as it is first written; for a CUDA
    device all at once.

    Registered rather than allocated as pinned memory, which torch rounds up to a power of two: 40
    GiB would take 64.
    """
    memory = torch.frombuffer(mmap.mmap(-1, num_pages * kv.page_bytes), dtype=torch.uint8)
    if kv.data.device.type == "cuda":
        ipc.register_memory(memory)
    return memory.view(kv.data.dtype).view(num_pages, *kv.data.shape[1:])


class HostPool:
    """Args: `group`: the tensor-parallel ranks, which carry out the same copies in the same
    steps."""

    def __init__(self, kv: KvTensors, num_pages: int, group: Collectives = ALONE) -> None:
        self.memory = make_host_memory(kv, num_pages)
        """A page per slot."""
        self._device = kv.data
        self._group = group
        self._checksums = torch.zeros(num_pages, dtype=torch.int64, device=kv.data.device)
        """By slot, on the device: what the page had when it left."""
        self._sums: PageSums | None = None
        if copy_native_pages is None or kv.data.device.type != "cpu":
            self._sums = PageSums(kv.data)

    def carry_out(self, runs: Iterable[CopyRun]) -> Tensor | None:
        """Copy pages in both directions, in the order of the runs.

        Returns:
            bool [n] on the device, for each page that came back, in order: whether it is damaged.
            None: none came back.
        Cost: reads and writes each page once; on CUDA all is queued on the current stream and the
        host does not wait.
        """
        damaged = []
        for run in runs:
            slots = torch.from_numpy(np.frombuffer(run.slots, np.int32).astype(np.int64))
            slots = slots.to(self._device.device, non_blocking=True)
            checksums = self._copy_run(run)
            if run.to_host:
                self._checksums[slots] = checksums
            else:
                damaged.append(self._checksums[slots] != checksums)
        if not damaged:
            return None
        return self._group.all_reduce(torch.cat(damaged).to(torch.int32)) != 0

    def _copy_run(self, run: CopyRun) -> Tensor:
        """Copy a run's pages. Returns their checksums: int64 [n] on the device."""
        if self._sums is None:
            return self._copy_native(run)
        for page, slot, count in _contiguous_runs(run.pages, run.slots):
            here = self._device[page : page + count]
            there = self.memory[slot : slot + count]
            target, source = (there, here) if run.to_host else (here, there)
            target.copy_(source, non_blocking=True)
        return self._sums.sum_pages(self._sums.page_ids(run.pages.tobytes()))

    def _copy_native(self, run: CopyRun) -> Tensor:
        blocks = (self._device, run.pages.tobytes()), (self.memory, run.slots.tobytes())
        source, target = blocks if run.to_host else reversed(blocks)
        page_bytes = self.memory[0].nbytes
        hashes = copy_native_pages(
            source[0].data_ptr(), source[1], target[0].data_ptr(), target[1], page_bytes
        )
        return torch.from_numpy(np.frombuffer(hashes, np.int64).copy())


def _contiguous_runs(pages: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first page, first slot, count) of stretches in which both ascend by one."""
    start = 0
    for index in range(1, len(pages) + 1):
        if (
            index == len(pages)
            or pages[index] - pages[index - 1] != 1
            or slots[index] - slots[index - 1] != 1
        ):
            yield pages[start], slots[start], index - start
            start = index
