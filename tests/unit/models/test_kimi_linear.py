"""Kimi-Linear: the spellings of config.json, tensors, shares of ranks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.layers.shard import Shard
from baton.layers.spec import DTYPE_BYTES, DeltaSpec
from baton.models.spec.model import ModelSpec, plan_weights, share_of
from baton.models.spec_reader import read_spec
from tests.support.models.published import PUBLISHED, published_config

KIMI = "Kimi-Linear 48B A3B"
NESTED = PUBLISHED[KIMI]["linear_attn_config"]


def read(path: Path, **changes: Any) -> ModelSpec:
    """The published model; a change to `...` removes the field."""
    config = {k: v for k, v in (published_config(KIMI) | changes).items() if v is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return read_spec(path, load_format="dummy")


def test_published_config_and_that_of_transformers_give_one_spec(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    published = read(tmp_path)
    # The class warns of the fields about rotation, which it does not read.
    fields = {k: v for k, v in published_config(KIMI).items() if not k.startswith("rope_")}
    transformers.KimiLinearConfig(**fields).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"model_max_length", "layer_types", "mlp_layer_types", "linear_head_dim"} <= set(saved)
    saved.pop("linear_attn_config", None)
    (tmp_path / "config.json").write_text(json.dumps(saved))
    spec = read_spec(tmp_path, load_format="dummy")
    assert spec.layers == published.layers
    assert spec.max_context == published.max_context == 1048576


def test_absent_fields_mean_what_they_mean_to_the_class(tmp_path: Path) -> None:
    needed = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads")
    fields = set(PUBLISHED[KIMI]) - {*needed, "vocab_size", "linear_attn_config"}
    lists = {name: NESTED[name] for name in ("full_attn_layers", "kda_layers")}
    absent = dict.fromkeys(fields, ...)
    spec = read(tmp_path, **absent, linear_attn_config=lists)
    assert spec.layers == read(tmp_path).layers
    assert spec.max_context == 1048576
    for left in ({}, {"kda_layers": [1]}):
        spec = read(tmp_path, linear_attn_config=left)
        assert spec.paged_layers == list(range(4, 27, 4))


def test_layers_keep_latents_without_positions_or_states(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert spec.paged_layers == [3, 7, 11, 15, 19, 23, 26]
    assert spec.kv_spec(16).token_bytes == 7 * (512 + 64) * DTYPE_BYTES["bfloat16"]
    conv = 3 * 3 * 32 * 128 * DTYPE_BYTES["bfloat16"]
    matrix = 32 * 128 * 128 * DTYPE_BYTES["float32"]
    assert {state.state_bytes("bfloat16") for state in spec.states.values()} == {conv + matrix}
    assert {layer.attention.rope for layer in spec.layers} == {None}


def names_of(spec: ModelSpec, layer: int, stored: tuple[str, ...] = ()) -> set[str]:
    """Checkpoint names of a layer's tensors, without their prefix."""
    params = [param for number, param in plan_weights(spec, stored=stored) if number == layer]
    return {
        part.source.removeprefix(f"model.layers.{layer}.")
        for param in params
        for part in param.parts
    }


def test_dense_blocks_are_read_under_either_name(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert "mlp.gate_proj.weight" in names_of(spec, 0)
    stored = "model.layers.0.block_sparse_moe.down_proj."
    names = names_of(spec, 0, (stored,))
    assert "block_sparse_moe.gate_proj.weight" in names
    assert not any(name.startswith("mlp.") for name in names)
    assert "block_sparse_moe.experts.255.w3.weight" in names_of(spec, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope = false"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func = .*: sigmoid"),
        ({"num_experts_per_token": 257}, "num_experts_per_token = 257"),
        ({"model_max_length": -1}, "model_max_length = -1"),
        ({"mlp_layer_types": ["sparse"] * 27}, "first_k_dense_replace = 1"),
        ({"linear_attn_config": [1]}, "linear_attn_config = .* an object is needed"),
        (
            {"linear_attn_config": NESTED | {"short_conv_kernel_size": 9}},
            "linear_attn_config.short_conv_kernel_size = 9 .* up to 8",
        ),
        (
            {"linear_attn_config": NESTED | {"full_attn_layers": [4, 8]}},
            "linear_attn_config.kda_layers = .* each layer from 1 to 27 is needed once",
        ),
        (
            {"linear_attn_config": NESTED | {"full_attn_layers": "4"}},
            "linear_attn_config.full_attn_layers = .* a list of layer numbers is needed",
        ),
        ({"layer_types": ["linear_attention"] * 27}, "at least one layer of full_attention"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name_in_the_file(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **changes)


def rows_taken(spec: ModelSpec, shard: Shard, name: str) -> list[int]:
    """Rows that a rank takes of the last checkpoint tensor of tensor `name` of layer 0."""
    (param,) = (p for layer, p in plan_weights(spec, shard) if layer == 0 and p.name == name)
    cut = next(cut for cut in param.parts[-1].share if isinstance(cut, slice))
    return list(range(cut.start, cut.stop))


def test_ranks_have_some_heads_and_all_narrow_projections(tmp_path: Path) -> None:
    spec = read(tmp_path)
    share = share_of(spec, Shard(1, 4))
    assert share.states[0] == DeltaSpec(8, 8, 128, 128, taps=4, first_value_head=8)
    for name, rows in (
        ("inputs", 4096), ("conv", 4096), ("gates", 32), ("decay_up", 4096), ("z_up", 4096),
        ("rate", 32), ("bias", 4096),
    ):  # fmt: skip
        own = range(rows // 4, rows // 2)
        assert rows_taken(spec, Shard(1, 4), name) == list(own), name
    (gates,) = (p for n, p in plan_weights(spec, Shard(1, 4)) if n == 0 and p.name == "gates")
    assert gates.part_rows == [128, 128, 8]
    odd = read(tmp_path, linear_attn_config=NESTED | {"num_heads": 24})
    with pytest.raises(ConfigError, match="linear_num_heads = 24 is no multiple"):
        share_of(odd, Shard(0, 16))
