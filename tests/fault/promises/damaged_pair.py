"""A pair that damages pages is named and left out; the seven others notice nothing, and no answer is wrong.

One P serves eight D nodes. On the way to one of them each page has a flipped bit.

    python -m tests.fault.promises.damaged_pair [--short]

The long form has simulated engines, whose pages are real, behind a router; the short form has transfer nodes alone and
compares the bytes of every page.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import openai
from baton._native import BootstrapServer

from tests.fault.promises.show import Show, run_script
from tests.support.processes.cluster import count, metrics
from tests.support.processes.own_cluster import OwnCluster
from tests.support.processes.transfer_rank import TransferRank

PAIRS = 8
DAMAGED = 5
FLIPPED = {"rules": [{"on": "PAGE", "do": "flip", "repeat": True}]}
ROOMS = 6
QUARANTINED_AFTER = 3
"""Rooms in a row: docs/protocol.md."""
REQUESTS = 400
AT_ONCE = 16


def short(show: Show) -> None:
    server = BootstrapServer("127.0.0.1", 0, None)
    p = TransferRank("prefill")
    p.register(server.port)
    ranks = [
        TransferRank("decode", {"fault": FLIPPED} if number == DAMAGED else {})
        for number in range(PAIRS)
    ]
    ends: dict[int, list[str]] = {number: [] for number in range(PAIRS)}
    right = 0
    for turn in range(ROOMS):
        for number, d in enumerate(ranks):
            room = 1 + turn * PAIRS + number
            source = range(20 * number, 20 * number + 20)
            p.prefill(room, source)
            d.open(room, server.port)
            d.grant(room, range(20))
            ends[number].append(d.end(room))
            right += d.holds(room, range(20))
            if ends[number][-1] == "QUARANTINED":
                p.node.abort(
                    room, "CLIENT_GONE"
                )  # the router ends P's leg; P never heard of D here
            p.end(room)
    good = [number for number in range(PAIRS) if ends[number] == ["committed"] * ROOMS]
    expected = ["CHECKSUM"] * QUARANTINED_AFTER + ["QUARANTINED"] * (ROOMS - QUARANTINED_AFTER)
    show.keep(
        f"only pair {DAMAGED} of {PAIRS} is quarantined, after {QUARANTINED_AFTER} rooms",
        ends[DAMAGED] == expected and len(good) == PAIRS - 1,
        ends[DAMAGED],
    )
    show.keep(
        "every page that was committed is right",
        right == ROOMS * (PAIRS - 1) and not p.held() and not any(d.held() for d in ranks),
        f"{right} rooms of 20 pages",
    )
    for rank in (p, *ranks):
        rank.close()
    server.stop()


def long(show: Show) -> None:
    flags = ("--simulate", "reference,speed=50", "--disaggregation-transfer-backend", "tcp")
    engines: dict[str, tuple[str, tuple[str, ...]]] = {"prefill": ("prefill", flags)}
    for number in range(PAIRS):
        fault = ("--test-kv-fault", json.dumps(FLIPPED)) if number == DAMAGED else ()
        engines[f"decode-{number}"] = ("decode", (*flags, *fault))
    with OwnCluster.empty() as cluster:
        cluster.start_engines(engines)
        # By turns, so that each pair is asked.
        cluster.start_router("--policy", "round_robin")
        show.tell(f"router, one P and {PAIRS} D are up")
        _ask_all(show, cluster)


def _ask_all(show: Show, cluster: OwnCluster) -> None:
    started = time.monotonic()
    named_after: list[float] = []

    def ask(number: int) -> str:
        prompt = f"{number} of the requests before the pairs " * 6
        try:
            text = cluster.complete(prompt, 8)
        except openai.APIError as err:
            return f"failed: {getattr(err, 'code', None) or type(err).__name__}"
        if not named_after and _pair_named_by_router(cluster):
            named_after.append(time.monotonic() - started)
        return "answered" if len(text) == 8 * 4 else "wrong length"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = Counter(pool.map(ask, range(REQUESTS)))
    quarantines = {
        name: count(member.url, "baton_kv_quarantines_total")
        for name, member in cluster.members.items()
        if member.role == "decode"
    }
    failures = {
        name: sum(
            sample.value
            for sample in metrics(member.url)
            if sample.name == "baton_kv_transfer_failures_total"
        )
        for name, member in cluster.members.items()
        if member.role == "decode"
    }
    damaged = f"decode-{DAMAGED}"
    show.tell(f"{REQUESTS} requests: {dict(outcomes)}; failed transfers by D {failures}")
    retries = sum(
        sample.value
        for sample in metrics(cluster.url)
        if sample.name == "baton_router_retries_total"
    )
    cluster.assert_nothing_is_held(60)
    show.keep("every request was answered", outcomes["answered"] == REQUESTS, dict(outcomes))
    others = {name: value for name, value in failures.items() if value and name != damaged}
    show.keep(
        "the seven other pairs notice nothing", not others, others or "no transfer of theirs failed"
    )
    show.keep(
        f"{damaged} alone is quarantined", {n for n, v in quarantines.items() if v} == {damaged},
        f"{retries:.0f} retries of the router",
    )  # fmt: skip
    log = re.sub(r"\x1b\[[0-9;]*m", "", cluster.members[damaged].log.read_text(errors="replace"))
    line = next((line for line in log.splitlines() if "damaged pages" in line), "")
    bootstrap = f"port={cluster.members['prefill'].bootstrap_port}"
    show.keep(f"the log of {damaged} names the prefill rank", bootstrap in line, line[-160:])
    named = _pair_named_by_router(cluster)
    show.keep("the router names the pair", bool(named), f"{named} (after {named_after[:1]} s)")


def _pair_named_by_router(cluster: OwnCluster) -> str:
    """The router's line about the pair, if it names both nodes of it and no other."""
    pair = (cluster.members["prefill"].url, cluster.members[f"decode-{DAMAGED}"].url)
    log = re.sub(r"\x1b\[[0-9;]*m", "", cluster.members["router"].log.read_text(errors="replace"))
    lines = [line for line in log.splitlines() if "a pair cannot work together" in line]
    assert all(all(url in line for url in pair) for line in lines), lines
    return lines[0].partition("WARN")[2][:220].strip() if lines else ""


if __name__ == "__main__":
    run_script(__doc__, long, short)
