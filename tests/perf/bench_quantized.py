"""Weights that stay quantized against bfloat16, on the CPU: tokens/s of decode and prefill, as ratios.

    python -m tests.perf.bench_quantized [--model-path DIR] [--rounds N] [--threads N] [int8|int4 …]

Three engines in this process have the same random dense model of 430 M parameters: as it is stored,
with --quantization int8 and with int4 (output head and embedding are as stored in all of them). A
round times two of them in turn. Behind each decode rate stand the bytes of weights that it read, as
a share of the rate at which torch sums memory in the same rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

# Read when torch is imported: what is summed lies on large pages, as our weights do.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from baton import _native
from tests.perf.bench_engine import Baton, compare, timed

DECODE_TOKENS = 17
BATCHES = (1, 8)
PREFILL_TOKENS = 512
VOCAB = 8192
LAYERS = 16
HIDDEN = 1536
INNER = 4096
KV_WIDTH = 512
LAYER_NUMBERS = HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH + 3 * INNER)
"""Weights of a layer."""
BITS = {"bfloat16": 16.0, "int8": 8 + 32 / 128, "int4": 4 + 32 / 32}
"""Per weight, with its share of a scale."""


def make_dense(path: Path) -> None:
    """Random Llama: 16 layers x 1536, 12/4 heads of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=12, num_key_value_heads=4, head_dim=128, max_position_embeddings=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def step_bytes(form: str) -> float:
    """Weights that a decode step reads, the head's in bfloat16."""
    return LAYERS * LAYER_NUMBERS * BITS[form] / 8 + VOCAB * HIDDEN * 2


class Arms:
    """Engines on one model, and memory to read."""

    def __init__(self, path: Path, threads: int) -> None:
        self.path = path
        self.threads = threads
        self._generator = torch.Generator().manual_seed(1)
        self._memory = torch.ones(1 << 26, dtype=torch.int64)
        self._read_rates: list[float] = []

    def _prompts(self, count: int, tokens: int) -> list[list[int]]:
        return torch.randint(3, VOCAB, (count, tokens), generator=self._generator).tolist()

    def decode(self, arm: Baton, batch: int) -> float:
        prompts = self._prompts(batch, 64)
        short = timed(lambda: arm.run(prompts, 1))
        seconds = timed(lambda: arm.run(prompts, DECODE_TOKENS)) - short
        return batch * (DECODE_TOKENS - 1) / seconds

    def prefill(self, arm: Baton) -> float:
        prompts = self._prompts(1, PREFILL_TOKENS)
        return PREFILL_TOKENS / timed(lambda: arm.run(prompts, 1))

    def read_memory(self) -> None:
        seconds = timed(lambda: self._memory.sum())
        self._read_rates.append(self._memory.nbytes / seconds)

    def compare_decode(
        self, form: str, coded: Baton, plain: Baton, batch: int, rounds: int
    ) -> None:
        rates: dict[str, list[float]] = {form: [], "bfloat16": []}
        self._read_rates.clear()

        def decode(arm: Baton, name: str) -> float:
            self.read_memory()
            rates[name].append(self.decode(arm, batch))
            return rates[name][-1]

        compare(
            f"{form}, decode, batch {batch}",
            rounds,
            lambda: decode(coded, form),
            lambda: decode(plain, "bfloat16"),
        )
        read = statistics.median(self._read_rates)
        shares = [
            f"{name} {statistics.median(each) / batch * step_bytes(name) / read:.2f}"
            for name, each in rates.items()
        ]
        print(f"    of {read / 1e9:.1f} GB/s: {', '.join(shares)}", flush=True)


def bench(path: Path, threads: int, rounds: int, forms: list[str]) -> None:
    arms = Arms(path, threads)
    plain = Baton(path, "bfloat16", threads)
    print(f"{'tokens/s':<28} {'codes':>10} {'bfloat16':>12} {'ratio':>7}  spread")
    for form in forms:
        coded = Baton(path, "bfloat16", threads, quantization=form)
        for arm in (plain, coded):
            arms.decode(arm, 1)
        for batch in BATCHES:
            arms.compare_decode(form, coded, plain, batch, rounds)
        compare(
            f"{form}, prefill of {PREFILL_TOKENS}",
            rounds,
            lambda coded=coded: arms.prefill(coded),
            lambda: arms.prefill(plain),
        )
        coded.engine.close()
    plain.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model-path", help="where the model is kept, and made if it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("forms", nargs="*", help="int8, int4; both if none is given")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"isa {_native.cpu_isa()}, threads {args.threads}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        path = Path(args.model_path or scratch)
        if not (path / "config.json").exists():
            make_dense(path)
        bench(path, args.threads, args.rounds, args.forms or ["int8", "int4"])


if __name__ == "__main__":
    main()
