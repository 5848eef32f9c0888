"""`baton simulate`: the virtual clock against hand-made schedules and queueing theory, traces, flags, the command."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.config import EngineConfig
from baton.config.flags import flags_table
from baton.config.simulated import BLOCK_TOKENS, PRESETS, StepModel, scale_tokens
from baton.errors import ConfigError
from baton.sched.policies import POLICIES
from baton.sched.setup.from_config import limits
from baton.sched.setup.limits import Limits
from baton_ops.cli import main
from baton_ops.sim import main as command
from baton_ops.sim import trace as traces
from baton_ops.sim.chart import cdf_svg
from baton_ops.sim.node import NodeSetting, RequestOutcome, SimNode
from baton_ops.sim.report import SummaryStat, format_table, summarize_run
from baton_ops.sim.trace import TraceRequest

MS_PER_TOKEN = StepModel(
    step_ms=0,
    token_us=1000,
    weights_ms=0,
    attention_ns=0,
    kv_read_ns=0,
    transfer_ms=1000,
    transfer_us=0,
)
"""A step takes a millisecond per token and nothing else; D needs a second to pull a prompt."""


def request(
    at_ms: float, prompt: int, answer: int = 1, blocks: tuple[int, ...] | None = None
) -> TraceRequest:
    made = blocks if blocks is not None else tuple(range(-(-prompt // BLOCK_TOKENS)))
    return TraceRequest(at_ms, prompt, answer, made)


def budgets(**changes: Any) -> Limits:
    base = {
        "num_pages": 4096,
        "page_size": 16,
        "max_running_requests": 64,
        "max_queued_requests": 10_000,
    }
    return Limits(**(base | {"step_tokens": 64, "role": "prefill"} | changes))


def node(
    trace: list[TraceRequest],
    *,
    budget: Limits | None = None,
    model: StepModel = MS_PER_TOKEN,
    **more: Any,
) -> SimNode:
    setting = NodeSetting(
        trace=trace, arrivals=[r.timestamp_ms / 1e3 for r in trace], model=model, **more
    )
    return SimNode(setting, budget or budgets())


def ran(trace: list[TraceRequest], **more: Any) -> SimNode:
    made = node(trace, **more)
    made.run()
    return made


def random_trace(seed: int, count: int = 60) -> list[TraceRequest]:
    """Little trees of shared blocks, lengths from one token to five blocks, bursts."""
    rng = random.Random(seed)
    at, made = 0.0, []
    for _ in range(count):
        at += rng.choice([0, 0, 50, 400])
        prompt = rng.randint(1, 5 * BLOCK_TOKENS)
        blocks = [rng.randrange(3)]
        while len(blocks) * BLOCK_TOKENS < prompt:
            blocks.append(
                3 * blocks[-1] + 3 + rng.randrange(3)
            )  # a ternary tree: a number has one prefix
        made.append(
            TraceRequest(at, prompt, rng.randint(1, 40), tuple(blocks), rng.choice([None, 1, 50]))
        )
    return made


# ---------------------------------------------------------------------- the clock


def test_ttft_of_a_tiny_trace_without_overlap() -> None:
    """A's first 64 tokens until 64 ms; its other 36 with 16 of B's (28 fit: whole pages) until 116; B's rest to 132."""
    made = ran(
        [
            request(0, 100, blocks=(0,)),
            request(10, 32, blocks=(1,)),
            request(1000, 100, blocks=(0,)),
        ],
        overlap=False,
    )
    assert [r.ttft for r in made.records] == pytest.approx([0.116, 0.122, 0.004])
    assert [r.wait for r in made.records] == pytest.approx([0.0, 0.054, 0.0])
    assert [r.cached_tokens for r in made.records] == [0, 0, 96], (
        "six whole pages of C's prompt are A's"
    )
    assert made.steps == 4


