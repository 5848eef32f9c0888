"""Lines that `baton up` prints for a first answer."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable
from types import SimpleNamespace

import pytest

from baton_ops.launch.local_cluster import PORT_TAKEN, ROUTER_PORT_TRIES, LocalCluster
from baton_ops.launch.screen import make_greeting
from baton_ops.launch.supervisor import ChildFailed

URL = "http://127.0.0.1:8000"


def curl(text: str) -> list[str]:
    """Arguments of the curl line, as a shell splits them."""
    line = text[text.index("curl ") : text.index("from openai")]
    return shlex.split(line.removesuffix("import os\n"))


def test_greeting_sends_the_key_that_the_cluster_wants() -> None:
    header = "authorization: Bearer it's a $KEY"
    given = make_greeting(URL, "m", api_key="it's a $KEY")
    assert header in curl(given)
    assert """api_key="it's a $KEY")""" in given


def test_greeting_leaves_a_key_of_the_environment_there() -> None:
    given = make_greeting(URL, "m", api_key="secret", key_in_environment=True)
    assert "secret" not in given
    assert '-H "authorization: Bearer $BATON_API_KEY"' in given
    assert (
        'import os\nfrom openai import OpenAI\nclient = OpenAI(base_url="http://127.0.0.1:8000/v1", '
        in given
    )
    assert 'api_key=os.environ["BATON_API_KEY"])' in given


def test_greeting_of_an_open_cluster_names_no_key() -> None:
    given = make_greeting(URL, "m", key_in_environment=True)
    assert "authorization" not in given
    assert 'api_key="none")' in given
    assert curl(given)[-1].startswith('{"model":"m"')


class StubRouter:
    """Ends with an error at its first starts."""

    def __init__(self, failures: int, error: str) -> None:
        self.failures, self.error, self.starts = failures, error, 0

    async def start(self) -> None:
        self.starts += 1

    async def until_ready(self, timeout_secs: float, ready: Awaitable[None]) -> None:
        ready.close()  # type: ignore[attr-defined]
        if self.starts <= self.failures:
            raise ChildFailed("router exited with code 2 before it was ready")

    def last_errors(self) -> str:
        return self.error


def started(router: StubRouter, port: int | None) -> LocalCluster:
    cluster = LocalCluster.__new__(LocalCluster)
    cluster.plan = SimpleNamespace(up=SimpleNamespace(port=port), start_timeout_secs=1.0)  # type: ignore[assignment]
    cluster.router = router  # type: ignore[assignment]
    cluster.host, cluster.port = "127.0.0.1", port or 1
    cluster._print_line = lambda _: None  # type: ignore[method-assign]
    asyncio.run(cluster._start_router_first())
    return cluster


@pytest.mark.parametrize("port", [0, None])
def test_router_takes_another_free_port_if_the_chosen_one_was_taken_meanwhile(
    port: int | None,
) -> None:
    router = StubRouter(2, f"baton-router: 127.0.0.1:1 {PORT_TAKEN}; stop what listens there")
    assert started(router, port).port > 1
    assert router.starts == 3


@pytest.mark.parametrize(
    ("port", "error", "starts"),
    [
        (8000, PORT_TAKEN, 1),
        (0, "baton-router: --workers is missing", 1),
        (0, PORT_TAKEN, ROUTER_PORT_TRIES),
    ],
)
def test_other_failures_and_a_port_that_was_asked_for_end_the_start(
    port: int, error: str, starts: int
) -> None:
    router = StubRouter(99, error)
    with pytest.raises(ChildFailed):
        started(router, port)
    assert router.starts == starts
