"""POST /debug/diagnosis of a real front: its host, proof of its key, and its way to prefill nodes."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from baton._native import BootstrapServer

from baton.server.observability.diagnosis import _mac, key_proof, sign_request
from tests.support.processes.front import FakeEngine, fake_engine, model
from tests.support.processes.ports import reserve_port

KEY = "cluster-secret"
SECOND_KEY = "rotated"
API_KEY = "api-secret"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    keys = ("--cluster-key", KEY, "--second-cluster-key", SECOND_KEY, "--api-key", API_KEY)
    with fake_engine("--model-path", model(), "--disaggregation-mode", "decode", *keys) as running:
        yield running


def ask(engine: FakeEngine, body: Any, key: str = API_KEY) -> httpx.Response:
    return httpx.post(
        f"{engine.url}/debug/diagnosis",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    )


def look(engine: FakeEngine, port: int) -> dict[str, Any]:
    answer = ask(engine, {"prefill": [{"host": "127.0.0.1", "port": port}]})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["prefill"][0])


@contextmanager
def bootstrap(key: str | None) -> Iterator[int]:
    server: Any = BootstrapServer("127.0.0.1", 0, key)
    try:
        yield server.port
    finally:
        server.stop()


@contextmanager
def listener(first_bytes: bytes) -> Iterator[int]:
    """A port that takes one connection, sends something and waits for its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(first_bytes)
                if first_bytes:
                    connection.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(30)


def register(bootstrap_port: int, rank_port: int) -> None:
    """Register rank 0 of 1 as a prefill rank does."""
    body = json.dumps(
        {
            "role": "Prefill", "attn_tp_size": 1, "attn_tp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1,
            "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": rank_port,
            "instance_id": "i", "owner": "o", "page_size": 16,
        }
    ).encode()  # fmt: skip
    stamp = sign_request(KEY, "/route", int(time.time() * 1000)).rpartition(" ")[0]
    header = f"{stamp} " + _mac(KEY, f"PUT\n/route\n{stamp}\n", body)
    headers = {"x-baton-auth": header, "content-type": "application/json"}
    answer = httpx.put(f"http://127.0.0.1:{bootstrap_port}/route", content=body, headers=headers)
    assert answer.status_code == 200, answer.text


def test_route_needs_the_key_of_the_engine(engine: FakeEngine) -> None:
    assert ask(engine, {}, "wrong").status_code == 401


def test_proof_is_of_the_challenge_and_no_secret_is_shown(engine: FakeEngine) -> None:
    answer = ask(engine, {"challenge": "abc"})
    found = answer.json()
    assert found["cluster_key_proofs"] == [key_proof(KEY, "abc"), key_proof(SECOND_KEY, "abc")]
    assert found["has_cluster_key"] is True
    assert found["has_api_key"] is True
    assert KEY not in answer.text
    assert SECOND_KEY not in answer.text
    assert API_KEY not in answer.text
    assert ask(engine, {}).json()["cluster_key_proofs"] == []


def test_host_is_that_of_the_engine(engine: FakeEngine) -> None:
    host = ask(engine, {}).json()["host"]
    assert host["hostname"] == socket.gethostname()
    assert host["uid"] == os.geteuid()
    assert host["network_namespace"] == os.readlink("/proc/self/ns/net")


def test_rank_of_a_prefill_node_is_reached_through_its_bootstrap_server(engine: FakeEngine) -> None:
    with bootstrap(KEY) as port, listener(b"\0\0\0\1") as rank_port:
        assert look(engine, port)["bootstrap"] == "empty"
        register(port, rank_port)
        found = look(engine, port)
    assert (found["bootstrap"], found["detail"]) == ("ok", "")
    address = f"127.0.0.1:{rank_port}"
    assert found["ranks"] == [
        {"rank": 0, "address": address, "transfer": "reachable", "detail": "", "transport": None}
    ]


def test_closed_transfer_port_is_named(engine: FakeEngine) -> None:
    closed_port = reserve_port()
    with bootstrap(KEY) as port:
        register(port, closed_port)
        rank = look(engine, port)["ranks"][0]
    assert rank["transfer"] == "unreachable"
    assert f"127.0.0.1:{closed_port}" in rank["detail"]


def test_port_that_closes_at_once_is_no_transfer_port(engine: FakeEngine) -> None:
    with bootstrap(KEY) as port, listener(b"") as rank_port:
        register(port, rank_port)
        assert "closed the connection at once" in look(engine, port)["ranks"][0]["detail"]


def test_server_with_another_key_or_none_is_not_trusted(engine: FakeEngine) -> None:
    with bootstrap("other") as port:
        found = look(engine, port)
    assert found["bootstrap"] == "refused"
    assert "the cluster keys differ" in found["detail"]
    with bootstrap(None) as port:
        assert look(engine, port)["bootstrap"] == "untrusted"


def test_text_of_another_program_is_not_repeated(engine: FakeEngine) -> None:
    head = b"HTTP/1.1 401 Unauthorized\r\nconnection: close\r\ncontent-length: 6\r\n\r\n"
    with listener(head + b"secret") as port:
        found = look(engine, port)
    assert found["bootstrap"] == "refused"
    assert "secret" not in json.dumps(found)


def test_unreachable_server_is_named(engine: FakeEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = look(engine, port)
    assert found["bootstrap"] == "unreachable"
    assert f"127.0.0.1:{port}" in found["detail"]


def test_engine_without_a_key_asks_loopback_only() -> None:
    with fake_engine("--model-path", model(), "--disaggregation-mode", "decode") as engine:
        found = ask(engine, {"prefill": [{"host": "192.0.2.1", "port": 8998}]}).json()["prefill"][0]
    assert found["bootstrap"] == "untrusted"
    assert "--cluster-key" in found["detail"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prefill": {}}, "prefill"),
        ({"prefill": [{"host": "a"}]}, "prefill[0].port"),
        ({"prefill": [{"host": "a", "port": 70000}]}, "prefill[0].port"),
        ({"prefill": [{"host": "a", "port": 1}] * 65}, "prefill"),
        ({"challenge": "x" * 200}, "challenge"),
        ({"challenge": 5}, "challenge"),
    ],
)
def test_malformed_requests_are_refused(
    engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    answer = ask(engine, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
