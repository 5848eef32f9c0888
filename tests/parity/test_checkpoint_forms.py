"""One model in every form a directory comes in: both generations of config.json, one file or several, other dtypes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from baton.models.spec_reader import read_spec
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import (
    VARIANTS,
    as_transformers_4,
    make_checkpoint,
    reference_greedy,
    reference_model,
    variant_config,
)
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model
from tests.support.probes import RunnerProbe


# Kimi-Linear came with transformers 5, and turns nothing.
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "kimi-linear"])
def test_transformers_4_and_5_directories_give_one_spec(variant, tmp_path):
    config = variant_config(variant)
    config.architectures = [f"{VARIANTS[variant][0]}ForCausalLM"]
    config.dtype = "float32"
    path = tmp_path / "v5"
    config.save_pretrained(path)
    assert "rope_parameters" in json.loads((path / "config.json").read_text())
    new = read_spec(path, load_format="dummy")
    old = read_spec(as_transformers_4(path, tmp_path / "v4"), load_format="dummy")
    assert dataclasses.replace(old, model_hash="") == dataclasses.replace(new, model_hash="")


def test_sharded_checkpoints_load_like_whole_ones(reference, tmp_path):
    whole = load_model(reference("qwen3").path)
    path = make_checkpoint("qwen3", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    sharded = load_model(path)
    for a, b in zip(whole.weights.layers, sharded.weights.layers, strict=True):
        assert torch.equal(a.attention.qkv, b.attention.qkv)
        assert torch.equal(a.mlp.gate_up, b.mlp.gate_up)
    assert torch.equal(whole.weights.lm_head, sharded.weights.lm_head)


def test_float16_checkpoint_runs_as_bfloat16_and_exactly_as_float32(reference, tmp_path):
    ref = reference("llama")
    path = make_checkpoint("llama", tmp_path / "half", dtype="float16")
    assert load_model(path).weights.embed.dtype == torch.bfloat16
    wide = load_model(path, dtype="float32")
    assert torch.equal(wide.weights.embed, ref.model.get_input_embeddings().weight.half().float())


def test_float16_checkpoint_computed_as_it_is(reference, tmp_path):
    """The whole engine, in float16 on the CPU, answers as transformers does in float16."""
    ref = reference("llama")
    path = make_checkpoint("llama", tmp_path / "half", dtype="float16")
    engine = make_engine(path, dtype="float16")
    assert RunnerProbe(engine.runner).kv_pool.data.dtype == torch.float16
    got = answer(
        engine, ref.prompts, greedy(24)
    )  # longer ones meet a near tie, which rounding decides
    engine.close()
    half = reference_model(path).half()
    assert got == [reference_greedy(half, prompt, 24) for prompt in ref.prompts]


def test_tied_head_is_the_embedding_itself(reference):
    weights = load_model(reference("qwen2").path).weights
    assert weights.lm_head is weights.embed


def test_positions_beyond_the_first_table_are_rotated_right(reference, monkeypatch):
    monkeypatch.setattr("baton.models.blocks.rope._FIRST_POSITIONS", 8)
    ref = reference("llama-yarn")
    logits = ModelLoop(load_model(ref.path), "torch", 4).prompt_logits(ref.prompts[2], 9)
    torch.testing.assert_close(logits, ref.logits[2], atol=1e-4, rtol=1e-4)
