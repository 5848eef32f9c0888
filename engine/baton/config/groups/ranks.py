"""Flags about ranks, devices and the memory of their KV pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt

MEM_FRACTION = 0.85
"""Steps need memory besides, which is measured and comes first (runtime.memory.device_memory)."""


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    HEADING: ClassVar = "ranks and device"

    tp_size: int = opt(
        1,
        "tensor-parallel ranks: processes per DP rank that divide every layer's heads "
        "and weights among them",
        also=("--tp", "--tensor-parallel-size"),
        ge=1,
        le=64,
        on_device=True,
    )
    dist_timeout: float = opt(
        120.0,
        "longest wait of a tensor-parallel rank for another one, at start and in every step [s]",
        gt=0,
        le=86_400,
        on_device=True,
    )
    ep_size: int = opt(
        1,
        "models with experts: divide whole experts among the tensor-parallel ranks, in place of "
        "each expert's weights; 1 or tp-size",
        also=("--ep", "--expert-parallel-size"),
        ge=1,
        le=64,
        on_device=True,
    )
    dp_size: int = opt(
        1,
        "data-parallel ranks, each with its own scheduler and KV pool",
        also=("--dp", "--data-parallel-size"),
        ge=1,
        le=64,
        simulated=False,
    )
    device: str = opt(
        "cpu",
        "compute device; cuda: one GPU (docs/gpu.md); auto: cuda where there is one, else cpu",
        choices=("cpu", "cuda", "auto"),
        on_device=True,
    )
    attention_backend: str = opt(
        "auto",
        "cpu: native paged kernels; flashinfer: CUDA devices only; torch: reference on any device; "
        "auto: the fastest that can serve here",
        choices=("auto", "cpu", "torch", "flashinfer"),
        on_device=True,
    )
    disable_cuda_graph: bool = opt(
        False,
        "CUDA: launch every kernel of a decode step, instead of replaying steps recorded at start",
        also=("--enforce-eager",),
        on_device=True,
    )
    cuda_graph_max_bs: int | None = opt(
        None,
        "CUDA: most rows of a decode step that is recorded, 1 to 1024; larger steps launch every "
        "kernel (default: 256; never more than max-running-requests, and as many more for each "
        "drafted token)",
        ge=1,
        le=1024,
        on_device=True,
    )
    cpu_threads: int = opt(
        0,
        "compute threads per process, of which there are dp-size times tp-size; 0: "
        "cores / processes",
        ge=0,
        on_device=True,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    HEADING: ClassVar = "KV memory"

    page_size: int = opt(
        16, "tokens per KV page; equal on all nodes of a cluster [tokens]", also=("--block-size",)
    )
    max_total_tokens: int = opt(
        0,
        "KV pool size per DP rank; 0: sized from kv-pool-mib, or on a GPU "
        "from mem-fraction-static [tokens]",
        ge=0,
    )
    kv_pool_mib: int | None = opt(
        None,
        "memory of the KV pool per process when max-total-tokens is 0; tensor-parallel ranks each "
        "hold their heads' share of all pages (default: 128 on the CPU; on a CUDA device sized by "
        "mem-fraction-static) [MiB]",
        ge=1,
        on_device=True,
    )
    mem_fraction_static: float = opt(
        MEM_FRACTION,
        "CUDA: share of the device's whole memory for weights and KV pool together; less is taken "
        "when less is free. Several engines on one device share it, 0.4 each for two",
        gt=0,
        lt=1,
        on_device=True,
    )
    host_kv_gib: float = opt(
        0.0,
        "host memory per process for KV evicted from the pool; 0: none [GiB]",
        ge=0,
        lt=2**20,
        on_device=True,
    )
