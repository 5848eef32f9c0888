"""Families with latent attention: fields of config.json, factors of scores, tensors, shares of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.shard import Shard
from baton.layers.spec import LatentSpec
from baton.models.blocks.mla import MlaBlock
from baton.models.blocks.rope import RopeTables
from baton.models.load import load_weights
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.model import ModelSpec, plan_weights, share_of
from baton.models.spec_reader import read_spec
from tests.support.models.checkpoints import make_checkpoint, variant_config
from tests.support.models.published import published_config

V2_LITE = "DeepSeek V2 Lite"
V3 = "DeepSeek V3"
GLM = "GLM-4.7-Flash"


def read(path: Path, name: str, *, on_cpu: bool = True, **changes: Any) -> ModelSpec:
    """A published model; a change to `...` removes the field."""
    config = {k: v for k, v in (published_config(name) | changes).items() if v is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return read_spec(path, load_format="dummy", on_cpu=on_cpu)


def block_of(spec: ModelSpec) -> MlaBlockSpec:
    (block,) = {layer.attention for layer in spec.layers}
    assert isinstance(block, MlaBlockSpec)
    return block


def test_absent_fields_mean_what_they_mean_to_the_class(tmp_path: Path) -> None:
    sizes = (
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace",
        "n_routed_experts", "moe_intermediate_size", "rope_scaling",
    )  # fmt: skip
    absent = read(tmp_path, V3, **dict.fromkeys(sizes, ...))
    assert absent.layers[:3] == (absent.layers[0],) * 3
    stated = read(tmp_path, V3, rope_scaling=None)
    assert absent.layers == stated.layers
    absent = read(tmp_path, GLM, **dict.fromkeys(sizes, ...))
    assert absent.layers == read(tmp_path, GLM).layers


def test_null_query_rank_projects_queries_in_one_step(tmp_path: Path) -> None:
    assert block_of(read(tmp_path, V2_LITE)).q_rank is None
    assert block_of(read(tmp_path, V2_LITE, q_lora_rank=...)).q_rank == 1536


def test_kimi_k2_is_deepseek_v3_under_its_own_model_type(tmp_path: Path) -> None:
    spec = read(tmp_path, "Kimi K2")
    assert spec.architecture == "DeepseekV3ForCausalLM"
    assert block_of(spec).num_heads == 64
    with pytest.raises(ConfigError, match="make them agree"):
        read(tmp_path, "Kimi K2", model_type="deepseek_v2")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (V3, {"index_topk": 2048}, "an indexer"),
        (V3, {"num_key_value_heads": 8}, r"num_attention_heads \(128\) is needed"),
        (V3, {"head_dim": 128}, "imply 64"),
        (V3, {"qk_head_dim": 128}, "imply 192"),
        (V3, {"qk_rope_head_dim": 63}, "even size"),
        (V3, {"topk_method": "greedy"}, "supported: noaux_tc"),
        (V3, {"scoring_func": "softmax"}, "supported: sigmoid"),
        (V3, {"moe_layer_freq": 2}, "supported: 1"),
        (V3, {"hidden_act": "gelu"}, "supported: silu"),
        (V3, {"partial_rotary_factor": 0.5}, "supported: 1.0"),
        (V2_LITE, {"attention_bias": True}, "without q_lora_rank"),
        (V2_LITE, {"norm_topk_prob": True}, "transformers' class ignores it"),
        (V2_LITE, {"rope_interleave": False}, "supported: true"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "supported: greedy, group_limited_greedy"),
        (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": 7}, "divisor of the 64"),
        (GLM, {"mlp_layer_types": ["dense"]}, "47 times dense or sparse"),
        (GLM, {"first_k_dense_replace": 2}, "mlp_layer_types says"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, name, **changes)


def test_gpu_is_told_that_there_are_no_heads(tmp_path: Path) -> None:
    assert read(tmp_path, V3, on_cpu=False).kernel_shapes.heads is None


def attention_of_transformers(variant: str, rope: dict[str, Any]) -> tuple[float, Tensor]:
    """Factor of scores, and cosines of the first positions, of a tiny model's class."""
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    config = variant_config(variant)
    config.rope_parameters = rope
    model: Any = transformers.DeepseekV3ForCausalLM(config).model
    attention = model.layers[0].self_attn
    assert isinstance(attention, modeling_deepseek_v3.DeepseekV3Attention)
    cos, _ = model.rotary_emb(torch.zeros(1), torch.arange(300)[None])
    return attention.scaling, cos[0, :, : config.qk_rope_head_dim // 2]


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.3},
        {"mscale": 0.8},
        {"mscale_all_dim": 0.8},
        {"mscale": 1.0, "mscale_all_dim": 0.0},
        {"mscale_all_dim": 1.0, "attention_factor": 1.1},
        {"mscale_all_dim": 1.0, "factor": 1.0},
    ],
    ids=str,
)
def test_yarn_scales_scores_and_rotations_as_transformers_does(
    tmp_path: Path, weights: dict[str, float]
) -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 128,
    } | weights  # fmt: skip
    scale, cos = attention_of_transformers("deepseek-v3", rope)
    config = variant_config("deepseek-v3").to_dict() | {"rope_parameters": rope}
    names = {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config | names))
    block = block_of(read_spec(tmp_path, load_format="dummy"))
    assert block.heads.scale == pytest.approx(scale, rel=1e-12)
    assert block.rope is not None
    torch.testing.assert_close(RopeTables(block.rope, 8, 512).cos[:300], cos)


