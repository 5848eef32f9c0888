"""Our engine against transformers' generate() on the same checkpoint: prefill and decode tokens/s, as ratios.

Both arms run in this process, interleaved, `--rounds` times each, same weights, dtype and threads, greedy; in float32
equal outputs are checked first. Decode speed comes from the time of a long answer minus that of a one-token answer.
Run: python -m tests.perf.bench_engine [--model-path DIR] [--rounds N]   (default: a random 75 M Llama made on the spot)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.runtime.engine_loop import EngineLoop
from tests.support.engines.engine_run import answer, greedy, make_engine

DECODE_TOKENS = 33


def make_small(path: Path) -> None:
    """Random Llama of 75 M parameters: 10 layers x 768, 12/4 heads of 64, vocabulary 8192."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Transformers:
    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                min_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [row.tolist() for row in out[:, ids.shape[1] :]]


class Baton:
    def __init__(self, path: Path, dtype: str, threads: int, **flags: Any) -> None:
        self.engine: EngineLoop = make_engine(
            path, dtype=dtype, cpu_threads=threads, page_size=16, max_total_tokens=16384, disable_radix_cache=True,
            chunked_prefill_size=2048, **flags,
        )  # fmt: skip

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return answer(self.engine, prompts, greedy(tokens))


def compare(name: str, rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    """Interleave both arms and print tokens/s of each and their ratio (median, lowest and highest of the rounds)."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in pairs)
    mine, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = (
        f"{statistics.median(ratios):>7.2f}  {f'{ratios[0]:.2f}-{ratios[-1]:.2f}':>11}  n={rounds}"
    )
    print(f"{name:<28} {mine:>10.1f} {peer:>12.1f} {ratio}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model-path", help="Hugging Face directory (default: a random 75 M Llama)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        path = Path(args.model_path or scratch)
        if not args.model_path:
            make_small(path)
        bench(path, args.dtype, args.threads, args.rounds)


def bench(path: Path, dtype: str, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(1)
    peer, ours = Transformers(path, getattr(torch, dtype)), Baton(path, dtype, threads)
    vocab = peer.model.config.vocab_size

    def prompts(count: int, length: int) -> list[list[int]]:
        return torch.randint(0, vocab, (count, length), generator=generator).tolist()

    if dtype == "float32":
        check = prompts(2, 40)
        assert ours.run(check, 16) == peer.run(check, 16), (
            "the arms must give equal tokens before they are timed"
        )
    print(f"{path.name} {dtype}, {threads} threads, torch {torch.__version__}")
    print(f"{'tokens/s':<28} {'baton':>10} {'transformers':>12} {'ratio':>7}  {'spread':>11}")

    def prefill(arm: Transformers | Baton, batch: int) -> float:
        work = prompts(batch, 512)
        return batch * 512 / timed(lambda: arm.run(work, 1))

    def decode(arm: Transformers | Baton, batch: int) -> float:
        work = prompts(batch, 64)
        short = timed(lambda: arm.run(work, 1))
        return batch * (DECODE_TOKENS - 1) / (timed(lambda: arm.run(work, DECODE_TOKENS)) - short)

    for arm in (peer, ours):
        arm.run(prompts(1, 64), 4)
    compare("prefill 512, batch 1", rounds, lambda: prefill(ours, 1), lambda: prefill(peer, 1))
    for batch in (1, 8):
        compare(
            f"decode, batch {batch}",
            rounds,
            lambda b=batch: decode(ours, b),
            lambda b=batch: decode(peer, b),
        )
    ours.engine.close()


if __name__ == "__main__":
    main()
