"""Families with the gated delta net: fields of config.json, tensors, shares of ranks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import ConfigError
from baton.layers.shard import Shard
from baton.layers.spec import DeltaSpec
from baton.models.checkpoint import check_checkpoint
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.model import ModelSpec, is_ignorable, plan_weights, share_of
from baton.models.spec_reader import read_spec
from tests.support.models.published import published_config

NEXT = "Qwen3-Next 80B A3B"


def read(path: Path, **changes: Any) -> ModelSpec:
    """The published model; a change to `...` removes the field."""
    config = {k: v for k, v in (published_config(NEXT) | changes).items() if v is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return read_spec(path, load_format="dummy")


def test_absent_fields_mean_what_they_mean_to_the_class(tmp_path: Path) -> None:
    fields = (
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "full_attention_interval", "num_experts",
        "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "norm_topk_prob", "partial_rotary_factor", "head_dim", "num_key_value_heads",
    )  # fmt: skip
    assert read(tmp_path, **dict.fromkeys(fields, ...)).layers == read(tmp_path).layers


def test_every_fourth_layer_has_pages_and_the_others_a_state(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert spec.paged_layers == list(range(3, 48, 4))
    assert len(spec.states) == 36
    assert {state.state_bytes("bfloat16") for state in spec.states.values()} == {49152 + 2097152}
    (group,) = spec.kv_spec(16).groups
    assert group.layer_numbers == spec.paged_layers
    kinds = ["full_attention", "linear_attention"] * 24
    assert read(tmp_path, layer_types=kinds).paged_layers == list(range(0, 48, 2))
    assert read(tmp_path, full_attention_interval=3).paged_layers == list(range(2, 48, 3))


def test_norm_inside_the_delta_net_has_its_weight_as_it_is(tmp_path: Path) -> None:
    layer = read(tmp_path).layers[0]
    assert isinstance(layer.attention, DeltaBlockSpec)
    assert layer.norms.norm.adds_one
    assert not layer.attention.norm.adds_one


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention"] * 48}, "at least one layer of full_attention"),
        ({"layer_types": ["full_attention"] * 47}, "48 times linear_attention or full_attention"),
        ({"linear_num_value_heads": 24}, r"multiple of linear_num_key_heads \(16\)"),
        ({"linear_conv_kernel_dim": 9}, "up to 8"),
        ({"hidden_act": "gelu"}, "supported: silu"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"host_kv_gib": 1.0}, "--host-kv-gib 1: .* leave the flag out"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype auto"),
    ],
)
def test_start_with_a_flag_that_has_no_states_yet_is_refused(
    tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    small = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 32}
    read(tmp_path, **small)
    given = {"model_path": str(tmp_path), "load_format": "dummy", "device": "cpu"}
    check_checkpoint(build_config(given), tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_checkpoint(build_config(given | flags), tmp_path)


def test_draft_layers_in_files_are_not_read(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert is_ignorable(spec, "mtp.layers.0.mlp.gate.weight")
    assert not is_ignorable(spec, "model.layers.0.mtp.weight")


def rows_taken(spec: ModelSpec, shard: Shard, name: str) -> list[int]:
    """Rows of the checkpoint's tensors that a rank takes for tensor `name` of layer 0, in its order."""
    (param,) = (p for layer, p in plan_weights(spec, shard) if layer == 0 and p.name == name)
    cuts = [part.share[0] for part in param.parts]
    return [row for cut in cuts if isinstance(cut, slice) for row in range(cut.start, cut.stop)]


def test_ranks_have_some_key_heads_and_their_value_heads(tmp_path: Path) -> None:
    spec = read(tmp_path)
    share = share_of(spec, Shard(1, 4))
    assert share.states[0] == DeltaSpec(4, 8, 128, 128, taps=4, first_value_head=8)
    for name, rows in (
        ("inputs", 16 * (2 * 128 + 4 * 128)),
        ("gates", 64),
        ("conv", 8192),
        ("rate", 32),
        ("bias", 32),
    ):
        taken = [rows_taken(spec, Shard(rank, 4), name) for rank in range(4)]
        assert sorted(row for own in taken for row in own) == list(range(rows)), name
    # A group of rows has a query, a key, two values and two z of 128 elements.
    own = rows_taken(spec, Shard(1, 4), "inputs")
    assert own[:2] == [4 * 768, 4 * 768 + 1]
    assert own[4 * 128] == 4 * 768 + 128
    assert own[8 * 128] == 4 * 768 + 256
    assert own[16 * 128] == 4 * 768 + 512
    with pytest.raises(ConfigError, match="linear_num_key_heads = 16 is no multiple"):
        share_of(read(tmp_path, num_attention_heads=32, head_dim=128), Shard(0, 32))
