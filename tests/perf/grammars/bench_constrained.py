"""Decode steps whose rows follow grammars against steps of plain rows, with a tokenizer of 150,000 tokens.

    python -m tests.perf.grammars.bench_constrained                                  on a GPU, the shape of Qwen3-0.6B
    python -m tests.perf.grammars.bench_constrained --device cpu --shape tiny --quick

Per batch, the two arms take turns in blocks of steps of the real engine. `object` answers a JSON Schema, where few
tokens are allowed at most places; `text` is one long JSON string, where most of the vocabulary is. Times are per row:
`mask us` of filling a step's masks on the host, `apply us` of applying them, with the upload. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton.layers.cuda.stream import CudaStream
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.grammar.waiting import GrammarQueue
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.sampling.grammar_masks import apply_packed_masks
from baton.sched.types.request import SamplingParams
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
        "grammar", "batch", "plain ms", "grammar ms", "ratio", "spread", "rounds", "mask us"
    )  # fmt: skip
    row = report.table("decode steps, plain and with a grammar", columns)
    for kind, schema in GRAMMARS.items():
        grammar = schema_text(schema)
        for batch in blocks.batches:
            run_block(driver, batch, 3, grammar, 1)  # compiles the grammar
            plain = []
            constrained = []
            fill_secs = filler.seconds.sum
            fills = sum(filler.seconds.counts)
            for index in range(blocks.rounds):
                seed = 1000 * index
                plain.append(statistics.median(run_block(driver, batch, blocks.steps, "", seed)))
                constrained.append(
                    statistics.median(run_block(driver, batch, blocks.steps, grammar, seed))
                )
            ratios = [
                with_it / without for with_it, without in zip(constrained, plain, strict=True)
            ]
            per_fill = (filler.seconds.sum - fill_secs) / (sum(filler.seconds.counts) - fills)
            row(
                "constrained",
                kind,
                batch,
                statistics.median(plain) * 1e3,
                statistics.median(constrained) * 1e3,
                statistics.median(ratios),
                spread(ratios),
                len(ratios),
                per_fill / batch * 1e6,
            )


def apply_masks(report: Report, device: torch.device, vocab: int, blocks: Blocks) -> None:
    row = report.table("masks applied to logits", ("rows", "vocab", "apply us", "spread", "n"))
    put = CudaStream(device).put if device.type == "cuda" else torch.from_numpy
    for batch in blocks.batches:
        logits = torch.randn((batch, vocab), device=device)
        rows = np.arange(batch)
        packed = np.random.default_rng(1).integers(0, 256, (batch, -(-vocab // 32) * 4), np.uint8)
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
    parser.add_argument("--threads", type=int, default=2, help="that fill masks")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--jsonl", type=Path, help="append every row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    blocks = QUICK if args.quick else Blocks()
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
