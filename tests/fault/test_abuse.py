"""One client's abuse is not another client's problem.

Each case does something hostile or careless to a running cluster while two honest clients ask. Honest answers must
be right, no node may die, and afterwards pages, descriptors and answer times are as they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.fault.victim import Victim
from tests.support.processes.cluster import eventually, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MIB = 1 << 20


def post(victim: Victim, path: str, data: bytes) -> int:
    """Status of a POST, 0 when the connection ended without one."""
    request = urllib.request.Request(
        victim.cluster.url + path, data, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as err:
        with err:
            body = err.read()
        assert json.loads(body)["error"]["code"], body
        return err.code
    except OSError:
        return 0


def connect(victim: Victim, port: int | None = None) -> socket.socket:
    host, own_port = victim.cluster.url.removeprefix("http://").split(":")
    return socket.create_connection((host, port or int(own_port)), timeout=30)


def long_prompt(mib: float) -> Callable[[Victim], None]:
    def case(victim: Victim) -> None:
        text = "word and more " * int(mib * MIB / 14)
        assert post(victim, "/v1/completions", victim.body(prompt=text)) in (400, 413)
        assert post(victim, "/generate", json.dumps({"text": text}).encode()) in (400, 413)

    return case


def malformed_bodies(victim: Victim) -> None:
    bodies = [
        b"{", b"[]", b"null", b'{"prompt":', b"\xff\xfe{}", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 50_000,
        victim.body(max_tokens=-1), victim.body(temperature=1e400), victim.body(n=10**9), victim.body(prompt=[2**40]),
        victim.body(prompt=[-7]), victim.body(logit_bias={"x": 1}), victim.body(stop=["a"] * 10_000),
    ]  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: post(victim, "/v1/completions", body), bodies * 12))
    assert {400} >= set(statuses) - {413, 422}, sorted(set(statuses))


def bodies_that_never_come(victim: Victim) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {32 * MIB}\r\n\r\n"
    ).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(48):
            connection = stack.enter_context(connect(victim))
            connection.sendall(head + b" " * 4096)
        for prompt, text in victim.expected.items():
            assert victim.complete(prompt) == text


def aborted_requests(victim: Victim) -> None:
    rng = random.Random(7)

    def leave(i: int) -> None:
        with connect(victim) as connection:
            body = victim.body(
                prompt=f"shared beginning of all {i % 3}",
                max_tokens=400,
                stream=True,
                ignore_eos=True,
            )
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            ).encode()
            data = head + body
            phase = rng.randrange(4)
            if phase == 0:
                connection.sendall(data[: rng.randrange(1, len(data))])
                return
            connection.sendall(data)
            for _ in range(phase - 1):
                connection.recv(256)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(leave, range(120)))


def images_in_text(victim: Victim) -> None:
    image = "data:image/png;base64," + "QUJD" * (MIB // 4)
    parts = [
        {"type": "text", "text": "what is this"},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    body = json.dumps(
        {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    ).encode()
    for _ in range(4):
        assert post(victim, "/v1/chat/completions", body) in (400, 413)


def burst_of_short_prompts(victim: Victim) -> None:
    with ThreadPoolExecutor(96) as pool:
        bodies = [victim.body(prompt=f"{i} short", max_tokens=1) for i in range(600)]
        statuses = list(pool.map(lambda body: post(victim, "/v1/completions", body), bodies))
    assert set(statuses) <= {200, 429, 503}, sorted(set(statuses))


def strangers_on_kv_ports(victim: Victim) -> None:
    rng = random.Random(3)
    for port in victim.node_ports():
        with contextlib.ExitStack() as stack:
            for i in range(150):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(connect(victim, port))
                    if i % 3 == 1:
                        connection.sendall(rng.randbytes(rng.randrange(1, 4096)))
                    if i % 3 == 2:
                        connection.sendall(b"\x00\x40\x00\x00" + b"\x93" * 64)
            for prompt, text in victim.expected.items():
                assert victim.complete(prompt) == text


def head_floods(victim: Victim) -> None:
    for _ in range(4):
        with contextlib.suppress(OSError), connect(victim) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\n" + b"x-filler: 0123456789\r\n" * 100_000
            )
            connection.recv(1024)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(victim)).sendall(b"POST /v1/comp")
        for prompt, text in victim.expected.items():
            assert victim.complete(prompt) == text


def stopped_decode_node(victim: Victim) -> None:
    """The node's processes stand still for longer than any heartbeat, then go on."""
    processes = family(victim.cluster.node("decode")["pid"])
    resumed = threading.Timer(8.0, lambda: [os.kill(p.pid, signal.SIGCONT) for p in processes])
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    resumed.start()
    try:
        statuses = {
            post(victim, "/v1/completions", victim.body(prompt="while it stands")) for _ in range(3)
        }
        assert statuses <= {200, 502, 503, 504}
    finally:
        resumed.join()


CASES: dict[str, Callable[[Victim], None]] = {
    "prompt_of_3_mib": long_prompt(3),
    "prompt_of_20_mib": long_prompt(20),
    "malformed_bodies": malformed_bodies,
    "bodies_that_never_come": bodies_that_never_come,
    "aborted_requests": aborted_requests,
    "images_in_text": images_in_text,
    "burst_of_short_prompts": burst_of_short_prompts,
    "strangers_on_kv_ports": strangers_on_kv_ports,
    "head_floods": head_floods,
}
MAY_FAIL = {"burst_of_short_prompts"}
"""Cases that use up what the cluster can take: honest requests may be refused with a code, never answered wrongly."""


@pytest.mark.parametrize("name", CASES)
def test_abuse_costs_honest_clients_nothing(victim: Victim, name: str) -> None:
    with victim.honest_clients() as honest:
        CASES[name](victim)
        answered = len(honest.texts)
        eventually("an honest client is answered after it", lambda: len(honest.texts) > answered)
    assert name in MAY_FAIL or not honest.errors, honest.errors[:3]
    victim.assert_recovered()


def test_stopped_decode_node_comes_back(victim: Victim) -> None:
    with victim.honest_clients():
        stopped_decode_node(victim)
    victim.assert_recovered()


def test_memory_after_all_cases_is_bounded(victim: Victim) -> None:
    router = psutil.Process(victim.cluster.state["router"]["pid"])
    assert router.memory_info().rss < 512 * MIB