def test_ttft_of_a_tiny_trace_with_overlap() -> None:
    """A's second chunk is planned before B is there, so B starts alone when it ends."""
    made = ran([request(0, 100, blocks=(0,)), request(10, 32, blocks=(1,))], overlap=True)
    assert [r.ttft for r in made.records] == pytest.approx([0.100, 0.122])
    assert [r.started for r in made.records] == pytest.approx([0.0, 0.100])


def test_lease_keeps_pages_until_the_transfer_is_over() -> None:
    """Eight pages: A's seven are free again a second after its first token, and only then B may start."""
    trace = [request(0, 100, blocks=(0,)), request(0, 100, blocks=(1,))]
    made = ran(trace, overlap=False, budget=budgets(num_pages=8))
    assert made.records[0].ttft == pytest.approx(0.100)
    assert made.records[1].started == pytest.approx(1.100)


def test_decoding_waits_for_weights_and_reads_its_context() -> None:
    model = StepModel(step_ms=1, token_us=1000, weights_ms=10, attention_ns=0, kv_read_ns=1e6)
    made = ran([request(0, 32, answer=3)], model=model, overlap=False, budget=budgets(role="null"))
    record = made.records[0]
    assert record.ttft == pytest.approx(0.033), "1 ms + 32 tokens"
    assert record.finished == pytest.approx(0.033 + (0.011 + 0.033) + (0.011 + 0.034)), (
        "contexts of 33 and 34 tokens"
    )
    assert record.tpot == pytest.approx((0.011 + 0.033 + 0.011 + 0.034) / 2)


def test_attention_counts_each_pair_of_tokens_once_however_a_prompt_is_cut() -> None:
    model = dataclasses.replace(MS_PER_TOKEN, attention_ns=1e5)
    for chunk in (16, 64, 512):
        made = ran([request(0, 100)], model=model, overlap=False, budget=budgets(step_tokens=chunk))
        assert made.records[0].ttft == pytest.approx(0.1 + 1e-4 * 100 * 101 / 2)
    assert model.prefill_seconds(60, 40) == pytest.approx(0.06 + 1e-4 * sum(range(41, 101)))


