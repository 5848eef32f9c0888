"""Flags about prefill and decode nodes and the KV pages that they hand over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt

KV_TRANSPORTS = ("shm", "cuda_ipc", "tcp", "gloo", "nccl")
"""Values of --disaggregation-transfer-backend besides auto."""


@dataclass(frozen=True, kw_only=True)
class DisaggregationFlags:
    HEADING: ClassVar = "prefill and decode nodes"

    disaggregation_mode: str = opt(
        "null",
        "null: both phases here; prefill / decode: one half of a pair",
        choices=("null", "prefill", "decode"),
        simulated=False,
    )
    disaggregation_bootstrap_port: int = opt(
        8998,
        "P node: port of the bootstrap server; 0 picks a free one",
        ge=0,
        le=65535,
        simulated=False,
    )
    disaggregation_transfer_backend: str = opt(
        "auto",
        "how KV pages travel; auto: shm on one host, else tcp; with --device cuda: cuda_ipc on one "
        "GPU, else nccl, else tcp; nccl has not run on GPUs yet (docs/gpu.md); gloo: nccl's code "
        "path through host memory",
        choices=("auto", *KV_TRANSPORTS),
        simulated=False,
    )
    transfer_port: int = opt(
        0,
        "first TCP port of the transfer runtime, one per DP rank; 0 picks free ones",
        ge=0,
        le=65535,
        simulated=False,
    )
    cluster_key: str | None = opt(
        None,
        "shared secret of all engines that authenticates KV transfers; without it they "
        "stay on loopback",
        env="BATON_CLUSTER_KEY",
        secret=True,
        simulated=False,
    )
    second_cluster_key: str | None = opt(
        None,
        "key that is accepted besides cluster-key; only cluster-key signs. For changing the key "
        "node by node (docs/guide/security.md)",
        env="BATON_SECOND_CLUSTER_KEY",
        secret=True,
        simulated=False,
    )
    insecure_kv: bool = opt(
        False,
        "without cluster-key: listen for KV transfers on --host or --kv-host, and take KV from any "
        "host; any client of these ports can read prompts and forge answers",
        simulated=False,
    )
    kv_host: str | None = opt(
        None,
        "address the transfer ports listen on, e.g. of a network for KV; the bootstrap server "
        "stays on --host (default: --host, or 127.0.0.1 without cluster-key)",
        simulated=False,
    )
    kv_advertise_host: str | None = opt(
        None,
        "P node: address or host name that D nodes connect to for KV (default: the address that "
        "the "
        "transfer ports listen on, and for 0.0.0.0 or :: the address of the default route)",
        simulated=False,
    )
    kv_copy_threads: int = opt(
        1,
        "threads per rank that take checksums of KV pages in host memory and copy them by shm; one "
        "room keeps at most two busy",
        ge=1,
        le=32,
        simulated=False,
    )
    kv_tcp_streams: int = opt(
        1,
        "tcp streams from a D rank to each P rank, which share every prompt's pages, and threads "
        "per rank that serve tcp; more than 1 pays where a core or the network limits one stream",
        ge=1,
        le=8,
        simulated=False,
    )
    kv_lease_secs: float = opt(
        30.0,
        "how long P keeps a finished prompt's pages for D without a heartbeat [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )
    kv_transfer_timeout_secs: float = opt(
        60.0,
        "D: longest wait for P's answer and for a page being copied; waiting in a queue "
        "does not count [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )
    num_reserved_decode_tokens: int = opt(
        512,
        "D keeps room for this many more tokens per running request when admitting [tokens]",
        ge=0,
        simulated=False,
    )
    nccl_max_ctas: int | None = opt(
        None,
        "thread blocks that NCCL may use per KV transfer, 1 to 32; each occupies an SM and moves "
        "some 20 GB/s; P's value applies to the pair (default: 8, or 1 with "
        "NCCL_MULTI_RANK_GPU_ENABLE=1, for P and D on one GPU)",
        ge=1,
        le=32,
        simulated=False,
    )
    test_kv_fault: str | None = opt(
        None,
        "for tests: damage KV transfers by these rules, a JSON object "
        "(kv_transfer/src/transport/fault_injection.rs)",
        simulated=False,
    )