def test_norms_of_latents_do_not_take_the_eps_of_config(tmp_path: Path) -> None:
    spec = read(tmp_path, V3, rms_norm_eps=0.5)
    assert (block_of(spec).latent_norm.eps, spec.norm.eps) == (1e-6, 0.5)


def test_ranks_have_their_heads_and_all_latents(tmp_path: Path) -> None:
    spec = read(tmp_path, V3)
    shares = [share_of(spec, Shard(rank, 4)) for rank in range(4)]
    assert {share.attention[0] for share in shares} == {
        LatentSpec(32, 512, 64, scale=block_of(spec).heads.scale)
    }
    groups = {share.kv_spec(16).groups for share in (spec, *shares)}
    assert len(groups) == 1, "every rank keeps the same pages"
    rows: dict[str, set[int]] = {}
    for rank in range(4):
        for layer, param in plan_weights(spec, Shard(rank, 4)):
            if layer == 0 and param.name in ("kv_b", "q_b"):
                (cut, _) = param.parts[0].share
                assert isinstance(cut, slice)
                taken = set(range(cut.start, cut.stop))
                assert not taken & rows.setdefault(param.name, set())
                rows[param.name] |= taken
    assert {name: len(taken) for name, taken in rows.items()} == {
        "kv_b": 128 * 256,
        "q_b": 128 * 192,
    }
    with pytest.raises(ConfigError, match="num_attention_heads = 20 is no multiple"):
        share_of(read(tmp_path, GLM), Shard(0, 8))


def test_matrix_that_is_taken_apart_stays_plain_where_others_are_quantized_at_load(
    tmp_path: Path,
) -> None:
    pytest.importorskip("baton._native", reason="the native module is not built")
    path = make_checkpoint("deepseek-v2-lite", tmp_path / "m")
    plain = load_weights(read_spec(path), path).weights.layers[1].attention
    quantized = load_weights(read_spec(path, quantization="int8"), path).weights.layers[1].attention
    assert isinstance(plain, MlaBlock)
    assert isinstance(quantized, MlaBlock)
    assert not isinstance(quantized.o, Tensor)
    for ours, before in (
        (quantized.key_up, plain.key_up),
        (quantized.value_up, plain.value_up),
    ):
        assert isinstance(ours, Tensor)
        assert isinstance(before, Tensor)
        assert torch.equal(ours, before)
