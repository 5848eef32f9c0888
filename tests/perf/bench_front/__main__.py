"""CPU time of an engine's front, with engines that have no model.

    python -m tests.perf.bench_front [--cells tokens,answers,requests,prompts,bodies] [--rounds 3] [--baseline PATH]

* tokens: chat streams at a steady pace, per token; the pace is below what the front can do, so that every token is an
  event of its own, and both trees do the same;
* answers: the same for tool calls, reasoning, text beside tools, responses and messages, in turns on one engine, whose
  made tokenizer knows both formats; the ratio is to plain chat;
* requests: chats of 200 characters, answered with one token;
* prompts: chats of 44,000 tokens, answered with one token;
* bodies: longest pause of other streams while bodies of 20 MB arrive.

Tokenizers: the demo model's, and one with 150,000 tokens that is made here (or --tokenizer-path DIR). --baseline PATH
measures another checkout beside this one, in turns; the ratio is this tree's CPU time to the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.perf.bench_front.answer_arms import ARMS, PLAIN, AnswerArm, arm_job
from tests.perf.bench_front.engines import RunningEngine, SourceTree, start_engines
from tests.perf.bench_front.made_tokenizer import make_tokenizer
from tests.perf.processes.fleet import REPO, machine

SHORT_CHARS = 200
PROMPT_TOKENS = 44_000
BODY_BYTES = 20_000_000
BODY_STREAMS = 16
BODY_STEP_MS = 10.0
FAST_STEP_MS = 1.0
WORD = "bato "
WORD_TOKEN = re.compile("[Ġ▁]([a-z]{3,})")
DEMO = REPO / "engine/baton/models/demo"


@dataclass(frozen=True, slots=True)
class Cell:
    """A measurement: what the client does, and which of its numbers is compared."""

    name: str
    unit: str
    value: str
    scale: float
    step_ms: float
    job: dict[str, Any]


def read_words(tokenizer: Path, count: int) -> str:
    """Text of `count` words that are one token each."""
    model = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
    words = [match[1] for token in model["vocab"] if (match := WORD_TOKEN.fullmatch(token))]
    return " ".join(random.Random(1).choices(words, k=count))


CELLS = ("tokens", "answers", "requests", "prompts", "bodies")


def cell_names(text: str) -> tuple[str, ...]:
    """Value of --cells. Raises ArgumentTypeError for a name that there is not."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no cell {unknown[0]!r}; there are {', '.join(CELLS)}"
        )
    return names


def answer_cell(options: argparse.Namespace, arm: AnswerArm, tokenizer: Path, streams: int) -> Cell:
    """Streams of one kind of answer at the pace of the options."""
    tokens = max(int(options.pace * options.seconds / streams), 32)
    return Cell(
        f"token, {streams} streams",
        "us",
        "cpu_us",
        1.0,
        streams / options.pace * 1e3,
        arm_job(arm, tokenizer, streams, tokens),
    )


def make_cells(options: argparse.Namespace, tokenizer: Path) -> Iterator[Cell]:
    names = options.cells
    words = read_words(tokenizer, PROMPT_TOKENS)
    if "tokens" in names:
        for streams in map(int, options.streams.split(",")):
            yield answer_cell(options, PLAIN, tokenizer, streams)
    if "requests" in names:
        job = {"measure": "requests", "streams": 16, "requests": 1500}
        yield Cell(
            f"request, {SHORT_CHARS} characters",
            "us",
            "cpu_us",
            1.0,
            FAST_STEP_MS,
            {**job, "content": words[:SHORT_CHARS]},
        )
    if "prompts" in names:
        job = {"measure": "requests", "streams": 2, "requests": 20}
        yield Cell(
            f"prompt, {PROMPT_TOKENS} tokens",
            "ms",
            "cpu_us",
            1e-3,
            FAST_STEP_MS,
            {**job, "content": words},
        )
    if "bodies" in names:
        yield Cell(
            f"pause, {BODY_BYTES // 1_000_000} MB bodies",
            "ms",
            "gap_ms",
            1.0,
            BODY_STEP_MS,
            {
                "measure": "gaps",
                "streams": BODY_STREAMS,
                "tokens": 20_000,
                "bodies": 5,
                "body_bytes": BODY_BYTES,
                "word": WORD,
            },
        )


