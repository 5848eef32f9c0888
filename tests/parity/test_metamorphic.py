"""The same tokens, whatever surrounds a request: pairs of settings in the fast suite, the whole product as `slow`.

The plain run is one request alone on an engine without overlap, cache or chunks, which equals transformers' generate().
Every axis below must leave it as it is. A new one (a preemption mode, a policy) is a line in AXES and, if it acts on
the engine, one in `flags_of` or DISTURBANCES.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.sched.planner.preemption import PreemptionPlanner
from baton.sched.types.request import SamplingParams
from tests.parity.conftest import Reference
from tests.support import effort
from tests.support.engines.engine_run import greedy
from tests.support.engines.metamorph import Arena, Cluster, preempt_at, suspend_at
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import VOCAB
from tests.support.pairwise import Case, pairs, pairwise, product

STEPS = 14
PROBES = [1, 63, 64, 130]
OTHERS = [5, 40, 64]
LAST_TURN = 24
"""Later than a probe of two chunks has its last token in the fast settings."""

ENGINE_AXES = {
    "page": [1, 16, 64],
    "overlap": [True, False],
    "chunk": ["small", "several", "whole"],
    "policy": ["fcfs", "lpm", "srpt-aging"],
    "route": ["one", "shm", "tcp"],
    "disturbance": ["none", "retract", "preempt", "suspend"],
    "mode": ["cache", "recompute", "offload"],
}
QUICK = {("preempt", "recompute"), ("preempt", "offload"), ("suspend", "cache")}
"""Disturbances tried at every turn also in the fast suite."""
REQUEST_AXES = {
    "prefix": ["cold", "part", "full"],
    "place": ["alone", "first", "middle", "last"],
    "sampling": ["greedy", "seeded", "restricted"],
}
SAMPLING = {
    "greedy": greedy(STEPS),
    "seeded": SamplingParams(
        max_new_tokens=STEPS, temperature=0.9, top_p=0.9, top_k=200, seed=11, frequency_penalty=0.4
    ),
    "restricted": SamplingParams(
        max_new_tokens=STEPS,
        seed=11,
        allowed_tokens=pack_ids(range(60, 66)),
        bad_words=((60,), (61, 62), (62, 61, 63)),
    ),
}


def is_valid(case: Case) -> bool:
    """A request that is alone displaces no other; --preemption-mode says how one preempted or suspended does."""
    if case["disturbance"] == "retract" and case.get("place") == "alone":
        return False
    return case["mode"] == "cache" or case["disturbance"] in ("preempt", "suspend")


def named(case: Case) -> str:
    return "-".join(map(str, case.values()))


EVERY = 1 if os.environ.get("BATON_TEST_WHOLE") else 7
"""The whole product takes half an hour; by default every seventh case runs, which meets all values of every axis."""
WHOLE = product(
    {name: values for name, values in ENGINE_AXES.items() if name != "policy"}, is_valid
)


def flags_of(case: Case) -> dict[str, object]:
    """Engine flags of a case."""
    page = case["page"]
    flags: dict[str, object] = {
        "page_size": page,
        "chunked_prefill_size": {"small": max(page, 5), "several": 64, "whole": 1024}[
            case["chunk"]
        ],
        "disable_overlap_schedule": not case["overlap"],
        "schedule_policy": case["policy"],
        "max_total_tokens": 4096,
    }
    if case["disturbance"] == "retract":
        # The longest probe and its answer fit, and hardly anything beside them; a pair needs room for prompts that the
        # other side is not ready for.
        pool = -(-160 // page) * page if case["route"] == "one" else 256
        flags |= {
            "max_total_tokens": pool,
            "schedule_conservativeness": 0.01,
            "num_reserved_decode_tokens": 0,
        }
    if case["disturbance"] == "preempt":
        flags |= {
            "enable_priority_scheduling": True,
            "priority_scheduling_preemption_threshold": 5,
            "preemption_min_remaining_tokens": 0,
            "max_running_requests": 2,
        }
    if case["disturbance"] in ("preempt", "suspend"):
        flags |= {"preemption_mode": case["mode"]} | (
            {"host_kv_gib": 0.01} if case["mode"] == "offload" else {}
        )
    return flags


@dataclass
class Plain:
    path: Path
    probes: list[list[int]]
    others: list[list[int]]
    want: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def plain(reference: Callable[[str], Reference]) -> Plain:
    ref = reference("llama")
    rng = random.Random(9)

    def draw(lengths: list[int]) -> list[list[int]]:
        return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]

    probes, others = draw(PROBES), draw(OTHERS)
    flags = {
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "chunked_prefill_size": 1024,
    }
    alone = Cluster(ref.path, page_size=4, **flags)
    want = {name: [alone.ask(p, params) for p in probes] for name, params in SAMPLING.items()}
    alone.close()
    assert want["greedy"] == ref.answers(probes, STEPS)
    assert want["greedy"] != want["seeded"]
    return Plain(ref.path, probes, others, want)


def disturbance(plain: Plain, cluster: Cluster, kind: str, turn: int) -> Callable[[int], None]:
    if kind == "preempt":
        return preempt_at(cluster, turn, plain.others[1])
    return suspend_at(cluster, turn) if kind == "suspend" else lambda _: None


def check(plain: Plain, cluster: Cluster, case: Case, turn: int, which: int) -> None:
    """Probe `which` in this case's surroundings; `turn`: when the disturbance comes."""
    arena = Arena(cluster, plain.others)
    probe, want = plain.probes[which], plain.want[case["sampling"]][which]
    arena.warm(case["prefix"], probe)
    disturb = disturbance(plain, cluster, case["disturbance"], turn)
    handle = arena.ask(probe, SAMPLING[case["sampling"]], case["place"], disturb)
    assert cluster.got[handle] == want, (
        f"{case}, disturbed before turn {turn}, probe of {len(probe)} tokens"
    )
    if case["prefix"] == "full" and case["disturbance"] == "none":
        assert cluster.cached[handle] == (len(probe) - 1) // case["page"] * case["page"]


