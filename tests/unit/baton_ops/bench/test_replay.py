"""A trace as requests: text that is equal where the trace says so, and turns that follow their conversation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton_ops.bench import main
from baton_ops.bench.measured_request import RequestTiming
from baton_ops.bench.replay import (
    ReplayRound,
    find_parents,
    format_report,
    prompt_text,
    timed_requests,
)
from baton_ops.bench.words import WORDS, make_words
from baton_ops.sim.report import percentile
from baton_ops.sim.trace import TraceRequest, locate_trace, prompt_tokens, read_trace


def request(tokens: int, *blocks: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(at, tokens, 4, blocks)


def test_there_are_256_words_of_four_characters() -> None:
    assert len(set(WORDS)) == 256
    assert len(make_words("x", 99)) == 396
    assert make_words("x", 99) == make_words("x", 99) != make_words("y", 99)


@pytest.mark.parametrize("scale", [1, 8, 512])
def test_prompts_have_common_text_exactly_where_the_trace_has_common_tokens(scale: int) -> None:
    trace = read_trace(locate_trace("gen_hot_system_prompt"), 40)
    rng = random.Random(scale)
    for _ in range(60):
        a, b = rng.sample(trace, 2)
        ids, texts = (
            [prompt_tokens(r, scale) for r in (a, b)],
            [prompt_text(r, scale) for r in (a, b)],
        )
        assert [len(t) for t in texts] == [4 * len(i) for i in ids]
        same = next(
            (n for n, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), min(map(len, ids))
        )
        assert texts[0][: 4 * same] == texts[1][: 4 * same]
        assert texts[0][4 * same : 4 * same + 40] != texts[1][4 * same : 4 * same + 40]


def test_turn_continues_the_request_whose_blocks_it_repeats() -> None:
    first, second, third = (
        request(1100, 0, 1, 2),
        request(1700, 0, 1, 3, 4),
        request(2300, 0, 1, 3, 5, 6),
    )
    assert find_parents([first, second, third]) == [None, 0, 1]


def test_unrelated_requests_behind_one_system_prompt_do_not_wait() -> None:
    trace = [
        request(1600, 0, 1, 2, 3),
        request(1600, 0, 1, 4, 5),
        request(1600, 0, 1, 6, 7),
        request(2100, 0, 1, 4, 8, 9),
    ]
    assert find_parents(trace) == [None, None, None, 1]


def test_arrivals_are_stretched() -> None:
    trace = [request(10, 0, at=0.0), request(10, 1, at=2000.0), request(10, 2, at=3000.0)]
    assert [ask.at for ask in timed_requests(trace, 0.5)] == [0.0, 1.0, 1.5]


def test_tpot_counts_the_tokens_after_the_first() -> None:
    assert RequestTiming(ttft=1.0, e2e=4.0, tokens=4).tpot == 1.0
    assert RequestTiming(ttft=1.0, e2e=1.0, tokens=1).tpot == 0.0


def test_percentiles_interpolate() -> None:
    assert percentile(sorted([3, 1, 2]), 0.5) == 2
    assert percentile([0, 10], 0.95) == 9.5
    assert percentile([7], 0.95) == 7


def test_report_says_what_came_back() -> None:
    outcome = ReplayRound(
        2.0,
        (RequestTiming(0.1, 0.5, 5, 100, 30), RequestTiming(0.3, 0.5, 1, 100, 0)),
        ("ValueError: status 503",),
        0.5,
    )
    text = format_report(outcome, {"http://a": 1, "http://b": 3})
    for part in (
        "3 requests in 2.0 s, 1 failed",
        "status 503",
        "0.5 s late",
        "cached 0.150",
        "over the mean 1.50",
    ):
        assert part in text
    assert [line.split()[2] for line in text.splitlines() if line.startswith(("TTFT", "TPOT"))] == [
        "200.0",
        "100.0",
    ]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--trace", "x"], "needs the server to measure"),
        (["--trace", "x", "--url", "u", "--rounds", "3"], "unrecognized arguments: --rounds"),
        (["--url", "u"], "see aiperf, guidellm, vllm bench serve in --help"),
        (["--trace", "x", "--url", "u", "--length-scale", "0"], "must be at least 1"),
        (["--trace", "x", "--url", "u", "--timeout-secs", "0"], "must be above 0"),
        (["--trace", "x", "--url", "u", "--limit", "-1"], "must not be negative"),
        (["--trace", "x", "--url", "u", "--speed", "2", "--rate", "3"], "both rescale"),
        (["--trace", "x", "--url", "u", "--length-scale", "3"], "divisor of 512"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.parse_flags(flags)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("name", main.LOAD_GENERATORS)
def test_help_has_the_command_of_each_load_generator(name: str) -> None:
    """The tested commands are those of docs/guide/clients.md."""
    command = main.LOAD_GENERATORS[name]
    page = Path(__file__).parents[4] / "docs/guide/clients.md"
    row = next(line for line in page.read_text().splitlines() if line.startswith(f"| {name} |"))
    assert f"`{command}`" in row
    shown = main.make_parser().format_help()
    assert (
        command.split()
        == shown[shown.index(command.split(" -")[0]) :]
        .replace("\\\n", "")
        .split()[: len(command.split())]
    )
