"""Wall time of filling the masks of one grammar's rows: one thread, or several that share a lexer or have their own.

    python -m tests.perf.grammars.bench_lexers [--threads 2] [--rounds 5]

Copies of one matcher share a lexer, whose lock is held while a mask is filled. Arms, in turn at every step of the
same answers:

* `one`: the calling thread fills all masks, as `MaskFiller` does for rows of one lexer;
* `shared`: several threads, one lexer;
* `own`: several threads, a lexer for each, as `MaskFiller` does where masks take long.

Time of a step's masks [us], median [10th, 90th percentile], and medians of the steps' ratios. Grammars as in
bench_constrained, over 151,936 tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from baton.runtime.grammar.token_masks import PackedMasks, allowed_ids
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from tests.perf.bench_front.made_tokenizer import SPECIAL_TOKENS, make_tokenizer
from tests.perf.grammars.bench_constrained import GRAMMARS
from tests.support.grammars.engines import schema_text

VOCAB = 151_936
EOS = SPECIAL_TOKENS.index("</s>")
ROWS = (8, 64)
STEPS = 30
ARMS = ("one", "shared", "own")


class LexerBench:
    """Answers of one grammar, the same ones in each arm."""

    def __init__(self, trie: LLTokenizer, text: str, rows: int, threads: int) -> None:
        self._executor = LLExecutor(threads)
        self._masks = np.zeros((rows, VOCAB // 32), np.int32)
        bases = [LLMatcher(trie, text, log_level=0) for _ in range(len(ARMS) - 1 + threads)]
        for base in bases:
            base.compute_bitmask()
        own = bases[len(ARMS) - 1 :]
        self._bases = {
            "one": [bases[0]] * rows,
            "shared": [bases[1]] * rows,
            "own": [own[row * threads // rows] for row in range(rows)],
        }
        self.seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def run_round(self, seed: int) -> None:
        rng = random.Random(seed)
        matchers = {arm: [base.deep_copy() for base in bases] for arm, bases in self._bases.items()}
        for step in range(STEPS):
            for offset in range(len(ARMS)):
                arm = ARMS[(step + offset) % len(ARMS)]
                started = time.perf_counter()
                self._fill(arm, matchers[arm])
                self.seconds[arm].append(time.perf_counter() - started)
            tokens = [choose_token(rng, mask) for mask in self._masks]
            for arm in ARMS:
                for matcher, token in zip(matchers[arm], tokens, strict=True):
                    assert matcher.consume_token(token)

    def _fill(self, arm: str, matchers: Sequence[LLMatcher]) -> None:
        if arm != "one":
            live = [(matcher, row) for row, matcher in enumerate(matchers)]
            fill_next_token_bitmask_par(self._executor, live, self._masks)
            return
        start = self._masks.ctypes.data
        row_bytes = self._masks.strides[0]
        for row, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)


def choose_token(rng: random.Random, mask: PackedMasks) -> int:
    return int(rng.choice(allowed_ids(mask)))


def percentiles(values: Sequence[float], digits: int) -> str:
    """Median [10th, 90th percentile]."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    low = ordered[tenth]
    high = ordered[-1 - tenth]
    return f"{statistics.median(ordered):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_tokenizer(Path(folder))
        source = TokenizerSource((path / "tokenizer.json").read_text(), [], [EOS])
        trie = build_trie(source, VOCAB)
    print("| grammar | rows | one | shared | own | shared / one | own / one | steps |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, schema in GRAMMARS.items():
        for rows in ROWS:
            bench = LexerBench(trie, schema_text(schema), rows, args.threads)
            for seed in range(args.rounds):
                bench.run_round(seed)
            one = bench.seconds["one"]
            micros = [percentiles([s * 1e6 for s in bench.seconds[arm]], 0) for arm in ARMS]
            ratios = [
                percentiles([b / a for a, b in zip(one, bench.seconds[arm], strict=True)], 2)
                for arm in ("shared", "own")
            ]
            print(f"| {kind} | {rows} | {' | '.join(micros + ratios)} | {len(one)} |", flush=True)


if __name__ == "__main__":
    main()
