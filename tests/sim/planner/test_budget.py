"""Budgets: what a step may hold in tokens and time, and what a request must find free before it is admitted."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import ConfigError, build_config, parse_config
from baton.sched.memory.demand import KnownAnswer, peak_growth
from baton.sched.metrics.step_time import StepTime, attended_pairs
from baton.sched.setup import from_config
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import ForwardMode, StepPlan
from baton.sched.types.sequence import is_partial, partial_of
from tests.support.effort import seeds
from tests.support.sched.sched_sim import VOCAB, Node, reference, request

# ---------------------------------------------------------------------- known lengths


def pages_needed(answers: list[KnownAnswer], page: int) -> int:
    """Step by step: the definition of peak_growth."""
    peak = 0
    for step in range(1, max((a.to_come for a in answers), default=0) + 1):
        now = 0
        for a in answers:
            if step > a.to_come + 1:
                now -= a.held_alone
            else:
                now += -(-(a.tokens + min(step, a.to_come)) // page) - -(-a.tokens // page)
        peak = max(peak, now)
    return peak


@given(
    st.lists(
        st.builds(KnownAnswer, st.integers(1, 40), st.integers(1, 30), st.integers(0, 10)),
        max_size=12,
    ),
    st.sampled_from([1, 2, 4, 16]),
)
def test_peak_growth_equals_walking_through_the_steps(
    answers: list[KnownAnswer], page: int
) -> None:
    assert peak_growth(answers, page) == pages_needed(answers, page)


@pytest.mark.parametrize("seed", seeds(20))
def test_requests_of_known_length_are_never_retracted(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 4])
    limits = Limits(rng.randint(16, 60), page, 16, 1000, 64, schedule_conservativeness=0.05)
    node = Node(limits, depth=rng.choice([1, 2]))
    want = {}
    for handle in range(60):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        answer = rng.randint(1, min(30, node.limits.capacity_tokens - len(prompt)))
        node.sched.add(request(handle, prompt, answer, ignore_eos=True))
        want[handle] = reference(request(handle, prompt, answer).prompt, answer, True)
        for _ in range(rng.randint(0, 3)):
            node.step()
    node.run()
    assert node.outputs == want
    assert node.sched.report.counters()["retractions_total"] == 0


def test_known_endings_let_a_request_in_that_the_sum_of_all_growth_would_keep_out() -> None:
    # Of 20 pages of 1 token, request 0 will take 14 in the end, 1 takes 5 and is gone before, 2 takes 5.
    node = Node(Limits(20, 1, 4, 10, 64, radix_cache=False), depth=1)
    node.sched.add(request(0, [1, 2, 3, 4], 10, ignore_eos=True))
    node.sched.add(request(1, [2], 4, ignore_eos=True))
    node.step()
    node.sched.add(request(2, [3, 3], 3, ignore_eos=True))
    node.step()
    assert node.sched.report.counts()["running"] == 3
    node.run()
    assert node.sched.report.counters()["retractions_total"] == 0


# ---------------------------------------------------------------------- watermark, clip


def test_watermark_keeps_pages_back_beside_others_but_never_from_a_lone_request() -> None:
    def running(watermark: float) -> int:
        node = Node(Limits(20, 1, 4, 10, 64, radix_cache=False, watermark=watermark), depth=1)
        node.sched.add(request(0, [1] * 8, 2, ignore_eos=True))
        node.sched.add(request(1, [2] * 8, 2, ignore_eos=True))
        node.step()
        return node.sched.report.counts()["running"]

    assert running(0.0) == 2
    assert running(0.1) == 1
    alone = Node(Limits(20, 1, 4, 10, 64, watermark=0.5), depth=1)
    alone.sched.add(request(0, [1] * 17, 2, ignore_eos=True))
    alone.run()
    assert len(alone.outputs[0]) == 2


def test_clip_bounds_what_an_answer_is_expected_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def running(clip: int) -> int:
        node = Node(Limits(100, 1, 4, 10, 64, radix_cache=False, clip_max_new_tokens=clip), depth=1)
        for handle in range(2):
            req = request(handle, [handle] * 8, 90)
            node.sched.add(
                dataclasses.replace(req, params=dataclasses.replace(req.params, stop_token_ids=()))
            )
        node.step()
        return node.sched.report.counts()["running"]

    assert (running(4096), running(30)) == (1, 2)
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "77")
    assert from_config.limits(build_config({}), 100).clip_max_new_tokens == 77
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "many")
    with pytest.raises(
        ConfigError, match="SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION: --clip-max-new-tokens many: "
    ):
        build_config({})


# ---------------------------------------------------------------------- steps sized by time


class Clockwork:
    """A device whose steps take base + rows + tokens + pairs seconds, with weights of its own."""

    base, row, token, pair = 0.002, 0.0001, 0.0001, 2e-7

    def seconds(self, plan: StepPlan) -> float:
        chunks = plan.rows[plan.num_decode :]
        return (
            self.base
            + self.row * plan.num_decode
            + self.token * sum(r.n for r in chunks)
            + self.pair * sum(attended_pairs(r.start, r.n) for r in chunks)
        )


def run_timed(node: Node, clockwork: Clockwork) -> list[tuple[StepPlan, float]]:
    """Run to the end, telling the scheduler what each step took."""
    steps = []
    while (plan := node.sched.plan()) is not None:
        node.absorb()
        node.sched.commit(plan, node.device.execute(plan))
        seconds = clockwork.seconds(plan)
        node.sched.observe(plan, seconds)
        node.absorb()
        steps.append((plan, seconds))
    return steps


@given(st.integers(0, 2**32), st.floats(0, 1e-2), st.floats(1e-6, 1e-3), st.floats(0, 1e-6))
def test_step_time_predicts_a_device_that_is_linear_in_rows_tokens_and_pairs(
    seed: int, base: float, token: float, pair: float
) -> None:
    rng = random.Random(seed)
    clockwork = Clockwork()
    clockwork.base, clockwork.row, clockwork.token, clockwork.pair = base, base / 100, token, pair
    node = Node(Limits(4000, 4, 8, 100, 256, radix_cache=False), depth=1)
    for handle in range(8):
        node.sched.add(
            request(
                handle,
                [handle % VOCAB] * rng.randint(500, 1500),
                rng.randint(5, 40),
                ignore_eos=True,
            )
        )
    times = StepTime(256)
    for plan, seconds in run_timed(node, clockwork):
        times.observe(plan, seconds)
    for start, n in ((0, 256), (1000, 64)):
        want = token * n + pair * attended_pairs(start, n)
        assert times.chunk_seconds(start, n) == pytest.approx(want, rel=0.35, abs=1.5 * base)
        fits = times.chunk_tokens(start, want)
        assert times.chunk_seconds(start, fits) <= want * 1.000001
        assert times.chunk_seconds(start, fits + 1) >= want * 0.999999


@pytest.mark.parametrize("base", [0.0, 0.005])
def test_prefill_rate_is_learned_beside_decode_rows_and_kept_through_short_prompts(
    base: float,
) -> None:
    """Steps with decode rows teach it, and the fixed time of many short steps does not displace long prompts."""
    clockwork = Clockwork()
    clockwork.base, clockwork.row, clockwork.token, clockwork.pair = base, 0.0, 0.0001, 0.0
    node = Node(Limits(4000, 4, 8, 200, 256, radix_cache=False), depth=1)
    node.sched.add(request(0, [1] * 8, 400, ignore_eos=True))  # decodes all the time
    for _ in range(20):
        plan = node.sched.plan()
        assert plan is not None
        node.sched.commit(plan, node.device.execute(plan))
        node.sched.observe(plan, clockwork.seconds(plan))
    node.sched.add(request(1, [2] * 2560, 1, ignore_eos=True))
    for handle in range(2, 150):
        node.sched.add(request(handle, [handle % VOCAB] * 8, 1, ignore_eos=True))
    steps = run_timed(node, clockwork)
    assert sum(plan.num_decode > 0 and len(plan.rows) > plan.num_decode for plan, _ in steps) > 10
    assert node.sched.report.load().prefill_tokens_per_s == pytest.approx(10_000, rel=0.1)


def test_long_prompt_leaves_tokens_of_each_step_to_short_ones_behind_it() -> None:
    """--long-prefill-token-threshold, on the flags' way into the scheduler."""
    flags = build_config(
        {"long_prefill_token_threshold": 128, "chunked_prefill_size": 256, "page_size": 16}
    )
    node = Node(from_config.limits(flags, 1000), depth=1)
    node.sched.add(request(0, [1] * 2000, 4))
    for handle in range(1, 4):
        node.sched.add(request(handle, [1 + handle] * 40, 4))
    plan = node.sched.plan()
    assert plan is not None
    assert [(row.handle, row.n) for row in plan.rows] == [(0, 128), (1, 40), (2, 40), (3, 40)]


