"""Perplexity of a text under a checkpoint: plain, as --quantization makes it, and with
--kv-cache-dtype fp8_e4m3.

    python -m tests.perf.bench_perplexity [--model-path DIR] [--window 512] FILE …

Each window of a file is a prompt of its own; its first token is not predicted. `KL` is the mean divergence of a row's
distribution from that of the plain weights, in nats; `same` is the share of rows with the same likeliest token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

import baton.models
from baton.layers.kv_spec import FP8
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.support.models.model_loop import ModelLoop

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    FP8: {"kv_cache_dtype": FP8},
}
"""Arguments of `read_spec`."""


def log_probabilities(
    path: Path, arguments: dict[str, Any], windows: list[list[int]]
) -> list[torch.Tensor]:
    """Of each window, [tokens, vocab] in float32."""
    model = load_weights(read_spec(path, "float32", **arguments), path)
    longest = max(map(len, windows))
    loop = ModelLoop(model, "torch", page_size=16, max_tokens=(longest + 16) * len(windows) + 16)
    return [loop.prompt_logits(window, longest).log_softmax(-1) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model-path", type=Path, default=Path(baton.models.__file__).parent / "demo"
    )
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model_path / "tokenizer.json"))
    windows = []
    for file in args.files:
        ids = tokenizer.encode(file.read_text()).ids
        windows += [ids[i : i + args.window] for i in range(0, len(ids) - 1, args.window)]
    predicted = torch.cat([torch.tensor(window[1:]) for window in windows])
    print(f"{len(predicted)} tokens in {len(windows)} windows")
    plain = None
    for name, arguments in ARMS.items():
        rows = torch.cat(
            [rows[:-1] for rows in log_probabilities(args.model_path, arguments, windows)]
        )
        plain = rows if plain is None else plain
        perplexity = -rows.gather(1, predicted[:, None]).mean()
        divergence = (plain.exp() * (plain - rows)).sum(-1).mean()
        same = (plain.argmax(-1) == rows.argmax(-1)).float().mean()
        print(f"{name:8} perplexity {perplexity.exp():8.3f}  KL {divergence:.5f}  same {same:.4f}")


if __name__ == "__main__":
    main()
