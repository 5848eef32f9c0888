"""Bench of servers: equal work for both arms, ratios taken within a round."""

from __future__ import annotations

import pytest

from baton_ops.bench.measured_request import RequestTiming
from tests.perf.bench_serving import (
    COLUMNS,
    BenchArm,
    LoadRound,
    LoadShape,
    format_table,
    make_prompts,
    parse_flags,
    rounds_as_json,
)

WORK = LoadShape(requests=3, concurrency=2, prompt_tokens=10, output_tokens=4, shared_tokens=6)


def test_prompts_share_their_start_and_depend_on_the_seed() -> None:
    first, again, other = make_prompts(WORK, 1), make_prompts(WORK, 1), make_prompts(WORK, 2)
    assert first == again
    assert first != other
    assert {len(p) for p in first} == {10}
    assert len({tuple(p[:6]) for p in first + other}) == 1
    assert len({tuple(p[6:]) for p in first + other}) == 6


def test_ratio_is_the_median_over_rounds_not_of_medians() -> None:
    slow_then_fast = BenchArm("base", "", "", rounds(1.0, 4.0))
    always_double = BenchArm("other", "", "", rounds(2.0, 8.0))
    last = format_table([slow_then_fast, always_double]).splitlines()[-1]
    assert "0.50 [0.50, 0.50]" in last  # tokens/s
    assert last.count("2.00 [2.00, 2.00]") == 5


def test_value_of_zero_at_the_first_server_gives_no_ratio() -> None:
    one_event = BenchArm("base", "", "", [LoadRound(1.0, (RequestTiming(1.0, 1.0, 4),), ())])
    streamed = BenchArm("other", "", "", rounds(2.0))
    last = format_table([one_event, streamed]).splitlines()[-1]
    assert last.split()[-5:] == ["-", "-", "2.00", "[2.00,", "2.00]"]  # TPOT p50, p95; E2E
    ratios = rounds_as_json([one_event, streamed])[1]["ratios_to_first"]
    assert ratios["TPOT p50 ms"] == [None]
    assert ratios["E2E p95 ms"] == [2.0]


def rounds(*seconds: float) -> list[LoadRound]:
    return [LoadRound(s, (RequestTiming(s / 2, s, 4),), ()) for s in seconds]


def two_servers() -> list[BenchArm]:
    """Servers whose addresses differ in their last character."""
    return [
        BenchArm(url, url, "demo", rounds(1.0, 4.0))
        for url in ("http://127.0.0.1:33000", "http://127.0.0.1:33001")
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_table_fits_the_terminal_and_names_each_server(columns: int) -> None:
    lines = format_table(two_servers(), columns).splitlines()
    assert max(map(len, lines)) <= columns
    parts = "\n".join(lines).split("\n\n")
    assert len(parts) > 1
    for part in parts:
        names = [line[:30].split("  ")[0] for line in part.splitlines()]
        assert names[1:] == ["127.0.0.1:33000", "127.0.0.1:33001", "127.0.0.1:33001 / first"]
    shown = "".join(part.splitlines()[0] for part in parts)
    assert all(name in shown for name, _ in COLUMNS)


def test_results_can_be_written_as_json() -> None:
    assert parse_flags(["--json", "out.json"]).json == "out.json"
    first, second = rounds_as_json(two_servers())
    assert (first["url"], second["url"]) == ("http://127.0.0.1:33000", "http://127.0.0.1:33001")
    assert [found["tokens/s"] for found in first["rounds"]] == [4.0, 1.0]
    assert first["medians"]["E2E p95 ms"] == 2500.0
    assert second["ratios_to_first"]["tokens/s"] == [1.0, 1.0]


def test_senseless_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--rounds", "0"])
    assert "--rounds 0: must be at least 1" in capsys.readouterr().err
