"""Flags about the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt


@dataclass(frozen=True, kw_only=True)
class HttpFlags:
    HEADING: ClassVar = "HTTP server"

    host: str = opt("127.0.0.1", "address the HTTP server listens on", simulated=False)
    port: int = opt(
        30000, "port of the HTTP server; 0 picks a free one", ge=0, le=65535, simulated=False
    )
    health_port: int | None = opt(
        None,
        "answer the health endpoints on this port of --host too, so that clients cannot take the "
        "connections of probes; 0 picks a free one",
        ge=0,
        le=65535,
        simulated=False,
    )
    api_key: str | None = opt(
        None,
        "require 'Authorization: Bearer KEY' on all but health endpoints",
        env="BATON_API_KEY",
        secret=True,
        simulated=False,
    )
    max_connections: int = opt(
        65_536,
        "most connections at once; a new one closes the one that has waited longest without a "
        "request (an address with a quarter of them that wait closes its own), or is closed while "
        "all have requests",
        ge=1,
        simulated=False,
    )
    header_read_timeout_secs: float = opt(
        10.0,
        "longest time from the first byte of a request's head to its last [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )
    idle_connection_timeout_secs: float = opt(
        90.0,
        "longest time that a connection may be idle [s]",
        gt=0,
        lt=1e9,
        simulated=False,
    )

    allowed_hosts: str = opt(
        "",
        "without --api-key: names, separated by commas, by which this engine may be asked besides "
        "addresses, localhost and, beyond loopback, names without a dot; *: any "
        "(docs/guide/security.md)",
        simulated=False,
    )
