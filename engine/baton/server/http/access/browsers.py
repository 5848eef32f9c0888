"""Requests that a web page of another site makes a browser send, and names that it gives to this
server.

A page needs no answer to do harm: a browser sends its POST to any address, also to this machine's.
And a page whose host's name is changed to this machine's address meanwhile (DNS rebinding) reads
answers too, as its own site's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from baton.errors import ForeignOrigin, HostNotAllowed, UnsupportedMediaType
from baton.server.text.native import native_extension

READING_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
OWN_SITES = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site: of a page of this server, and of the user's own (an address that was
typed).
"""
ANY_HOST = "*"


def refuse_foreign_page(request: web.BaseRequest, path: str) -> None:
    """Raise ForeignOrigin for a request that changes something and that a page of another site has
    sent.

    Programs that are no browsers send neither header. The rule is that of Go 1.25 (net/http,
    cross-origin protection).
    """
    if request.method in READING_METHODS and path not in native_extension().CHANGING_PATHS:
        return
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get(hdrs.ORIGIN)
    if (
        site is not None
    ):  # a page cannot set it; behind a proxy that changes Host, it alone is right
        is_foreign = site not in OWN_SITES
    else:
        is_foreign = origin is not None and not _is_own(origin, request)
    if is_foreign:
        page = (origin or "another site")[:100]
        raise ForeignOrigin(
            f"a page of {page} may not send {request.method} {path[:100]} to an engine without a "
            "key; let browsers "
            "ask a router with --cors-allowed-origins, or give the engine an --api-key"
        )


def _is_own(origin: str, request: web.BaseRequest) -> bool:
    try:
        return urlsplit(origin).netloc == request.headers.get(hdrs.HOST, "")
    except ValueError:  # no URL
        return False


def refuse_unknown_host(
    request: web.BaseRequest, allowed: Collection[str], *, is_on_loopback: bool
) -> None:
    """Raise HostNotAllowed for a name that is not this server's, as far as it knows.

    A page cannot be of an address, nor of `localhost`: browsers resolve that name themselves.
    Beyond loopback it cannot be of a name without a dot either: such names are those of services
    and of machines.
    """
    given = request.headers.get(hdrs.HOST)
    if given is None or ANY_HOST in allowed:
        return
    name = host_name(given)
    if name == "localhost" or name in allowed or _is_address(name):
        return
    if not is_on_loopback and name and "." not in name:
        return
    raise HostNotAllowed(
        f"this engine has no key and is not known as {name[:100]!r}; ask it by its address, start "
        "it with "
        "--allowed-hosts NAME, or give it an --api-key"
    )


def host_name(host: str) -> str:
    """The name in a Host header, in lower case; an IPv6 address without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refuse_other_media_types(request: web.BaseRequest) -> None:
    """Raise UnsupportedMediaType for a body that is not declared as JSON.

    A browser lets any page send forms and plain text to any server, but asks the server before it
    sends JSON.
    """
    if request.content_type != "application/json":
        raise UnsupportedMediaType(
            f"the body is {request.content_type[:50]}; send it as application/json"
        )