@pytest.fixture(autouse=True)
def preemption_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt at every moment: measured step times would spare a request that is about to end."""
    monkeypatch.setattr(PreemptionPlanner, "_saves_time", lambda *_, **__: True)


def test_selection_holds_every_pair() -> None:
    chosen = pairwise(ENGINE_AXES | REQUEST_AXES, is_valid)
    every = product(ENGINE_AXES | REQUEST_AXES, is_valid)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, every))
    assert len(chosen) < 25 < 1000 < len(every)


@pytest.mark.parametrize("case", pairwise(ENGINE_AXES | REQUEST_AXES, is_valid), ids=named)
def test_nothing_around_a_request_changes_its_tokens(plain: Plain, case: Case) -> None:
    cluster = Cluster(plain.path, case["route"], **flags_of(case))
    try:
        for which in range(len(PROBES)):
            check(plain, cluster, case, (7 * which + sum(map(ord, str(case)))) % LAST_TURN, which)
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(0, len(WHOLE), EVERY), ids=lambda n: named(WHOLE[n]))
def test_whole_product(plain: Plain, number: int) -> None:
    """Policies and probes take turns instead of multiplying: no policy knows the page size."""
    policies = ENGINE_AXES["policy"]
    engine_case = WHOLE[number] | {"policy": policies[number % len(policies)]}
    cluster = Cluster(plain.path, engine_case["route"], **flags_of(engine_case))
    try:
        for i, case in enumerate(product(REQUEST_AXES, lambda c: is_valid(engine_case | c))):
            check(
                plain,
                cluster,
                engine_case | case,
                turn=i % LAST_TURN,
                which=(number + i) % len(PROBES),
            )
        if engine_case["disturbance"] == "retract" and engine_case["route"] == "one":
            assert cluster.engines[-1].sched.report.counters()["retractions_total"] > 0
        if engine_case["disturbance"] == "preempt" and engine_case["route"] == "one":
            assert cluster.engines[-1].sched.report.counters()["preemptions_total"] > 0
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=[] if (kind, mode) in QUICK else pytest.mark.slow)
        for kind, mode in itertools.product(("preempt", "suspend"), ENGINE_AXES["mode"])
    ],
)
def test_disturbed_before_every_turn_in_turn(plain: Plain, kind: str, mode: str) -> None:
    """One probe, one engine, the disturbance at each moment of its life.

    In the fast suite, the ways to sample take turns.
    """
    case = {"page": 16, "overlap": True, "chunk": "small", "policy": "fcfs", "route": "one"}
    case |= {"disturbance": kind, "mode": mode, "prefix": "cold", "place": "first"}
    cluster = Cluster(plain.path, "one", **flags_of(case))
    arena = Arena(cluster, plain.others)
    try:
        asked = 0
        for turn, (number, sampling) in itertools.product(range(LAST_TURN), enumerate(SAMPLING)):
            if not effort.EVERY and turn % len(SAMPLING) != number:
                continue
            asked += 1
            arena.warm("cold", plain.probes[2])
            disturb = disturbance(plain, cluster, kind, turn)
            handle = arena.ask(plain.probes[2], SAMPLING[sampling], "first", disturb)
            assert cluster.got[handle] == plain.want[sampling][2], f"{sampling}, before turn {turn}"
        if kind == "preempt":
            assert cluster.engines[0].sched.report.counters()["preemptions_total"] > asked / 3
        else:
            assert cluster.suspended > asked / 3
    finally:
        cluster.close()
