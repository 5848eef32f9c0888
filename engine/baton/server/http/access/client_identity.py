"""Identity of the client that a request is from, where clients share something by turns."""

from __future__ import annotations

import ipaddress
import re

from aiohttp import web

from baton.config.tenants import TENANT_NAME
from baton.server.request.tenancy import TENANT_HEADER
from baton.server.text.native import native_extension

_CLIENT_NAME = re.compile(r"[\x21-\x7e]{1,64}")
NETWORK_BITS = 64
"""Bits of an IPv6 address that name its network: a host may take any address of it."""


def client_of(request: web.BaseRequest, *, has_tenants: bool) -> str:
    """Name of the client: its tenant, else what a router says, else its address.

    The API key is that of all clients and tells none from another. A tenant counts with
    --tenant-config alone: without it, any client may send any name, and be a new one with each
    request.
    """
    tenant = request.headers.get(TENANT_HEADER, "")
    if has_tenants and TENANT_NAME.fullmatch(tenant):
        return f"tenant {tenant}"
    # Routers replace what a client has written in this header: an engine trusts it.
    stated = request.headers.get(native_extension().headers.CLIENT, "")
    if _CLIENT_NAME.fullmatch(stated):
        return f"client {stated}"
    return f"address {network_of(request.remote)}"


def network_of(address: str | None) -> str:
    """An IPv4 address, or the network of an IPv6 address; "": there is none, as on a Unix
    socket.
    """
    if address is None:
        return ""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, NETWORK_BITS), strict=False).network_address)
