"""From which length on a pull of KV is cheaper than to compute it, by the speed of the link.

A pull costs a fixed time and one per byte, which is fitted to measured pulls; computing costs what the step-time model
of a device says (baton.config.simulated). Links of 1 and 10 Gb/s are network namespaces with a token bucket between
them, where this machine allows that; faster ones are computed from the fit.

    python -m tests.fault.promises.pull_break_even [--short]

The short form measures over loopback alone, with small pages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton._native import BootstrapServer

from baton.config.simulated import PRESETS, StepModel
from tests.fault.promises.show import Show, run_script
from tests.support.processes.transfer_rank import Killable, TransferRank

KEY = "one key for both sides"
PAGE_TOKENS = 16
TOKEN_BYTES = 131_072
"""KV of a token of a model of 8e9 parameters: 32 layers, 8 KV heads of 128, two bytes."""
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
"""Pages of a pull."""
SHORT_LENGTHS = (1, 8, 64)
REPEATS = 5
ENOUGH_SECS = 0.5
GBIT = 1e9 / 8
MEASURED_GBITS = (1, 10)
COMPUTED_GBITS = (25, 100, 400)
LONGEST_TOKENS = 262_144


@dataclass(frozen=True, slots=True)
class PullCost:
    """Seconds of a pull: fixed, and per byte."""

    fixed_secs: float
    byte_secs: float

    def seconds(self, tokens: int) -> float:
        return self.fixed_secs + tokens * TOKEN_BYTES * self.byte_secs

    def __str__(self) -> str:
        return f"{self.fixed_secs * 1e3:.2f} ms + {1 / self.byte_secs / GBIT:.2f} Gb/s"


def fit(points: Sequence[tuple[int, float]]) -> PullCost:
    """Least squares over (bytes, seconds), each weighted by 1 / seconds: small pulls count as much as large ones."""
    rows = [(1 / secs, size / secs) for size, secs in points]
    a = sum(w * w for w, _ in rows)
    b = sum(w * x for w, x in rows)
    c = sum(x * x for _, x in rows)
    d = sum(w for w, _ in rows)
    e = sum(x for _, x in rows)
    determinant = a * c - b * b
    fixed = max(0.0, (d * c - b * e) / determinant)
    return PullCost(fixed, (a * e - b * d) / determinant)


def compute_seconds(model: StepModel, tokens: int) -> float:
    """Of a prompt alone in its steps."""
    linear = max(model.weights_ms * 1e-3, model.token_us * 1e-6 * tokens)
    attention = model.attention_ns * 1e-9 * tokens * (tokens + 1) / 2
    return model.step_ms * 1e-3 + linear + attention


def cheaper_ranges(cost: PullCost, model: StepModel) -> str:
    """The lengths at which a pull takes less time than to compute, found to 2 %."""
    lengths = [1]
    while lengths[-1] < LONGEST_TOKENS:
        lengths.append(max(lengths[-1] + 1, int(lengths[-1] * 1.02)))
    ranges: list[list[int]] = []
    was_cheaper = False
    for tokens in lengths:
        is_cheaper = cost.seconds(tokens) < compute_seconds(model, tokens)
        if is_cheaper and was_cheaper:
            ranges[-1][1] = tokens
        elif is_cheaper:
            ranges.append([tokens, tokens])
        was_cheaper = is_cheaper
    texts = [
        f"from {first}" if last == lengths[-1] else f"{first} to {last}" for first, last in ranges
    ]
    return " and ".join(texts) or "never"


def short(show: Show) -> None:
    server = BootstrapServer("127.0.0.1", 0, None)
    p = TransferRank("prefill")
    p.register(server.port)
    d = TransferRank("decode")
    points = []
    is_right = True
    for number, pages in enumerate(SHORT_LENGTHS * 3):
        room = 1 + number
        p.prefill(room, range(pages))
        took, right = d.time_pull(room, range(pages), server.port)
        points.append((pages * p.page_bytes, took))
        is_right &= right
        p.end(room)
    for rank in (p, d):
        rank.close()
    server.stop()
    show.keep("every pulled page is right", is_right, f"loopback {fit(points[3:])}")
    exact = PullCost(0.002, 1 / (10 * GBIT))
    found = fit(
        [(size, exact.fixed_secs + size * exact.byte_secs) for size in (10**5, 10**6, 10**7)]
    )
    is_exact = abs(found.fixed_secs - 0.002) < 1e-6 and abs(found.byte_secs * 10 * GBIT - 1) < 1e-6
    show.keep("the fit of a line is the line", is_exact, found)
    # 27 us to compute a token, 10.5 us to pull it at 100 Gb/s; 4.7 ms that each step takes at least.
    ranges = cheaper_ranges(PullCost(0.001, 1 / (100 * GBIT)), PRESETS["h200-8b"])
    show.keep("at 100 Gb/s every pull of an H200's KV is cheaper", ranges == "from 1", ranges)


def long(show: Show) -> None:
    loopback = _measure(show, "loopback", "127.0.0.1", (), ())
    costs = {"loopback (measured)": loopback}
    missing = _missing_for_namespaces()
    for gbits in MEASURED_GBITS:
        reason = missing or _too_slow(loopback, gbits)
        if reason:
            show.tell(f"{gbits} Gb/s is not measured: {reason}")
            costs[f"{gbits} Gb/s (computed)"] = _computed(loopback, gbits)
            continue
        with _linked_namespaces(gbits) as (p_prefix, d_prefix, host):
            cost = _measure(show, f"{gbits} Gb/s", host, p_prefix, d_prefix)
        costs[f"{gbits} Gb/s (measured)"] = cost
    for gbits in COMPUTED_GBITS:
        costs[f"{gbits} Gb/s (computed)"] = _computed(loopback, gbits)
    print(
        "| link | pull | cheaper than an H200 computes it [tokens] | than the reference device does |"
    )
    print("|---|---|---|---|")
    for name, cost in costs.items():
        ranges = [cheaper_ranges(cost, PRESETS[device]) for device in ("h200-8b", "reference")]
        print(f"| {name} | {cost} | {ranges[0]} | {ranges[1]} |")


def _computed(loopback: PullCost, gbits: int) -> PullCost:
    """A link of which nothing but its speed is known: the fixed part is that of this machine's software."""
    return PullCost(loopback.fixed_secs, 1 / (gbits * GBIT))


