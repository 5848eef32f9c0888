"""The name by which clients take turns."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from baton.server.http.access.client_identity import client_of, network_of


def client(headers: dict[str, str], *, has_tenants: bool = False) -> str:
    transport: Any = _Transport("192.0.2.7")
    request = make_mocked_request("POST", "/generate", headers=headers, transport=transport)
    return client_of(request, has_tenants=has_tenants)


class _Transport:
    def __init__(self, address: str) -> None:
        self._address = address

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._address, 40000) if name == "peername" else default


def test_tenant_counts_where_tenants_are_known_alone() -> None:
    headers = {"x-tenant-id": "acme", "x-baton-client": "17"}
    assert client(headers, has_tenants=True) == "tenant acme"
    assert client(headers) == "client 17"


def test_client_is_what_the_router_says_else_the_address() -> None:
    assert client({"x-baton-client": "17"}) == "client 17"
    assert client({}) == "address 192.0.2.7"
    assert client({"authorization": "Bearer k"}) == "address 192.0.2.7"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65])
def test_name_of_wrong_form_is_not_taken(given: str) -> None:
    assert client({"x-baton-client": given}) == "address 192.0.2.7"


def test_host_with_many_ipv6_addresses_is_one_client() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:9")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("fe80::1%eth0") == "fe80::"
    assert network_of(None) == ""
