"""Model directories with the shape of well-known models and no weights, for --load-format dummy.

    python -m tests.support.models.shapes qwen3-0.6b DIR

config.json is that of the published checkpoint as far as it tells the shape; the tokenizer is a small one, made here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.models import tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "dtype": "bfloat16",
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}  # fmt: skip
"""`tiny` is of no real model: for trying scripts on CPUs. Its heads are of a size that flashinfer takes."""


def make(shape: str, path: Path, **changes: Any) -> Path:
    """Write the directory and return it. `changes`: to config.json."""
    tiny_model.make(path)
    config = {"bos_token_id": 0, "eos_token_id": 1, **SHAPES[shape], **changes}
    (path / "config.json").write_text(json.dumps(config))
    return path


if __name__ == "__main__":
    print(make(sys.argv[1], Path(sys.argv[2])))
