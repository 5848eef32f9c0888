"""CPU time of masks: constrained rows against free rows of the same step, on logits 152,064 wide.

    python -m tests.perf.grammars.bench_masks [--rounds 15]

Grammars: a number, of which few tokens are a part, and the text of a JSON string, of which nearly all are. Each row of
the table is a step of so many sequences:

* `free`: choosing a token per row without a mask;
* `fill`: filling the masks (llguidance);
* `masked`: filling, choosing among what is allowed, and advancing the grammars;
* `cost`: masked - free.

Time of the thread [us per row], median [10th to 90th percentile] of rounds in which all arms run in turn: neighbors on
the machine take time from all alike. Masks are filled by one thread here, by several in an engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from baton.runtime.grammar.sequence_grammar import SequenceGrammar
from baton.runtime.grammar.token_masks import MaskFiller, count_allowed
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import sample_tokens
from baton.sched.types.request import SamplingParams
from tests.perf.bench_front.made_tokenizer import SPECIAL_TOKENS, make_tokenizer

VOCAB = 152_064
"""Width of Qwen3's logits."""
EOS = SPECIAL_TOKENS.index("</s>")
ROWS = (1, 16, 64)


@dataclass(frozen=True)
class BenchGrammar:
    """A grammar, and the text with which its answers begin."""

    name: str
    text: str
    begin: str


GRAMMARS = (
    BenchGrammar("few allowed", "start: /[0-9]{4,4000}/", "123"),
    BenchGrammar("many allowed", 'start: %json {"type": "string", "minLength": 2000}', '"ba'),
)
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
}


class MaskBench:
    """Steps of one grammar and one kind of draw."""

    def __init__(
        self, trie: LLTokenizer, grammar: BenchGrammar, draw: dict[str, Any], rows: int
    ) -> None:
        self._trie = trie
        self._filler = MaskFiller(trie.vocab_size, VOCAB, threads=1)
        self._base = LLMatcher(trie, grammar.text, log_level=0)
        assert not self._base.is_error(), self._base.get_error()
        self._begin = [token for byte in grammar.begin for token in trie.tokenize_str(byte)]
        self._params = [SamplingParams(seed=seed, **draw) for seed in range(rows)]
        self._history = [0, *self._begin]
        generator = torch.Generator().manual_seed(rows)
        self._logits = torch.randn((rows, VOCAB), generator=generator) * 2
        self._logits[:, self._allowed_id()] += 14.0
        """As a model's that follows the grammar: an allowed token has the largest logit in most rows."""
        self._logits[::8, self._allowed_id()] -= 14.0

    def _allowed_id(self) -> int:
        return self._begin[-1]

    def _row(self, params: SamplingParams, *, constrained: bool) -> SampleRow:
        grammar = None
        if constrained:
            grammar = SequenceGrammar(self._base.deep_copy(), frozenset((EOS,)), self._begin)
        return SampleRow(params, 1, self._history, grammar)

    def count_allowed(self) -> int:
        grammar = SequenceGrammar(self._base.deep_copy(), frozenset((EOS,)), self._begin)
        (mask,), _ = self._filler.fill_masks([grammar])
        return count_allowed(mask)

    def run_round(self) -> tuple[float, float, float]:
        """Seconds of the arms free, fill and masked."""
        free = [self._row(params, constrained=False) for params in self._params]
        masked = [self._row(params, constrained=True) for params in self._params]
        filled = [self._row(params, constrained=True).grammar for params in self._params]
        grammars = [grammar for grammar in filled if grammar is not None]
        return (
            seconds_of(lambda logits: sample_tokens(logits, free), self._logits.clone()),
            seconds_of(lambda _: self._filler.fill_masks(grammars), self._logits),
            seconds_of(
                lambda logits: sample_tokens(logits, masked, self._filler), self._logits.clone()
            ),
        )


def seconds_of(work: Callable[[Tensor], object], logits: Tensor) -> float:
    """Time of this thread that the work takes."""
    started = time.thread_time()
    work(logits)
    return time.thread_time() - started


def spread(seconds: Sequence[float], rows: int) -> str:
    """Median and percentiles [us per row]."""
    ordered = sorted(value / rows * 1e6 for value in seconds)
    tenth = len(ordered) // 10
    return f"{statistics.median(ordered):5.0f} [{ordered[tenth]:.0f}, {ordered[-1 - tenth]:.0f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_tokenizer(Path(folder))
        source = TokenizerSource((path / "tokenizer.json").read_text(), [], [EOS])
        trie = build_trie(source, VOCAB)
    print("| grammar | draw | rows | allowed | free | fill | masked | cost |")
    print("|---|---|---|---|---|---|---|---|")
    for grammar in GRAMMARS:
        for name, draw in DRAWS.items():
            for rows in ROWS:
                bench = MaskBench(trie, grammar, draw, rows)
                bench.run_round()
                free, fill, masked = zip(*(bench.run_round() for _ in range(rounds)), strict=True)
                cost = [m - f for m, f in zip(masked, free, strict=True)]
                cells = [spread(seconds, rows) for seconds in (free, fill, masked, cost)]
                print(
                    f"| {grammar.name} | {name} | {rows} | {bench.count_allowed()} | {' | '.join(cells)} |"
                )


if __name__ == "__main__":
    main()
