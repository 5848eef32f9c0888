"""kill -9 of P, D or router in any state of a room: one answer for each request, nothing held, service comes back.

Each case waits until a room is in the wanted state, kills a process, and starts its successor at the same or at another
address. Every request then has exactly one end: the right answer, or an error with a code.

    python -m tests.fault.promises.kill_matrix [--short]

The long form kills engines and routers under requests of a client, one P and one D; the short form kills transfer
nodes in processes of their own, with every state held until the kill.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
from baton._native import BootstrapServer

import baton.models
from tests.fault.promises.show import Show, run_script
from tests.support.processes.own_cluster import OwnCluster, rooms_of, seconds_until
from tests.support.processes.transfer_rank import Killable, TransferRank, await_state

PAGES = range(0, 40)
TARGET = range(100, 140)
PREFILL_STATES = ("WAITING", "PREFILLING", "LEASED")
DECODE_STATES = ("OPENING", "ADMITTED", "PULLING")
SLOW_PAGES = {"fault": {"rules": [{"on": "PAGE", "do": {"delay_ms": 20}, "repeat": True}]}}
"""For the node that sends (tcp): each read of D is answered this much later."""

Start = Callable[..., Killable]


# ---- transfer nodes alone ----


def short(show: Show) -> None:
    with Killable.processes() as start:
        for number, state in enumerate(PREFILL_STATES):
            for same_address in (True, False):
                _kill_prefill_rank(show, start, state, 10 * number, same_address)
        for number, state in enumerate(DECODE_STATES):
            for same_address in (True, False):
                _kill_decode_rank(show, start, state, 100 + 10 * number, same_address)


def _kill_prefill_rank(show: Show, start: Start, state: str, room: int, same_address: bool) -> None:
    server = BootstrapServer("127.0.0.1", 0, None)
    p = start("prefill", {})
    p.call("register", server.port)
    port = p.call("port")
    d = TransferRank("decode", {})
    p.call("offer", room)
    if state != "WAITING":
        p.call("publish", room, PAGES[:10])
    if state == "LEASED":
        p.call("publish", room, PAGES[10:], 10)
        p.call("finish", room, len(PAGES))
    d.open(room, server.port)
    await_state("D's room is admitted", lambda: d.state(room) == "ADMITTED")
    if state == "PREFILLING":
        d.grant(room, TARGET)
        await_state("D pulls", lambda: d.state(room) == "PULLING")
    assert p.call("state", room) == state
    killed_at = time.monotonic()
    p.kill()
    end = d.end(room)
    successor = start("prefill", {"port": port} if same_address else {})
    successor.call("register", server.port)
    successor.call("prefill", room + 1, PAGES)
    d.open(room + 1, server.port)
    d.grant(room + 1, TARGET)
    _judge(show, f"P {state}", same_address, d, room, end, killed_at)
    assert successor.call("end", room + 1) == "DONE"
    assert not successor.call("held")
    successor.kill()
    d.close()
    server.stop()


def _judge(
    show: Show,
    case: str,
    same_address: bool,
    d: TransferRank,
    room: int,
    end: str,
    killed_at: float,
) -> None:
    """The successor serves the next room, and the survivor holds nothing of the first."""
    next_end = d.end(room + 1)
    back_ms = (time.monotonic() - killed_at) * 1000
    is_right = next_end == "committed" and d.holds(room + 1, TARGET)
    ends = len(d.ends(room))
    where = "same address" if same_address else "other address"
    show.keep(
        f"{case} killed, {where}: one end, then right pages, nothing held",
        end in ("PEER_DEAD", "TRANSPORT_BROKEN") and ends == 1 and is_right and not d.held(),
        f"{ends} x {end}, next {next_end} after {back_ms:.0f} ms",
    )


def _kill_decode_rank(show: Show, start: Start, state: str, room: int, same_address: bool) -> None:
    """P keeps the pages: a second D gets them without a second prefill."""
    server = BootstrapServer("127.0.0.1", 0, None)
    p = TransferRank("prefill", SLOW_PAGES if state == "PULLING" else {})
    p.register(server.port)
    if state != "OPENING":
        p.prefill(room, PAGES)
    d = start("decode", {})
    port = d.call("port")
    d.call("open", room, server.port)
    if state == "PULLING":
        d.call("grant", room, TARGET)
    await_state(f"D's room is {state}", lambda: d.call("state", room) == state)
    killed_at = time.monotonic()
    d.kill()
    successor = start("decode", {"port": port} if same_address else {})
    if state == "OPENING":
        p.prefill(room, PAGES)
    await_state("P has lost the reader", lambda: p.counter("kv_links_lost_total") > 0)
    successor.call("open", room, server.port)
    successor.call("grant", room, TARGET)
    end = successor.call("end", room)
    back_ms = (time.monotonic() - killed_at) * 1000
    is_right = end == "committed" and successor.call("holds", room, TARGET)
    p_end = p.end(room)
    where = "same address" if same_address else "other address"
    show.keep(
        f"D {state} killed, {where}: its successor reads the same pages, P's room has one end, nothing held",
        is_right and p_end == "DONE" and len(p.ends(room)) == 1 and not p.held(),
        f"{end} after {back_ms:.0f} ms, P {p_end}",
    )
    successor.kill()
    p.close()
    server.stop()


# ---- engines and router ----

DEMO = Path(baton.models.__file__).parent / "demo"
AT_ONCE = 8
MAX_TOKENS = 16
BODY = "a room of the kill matrix " * 25
STATES = {"prefill": PREFILL_STATES, "decode": DECODE_STATES}


def long(show: Show) -> None:
    late_answers = {"on": "OPEN_OK", "do": {"delay_ms": 150}, "repeat": True}
    slow_reads = {"on": "PAGE", "do": {"delay_ms": 50}, "repeat": True}
    rules = json.dumps({"rules": [late_answers, slow_reads]})
    flags = (
        "--model-path", str(DEMO), "--chunked-prefill-size", "64", "--kv-lease-secs", "5",
        "--disaggregation-transfer-backend", "tcp",
    )  # fmt: skip
    with OwnCluster.empty() as cluster:
        cluster.start_engines(
            {
                "prefill": ("prefill", (*flags, "--test-kv-fault", rules)),
                "decode": ("decode", flags),
            }
        )
        cluster.start_router("--health-check-interval-secs", "1")
        prompts = [f"{i}: {BODY}" for i in range(AT_ONCE)]
        expected = {prompt: cluster.complete(prompt, MAX_TOKENS) for prompt in prompts}
        show.tell(f"{AT_ONCE} answers of the undisturbed cluster are known")
        for victim in ("prefill", "decode", "router"):
            watched = "decode" if victim == "router" else victim
            for state in STATES[watched]:
                for same_address in (True, False):
                    _kill_process(show, cluster, victim, watched, state, same_address, expected)


def _kill_process(
    show: Show, cluster: OwnCluster, victim: str, watched: str, state: str, same_address: bool,
    expected: dict[str, str],
) -> None:  # fmt: skip
    for node in cluster.state["nodes"]:
        cluster.post("/flush_cache", {}, node["url"])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {prompt: pool.submit(cluster.complete, prompt, MAX_TOKENS) for prompt in expected}
        url = cluster.members[watched].url
        is_met = _poll_room(url, state, asked)
        cluster.members[victim].kill()
        killed_at = time.monotonic()
        cluster.restart(victim, same_address=same_address)
        outcomes = Counter(_outcome(future, expected[prompt]) for prompt, future in asked.items())
    cluster.await_service()
    back_secs = time.monotonic() - killed_at
    pair_secs = seconds_until("the router has both nodes", lambda: len(cluster.ready()) == 2)
    cluster.assert_nothing_is_held(60)
    again = sum(cluster.complete(prompt, MAX_TOKENS) == text for prompt, text in expected.items())
    where = "same" if same_address else "other"
    met = "" if is_met else " (the state was not met: killed at another moment)"
    bad = outcomes["wrong"] + outcomes["no answer"] * (victim != "router")
    show.keep(
        f"{victim} killed at {watched} {state}{met}, {where} address: {AT_ONCE} answers, one each, nothing held",
        not bad and outcomes.total() == AT_ONCE and again == AT_ONCE,
        f"{dict(outcomes)}; service back after {back_secs:.1f} s, both nodes after {back_secs + pair_secs:.1f} s",
    )


def _poll_room(url: str, state: str, asked: dict[str, Future[str]]) -> bool:
    """Wait until a room of the engine is in the state; False if all requests have ended before."""
    while not all(future.done() for future in asked.values()):
        if any(room["state"] == state for room in rooms_of(url)):
            return True
    return False


def _outcome(future: Future[str], expected: str) -> str:
    try:
        return "right" if future.result() == expected else "wrong"
    except openai.APIStatusError as err:
        return str(err.code)
    except openai.APIConnectionError:
        return "no answer"


if __name__ == "__main__":
    run_script(__doc__, long, short)
