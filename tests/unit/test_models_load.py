"""Loading weights: complaints name what is wrong, dummies are reproducible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ConfigError
from baton.models.load import load_model
from baton.models.spec import read_spec
from baton.models.weights import plan_weights

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float32",
    "tie_word_embeddings": False,
}  # fmt: skip
Edit = Callable[[dict[str, torch.Tensor]], Any]


def checkpoint(path: Path, edit: Edit = lambda tensors: None, **changes: Any) -> Path:
    """A directory with random weights in checkpoint names, after `edit`."""
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(0)
    parts = [part for param in plan_weights(read_spec(path)) for part in param.parts]
    tensors = {part.source: torch.randn(part.shape, generator=generator) for part in parts}
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_projections_are_stacked_in_order(tmp_path):
    kept: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, edit=kept.update)
    weights = load_model(path).weights
    prefix = "model.layers.1."
    qkv = [kept[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"]
    bias = [kept[f"{prefix}self_attn.{x}_proj.bias"] for x in "qkv"]
    gate_up = [kept[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(weights.layers[1].qkv, torch.cat(qkv))
    assert torch.equal(weights.layers[1].qkv_bias, torch.cat(bias))
    assert torch.equal(weights.layers[1].gate_up, torch.cat(gate_up))
    assert torch.equal(weights.lm_head, kept["lm_head.weight"])
    assert weights.layers[0].o_bias is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["missing tensor model.layers.1.mlp.up_proj.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["missing tensor lm_head.weight"]),
        (lambda t: t.update({"model.layers.0.mlp.router.weight": torch.ones(2)}), ["unexpected", "mlp.router.weight"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(8)}), ["model.norm.weight is [8]", "implies [16]"]),
        (lambda t: t.clear(), ["missing tensor", "more"]),
    ],
)
def test_weights_that_do_not_fit_are_listed(tmp_path, edit, words):
    with pytest.raises(ConfigError) as err:
        load_model(checkpoint(tmp_path, edit))
    for word in words:
        assert word in err.value.message


def test_computed_tensors_in_a_checkpoint_are_ignored(tmp_path):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = torch.ones(32, 16)

    weights = load_model(checkpoint(tmp_path, edit, tie_word_embeddings=True)).weights
    assert weights.lm_head is weights.embed
    assert not torch.equal(weights.embed, torch.ones(32, 16))


def test_absent_and_damaged_files_are_named(tmp_path):
    path = checkpoint(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors.*damaged"):
        load_model(path)
    file.unlink()
    with pytest.raises(ConfigError, match="--load-format dummy"):
        load_model(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x-1.safetensors"}}))
    with pytest.raises(ConfigError, match=r"1 of 1 files are absent, first x-1\.safetensors"):
        load_model(path)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    a, b, c = (load_model(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.weights.layers[1].down, b.weights.layers[1].down)
    assert not torch.equal(a.weights.layers[1].down, c.weights.layers[1].down)
    assert a.spec.model_hash == b.spec.model_hash != c.spec.model_hash
    half = load_model(tmp_path, dtype="bfloat16", load_format="dummy", seed=1)
    assert torch.equal(half.weights.embed, a.weights.embed.bfloat16())
