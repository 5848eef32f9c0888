"""The name by which clients take turns, pages of other sites, and names of hosts."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from baton.errors import ForeignOrigin, HostNotAllowed
from baton.server.http.access.browsers import refuse_foreign_page, refuse_unknown_host
from baton.server.http.access.client_identity import client_of, network_of


def request_with(headers: dict[str, str], method: str = "POST") -> web.Request:
    transport: Any = _Transport("192.0.2.7")
    return make_mocked_request(method, "/generate", headers=headers, transport=transport)


def client(headers: dict[str, str], *, has_tenants: bool = False) -> str:
    return client_of(request_with(headers), has_tenants=has_tenants)


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


OWN = {"host": "127.0.0.1:30000"}
FOREIGN_PAGES = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8000"},
    {"origin": "http://[broken"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:30000"},
    {"sec-fetch-site": ""},
)
OWN_PAGES = (
    {},
    {"origin": "http://127.0.0.1:30000"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy"},
)
"""As in the tests of Go's CrossOriginProtection (net/http, csrf_test.go): what decides is Sec-Fetch-Site where a
browser sends it, else Origin."""


@pytest.mark.parametrize("headers", FOREIGN_PAGES)
def test_page_of_another_site_changes_nothing(headers: dict[str, str]) -> None:
    for method, path in (("POST", "/drain"), ("PUT", "/generate"), ("GET", "/flush_cache")):
        with pytest.raises(ForeignOrigin):
            refuse_foreign_page(request_with(OWN | headers, method), path)
    refuse_foreign_page(request_with(OWN | headers, "GET"), "/v1/models")


@pytest.mark.parametrize("headers", OWN_PAGES)
def test_own_pages_and_programs_are_not_refused(headers: dict[str, str]) -> None:
    refuse_foreign_page(request_with(OWN | headers), "/drain")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:30000",
        "[::1]:30000",
        "10.1.2.3:1",
        "localhost:30000",
        "LocalHost",
        "gpu1:30000",
        "GPU1",
    ],
)
def test_addresses_and_named_hosts_are_allowed(host: str) -> None:
    refuse_unknown_host(request_with({"host": host}), {"gpu1"}, is_on_loopback=True)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:30000", "localhost.evil.example", "", "gpu2"]
)
def test_other_names_are_refused_unless_any_is_allowed(host: str) -> None:
    with pytest.raises(HostNotAllowed):
        refuse_unknown_host(request_with({"host": host}), {"gpu1"}, is_on_loopback=True)
    refuse_unknown_host(request_with({"host": host}), {"*"}, is_on_loopback=True)


def test_names_without_a_dot_are_allowed_beyond_loopback() -> None:
    refuse_unknown_host(request_with({"host": "decode:30000"}), set(), is_on_loopback=False)
    for host in ("evil.example", ""):
        with pytest.raises(HostNotAllowed):
            refuse_unknown_host(request_with({"host": host}), set(), is_on_loopback=False)


def test_request_without_a_host_is_no_browsers() -> None:
    refuse_unknown_host(request_with({}), set(), is_on_loopback=True)