def describe(found: Sequence[dict[str, float]], cell: Cell) -> str:
    """Median of the compared number with its spread, then the medians of the others."""
    values = sorted(row[cell.value] * cell.scale for row in found)
    others = [
        f"{name} {statistics.median(row[name] for row in found):.4g}"
        for name in found[0]
        if name != cell.value
    ]
    spread = f"{values[0]:.1f}-{values[-1]:.1f}"
    return f"{statistics.median(values):8.1f} {cell.unit} {spread:>15}  n={len(found)}  {', '.join(others)}"


def describe_ratio(
    mine: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], cell: Cell
) -> str:
    ratios = sorted(a[cell.value] / b[cell.value] for a, b in zip(mine, theirs, strict=True))
    return f"{statistics.median(ratios):8.3f}    {f'{ratios[0]:.3f}-{ratios[-1]:.3f}':>15}  n={len(ratios)}"


Arm = tuple[AnswerArm, RunningEngine]


async def measure_answers(
    options: argparse.Namespace, trees: list[SourceTree], scratch: Path
) -> None:
    """Cost per token of each kind of answer, in turns; of the baseline, that of plain chat."""
    tokenizer = make_tokenizer(scratch / "formats", has_formats=True)
    for streams in map(int, options.streams.split(",")):
        plain = answer_cell(options, PLAIN, tokenizer, streams)
        async with start_engines(
            trees, tokenizer=tokenizer, step_ms=plain.step_ms, log_dir=scratch
        ) as engines:
            arms = {arm.name: (arm, engines[0]) for arm in ARMS}
            for engine in engines[1:]:
                arms[f"{PLAIN.name}, {engine.tree.name}"] = (PLAIN, engine)
            found = await measure_arms(options, arms, tokenizer, streams)
        for name, rows in found.items():
            print(f"{plain.name:<20} {name:<16} {describe(rows, plain)}", flush=True)
        for name, rows in found.items():
            row = describe_ratio(rows, found[PLAIN.name], plain)
            print(f"{plain.name:<20} {name:<16} {row} of {PLAIN.name}", flush=True)


async def measure_arms(
    options: argparse.Namespace, arms: dict[str, Arm], tokenizer: Path, streams: int
) -> dict[str, list[dict[str, float]]]:
    """Results of each arm, one a round. Every other round goes through the arms backwards."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(options.rounds):
        names = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in names:
            arm, engine = arms[name]
            cell = answer_cell(options, arm, tokenizer, streams)
            found[name].append(await engine.measure(cell.job))
    return found


async def measure(options: argparse.Namespace, scratch: Path) -> None:
    trees = [SourceTree("this tree", REPO)]
    if options.baseline is not None:
        trees.append(SourceTree("baseline", options.baseline.resolve()))
    made = options.tokenizer_path or make_tokenizer(scratch)
    tokenizers = {"demo": DEMO, "large": made}
    print(machine(), flush=True)
    if "answers" in options.cells:
        await measure_answers(options, trees, scratch)
    for name in options.tokenizers.split(","):
        for cell in make_cells(options, tokenizers[name]):
            found: dict[str, list[dict[str, float]]] = {tree.name: [] for tree in trees}
            async with start_engines(
                trees, tokenizer=tokenizers[name], step_ms=cell.step_ms, log_dir=scratch
            ) as engines:
                for _ in range(options.rounds):
                    for engine in engines:
                        found[engine.tree.name].append(await engine.measure(cell.job))
            for tree in trees:
                row = describe(found[tree.name], cell)
                print(f"{name:<6} {cell.name:<24} {tree.name:<10} {row}", flush=True)
            if len(trees) == 2:
                mine, theirs = (found[tree.name] for tree in trees)
                row = describe_ratio(mine, theirs, cell)
                print(f"{name:<6} {cell.name:<24} {'ratio':<10} {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of an engine's front")
    parser.add_argument("--cells", type=cell_names, default=CELLS, help=f"of {','.join(CELLS)}")
    parser.add_argument("--tokenizers", default="demo,large", help="of demo and large")
    parser.add_argument("--streams", default="32,256")
    parser.add_argument(
        "--pace", type=float, default=6000.0, help="tokens per second of all streams"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a run of streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer-path", type=Path, help="directory of the large tokenizer")
    parser.add_argument("--baseline", type=Path, help="another checkout, built, to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-front-") as scratch:
        asyncio.run(measure(options, Path(scratch)))


if __name__ == "__main__":
    main()
