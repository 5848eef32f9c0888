"""short-first and hrrn on two lengths, the production scheduler on a virtual clock: means fall, the tail is bounded."""

from __future__ import annotations

import functools
import random

import pytest

from baton.config.simulated import StepModel
from baton.sched.policies import PolicyParams
from baton.sched.setup.limits import Limits
from baton_ops.sim.node import NodeSetting, SimNode
from baton_ops.sim.report import percentile, ttft_values
from baton_ops.sim.trace import TraceRequest

SHORT, LONG, SHARE_LONG = 128, 8192, 0.15
TOKENS_PER_SEC = 1000.0
AGING = 500.0
SEEDS = [1, pytest.param(2, marks=pytest.mark.slow)]


def bimodal(
    seed: int, rho: float = 0.8, count: int = 3000
) -> tuple[list[TraceRequest], list[float]]:
    rng = random.Random(seed)
    lengths = [LONG if rng.random() < SHARE_LONG else SHORT for _ in range(count)]
    mean_secs = sum(lengths) / count / TOKENS_PER_SEC
    at, arrivals = 0.0, []
    for _ in lengths:
        at += rng.expovariate(rho / mean_secs)
        arrivals.append(at)
    trace = [
        TraceRequest(0.0, n, 1, tuple(100 * i + j for j in range(-(-n // 512))))
        for i, n in enumerate(lengths)
    ]
    return trace, arrivals


@functools.cache
def run(policy: str, seed: int) -> list[float]:
    """TTFTs, sorted."""
    trace, arrivals = bimodal(seed)
    lim = Limits(
        40_000, 16, 8, 100_000, 512, role="prefill", policy=policy, radix_cache=False,
        policy_params=PolicyParams(short_first_aging_tokens_per_s=AGING, short_first_output_weight=0.0),
    )  # fmt: skip
    model = StepModel(
        step_ms=0.01, token_us=1e6 / TOKENS_PER_SEC, weights_ms=0.01, attention_ns=0.0
    )
    node = SimNode(NodeSetting(trace, arrivals, model), lim)
    node.run()
    return sorted(ttft_values(node.records))


@pytest.mark.parametrize("seed", SEEDS)
def test_short_first_beats_fcfs_in_the_mean_and_bounds_the_tail(seed: int) -> None:
    fcfs, short = run("fcfs", seed), run("short-first", seed)
    assert len(fcfs) == len(short) == 3000
    assert sum(short) < 0.75 * sum(fcfs)
    # A long request is overtaken only by what arrives within (LONG - SHORT) / AGING seconds, in which at most the
    # same time's work is done for others, and that again while it is done: 1 / (1 - rho) times in the mean.
    overtaken_secs = (LONG - SHORT) / AGING
    assert percentile(short, 0.999) < percentile(fcfs, 0.999) + overtaken_secs / (1 - 0.8)


@pytest.mark.parametrize("seed", SEEDS)
def test_hrrn_gains_without_a_parameter(seed: int) -> None:
    fcfs, hrrn = run("fcfs", seed), run("hrrn", seed)
    assert sum(hrrn) < 0.9 * sum(fcfs)
    assert percentile(hrrn, 0.999) < 1.5 * percentile(fcfs, 0.999)