@pytest.mark.parametrize("policy", ["fcfs", "srpt-aging"])
def test_without_chunking_every_prompt_is_computed_in_one_step(policy: str) -> None:
    values = {
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 100,
        "page_size": 4,
        "schedule_policy": policy,
        "srpt_aging": 0.0,
    }
    node = Node(from_config.limits(build_config(values), 1000), depth=1)
    lengths = [60, 30, 50, 300, 20]
    for handle, length in enumerate(lengths):
        node.sched.add(request(handle, [handle % VOCAB] * length, 1, ignore_eos=True))
    seen: list[int] = []
    while len(seen) < len(lengths):
        plan = node.sched.plan()
        assert plan is not None
        rows = [row for row in plan.rows if row.start == 0]
        assert [row.n for row in rows] == [lengths[row.handle] for row in rows]
        assert len(rows) == 1 or sum(row.n for row in rows) <= 100
        seen += [row.handle for row in rows]
        node.sched.commit(plan, node.device.execute(plan))
        node.absorb()
    assert seen == ([0, 1, 2, 3, 4] if policy == "fcfs" else [4, 1, 2, 0, 3])


@pytest.mark.parametrize("budget", [100, 90])
def test_request_is_admitted_only_into_a_step_that_computes_some_of_it(budget: int) -> None:
    values = {"chunked_prefill_size": -1, "max_prefill_tokens": budget, "page_size": 4}
    node = Node(from_config.limits(build_config(values), 1000), depth=1)
    for handle in (0, 1):
        node.sched.add(request(handle, [handle] * 50, 4, ignore_eos=True))
    plan = node.sched.plan()
    assert plan is not None
    admitted = 2 if budget == 100 else 1
    assert len(plan.rows) == len(plan.admitted) == admitted
    assert node.sched.report.counts()["running"] == admitted


