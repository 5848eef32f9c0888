"""A slow D whose lease has run out gives no wrong token.

D is held up between P's announcement of pages and its own read of them, for longer than P's lease. P then computes
other prompts into the same pages. What D reads afterwards is either refused or found to be changed: the request is
tried again, and its answer has the tokens of an undisturbed one.

    python -m tests.fault.promises.slow_decode [--short]

The long form stops the processes of D nodes with SIGSTOP, behind a router; the short form holds one copy of each
transport in one process, where every page of P is seen to get a new owner meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

import baton.models
from tests.fault.promises.show import Show, run_script
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.retried_pair import RetriedPair
from tests.support.processes.cluster import Cluster, family, get, metrics

DEMO = Path(baton.models.__file__).parent / "demo"
SHORT_LEASE_MS = 150
"""Shorter than the interval of the heartbeats that renew leases."""
SHORT_ATTEMPTS = 100
"""A loaded machine loses this lease again and again; the last attempt is not to decide."""
REQUESTS = 42
"""As many as the report of eight wrong answers counted: aws-samples/aws-do-eks#84."""
AT_ONCE = 6
MAX_TOKENS = 24
LEASE_SECS = 1
HOLD_SECS = 2.5
POOL_TOKENS = 6000
"""Of P: a few of the prompts here fit in, so that others take their pages."""


def short(show: Show) -> None:
    rng = random.Random(41)
    prompts = [[rng.randrange(3000) for _ in range(n)] for n in (40, 97, 64)]
    params = greedy(4)
    engine = make_engine(DEMO, page_size=16)
    expected = answer(engine, prompts, params)
    engine.close()
    for transport in ("shm", "tcp"):
        _hold_one_copy(show, transport, prompts, expected)