@pytest.mark.parametrize("role", ["prefill", "null"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_clock_runs_forward_pages_balance_and_everyone_is_answered(policy: str, role: str) -> None:
    made = node(
        random_trace(5), budget=budgets(policy=policy, role=role, num_pages=220, step_tokens=256)
    )
    seen: list[float] = []

    def watch(at: SimNode) -> None:
        seen.append(at.now)
        at.sched.ledger()

    made.run(watch)
    assert seen == sorted(seen)
    assert made.sched.is_idle
    for record, asked in zip(made.records, made.setting.trace, strict=True):
        assert record.outcome is RequestOutcome.COMPLETED
        assert record.started is not None
        assert record.first_token is not None
        assert record.finished is not None
        assert record.arrival <= record.started < record.first_token <= record.finished
        assert record.answer_tokens == (1 if role == "prefill" else asked.output_length)


def test_same_seed_same_decisions_other_seed_others() -> None:
    def summary(**more: Any) -> dict[str, object]:
        made = ran(random_trace(1), budget=budgets(policy="random", role="null"), **more)
        return dataclasses.asdict(summarize_run("random", made, 1.0, 0.0))

    assert summary() == summary()
    assert summary(jitter=0.3, seed=1) == summary(jitter=0.3, seed=1)
    assert summary(jitter=0.3, seed=1)["ttft"] != summary(jitter=0.3, seed=2)["ttft"]


def test_deadlines_and_limits_end_requests_and_are_counted() -> None:
    """A never ends in time, B waits behind it too long, C finds the queue full."""
    trace = [
        request(0, 2000, blocks=(0, 1, 2, 3)),
        request(1, 600, blocks=(4, 5)),
        request(2, 10, blocks=(6,)),
    ]
    made = ran(
        trace,
        overlap=False,
        timeout_secs=1.0,
        budget=budgets(max_queued_requests=1, prefill_max_requests=1),
    )
    assert [r.outcome for r in made.records] == [
        RequestOutcome.TIMED_OUT,
        RequestOutcome.TIMED_OUT,
        RequestOutcome.REFUSED,
    ]
    report = summarize_run("fcfs", made, 1.0, 0.0)
    assert (report.completed, report.refused, report.timed_out, report.ttft, report.in_time) == (
        0,
        1,
        2,
        None,
        0.0,
    )
    assert (
        "1 refused, 2 timed out (no TTFT above without a first token: see `in time`)"
        in format_table([report])
    )


@pytest.mark.parametrize("columns", [80, 120])
def test_table_is_divided_where_the_terminal_is_narrow(columns: int) -> None:
    made = ran([request(0, 64), request(1, 64)])
    summary = summarize_run("srpt-aging", made, 5.0, 0.1)
    whole = format_table([summary, summary]).splitlines()
    narrow = format_table([summary, summary], columns)
    assert max(map(len, narrow.splitlines())) <= columns < len(whole[0])
    parts = [part.splitlines() for part in narrow.split("\n\n")]
    assert all(line.startswith("srpt-aging") for part in parts for line in part[1:3])
    cells = [word for part in parts for word in part[0].split()[1:]]
    assert cells == whole[0].split()[1:], "each column once, in its order"


@pytest.mark.slow
def test_mean_wait_is_that_of_queueing_theory() -> None:
    """One prompt at a time, Poisson arrivals: M/G/1, so W = rate * E[S^2] / (2 (1 - rho)) (Pollaczek, Khinchine)."""
    rng = random.Random(3)
    sizes, rho, count = (20, 60, 400), 0.7, 30_000
    mean, square = sum(sizes) / 3e3, sum(s * s for s in sizes) / 3e6
    at, trace = 0.0, []
    for i in range(count):
        at += rng.expovariate(rho / mean) * 1e3
        trace.append(request(at, rng.choice(sizes), blocks=(i,)))
    budget = budgets(
        prefill_max_requests=1, step_tokens=512, radix_cache=False, page_size=128, num_pages=100_000
    )
    made = ran(
        trace, overlap=False, model=dataclasses.replace(MS_PER_TOKEN, transfer_ms=1), budget=budget
    )
    report = summarize_run("fcfs", made, 1.0, 0.0)
    assert report.wait is not None
    assert report.wait.mean == pytest.approx(rho / mean * square / (2 * (1 - rho)), rel=0.08)
    assert report.utilization == pytest.approx(rho, rel=0.03)


# ---------------------------------------------------------------------- traces


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [7, 9]}'


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "this is list"),
        ('{"input_length": 1, "output_length": 1}', "timestamp is None"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp is nan"),
        (
            f'{{"timestamp": 1{"0" * 400}, "input_length": 1, "output_length": 1}}',
            "timestamp is 10",
        ),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', "timestamp is True"),
        ('{"timestamp": 6, "input_length": 1e9, "output_length": 1}', "input_length is 1000000000"),
        ('{"timestamp": 6, "input_length": 1, "output_length": 99999999}', "1 to 16777216"),
        (
            '{"timestamp": 6, "input_length": 6, "output_length": 1, "priority": 2147483648}',
            "priority is 2147483648",
        ),
        ("[" * 100_000, "not JSON"),
        ('{"timestamp": 4, "input_length": 1, "output_length": 1}', "before the previous line's 5"),
        ('{"timestamp": 6, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": 6, "input_length": 1, "output_length": "3"}', "output_length is '3'"),
        (
            '{"timestamp": 6, "input_length": 600, "output_length": 1, "hash_ids": [7]}',
            "2 blocks of 512 expected",
        ),
        (
            '{"timestamp": 6, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}',
            "not a list of integers",
        ),
        (
            '{"timestamp": 6, "input_length": 6, "output_length": 1, "priority": 1.5}',
            "priority is 1.5",
        ),
    ],
)
def test_bad_line_is_named_by_its_number(line: str, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", line)
    with pytest.raises(ConfigError) as error:
        traces.read_trace(path)
    assert complaint in error.value.message
    assert "t.jsonl, line 3: " in error.value.message
    assert len(traces.read_trace(path, limit=1)) == 1, "lines beyond the limit are not looked at"


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        traces.read_trace(write(tmp_path / "empty.jsonl"))
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="cannot be read after line 0"):
        traces.read_trace(broken)
    with pytest.raises(ConfigError, match="mooncake_conversation_first30min"):
        traces.locate_trace("no-such-trace")