def test_vllm_names_are_aliases() -> None:
    parsed = parse_config(["--max-num-seqs", "7", "--max-num-batched-tokens", "64"])
    assert (parsed.max_running_requests, parsed.chunked_prefill_size) == (7, 64)


@pytest.mark.parametrize(
    "flag", ["enable_dynamic_chunking", "step_target_ms", "long_prefill_token_threshold"]
)
def test_without_chunking_flags_about_chunks_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="--chunked-prefill-size -1 splits no prompt"):
        build_config({"chunked_prefill_size": -1, flag: 64})


def test_step_target_keeps_steps_within_the_target_and_every_prompt_moving() -> None:
    clockwork = Clockwork()
    target = 0.02
    node = Node(Limits(20000, 4, 8, 100, 4096, step_target_secs=target), depth=1)
    for handle in range(3):
        node.sched.add(request(handle, [handle + 1] * 9, 400, ignore_eos=True))
    for handle in range(3, 6):
        node.sched.add(request(handle, [handle % VOCAB, handle] * 4000, 4, ignore_eos=True))
    steps = run_timed(node, clockwork)
    learned = [(plan, seconds) for plan, seconds in steps[10:] if plan.num_decode < len(plan.rows)]
    assert len(learned) > 20
    for plan, seconds in learned:
        assert seconds <= target * 1.1
        assert any(row.n >= 4 for row in plan.rows[plan.num_decode :]), (
            "at least a page of prompt per step"
        )
    full = [seconds for plan, seconds in learned if plan.stopped_by.value == "token_budget"]
    assert min(full) >= target * 0.8, "the target is used, not only kept"
    assert set(node.finished) == set(range(6))


