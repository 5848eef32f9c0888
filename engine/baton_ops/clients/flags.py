"""Values of flags that several commands share: addresses, keys and certificates."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from baton.config.files import refuse_other_kinds
from baton.config.flags import exit_with_mistakes
from baton_ops.clients.http_client import HttpClient

DEFAULT_ROUTER = "http://127.0.0.1:8000"
CONTROL_KEY_ENV = "BATON_CONTROL_KEY"
API_KEY_ENV = "BATON_API_KEY"


def wrong_urls(urls: Sequence[str], flag: str) -> list[str]:
    """Sentences about those that are no URL. `flag`: words before each."""
    good = ("http://", "https://")
    return [
        f"{flag}{url}: give http://HOST:PORT or https://HOST:PORT"
        for url in urls
        if not url.startswith(good)
    ]


def make_client(prog: str, ca_cert: str | None) -> HttpClient:
    """A client; prints what is wrong with the file and exits with 2."""
    try:
        if ca_cert is not None:
            refuse_other_kinds(Path(ca_cert))
        return HttpClient(ca_cert)
    except (OSError, ssl.SSLError) as err:
        exit_with_mistakes(
            prog, [f"--ca-cert {ca_cert}: {err.strerror or err}; give a PEM file with certificates"]
        )