def _too_slow(loopback: PullCost, gbits: int) -> str:
    """Why this machine cannot measure a link: its own part would be measured instead."""
    carried = 1 / loopback.byte_secs / GBIT
    if carried > 1.5 * gbits:
        return ""
    return f"this machine carries {carried:.2f} Gb/s without any link (make setup without NATIVE_PROFILE=dev?)"


def _measure(
    show: Show, name: str, host: str, p_prefix: Sequence[str], d_prefix: Sequence[str]
) -> PullCost:
    page_bytes = PAGE_TOKENS * TOKEN_BYTES
    settings = {"host": host, "advertise_host": host, "cluster_key": KEY}
    with Killable.processes(*p_prefix) as start_p, Killable.processes(*d_prefix) as start_d:
        p = start_p("prefill", settings, page_bytes, max(LENGTHS))
        port = p.call("serve_bootstrap", host, KEY)
        d_host = {} if not d_prefix else {"host": "0.0.0.0"}
        d = start_d("decode", {**settings, **d_host}, page_bytes, max(LENGTHS))
        points = []
        is_right = True
        room = 0
        for pages in LENGTHS:
            times = []
            for _ in range(REPEATS + 1):
                room += 1
                p.call("prefill", room, range(pages))
                took, right = d.call("time_pull", room, range(pages), port, host)
                times.append(took)
                is_right &= right
                p.call("end", room)
            points.append((pages * page_bytes, statistics.median(times[1:])))
            if points[-1][1] > ENOUGH_SECS and len(points) > 2:
                break  # a slow link, or a slow build: the line is known
        p.kill()
        d.kill()
    cost = fit(points)
    shown = ", ".join(f"{size // TOKEN_BYTES}: {secs * 1e3:.1f}" for size, secs in points)
    show.tell(f"{name}: ms by tokens {{{shown}}}; fit {cost}")
    show.keep(f"{name}: every pulled page is right", is_right, f"{room} pulls")
    return cost


def _missing_for_namespaces() -> str:
    """Why links cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (package iproute2)"
    try:
        with _linked_namespaces(1):
            return ""
    except subprocess.CalledProcessError as err:
        return f"{' '.join(err.cmd)} failed: {err.stderr.strip()}"


@contextlib.contextmanager
def _linked_namespaces(gbits: int) -> Iterator[tuple[list[str], list[str], str]]:
    """Two namespaces with a link of this speed: commands that run others in P's and in D's, and P's address."""
    tag = f"{os.getpid() % 100_000}"
    names = [f"baton-p-{tag}", f"baton-d-{tag}"]
    links = [f"bp{tag}", f"bd{tag}"]
    addresses = ["10.231.77.1", "10.231.77.2"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, addresses, strict=True):
            _run("ip", "link", "set", link, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", link)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", link, "up")
            limit = ("tbf", "rate", f"{gbits}gbit", "burst", f"{gbits * 256}kb", "latency", "50ms")
            _run(*inside, "tc", "qdisc", "add", "dev", link, "root", *limit)
        prefixes = [["ip", "netns", "exec", name] for name in names]
        yield prefixes[0], prefixes[1], addresses[0]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


if __name__ == "__main__":
    run_script(__doc__, long, short)