def test_equal_stamps_are_spread_over_the_gap_to_the_next() -> None:
    stamps = [1000, 1000, 1000, 4000, 9000, 9000]
    assert traces.arrival_times([request(at, 1) for at in stamps]) == pytest.approx(
        [0, 1, 2, 3, 8, 10.5]
    )


@pytest.mark.parametrize("scale", [1, 8, 512])
def test_tokens_are_equal_exactly_where_blocks_behind_equal_prefixes_are(scale: int) -> None:
    whole, partial = request(0, 1536, blocks=(1, 2, 3)), request(0, 1000, blocks=(1, 2))
    other, late = request(0, 1536, blocks=(1, 4, 3)), request(0, 512, blocks=(2,))
    a, b, c, d = (traces.prompt_tokens(r, scale) for r in (whole, partial, other, late))
    assert [len(t) for t in (a, b, c, d)] == [
        scale_tokens(n, scale) for n in (1536, 1000, 1536, 512)
    ]
    assert a[: len(b)] == b
    per_block = BLOCK_TOKENS // scale
    assert a[:per_block] == c[:per_block]
    assert not set(a[per_block : 2 * per_block]) & set(c[per_block : 2 * per_block])
    assert a[0] != d[0]
    assert traces.answer_token(0) > max(a)


def test_prompts_without_ids_share_nothing(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 2}'
    first, second, known = traces.read_trace(write(tmp_path / "t.jsonl", line, line, GOOD))
    assert len({*first.blocks, *second.blocks, *known.blocks}) == 6


def test_equal_ids_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    other = GOOD.replace("[7, 9]", "[8, 9]")
    first, again, different = traces.read_trace(write(tmp_path / "t.jsonl", GOOD, GOOD, other))
    assert first.blocks == again.blocks
    assert not set(first.blocks) & set(different.blocks)


def test_hits_are_the_trees_own_and_equal_the_yardstick_when_nothing_is_evicted() -> None:
    trace = [
        dataclasses.replace(r, timestamp_ms=i * 10_000.0) for i, r in enumerate(random_trace(9, 40))
    ]
    trace = [dataclasses.replace(r, input_length=len(r.blocks) * BLOCK_TOKENS) for r in trace]
    made = ran(trace, budget=budgets(step_tokens=4096))
    expected = traces.cached_in_arrival_order(trace, 1_000_000)
    assert [r.cached_tokens for r in made.records] == [n - n % 16 for n in expected]
    assert sum(expected) > 10_000


def test_yardstick_forgets_the_least_recently_used_blocks() -> None:
    trace = [request(0, 1024, blocks=b) for b in ((1, 2), (3, 4), (1, 2), (1, 5))]
    assert traces.cached_in_arrival_order(trace, 1024) == [0, 0, 0, 512]
    assert traces.cached_in_arrival_order(trace, 4096) == [0, 0, 1023, 512]
    assert traces.cached_in_arrival_order(trace, 0) == [0, 0, 0, 0]


# ---------------------------------------------------------------------- flags