def _hold_one_copy(
    show: Show, transport: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    params = greedy(4)
    with tempfile.TemporaryDirectory() as folder:
        hold = Path(folder) / "hold"
        rules = {"rules": [{"on": "COPIED", "do": {"hold": str(hold)}}]}
        # By shm D copies, by tcp P's sender does: each looks at the generations a second time.
        held: dict[str, Any] = {"settings": {"fault": rules, "lease_ms": SHORT_LEASE_MS}}
        plain: dict[str, Any] = {"settings": {"lease_ms": SHORT_LEASE_MS}}
        p_more, d_more = (plain, held) if transport == "shm" else (held, plain)
        pair = RetriedPair(
            DEMO, transport, {**p_more, "max_total_tokens": 384}, d_more, page_size=16
        )
        try:
            rooms = pair.submit(prompts, params)
            pair.until(lambda: hold.with_suffix(".reached").exists())
            pair.turn_until(pair.p, lambda: not pair.p.engine.sched.report.counts()["leased"])
            pages = range(pair.p.native.num_pages)
            before = [pair.p.native.generation(page) for page in pages]
            fillers = [[2000 + i] * 180 for i in range(3)]
            pair.prefill_alone(fillers, greedy(1))
            reused = sum(pair.p.native.generation(page) != before[page] for page in pages)
            hold.with_suffix(".go").touch()
            outcome = pair.collect(rooms, prompts, params, SHORT_ATTEMPTS)
            pair.wait_idle()
        finally:
            hold.with_suffix(".go").touch()
            pair.close()
    wrong = sum(a != b for a, b in zip(outcome.tokens, expected, strict=True))
    show.tell(
        f"{transport}: the lease ran out during a copy, {reused} of {len(pages)} pages of P got a new owner; "
        f"of {len(prompts)} requests {outcome.retried} were retried {dict(outcome.reasons)}"
    )
    assert outcome.retried, "no request met the hold"
    show.keep(f"{transport}: 0 wrong answers, 0 failed", not wrong and not outcome.failed,
              f"{wrong} wrong, {outcome.failed} failed")  # fmt: skip


def long(show: Show) -> None:
    for transport in ("shm", "tcp"):
        with Cluster.up(
            "--decode", "2", "--transport", transport, "--kv-lease-secs", str(LEASE_SECS),
            "--chunked-prefill-size", "32", f"--prefill-args=--max-total-tokens {POOL_TOKENS}",
        ) as cluster:  # fmt: skip
            _stop_decode_nodes(show, cluster, transport)


def _stop_decode_nodes(show: Show, cluster: Cluster, transport: str) -> None:
    prompts = [f"{i}: " + f"page {i} of the pool " * 60 for i in range(REQUESTS)]
    expected = {prompt: cluster.complete(prompt, MAX_TOKENS) for prompt in prompts}
    for node in cluster.state["nodes"]:
        cluster.post("/flush_cache", {}, node["url"])
    show.tell(f"{transport}: {REQUESTS} answers of the undisturbed cluster are known")
    outcomes: Counter[str] = Counter()
    held = 0
    for start in range(0, REQUESTS, AT_ONCE):
        batch = prompts[start : start + AT_ONCE]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            stopper = threading.Thread(target=lambda: None)
            answers = [pool.submit(_outcome, cluster, prompt, expected) for prompt in batch]
            stopped = _stop_in_mid_transfer(cluster)
            if stopped:
                held += 1
                stopper = threading.Thread(target=_fill_pages, args=(cluster, start))
                stopper.start()
                time.sleep(HOLD_SECS)
                for process in stopped:
                    os.kill(process, signal.SIGCONT)
                stopper.join()
            outcomes.update(future.result() for future in answers)
    failures = _by_label(cluster, "baton_kv_transfer_failures_total", "code")
    retries = _by_label(cluster, "baton_router_retries_total", "reason")
    show.tell(
        f"{transport}: D was stopped for {HOLD_SECS:g} s in mid-transfer {held} times (lease {LEASE_SECS} s); "
        f"answers {dict(outcomes)}; transfers that failed {failures}; retries of the router {retries}"
    )
    cluster.assert_nothing_is_held(60)
    show.keep(f"{transport}: 0 wrong answers", not outcomes["wrong"], dict(outcomes))
    assert held, "D was never stopped in mid-transfer"


def _outcome(cluster: Cluster, prompt: str, expected: dict[str, str]) -> str:
    try:
        text = cluster.complete(prompt, MAX_TOKENS)
    except openai.APIError as err:
        return f"failed: {getattr(err, 'code', None) or type(err).__name__}"
    return "right" if text == expected[prompt] else "wrong"


def _stop_in_mid_transfer(cluster: Cluster) -> list[int]:
    """Stop the processes of a D node to which P has announced pages that it has not read; their ids."""

    def room_of(node: dict[str, Any]) -> bool:
        ranks = json.loads(get(f"{node['url']}/debug/rooms") or '{"ranks": []}')["ranks"]
        rooms = [room for rank in ranks for room in rank["rooms"]["live"]]
        return any(room["state"] in ("ADMITTED", "PULLING") for room in rooms)

    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for index in (0, 1):
            node = cluster.node("decode", index)
            if room_of(node):
                processes = [process.pid for process in family(node["pid"])]
                for process in processes:
                    os.kill(process, signal.SIGSTOP)
                return processes
    return []


def _fill_pages(cluster: Cluster, number: int) -> None:
    """Let P compute other prompts, of more tokens than its pool has."""
    deadline = time.monotonic() + HOLD_SECS
    url = cluster.node("prefill")["url"]
    while time.monotonic() < deadline:
        number += 1
        body = {"model": "demo", "prompt": f"filler {number} " * 300, "max_tokens": 1}
        cluster.post("/v1/completions", body, url)


def _by_label(cluster: Cluster, name: str, label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for url in (cluster.url, *(node["url"] for node in cluster.state["nodes"])):
        for sample in metrics(url):
            if sample.name == name and sample.value:
                key = sample.labels[label]
                found[key] = found.get(key, 0) + sample.value
    return found


if __name__ == "__main__":
    run_script(__doc__, long, short)
