"""Decode with weights that stay quantized against bfloat16, on the CPU: tokens/s at batch 1, as ratios.

    python -m tests.perf.bench_quantized [--model-path DIR] [--rounds N] [--threads N]

Three engines in this process have the same random dense model of 430 M parameters: as it is stored,
with --quantization int8 and with int4 (output head and embedding are as stored in all of them). A
round times each of them in turn.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from baton import _native
from tests.perf.bench_engine import Baton, compare, timed

DECODE_TOKENS = 33
VOCAB = 8192


def make_dense(path: Path) -> None:
    """Random Llama: 16 layers x 1536, 12/4 heads of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1536, intermediate_size=4096, num_hidden_layers=16,
        num_attention_heads=12, num_key_value_heads=4, head_dim=128, max_position_embeddings=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def bench(path: Path, threads: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(1)
    plain = Baton(path, "bfloat16", threads)
    print(f"{'decode tokens/s, batch 1':<28} {'codes':>10} {'bfloat16':>12} {'ratio':>7}  spread")

    def decode(arm: Baton) -> float:
        prompts = torch.randint(3, VOCAB, (1, 64), generator=generator).tolist()
        short = timed(lambda: arm.run(prompts, 1))
        return (DECODE_TOKENS - 1) / (timed(lambda: arm.run(prompts, DECODE_TOKENS)) - short)

    for form in ("int8", "int4"):
        coded = Baton(path, "bfloat16", threads, quantization=form)
        for arm in (plain, coded):
            decode(arm)
        compare(form, rounds, lambda coded=coded: decode(coded), lambda: decode(plain))
        coded.engine.close()
    plain.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model-path", help="where the model is kept, and made if it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"isa {_native.cpu_isa()}, threads {args.threads}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        path = Path(args.model_path or scratch)
        if not (path / "config.json").exists():
            make_dense(path)
        bench(path, args.threads, args.rounds)


if __name__ == "__main__":
    main()