def test_every_flag_that_the_planner_reads_is_accepted_and_no_other() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.read: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.__dict__["read"].add(name)
            return getattr(EngineConfig(), name)

    recorder = Recorder()
    limits(recorder, 8)  # type: ignore[arg-type]
    own = {
        "schedule_policy",
        "disaggregation_mode",
        "num_reserved_decode_tokens",
    }  # --role, comma list, D only
    own |= {"kv_events_config"}  # no subscriber
    own |= {"step_tokens"}  # made of two flags
    also = {
        "max_prefill_tokens",
        "max_total_tokens",
        "disable_overlap_schedule",
        "request_timeout_secs",
        "default_deadline_ms",
    }
    accepted = {f.name for f in dataclasses.fields(EngineConfig)} - command.NOT_SIMULATED
    assert accepted == (recorder.read - own) | also


def test_all_means_every_policy_there_is() -> None:
    assert command.parse_flags(["--trace", "x", "--schedule-policy", "all"]).policies == tuple(
        POLICIES
    )


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model-path", "demo"], "there is no such flag"),
        (["--disaggregation-mode", "decode"], "there is no such flag"),
        (["--lim", "3"], "there is no such flag"),
        (["--schedule-policy", "fcfs,best"], "--schedule-policy best: there is no such order"),
        (["--schedule-policy", "fcfs,fcfs"], "names an order twice"),
        (["--load", "1", "--speedup", "2"], "give one"),
        (["--load", "0"], "--load 0.0: must be above 0"),
        (["--length-scale", "3"], "use a divisor of 512"),
        (["--max-total-tokens", "0"], "give a number of tokens"),
        (["--chunked-prefill-size", "100"], "multiple of --page-size"),
        (["--token-us", "-1"], "--token-us -1.0: must not be negative"),
        (["--step-ms", "0", "--weights-ms", "0"], "the clock would stand still"),
        (["--plot", "x.png"], "only .svg"),
        (["--draft-acceptance", "1.5"], "use 0 up to 1"),
        (["--draft-acceptance", "0.5"], "add --role null"),
        (["--draft-tokens", "0"], "must be at least 1"),
        (
            ["--draft-acceptance", "0.5", "--role", "null", "--length-scale", "2"],
            "use --length-scale 1",
        ),
    ],
)
def test_impossible_flags_are_refused(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.parse_flags(["--trace", "x", *flags])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_presets_can_be_changed_number_by_number() -> None:
    run = command.parse_flags(["--trace", "x", "--model", "h200-8b", "--step-ms", "9"])
    assert run.model == dataclasses.replace(PRESETS["h200-8b"], step_ms=9)


def test_coarser_tokens_scale_every_budget_counted_in_tokens() -> None:
    flags = [
        "--trace",
        "x",
        "--length-scale",
        "8",
        "--max-queued-tokens",
        "8000",
        "--chunked-prefill-size",
        "208",
    ]
    scaled = command.parse_flags(flags).make_limits("fcfs")
    assert (scaled.num_pages, scaled.page_size) == (1_000_000 // 8 // 16, 16)
    assert (scaled.step_tokens, scaled.max_queued_tokens) == (16, 1000)
    assert (
        scaled.policy_params.short_first_aging_tokens_per_s
        == EngineConfig().short_first_aging_tokens_per_s / 8
    )


SHIPPED = "mooncake_conversation_first30min"


def simulated(*flags: str) -> dict[str, Any]:
    run = command.parse_flags(["--trace", SHIPPED, "--load", "0.9", *flags])
    trace = traces.read_trace(traces.locate_trace(run.sim.trace), run.sim.limit)
    summaries, _, interrupted = command.simulate_policies(run, command.make_setting(run, trace))
    assert not interrupted
    return {s.policy: s for s in summaries}


def test_coarse_and_fine_tokens_give_the_same_times() -> None:
    fine, coarse = (simulated("--limit", "600", "--length-scale", n)["fcfs"] for n in ("1", "8"))
    assert coarse.ttft.mean == pytest.approx(fine.ttft.mean, rel=0.03)
    assert coarse.utilization == pytest.approx(0.9, abs=0.05)


def test_coarse_tokens_decode_at_the_same_pace_where_no_prompt_interferes() -> None:
    budget = budgets(role="null", num_pages=1000)
    fine, coarse = (
        ran([request(0, 4096, answer=512)], model=StepModel(), budget=budget, scale=n)
        for n in (1, 8)
    )
    assert coarse.records[0].answer_tokens == fine.records[0].answer_tokens == 512
    assert coarse.records[0].tpot == pytest.approx(fine.records[0].tpot, rel=0.01)


def test_shortest_remaining_first_wins_on_a_recorded_trace_and_pays_at_the_end() -> None:
    found = simulated(
        "--limit", "2000", "--length-scale", "16", "--schedule-policy", "fcfs,lpm,srpt-aging"
    )
    assert found["srpt-aging"].ttft.mean < 0.6 * found["fcfs"].ttft.mean
    assert found["lpm"].ttft.mean < 1.02 * found["fcfs"].ttft.mean
    assert found["srpt-aging"].wait.max > found["fcfs"].wait.max


@pytest.mark.slow
def test_policies_rank_on_a_recorded_trace_as_their_descriptions_say() -> None:
    """Near saturation, prompts only: the shortest remaining wins by far, the longest answer first only does harm.

    A prompt's answer says nothing about its prefill: lof keeps the mean and multiplies what the unlucky wait.
    """
    found = simulated("--limit", "2000", "--length-scale", "16", "--schedule-policy", "all")
    mean = {policy: summary.ttft.mean for policy, summary in found.items()}
    assert mean["srpt-aging"] < 0.6 * mean["fcfs"]
    assert min(mean, key=mean.__getitem__) in ("srpt-aging", "short-first")
    assert mean["lof"] > 0.9 * mean["fcfs"]
    assert found["lof"].ttft.p99 > 2 * found["fcfs"].ttft.p99
    assert found["lof"].wait.max > 2 * found["fcfs"].wait.max
    assert mean["random"] > mean["srpt-aging"]
    assert mean["hrrn"] < mean["fcfs"]
    assert found["fcfs"].wait.p99 < found["random"].wait.p99, "no request overtakes"


def test_every_policy_reports_ttft_tpot_and_wait() -> None:
    found = simulated(
        "--limit", "150", "--length-scale", "32", "--schedule-policy", "all", "--role", "null"
    )
    assert found.keys() == POLICIES.keys()
    for summary in found.values():
        for stat in (summary.ttft, summary.tpot, summary.wait):
            assert 0 <= stat.p50 <= stat.p95 <= stat.p99 <= stat.max
        assert summary.completed == summary.requests == 150
        assert summary.ttft.mean >= summary.wait.mean


def test_recorded_day_is_decided_alike_every_time() -> None:
    first, again = (
        simulated("--limit", "300", "--length-scale", "16", "--schedule-policy", "all")
        for _ in range(2)
    )
    assert [s.decisions for s in first.values()] == [s.decisions for s in again.values()]


def test_compressed_trace_is_the_same_trace(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.jsonl", GOOD, GOOD.replace("600", "700"))
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert traces.read_trace(packed) == traces.read_trace(plain)
    assert traces.locate_trace(str(packed)) == packed


# ---------------------------------------------------------------------- the command


def test_progress_says_how_far_and_how_long_every_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = iter(range(1000))
    progress = command.ProgressLine("lpm", clock=lambda: next(clock) / 2)
    node(random_trace(2)).run(progress)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3
    assert all(
        line.startswith("lpm: ") and " requests, " in line and " waiting, at " in line
        for line in lines
    )
    assert "no end in sight yet" in lines[0]
    assert lines[-1].endswith("s left")


def test_command_prints_a_row_per_policy_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, plot = tmp_path / "r.json", tmp_path / "r.svg"
    flags = [
        "--trace",
        "gen_hot_system_prompt",
        "--limit",
        "40",
        "--schedule-policy",
        "fcfs,lpm",
        "--speedup",
        "20",
    ]
    assert main.main(["simulate", *flags, "--json", str(results), "--plot", str(plot)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["policy", "requests", "completed"]
    assert [row.split()[:3] for row in rows] == [["fcfs", "40", "40"], ["lpm", "40", "40"]]
    document = json.loads(results.read_text())
    assert [p["policy"] for p in document["policies"]] == ["fcfs", "lpm"]
    assert document["engine"]["chunked_prefill_size"] == 8192
    assert document["policies"][0]["hit_rate"] > 0.5
    curves = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 2


def test_command_says_what_is_wrong_with_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["simulate", "--trace", str(write(tmp_path / "t.jsonl", GOOD, "{"))]) == 2
    assert "t.jsonl, line 2: not JSON" in capsys.readouterr().err
    assert (
        main.main(
            [
                "simulate",
                "--trace",
                "gen_hot_system_prompt",
                "--limit",
                "2",
                "--json",
                str(tmp_path),
            ]
        )
        == 1
    )
    assert "Is a directory" in capsys.readouterr().err


def test_ctrl_c_prints_what_there_is() -> None:
    argv = [sys.executable, "-m", "baton_ops.cli", "simulate", "--trace", SHIPPED, "--role", "null"]
    # A shell that runs the suite in the background ignores SIGINT for its children; a terminal does not.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, **pipes, preexec_fn=listens) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the trace
        assert "fcfs: " in process.stderr.readline(), "the first line of progress"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "fcfs (stopped)" in out.splitlines()[1]
    assert "Traceback" not in err


def test_simulator_loads_nothing_beyond_the_standard_library() -> None:
    script = "import sys, baton_ops.sim.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "zmq", "aiohttp", "msgspec", "asyncio"}
    assert "baton" in loaded


def test_statistics_interpolate_between_ranks() -> None:
    stat = SummaryStat.of([4.0, 1.0, 3.0, 2.0])
    assert stat == SummaryStat(
        mean=2.5, p50=2.5, p95=pytest.approx(3.85), p99=pytest.approx(3.97), max=4.0
    )
    assert SummaryStat.of([]) is None


def test_chart_is_drawn_for_any_values() -> None:
    for curves in ({}, {"none": []}, {"one": [0.0]}, {"a<b": [1e-9, 5.0] * 600, "c": [3e4]}):
        ElementTree.fromstring(cdf_svg("title & more", "s", curves))


@pytest.mark.parametrize("flags", [command.SimConfig, StepModel])
def test_docs_list_exactly_the_flags_there_are(flags: type) -> None:
    page = Path(__file__).parents[3] / "docs" / "simulate.md"
    assert flags_table(flags) in page.read_text(encoding="utf-8"), (
        "print(baton.config.markdown(...))"
    )


# ---------------------------------------------------------------------- classes and tenants


def mixed_trace(path: Path) -> Path:
    """Batch floods at the start; small interactive requests arrive meanwhile; two tenants of each."""
    lines = [
        {
            "timestamp": 0,
            "input_length": 4000,
            "output_length": 1,
            "priority_class": "batch",
            "tenant": f"t{i % 2}",
        }
        for i in range(20)
    ] + [
        {
            "timestamp": 100 * i,
            "input_length": 400,
            "output_length": 1,
            "priority_class": "interactive",
            "tenant": "t0",
        }
        for i in range(1, 30)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def shares_of(tmp_path: Path, *flags: str) -> dict[str, Any]:
    results = tmp_path / "out.json"
    trace = mixed_trace(tmp_path / "mixed.jsonl")
    argv = [
        "simulate",
        "--trace",
        str(trace),
        "--schedule-policy",
        "fcfs",
        "--chunked-prefill-size",
        "512",
        *flags,
    ]
    assert main.main([*argv, "--json", str(results)]) == 0
    summary = json.loads(results.read_text())["policies"][0]
    return {group["name"]: group for group in summary["groups"]}


def test_classes_of_a_trace_share_by_weight_and_are_reported_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = shares_of(tmp_path)
    assert "fcfs, class batch: 20 of 20 completed; TTFT s" in capsys.readouterr().out
    assert list(plain) == ["class batch", "class interactive", "tenant t0", "tenant t1"]
    shared = shares_of(tmp_path, "--priority-classes", "interactive:8,batch:1")
    assert (
        shared["class interactive"]["ttft"]["p99"] < plain["class interactive"]["ttft"]["p99"] / 4
    )
    assert shared["class batch"]["completed"] == 20


@pytest.mark.parametrize("scale", ["1", "8"])
def test_tenant_limits_hold_in_the_simulation(tmp_path: Path, scale: str) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(
        json.dumps({"tenants": {"t1": {"tokens_per_minute": 10_000, "max_kv_tokens": 4200}}})
    )
    groups = shares_of(tmp_path, "--tenant-config", str(file), "--length-scale", scale)
    assert groups["tenant t1"]["refused"] == 8, "two prompts of 4000 fit into a minute of 10 000"
    assert groups["tenant t0"]["refused"] == 0
    file.write_text(json.dumps({"tenants": {"t1": {"max_kv_tokens": 3000}}}))
    groups = shares_of(tmp_path, "--tenant-config", str(file), "--length-scale", scale)
    assert groups["tenant t1"]["refused"] == 10, "no prompt fits"


def test_names_in_a_trace_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = mixed_trace(tmp_path / "mixed.jsonl")
    assert (
        main.main(["simulate", "--trace", str(trace), "--priority-classes", "interactive:1"]) == 2
    )
    assert "the trace has requests of class batch" in capsys.readouterr().err
    trace.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1, "tenant": "a b"}\n')
    assert main.main(["simulate", "--trace", str(trace)]) == 2
    assert "line 1: tenant is 'a b'; a name has" in capsys.readouterr().err


# ---- drafts ----

WEIGHTS_ONLY = StepModel(
    step_ms=1, token_us=0, weights_ms=9, attention_ns=0, kv_read_ns=0, transfer_ms=0, transfer_us=0
)
"""A step takes 10 ms, however many tokens it has."""


def drafting(model: StepModel, acceptance: float, most: int = 4, seed: int = 0) -> SimNode:
    """One answer of 401 tokens; returns the node when it is complete."""
    setting = NodeSetting(
        [request(0, 64, 401)],
        [0.0],
        model,
        draft_acceptance=acceptance,
        draft_tokens=most,
        seed=seed,
    )
    node = SimNode(setting, budgets(role="null"))
    node.run()
    assert node.records[0].outcome is RequestOutcome.COMPLETED
    assert node.records[0].answer_tokens == 401
    return node


def test_right_drafts_shorten_an_answer_by_their_number() -> None:
    assert drafting(WEIGHTS_ONLY, 0.0).steps == 401
    # A row with 4 drafts gives 5 tokens; the first steps measure how long one takes.
    assert 80 < drafting(WEIGHTS_ONLY, 1.0).steps < 90


def test_tokens_per_step_are_those_of_the_acceptance() -> None:
    # Of 4 drafts as many count as come before the first wrong one: 1 + a + a^2 + a^3 + a^4 tokens.
    expected = sum(0.6**n for n in range(5))
    steps = sum(drafting(WEIGHTS_ONLY, 0.6, seed=seed).steps for seed in range(10))
    assert steps == pytest.approx(10 * 401 / expected, rel=0.08)


def test_drafts_that_do_not_pay_are_rarely_made() -> None:
    slow = dataclasses.replace(MS_PER_TOKEN, transfer_ms=0)
    node = drafting(slow, 0.3)
    assert node.steps > 390
    assert node.busy_seconds < 1.05 * drafting(slow, 0.0).busy_seconds


def test_same_seed_drafts_the_same() -> None:
    assert drafting(WEIGHTS_ONLY, 0.5).decisions == drafting(WEIGHTS_ONLY, 0.5).decisions
    assert drafting(WEIGHTS_ONLY, 0.5).decisions != drafting(WEIGHTS_ONLY, 0.5, seed=1).decisions
