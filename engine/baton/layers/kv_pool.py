"""The memory that holds what every slot's token leaves on one rank, as one page-major tensor.

    data [num_pages, num_layers, 2, page_size, num_kv_heads, head_dim]      index 0 of dimension 2 is K, 1 is V
    data [num_pages, num_layers, page_size, latent_dim + key_dim]           where attention has latents

Shape and type of a page are those of the pool's page group (`kv_spec`). A page is one span of
bytes, which is what travels between P and D. The memory belongs to the native `KvPool` (a sealed
memfd other processes may map read-only) and the tensor is a view of it; without the native module
it is ordinary torch memory, which serves a single process but cannot be transferred. On a GPU the
native pool has the pages' generations only, and moves the pages through `layers.cuda.device_pages`.

Behind it there may be a host pool of the same page shape (`layers.host_pool`).

Which page belongs to whom is the cache's business (`baton.cache`), not this module's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.cuda import ipc
from baton.layers.cuda.device_pages import CudaQueue, DevicePages
from baton.layers.kv_spec import FP8, KvScales, KVSpec
from baton.layers.ops import TORCH_DTYPES

log = logging.getLogger("baton.kv_pool")

MIB = 1 << 20
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


def asked_pages(
    spec: KVSpec,
    max_total_tokens: int,
    kv_pool_mib: int | None,
    draft_page_bytes: int = 0,
    draft_scratch_bytes: int = 0,
) -> int | None:
    """How many pages the user wants: max_total_tokens when set (rounded down to pages), else what fits kv_pool_mib;
    None: as many as fit.

    Args:
        draft_page_bytes: what each page takes beside its own bytes, for a draft model or head.
        draft_scratch_bytes: what a draft model or head takes beside its pages.
    Raises ConfigError when that is fewer than two pages.
    """
    page_size = spec.full_group.page_tokens
    page_bytes = spec.page_bytes + draft_page_bytes
    if not max_total_tokens and kv_pool_mib is None:
        return None
    pages = (
        max_total_tokens // page_size
        if max_total_tokens
        else max((kv_pool_mib or 0) * MIB - draft_scratch_bytes, 0) // page_bytes
    )
    if pages < 2:
        asked = (
            f"--max-total-tokens {max_total_tokens}"
            if max_total_tokens
            else f"--kv-pool-mib {kv_pool_mib}"
        )
        needed = 2 * page_size
        if not max_total_tokens:
            needed = -(-(2 * page_bytes + draft_scratch_bytes) // MIB)
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