def test_dynamic_chunking_shrinks_chunks_as_their_context_grows() -> None:
    clockwork = Clockwork()
    for dynamic in (False, True):
        node = Node(Limits(20000, 4, 8, 100, 512, enable_dynamic_chunking=dynamic), depth=1)
        node.sched.add(request(0, [1, 2, 3] * 5000, 1, ignore_eos=True))
        steps = run_timed(node, clockwork)
        lengths = [plan.rows[0].n for plan, _ in steps][:-1]
        times = [seconds for _, seconds in steps][:-1]
        if dynamic:
            assert lengths[0] == 512
            assert lengths[-1] < 256
            assert max(times[3:]) < 1.25 * min(times[3:])
        else:
            assert set(lengths) == {512}
            assert max(times) > 1.4 * min(times)


def test_one_page_moves_even_when_decode_alone_exceeds_the_target() -> None:
    node = Node(Limits(2000, 4, 8, 100, 512, step_target_secs=1e-6), depth=1)
    node.sched.add(request(0, [1] * 9, 30, ignore_eos=True))
    node.sched.add(request(1, [2] * 40, 1, ignore_eos=True))
    steps = run_timed(node, Clockwork())
    assert {
        row.n for plan, _ in steps for row in plan.rows if row.start < 9 or row.handle == 1
    } <= {1, 4}
    assert set(node.finished) == {0, 1}


# ---------------------------------------------------------------------- prefill first


def modes(limits: Limits) -> list[ForwardMode]:
    node = Node(limits, depth=1)
    node.sched.add(request(0, [1] * 4, 30, ignore_eos=True))
    node.step()
    node.step()
    for handle in range(1, 7):
        node.sched.add(request(handle, [handle % VOCAB] * 64, 1, ignore_eos=True))
    return [plan.mode for plan, _ in run_timed(node, Clockwork())]


def test_prefill_first_alternates_unless_mixed_chunk_or_a_longer_gap_is_allowed() -> None:
    limits = Limits(2000, 4, 8, 100, 64, prefill_first=True, radix_cache=False)
    extend, decode, mixed = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
    assert modes(limits)[:4] == [extend, decode, extend, decode]
    assert modes(dataclasses.replace(limits, enable_mixed_chunk=True))[:3] == [mixed, mixed, mixed]
    assert modes(dataclasses.replace(limits, max_decode_gap_secs=10.0))[:6] == [extend] * 6
    # A step of 64 tokens takes 8.4 ms, of which two fit into the gap; before the first one 32 ms are assumed.
    gap = modes(dataclasses.replace(limits, max_decode_gap_secs=0.020))
    assert gap[:6] == [extend, decode, extend, extend, decode, extend]


def test_max_decode_gap_without_prefill_first_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-decode-gap-ms 5.0: decode rows wait only with --prefill-first"
    ):
        build_config({"max_decode_gap_ms": 5.0})
    for field, value in (("watermark", 0.6), ("step_target_ms", -1.0), ("clip_max_new_tokens", 0)):
        with pytest.raises(ConfigError, match=rf"--{field.replace('_', '-')} {value}"):
            build_config({field: value})


@pytest.mark.parametrize("seed", range(10))
def test_total_growth_is_the_sum_of_growth_and_partial_of_a_filter(seed: int) -> None:
    rng = random.Random(seed)
    node = Node(
        Limits(400, rng.choice([1, 4]), 8, 1000, 16, clip_max_new_tokens=rng.choice([3, 4096])),
        depth=2,
    )
    partial = 0
    for handle in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        node.sched.add(request(handle, prompt, rng.randint(1, 60), ignore_eos=rng.random() < 0.5))
        node.step()
        memory = node.probe.memory
        running = node.probe.running.values()
        assert memory.total_growth(running) == sum(map(memory.growth, running))
        assert partial_of(running) == [seq for seq in running if is_partial(seq)]
        partial += len(partial_of(running))
    assert partial
