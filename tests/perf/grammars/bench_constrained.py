"""Decode steps whose rows follow grammars against steps of plain rows, with a tokenizer of 150,000 tokens.

    python -m tests.perf.grammars.bench_constrained                                  on a GPU, the shape of Qwen3-0.6B
    python -m tests.perf.grammars.bench_constrained --shape llama-3-8b --batches 64  a model of 10 ms a step
    python -m tests.perf.grammars.bench_constrained --device cpu --shape tiny --quick

Per batch, the two arms take turns in blocks of steps of the real engine. `object` answers a JSON Schema, where few
tokens are allowed at most places; `text` is one long JSON string, where most of the vocabulary is.

* first table: medians of the steps' times, `mean ms` the mean of all constrained steps, `added ms` what grammars add
  to a step; `mask us` per row, of filling the masks on the host, also of the first step of each answer;
* second table: what the thread that launches steps does for a constrained step, in this order, as means [ms per
  step]: `wait` until the step before has its tokens; `advance` the grammars, on whichever thread reads the result;
  `make` the draw's inputs, of which `fill` is filling masks; `queue` the draw, of which `apply` is copying masks and
  queueing their application. The time of a part includes its waits for the GIL;
* third table: applying masks, with the upload [us per row].

Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from baton.layers.cuda.stream import CudaStream
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.grammar.waiting import GrammarQueue
from baton.runtime.runner.cuda_runner import InFlight
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.sampling.grammar_masks import GrammarMasks, apply_packed_masks
from baton.runtime.sampling.step_sampler import SamplingLaunch
from baton.sched.types.request import SamplingParams
from baton.server.worker.process import MOST_MASK_THREADS
from tests.perf import bench_gpu
from tests.perf.bench_front.made_tokenizer import make_tokenizer
from tests.perf.bench_gpu import Driver, Effort, Report, spread
from tests.support.grammars.engines import schema_text

END_TOKEN = 1
RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999999},
        "name": {"type": "string", "pattern": "^[a-z]{30,60}$"},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 3},
    },
    "required": ["id", "name", "kind", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "object": {"type": "array", "items": RECORD, "minItems": 60},
    "text": {"type": "string", "minLength": 4000},
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """How much is run."""

    batches: tuple[int, ...] = (1, 8, 64)
    rounds: int = 5
    steps: int = 40


QUICK = Blocks(batches=(2,), rounds=2, steps=5)


class HostTimes:
    """Seconds of the host in the parts of constrained steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("wait", "advance", "make", "fill", "queue", "apply"), 0.0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Calls of the parts are measured meanwhile."""
        with ExitStack() as stack:
            for part, owner, name in (
                ("wait", InFlight, "wait_for_result"),
                ("advance", GrammarMasks, "advance"),
                ("make", SamplingLaunch, "__init__"),
                ("fill", MaskFiller, "fill_rows"),
                ("queue", SamplingLaunch, "queue_draw"),
                ("apply", GrammarMasks, "apply"),
            ):
                timed = self._timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            if part == "wait" and threading.current_thread().name != "device":
                return function(*args, **more)  # the engine loop waits, too
            started = time.perf_counter()
            advanced = self.seconds["advance"]
            try:
                return function(*args, **more)
            finally:
                seconds = time.perf_counter() - started
                if part == "wait":
                    seconds = max(0.0, seconds - (self.seconds["advance"] - advanced))
                self.seconds[part] += seconds

        return timed


def sampled(seed: int, steps: int, grammar: str) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=2 * steps + 40,
        temperature=1.0,
        seed=seed,
        grammar=grammar,
        stop_token_ids=(END_TOKEN,),
    )


def run_block(driver: Driver, batch: int, steps: int, grammar: str, seed: int) -> list[float]:
    """Seconds of each step in which all rows of the batch got a token."""
    rng = random.Random(seed)
    wanted = {
        driver.submit(driver.prompt(rng, 32), sampled(seed + i, steps, grammar))
        for i in range(batch)
    }
    started: set[int] = set()
    while started < wanted:
        started |= driver.turn().keys()
    times = []
    last = time.perf_counter()
    for _ in range(steps):
        got = driver.turn()
        now = time.perf_counter()
        if sum(got.values()) == batch:
            times.append(now - last)
        last = now
    for handle in wanted:
        driver.engine.sched.abort(handle)
    driver.rest()
    return times


def compare(report: Report, driver: Driver, filler: MaskFiller, blocks: Blocks) -> None:
    columns = (
        "grammar", "batch", "plain ms", "grammar ms", "mean ms", "added ms", "ratio", "spread", "rounds",
        "mask us",
    )  # fmt: skip
    row = report.table("decode steps, plain and with a grammar", columns)
    host_rows = []
    for kind, schema in GRAMMARS.items():
        grammar = schema_text(schema)
        for batch in blocks.batches:
            run_block(driver, batch, 3, grammar, 1)  # compiles the grammar
            plain = []
            constrained = []
            steps = []
            host = HostTimes()
            fill_secs = filler.seconds.sum
            fills = sum(filler.seconds.counts)
            for index in range(blocks.rounds):
                seed = 1000 * index
                plain.append(statistics.median(run_block(driver, batch, blocks.steps, "", seed)))
                with host.measured():
                    times = run_block(driver, batch, blocks.steps, grammar, seed)
                steps += times
                constrained.append(statistics.median(times))
            ratios = [
                with_it / without for with_it, without in zip(constrained, plain, strict=True)
            ]
            added = [with_it - without for with_it, without in zip(constrained, plain, strict=True)]
            fills = sum(filler.seconds.counts) - fills
            per_fill = (filler.seconds.sum - fill_secs) / fills
            host_rows.append((kind, batch, *(x / fills * 1e3 for x in host.seconds.values())))
            row(
                "constrained",
                kind,
                batch,
                statistics.median(plain) * 1e3,
                statistics.median(constrained) * 1e3,
                statistics.mean(steps) * 1e3,
                statistics.median(added) * 1e3,
                statistics.median(ratios),
                spread(ratios),
                len(ratios),
                per_fill / batch * 1e6,
            )
    row = report.table("the host in steps with a grammar, ms", ("grammar", "batch", *host.seconds))
    for values in host_rows:
        row("host", *values)


def apply_masks(report: Report, device: torch.device, vocab: int, blocks: Blocks) -> None:
    row = report.table("masks applied to logits", ("rows", "vocab", "apply us", "spread", "n"))
    put = CudaStream(device).put if device.type == "cuda" else torch.from_numpy
    for batch in blocks.batches:
        logits = torch.randn((batch, vocab), device=device)
        rows = np.arange(batch)
        packed = np.random.default_rng(1).integers(
            -(2**31), 2**31, (batch, -(-vocab // 32)), np.int32
        )
        times = []
        for _ in range(blocks.rounds * blocks.steps):
            bench_gpu.synchronize(device)
            started = time.perf_counter()
            apply_packed_masks(logits, put(rows), put(packed))
            bench_gpu.synchronize(device)
            times.append((time.perf_counter() - started) / batch * 1e6)
        row("apply", batch, vocab, statistics.median(times), spread(times), len(times))


def main() -> int:
    sys.setswitchinterval(0.0005)  # as server.worker.process has it
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--engine", type=bench_gpu.setting, action="append", default=[])
    threads = min(MOST_MASK_THREADS, len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, default=threads, help="that fill masks")
    parser.add_argument("--batches", type=int, nargs="+", help="numbers of rows")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--jsonl", type=Path, help="append every row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    blocks = QUICK if args.quick else Blocks()
    if args.batches:
        blocks = replace(blocks, batches=tuple(args.batches))
    report = Report(args.jsonl, bench_gpu.about(device))
    print(report.about, flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-constrained-") as name:
        folder = Path(name)
        effort = bench_gpu.QUICK if args.quick else Effort()
        driver = bench_gpu.load(args.shape, args, effort, folder)
        make_tokenizer(folder / args.shape)
        tokenizer = json.loads((folder / args.shape / "tokenizer.json").read_text())
        trie_size = max(driver.vocab, len(tokenizer["model"]["vocab"]))
        source = TokenizerSource(json.dumps(tokenizer), [], [END_TOKEN])
        filler = MaskFiller(trie_size, driver.vocab, args.threads)
        store = GrammarStore(build_trie(source, trie_size), filler)
        driver.engine.grammars = GrammarQueue(store)
        assert isinstance(driver.loaded.runner, ModelRunner)
        driver.loaded.runner.grammars = store
        with report.section("constrained"):
            compare(report, driver, filler, blocks)
        with report.section("apply"):
            apply_masks(report, device, driver.vocab, blocks)
        driver.engine.close()
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
