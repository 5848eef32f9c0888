"""The transfer runtime of one process, from flags: its address, its transports, what it tells peers
of its pages.

A bootstrap server knows ranks by one number. With tensor parallelism each process has one of its
own, in the order of DP ranks and of TP ranks within them; a process of D reads from the one of P
that holds the same heads.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
from collections.abc import Mapping
from typing import Any

from baton.config import KV_REMEDY, LOOPBACK, UNSPECIFIED_HOSTS, EngineConfig, is_loopback
from baton.disagg.native_node import NativeTransferNode
from baton.errors import ConfigError
from baton.server.worker.rank_config import BootstrapAddress

log = logging.getLogger("baton.transfer")

REGISTER_TIMEOUT_MS = 30_000
MIN_STALL_MS = 5_000
"""An engine that waits for something makes a sign of life every second; a step takes longer on a
slow machine.
"""
DEVICE_SLABS = {"slabs": 2, "slab_bytes": 16 << 20}
"""For pages in GPU memory. Both sides wait for the GPU twice per slab, which takes longer than
sending 4 MiB.
"""
TRANSPORTS = {
    "auto": ["shm", "tcp"], "shm": ["shm"], "tcp": ["tcp"], "gloo": ["gloo", "tcp"],
    "nccl": ["nccl", "tcp"],
}  # fmt: skip
"""By --disaggregation-transfer-backend, best first, of pages in host memory."""
ON_DEVICE = {
    "auto": ["cuda_ipc", "nccl", "tcp"], "cuda_ipc": ["cuda_ipc", "tcp"], "tcp": ["tcp"],
    "gloo": ["gloo", "tcp"],
    "nccl": ["nccl", "tcp"],
}  # fmt: skip
"""The same of pages in GPU memory."""


def transports(config: EngineConfig, *, on_device: bool) -> list[str]:
    """List the transports for pages in host memory, or on a device.

    Raises ConfigError when --disaggregation-transfer-backend is for the other place.
    """
    name = config.disaggregation_transfer_backend
    found = (ON_DEVICE if on_device else TRANSPORTS).get(name)
    if found is None:
        place, other = ("GPU", "cuda_ipc") if on_device else ("host", "shm")
        raise ConfigError(
            f"--disaggregation-transfer-backend {name}: the KV pages are in {place} memory with "
            "--device "
            f"{config.device}; use auto, {other} or tcp"
        )
    if on_device and name == "auto":
        from baton.runtime.communicators.nccl import find_obstacle

        if (reason := find_obstacle()) is not None:
            found = [each for each in found if each != "nccl"]
            log.info("KV pages do not travel by nccl: %s", reason)
    log.info(
        "KV pages are in %s memory and travel by %s",
        "GPU" if on_device else "host",
        ", else ".join(found),
    )
    return found


def warn_of_reach(config: EngineConfig) -> None:
    """Log at the start of a P or D engine who can reach its KV, where that may surprise."""
    announced = config.kv_advertise_host
    is_narrowed = (
        announced is not None and is_loopback(announced) and not is_loopback(config.kv_listen_host)
    )
    if config.disaggregation_mode == "prefill" and is_narrowed:
        log.warning(
            "--kv-advertise-host %s: only decode nodes of this machine can fetch KV from there",
            announced,
        )
    if config.disaggregation_mode == "null" or config.cluster_key is not None:
        return
    if config.insecure_kv:
        log.warning(
            "--insecure-kv: WITHOUT A CLUSTER KEY ANY HOST THAT REACHES THIS ENGINE'S KV PORTS CAN "
            "READ PROMPTS AND "
            "FORGE ANSWERS; give all engines the same --cluster-key (BATON_CLUSTER_KEY) instead"
        )
    elif config.bootstrap_listen_host != config.host:
        log.warning(
            "--host %s without a cluster key: KV transfers stay on %s, only nodes of this machine "
            "form pairs; %s",
            config.host,
            LOOPBACK,
            KV_REMEDY,
        )


PROBE_TARGETS = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses for documentation: they take the default route."""


def source_address(family: socket.AddressFamily, target: str) -> str | None:
    """This machine's address on the route to `target`; None when peers could not connect to it.
    Sends no packet.
    """
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    address = ipaddress.ip_address(found)
    return None if address.is_loopback or address.is_link_local else found


def advertised_host(config: EngineConfig) -> str:
    """The address where peers reach the transfer ports: as flags say, or this machine's outward
    one.

    Raises ConfigError on a prefill node that finds none: decode nodes would connect to themselves.
    """
    if config.kv_advertise_host is not None:
        return config.kv_advertise_host
    host = config.kv_listen_host
    if host not in UNSPECIFIED_HOSTS:
        return host
    for family, target in PROBE_TARGETS:
        if host == "0.0.0.0" and family == socket.AF_INET6:
            continue
        if (found := source_address(family, target)) is not None:
            return found
    if config.disaggregation_mode == "prefill":
        raise ConfigError(
            f"the transfer ports listen on {host or 'all addresses'}, and no default route tells "
            "which address decode "
            "nodes can reach; name it with --kv-advertise-host"
        )
    return LOOPBACK


def start(
    config: EngineConfig,
    native_pool: Any,
    layout: Mapping[str, object],
    dp_rank: int,
    tp_rank: int,
    bootstrap: BootstrapAddress | None,
) -> NativeTransferNode:
    """The transfer runtime for these pages, registered on a P node with its bootstrap server."""
    from baton._native import TransferNode
    from baton.runtime.communicators import make_backend

    host = advertised_host(config)
    allowed = transports(config, on_device=native_pool.on_device)
    if native_pool.on_device and config.kv_copy_threads > 1:
        raise ConfigError(
            f"--kv-copy-threads {config.kv_copy_threads}: pages in GPU memory are copied by one "
            "thread; leave it out"
        )
    number = dp_rank * config.tp_size + tp_rank
    settings = {
        "role": config.disaggregation_mode,
        "host": config.kv_listen_host,
        "advertise_host": host,
        "port": config.transfer_port + number if config.transfer_port else 0,
        "transports": allowed,
        "cluster_key": config.cluster_key,
        "second_cluster_key": config.second_cluster_key,
        "insecure": config.insecure_kv,
        "layout": layout,
        "dp_rank": number,
        "dp_size": config.dp_size * config.tp_size,
        "lease_ms": int(config.kv_lease_secs * 1000),
        "heartbeat_ms": 1000,
        "wait_ms": int(config.kv_transfer_timeout_secs * 1000),
        "stall_ms": max(MIN_STALL_MS, int(config.kv_transfer_timeout_secs * 1000 / 2)),
        "copy_threads": config.kv_copy_threads,
        "tcp_streams": config.kv_tcp_streams,
        "max_rooms": config.max_rooms,
        "fault": json.loads(config.test_kv_fault or "null"),
        **(DEVICE_SLABS if native_pool.on_device else {}),
    }
    backend = make_backend(config, host, allowed)
    node = NativeTransferNode(TransferNode(native_pool, json.dumps(settings), backend))
    if bootstrap is not None:
        node.register(bootstrap.host, bootstrap.port, REGISTER_TIMEOUT_MS)
    return node
