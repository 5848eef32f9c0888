"""The memory that holds what every slot's token leaves on one rank, as one page-major tensor.

    data [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]      index 0 of dimension 2 is K, 1 is V
    data [num_pages, num_layers, page_size, latent_dim + key_dim]           where attention has latents

Shape and type of a page are those of the pool's page group (`kv_spec`). A page is one span of
bytes, which is what travels between P and D. The memory belongs to the native `KvPool` (a sealed
memfd other processes may map read-only) and the tensor is a view of it; without the native module
it is ordinary torch memory, which serves a single process but cannot be transferred. On a GPU the
native pool has the pages' generations only, and moves the pages through `layers.cuda.device_pages`.

Behind it there may be a host pool of the same page shape (`--host-kv-gib`); whole pages are copied
between the two.

Which page belongs to whom is the cache's business (`baton.cache`), not this module's.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.cache.host import CopyRun
from baton.errors import ConfigError
from baton.layers.cuda import ipc
from baton.layers.cuda.device_pages import CudaQueue, DevicePages
from baton.layers.kv_spec import FP8, KvScales, KVSpec
from baton.layers.ops import TORCH_DTYPES

log = logging.getLogger("baton.kv_pool")

MIB = 1 << 20
GIB = 1 << 30
_PAGE_DTYPES = {**TORCH_DTYPES, FP8: torch.float8_e4m3fn}


@dataclass(slots=True)
class KvTensors:
    """A rank's KV pool. `native` owns the memory when set and must outlive `data`: keep this
    object."""

    spec: KVSpec
    data: Tensor
    native: Any = None
    """baton._native.KvPool, or None for plain memory."""
    dummy_page: int | None = None
    """A page of `data` that does not count: rows that are only padding write it
    (runtime.runner.capture)."""

    @property
    def page_size(self) -> int:
        return self.spec.full_group.page_tokens

    @property
    def num_pages(self) -> int:
        return self.data.shape[0] - (self.dummy_page is not None)

    @property
    def page_bytes(self) -> int:
        return self.spec.page_bytes

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of a step's q, k and v."""
        return TORCH_DTYPES[self.spec.compute_dtype]

    @property
    def scales(self) -> tuple[KvScales, ...]:
        """By layer, where the pages hold codes; else empty."""
        return self.spec.layer_scales


def asked_pages(spec: KVSpec, max_total_tokens: int, kv_pool_mib: int | None) -> int | None:
    """How many pages the user wants: max_total_tokens when set (rounded down to pages), else what fits kv_pool_mib;
    None: as many as fit.

    Raises ConfigError when that is fewer than two pages.
    """
    page_size = spec.full_group.page_tokens
    page_bytes = spec.page_bytes
    if not max_total_tokens and kv_pool_mib is None:
        return None
    pages = (
        max_total_tokens // page_size
        if max_total_tokens
        else (kv_pool_mib or 0) * MIB // page_bytes
    )
    if pages < 2:
        asked = (
            f"--max-total-tokens {max_total_tokens}"
            if max_total_tokens
            else f"--kv-pool-mib {kv_pool_mib}"
        )
        needed = 2 * page_size if max_total_tokens else -(-2 * page_bytes // MIB)
        each = f"{page_size} tokens, {page_bytes} bytes each"
        raise ConfigError(
            f"{asked} holds {pages} pages ({each}); at least 2 are needed: raise it to {needed}"
        )
    return pages


def make_pool(
    spec: KVSpec,
    num_pages: int,
    *,
    native: bool | None = None,
    device: torch.device | None = None,
    dummy_page: bool = False,
) -> KvTensors:
    """Allocate a zeroed pool.

    Args:
        dummy_page: one more page, for padding (KvTensors); not in a native pool's host memory.
        device: None is the host; elsewhere the memory is torch's, or with `native` a block that can
        be transferred.
        native: True takes the transferable memory and fails without it; False takes plain memory
        (tests);
            None takes the native one when this build has it.
    """
    total = num_pages + dummy_page
    dummy = num_pages if dummy_page else None
    group = spec.full_group
    shape = (total, *group.shape)
    dtype = _PAGE_DTYPES[group.dtype]
    on_host = device is None or device.type == "cpu"
    pool_class = (
        _native_pool_class(required=bool(native))
        if native or (native is None and on_host)
        else None
    )
    if pool_class is None:
        data = torch.zeros(shape, dtype=dtype, device=device)
        pool = None
    elif on_host:
        assert dummy is None, "every page of a native pool can be transferred"
        pool = pool_class(num_pages, spec.page_bytes)
        data = torch.frombuffer(pool.buffer(), dtype=torch.uint8).view(dtype).view(shape)
    else:
        assert device is not None, "None is the host"
        data = ipc.allocate_memory(total * spec.page_bytes, device).view(dtype).view(shape)
        pool = make_device_pool(pool_class, data[:num_pages], device)
    return KvTensors(spec, data, pool, dummy)


def make_device_pool(pool_class: Any, pages: Tensor, device: torch.device) -> Any:
    """A native pool whose pages are on a GPU: in one block, from its start."""
    moved = DevicePages(pages, CudaQueue(device), ipc.CudaIpc(device))
    return pool_class(len(pages), pages[0].nbytes, moved)


def host_pool_pages(spec: KVSpec, host_kv_gib: float, ranks: int) -> int:
    """How many pages --host-kv-gib holds. Raises ConfigError when that is none, or more than this
    machine has."""
    page_bytes = spec.page_bytes
    pages = int(host_kv_gib * GIB) // page_bytes
    if host_kv_gib and not pages:
        raise ConfigError(
            f"--host-kv-gib {host_kv_gib:g} holds no page of {page_bytes} bytes; raise it to {page_bytes / GIB:.6f}"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * page_bytes * ranks > memory:
        raise ConfigError(
            f"--host-kv-gib {host_kv_gib:g}: {ranks} rank(s) would take {host_kv_gib * ranks:g} GiB of the "
            f"{memory / GIB:.1f} GiB of this machine; lower it"
        )
    return pages


def make_host_pool(kv: KvTensors, num_pages: int) -> Tensor:
    """Host memory for `num_pages` pages of kv's shape, taken as it is first written; for a CUDA
    device all at once.

    Registered rather than allocated as pinned memory, which torch rounds up to a power of two: 40
    GiB would take 64.
    """
    memory = torch.frombuffer(mmap.mmap(-1, num_pages * kv.page_bytes), dtype=torch.uint8)
    if kv.data.device.type == "cuda":
        ipc.register_memory(memory)
    return memory.view(kv.data.dtype).view(num_pages, *kv.data.shape[1:])


def copy_pages(device: Tensor, host: Tensor, run: CopyRun) -> None:
    """Copy whole pages in one direction, neighbors in one go.

    Args:
        device: the pool's data. host: from `make_host_pool`.
    Cost: reads and writes each page once; on CUDA it is queued on the current stream and the host
    does not wait.
    """
    for page, slot, count in _contiguous_runs(run.pages, run.slots):
        here = device[page : page + count]
        there = host[slot : slot + count]
        target, source = (there, here) if run.to_host else (here, there)
        target.copy_(source, non_blocking=True)


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


def _native_pool_class(*, required: bool) -> Any:
    try:
        from baton._native import KvPool
    except ImportError as err:
        if required:
            message = f"this build has no transferable KV pool ({err}); build the native module with maturin"
            raise ConfigError(message) from err
        log.warning(
            "the KV pool is plain memory (%s); pages cannot be transferred to other processes", err
        )
        return None
    return KvPool
