"""--schedule-policy adaptive: forecasts, decisions, and what it settles on for known kinds of traffic."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from array import array

import pytest

from baton.config.simulated import StepModel
from baton.sched.policies import AdaptivePolicy, PolicyContext, PolicyParams, adaptive
from baton.sched.policies.adaptive import (
    CANDIDATES,
    OrderChoice,
    OrderForecast,
    QueueSnapshot,
    WaitingRequest,
    decide,
    forecast_in_parts,
    forecasts_in_parts,
    run_all,
    snapshot_in_parts,
)
from baton.sched.setup.limits import Limits
from baton.sched.state.tables import SchedulerState
from baton.sched.types.events import OrderReviewed
from baton.sched.types.sequence import Seq
from baton_ops.sim.node import NodeSetting, SimNode
from baton_ops.sim.trace import TraceRequest
from tests.support.sched.sched_sim import VOCAB, Node, request


def forecast(queue: QueueSnapshot, order: str) -> OrderForecast:
    return run_all(forecast_in_parts(queue, order))


def snapshot(
    *requests: WaitingRequest, cache_blocks: int = 100, rate: float = 100.0
) -> QueueSnapshot:
    return QueueSnapshot(rate, 10, cache_blocks, 0.0, 0.0, requests)


def waiting(
    tokens: int, *blocks: int, wait: float = 0.0, cached: int = 0, waited_tokens: int = 0
) -> WaitingRequest:
    return WaitingRequest(wait, tokens, 0.0, waited_tokens, blocks, cached)


def test_forecast_serves_one_after_the_other_at_the_measured_rate() -> None:
    queue = snapshot(waiting(800, wait=3.0), waiting(100, wait=2.0), waiting(100, wait=1.0))
    assert forecast(queue, "fcfs") == OrderForecast(
        pytest.approx((11 + 11 + 11) / 3), pytest.approx(11.0)
    )
    assert forecast(queue, "short-first") == OrderForecast(
        pytest.approx((3 + 3 + 13) / 3), pytest.approx(13.0)
    )


def test_forecast_knows_what_the_cache_holds_and_what_it_forgets() -> None:
    both = (waiting(35, 1, 2, 3), waiting(35, 7, 8, 9), waiting(35, 1, 2, 3))
    roomy, tight = snapshot(*both), snapshot(*both, cache_blocks=3)
    assert forecast(roomy, "fcfs").mean == pytest.approx((0.35 + 0.70 + 0.75) / 3)
    assert forecast(tight, "fcfs").mean == pytest.approx((0.35 + 0.70 + 1.05) / 3)
    assert forecast(tight, "lpm").mean == pytest.approx((0.35 + 0.40 + 0.75) / 3), (
        "1 and 3 before 2"
    )
    warm = snapshot(waiting(35, 1, 2, 3), waiting(35, 7, 8, 9, cached=2))
    assert forecast(warm, "lpm").mean == pytest.approx((0.15 + 0.50) / 2)


def test_forecast_by_response_ratio() -> None:
    queue = snapshot(waiting(200, waited_tokens=150), waiting(50, waited_tokens=50))
    assert forecast(queue, "hrrn").mean == pytest.approx((0.5 + 2.5) / 2), "150/200 < 50/50"


def test_equal_requests_have_equal_forecasts_and_keep_fcfs() -> None:
    found = run_all(
        forecasts_in_parts(
            snapshot(*[waiting(100, wait=10.0 - i, waited_tokens=1000 - 100 * i) for i in range(9)])
        )
    )
    assert len(set(found.values())) == 1
    assert decide(OrderChoice("fcfs"), found, 0.1) == OrderChoice("fcfs")


def costs(**mean: float) -> dict[str, OrderForecast]:
    return {name: OrderForecast(mean.get(name.replace("-", "_"), 10.0), 0.0) for name in CANDIDATES}


def test_rival_takes_over_when_it_is_clearly_better_twice_in_a_row() -> None:
    choice = OrderChoice("fcfs")
    steps = [
        (costs(lpm=9.5), OrderChoice("fcfs")),
        (costs(lpm=8.9), OrderChoice("fcfs", "lpm")),
        (costs(lpm=9.1), OrderChoice("fcfs")),
        (costs(lpm=8.9), OrderChoice("fcfs", "lpm")),
        (costs(hrrn=1.0), OrderChoice("fcfs", "hrrn")),
        (costs(hrrn=1.0), OrderChoice("hrrn")),
        (costs(short_first=1.0), OrderChoice("hrrn", "short-first")),
        (costs(short_first=1.0), OrderChoice("short-first")),
    ]
    for expected, after in steps:
        choice = decide(choice, expected, 0.1)
        assert choice == after


@pytest.mark.parametrize("seed", range(10))
def test_never_two_switches_within_two_windows(seed: int) -> None:
    rng = random.Random(seed)
    choice, switched = OrderChoice("fcfs"), []
    for _ in range(300):
        before, choice = (
            choice.active,
            decide(choice, {n: OrderForecast(rng.random(), rng.random()) for n in CANDIDATES}, 1),
        )
        switched.append(before != choice.active)
    assert any(switched)
    assert not any(a and b for a, b in itertools.pairwise(switched))


def test_tail_weight_decides_between_mean_and_p99() -> None:
    found = {name: OrderForecast(10.0, 10.0) for name in CANDIDATES} | {
        "lpm": OrderForecast(8.0, 30.0)
    }
    assert decide(OrderChoice("fcfs", "lpm"), found, 0.0).active == "lpm"
    assert decide(OrderChoice("fcfs", "lpm"), found, 0.5).active == "fcfs"


def test_snapshot_numbers_equal_prefixes_equally_and_namespaces_apart() -> None:
    state = SchedulerState(Limits(400, 4, 4, 100, 64))
    shared, other = [1] * 40, [2] * 40
    prompts = [(shared + [3] * 10, b""), (shared + [4] * 10, b""), (other, b""), (shared, b"t")]
    seqs = []
    for handle, (prompt, namespace) in enumerate(prompts):
        req = request(handle, prompt, 8)
        seqs.append(
            Seq(req.__class__(handle, "r", req.prompt, req.params, None, namespace), req.prompt, 8)
        )
    pages = state.memory.allocator.alloc(8)
    assert pages is not None
    state.memory.cache.insert(seqs[0].key, pages, b"")
    view = state.policy_context()
    made = run_all(
        snapshot_in_parts(seqs, view, PolicyParams(), lambda s: state.memory.cached_pages(s) * 4)
    )
    a, b, c, d = (r.blocks for r in made.requests)
    assert made.block_tokens == 16
    assert a[:2] == b[:2]
    assert a[2] != b[2], "the third block has a different end"
    assert not {*a} & {*c}
    assert not {*a} & {*d}
    assert [r.cached for r in made.requests] == [2, 2, 0, 0]
    assert made.cache_blocks == 100


def test_snapshot_and_review_are_bounded() -> None:
    state = SchedulerState(Limits(100_000, 16, 4, 10_000, 64))
    queue = []
    for handle in range(2000):
        prompt = array("i", [handle]) * 5000
        queue.append(
            Seq(
                request(handle, [1], 8).__class__(handle, "r", prompt, arrival=float(handle)),
                prompt,
                8,
            )
        )
    made = run_all(snapshot_in_parts(queue, state.policy_context(), PolicyParams(), lambda _: 0))
    assert len(made.requests) == adaptive.MAX_REQUESTS
    assert sum(len(r.blocks) for r in made.requests) <= adaptive.MAX_BLOCKS
    assert made.requests[0].tokens == 5000


# ---------------------------------------------------------------------- in the scheduler, on a virtual clock


def run(
    trace: list[TraceRequest], arrivals: list[float], pool_tokens: int
) -> tuple[list[str], SimNode]:
    """The orders that were active after each window of 5 s, and the node at the end."""
    lim = Limits(
        pool_tokens // 16, 16, 64, 10_000, 512, role="prefill", policy="adaptive",
        policy_params=PolicyParams(adaptive_window_secs=5.0, short_first_aging_tokens_per_s=10.0),
    )  # fmt: skip
    model = StepModel(
        step_ms=0.1, token_us=1000.0, weights_ms=0.1, attention_ns=0.0
    )  # 1000 tokens/s
    node = SimNode(NodeSetting(trace, arrivals, model), lim)
    active: list[str] = []
    drain = node.sched.drain_events

    def watch() -> list[object]:
        events = drain()
        active.extend(e.after for e in events if isinstance(e, OrderReviewed))
        return list(events)

    node.sched.drain_events = watch  # type: ignore[method-assign, assignment]
    node.run()
    return active, node


def switches(active: list[str]) -> int:
    return sum(a != b for a, b in zip(["fcfs", *active], active, strict=False))


def test_settles_on_lpm_where_prefixes_are_shared_and_the_cache_is_small() -> None:
    """Twelve documents of 1536 tokens, asked about in turn: by arrival each is forgotten before it is asked again."""
    rng = random.Random(1)
    trace, block = [], 1000
    for i in range(240):
        block += 1
        document = i % 12
        trace.append(
            TraceRequest(
                0.0,
                1536 + 512,
                rng.randint(1, 2000),
                (*(document * 3 + j for j in range(3)), block),
            )
        )
    active, _ = run(trace, [0.5 * i for i in range(240)], pool_tokens=6 * 2048)
    assert active[-1] == "lpm"
    assert switches(active) == 1


def test_settles_on_short_first_where_lengths_are_bimodal() -> None:
    rng = random.Random(2)
    lengths = [8192 if rng.random() < 0.15 else 128 for _ in range(300)]
    trace = [
        TraceRequest(0.0, n, 1, tuple(10_000 * i + j for j in range(-(-n // 512))))
        for i, n in enumerate(lengths)
    ]
    active, _ = run(trace, [0.9 * i for i in range(300)], pool_tokens=200_000)
    assert "short-first" in active
    assert switches(active) <= 2
    assert max(set(active), key=active.count) == "short-first"


def test_stays_on_fcfs_where_all_are_equal() -> None:
    trace = [TraceRequest(0.0, 1024, 1, (2 * i, 2 * i + 1)) for i in range(200)]
    active, node = run(trace, [0.9 * i for i in range(200)], pool_tokens=200_000)
    assert active
    assert set(active) == {"fcfs"}
    gauges = node.sched.gauges()
    assert gauges['schedule_policy_active{policy="fcfs"}'] == 1
    assert gauges['adaptive_policy{policy="fcfs"}'] == 1
    assert gauges['adaptive_policy{policy="lpm"}'] == 0


def test_decision_is_replayed_from_its_line() -> None:
    lim = Limits(
        400, 4, 2, 1000, 16, policy="adaptive", policy_params=PolicyParams(adaptive_window_secs=1.0)
    )
    node = Node(lim, depth=1)
    rng = random.Random(3)
    lines = []
    for handle in range(60):
        node.sched.add(
            request(handle, [rng.randrange(VOCAB) for _ in range(rng.choice([4, 200]))], 4)
        )
    for now in range(1, 40):
        plan = node.sched.plan(float(now * 2))
        for event in node.sched.drain_events():
            if isinstance(event, OrderReviewed):
                lines.append(event.line())
        if plan is not None:
            node.sched.commit(plan, node.device.execute(plan))
    assert len(lines) > 10
    decided = set()
    for line in lines:
        assert "\n" not in line
        then, today, expected = adaptive.replay_line(line)
        assert then == today
        assert set(expected) == set(CANDIDATES)
        decided.add(then.active)
    assert len(decided) > 1, "the trace makes it switch"
    changed = json.loads(lines[0]) | {"tail_weight": 0.0}
    changed["queue"]["short_first_aging"] = 0.0
    changed["before"] = {"active": "fcfs", "rival": "short-first"}
    assert adaptive.replay_line(json.dumps(changed))[1].active == "short-first"


def test_empty_queue_breaks_the_row() -> None:
    policy = AdaptivePolicy(
        PolicyParams(adaptive_window_secs=1.0, short_first_aging_tokens_per_s=0.0)
    )
    state = SchedulerState(Limits(100, 4, 4, 100, 64))
    at = state.policy_context()

    def view(now: float) -> PolicyContext:
        return PolicyContext(now, 0, at.index, 100.0, 0, at.answer_share, 400)

    queue = []
    for handle, length in enumerate([200, 4, 4, 4]):
        req = request(handle, [handle] * length, 1)
        queue.append(Seq(req, req.prompt, 1))
    policy.review(queue, view(0.0))
    first = policy.review(queue, view(1.0))
    assert first is not None
    assert policy.choice == OrderChoice("fcfs", "short-first")
    assert policy.review(queue[:1], view(2.0)) is None
    assert policy.choice == OrderChoice("fcfs")
    assert policy.review(queue, view(2.5)) is None, "the window is not over"


def test_long_queue_is_reviewed_over_many_plans_as_it_was_at_the_first() -> None:
    state = SchedulerState(Limits(100_000, 16, 4, 10_000, 64))
    rng = random.Random(4)
    queue = []
    for handle in range(600):
        plain = request(handle, [rng.randrange(VOCAB) for _ in range(rng.choice([40, 900]))], 4)
        queue.append(
            Seq(dataclasses.replace(plain, arrival=handle / 100), array("i", plain.prompt), 4)
        )
    policy = AdaptivePolicy(PolicyParams(adaptive_window_secs=1.0))
    at = state.policy_context()
    now = dataclasses.replace(at, now=1.0)
    once = run_all(policy._review_in_parts(queue, now))
    assert once is not None
    policy = AdaptivePolicy(PolicyParams(adaptive_window_secs=1.0))
    assert policy.review(queue, at) is None
    assert policy.review(queue, dataclasses.replace(at, now=0.99)) is None, "the window is not over"
    plans = 0
    reviewed = None
    while reviewed is None:
        reviewed = policy.review(queue, now)
        plans += 1
        queue.append(queue[0])  # who joins later does not count
        assert plans < 400
    assert plans > 50
    assert reviewed.line() == once.line()
    assert policy.review(queue, dataclasses.replace(at, now=1.99)) is None, (
        "the next window is not over"
    )
    after_a_long_step = policy.review(queue, dataclasses.replace(at, now=20.0))
    assert after_a_long_step is not None, "1 % of 18 s is time for all of it"
