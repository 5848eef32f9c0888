"""docs/models.md has the tables of the registry and of this suite; sizes of published models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.models.families import FAMILIES
from tests.parity.family_tables import TABLES, read_published
from tests.support.models.published import PUBLISHED

PAGE = Path(__file__).parents[2] / "docs/models.md"
KV_BYTES = {
    "Phi-3-mini 4k": 393216, "Phi-4": 204800, "Phi-4-mini": 131072, "Gemma 2 9B": 344064, "Gemma 3 1B": 26624,
    "Mixtral 8x7B": 131072, "Qwen1.5-MoE-A2.7B": 196608, "Qwen3-30B-A3B": 98304, "GLM-4.5-Air": 188416,
    "Qwen3-Next 80B A3B": 24576, "gpt-oss 20B": 49152, "gpt-oss 120B": 73728, "Llama 4 Scout": 196608,
}  # fmt: skip
"""Bytes of a token in bfloat16, counted by hand: 2 tensors of layers by KV heads by head size."""
PARAMETERS = {
    "Llama 3.1 8B": 8.03e9, "Phi-3-mini 4k": 3.82e9, "Phi-4": 14.7e9, "OLMo 2 7B": 7.3e9, "Granite 3.3 8B": 8.17e9,
    "SmolLM3 3B": 3.08e9, "Gemma 2 9B": 9.24e9, "Gemma 3 1B": 1.0e9, "Phi-3.5-MoE": 41.9e9, "Qwen3-30B-A3B": 30.5e9,
    "Qwen3-Next 80B A3B": 79.7e9, "gpt-oss 20B": 20.9e9, "gpt-oss 120B": 116.8e9, "Llama 4 Scout": 107.8e9,
    "Kimi-Linear 48B A3B": 49.1e9,
}  # fmt: skip
"""As the model cards have them."""


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_table_is_current(table: Callable[[], str]) -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run: python -m tests.parity.family_tables"


def test_each_family_has_a_published_model() -> None:
    assert {config["architectures"][0] for config in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize(("name", "size"), KV_BYTES.items())
def test_kv_of_a_token_is_that_of_the_published_model(name: str, size: int) -> None:
    assert read_published(name).kv_spec(16).token_bytes == size


@pytest.mark.parametrize(("name", "share"), [("Gemma 3 1B", 0.3), ("gpt-oss 20B", 0.55)])
def test_sequence_of_32k_tokens_holds_less_without_what_windows_have_passed(
    name: str, share: float
) -> None:
    spec = read_published(name)
    whole = spec.kv_spec(16)
    kv = whole.divide(spec.attention)
    held = 2048 + sum(rule.most_blocks(16, 1) * rule.width for rule in kv.rules)
    assert held * kv.page_bytes <= share * 2048 * whole.page_bytes


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameters_are_those_of_the_model_card(name: str, parameters: float) -> None:
    assert read_published(name).num_parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Gemma 2 9B", {}, (4096, 0) * 21),
        ("Gemma 3 1B", {}, (512, 512, 512, 512, 512, 0) * 4 + (512, 512)),
        ("Gemma 3 1B", {"sliding_window_pattern": 2}, (512, 0) * 13),
        ("OLMo 3 7B", {"layer_types": None}, (4096, 4096, 4096, 0) * 8),
        ("SmolLM3 3B", {}, (0,) * 36),
        ("gpt-oss 20B", {"layer_types": None}, (128, 0) * 12),
    ],
)
def test_windows_of_published_models(
    name: str, changes: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert tuple(layer.window for layer in read_published(name, **changes).attention) == windows


def test_layers_of_two_types_turn_by_two_embeddings() -> None:
    sliding, full = (read_published("Gemma 3 1B").layers[i].attention.rope for i in (0, 5))
    assert sliding is not None
    assert full is not None
    assert (sliding.theta, full.theta) == (10000.0, 1000000.0)
    kinds = [layer.attention.rope for layer in read_published("OLMo 3 7B").layers[2:4]]
    assert [rope and rope.kind for rope in kinds] == ["default", "yarn"]


def test_three_of_four_layers_of_llama_4_have_chunks_and_turn() -> None:
    layers = read_published("Llama 4 Scout").layers
    assert [layer.attention.heads.chunk for layer in layers] == [8192, 8192, 8192, 0] * 12
    assert [layer.attention.rope is not None for layer in layers] == [True, True, True, False] * 12


@pytest.mark.parametrize("name", ["gpt-oss 20B", "gpt-oss 120B"])
def test_gpt_oss_without_rotary_parameters_has_those_of_its_files(name: str) -> None:
    stated = read_published(name).layers[0].attention.rope
    assert stated is not None
    assert (stated.kind, stated.factor, stated.truncate) == ("yarn", 32.0, False)
    silent = read_published(name, rope_scaling=None, rope_theta=None)
    assert silent.layers[0].attention.rope == stated
    assert silent.max_context == 131072


def test_every_fourth_layer_of_smollm3_does_not_turn() -> None:
    turns = [layer.attention.rope is not None for layer in read_published("SmolLM3 3B").layers]
    assert turns == [True, True, True, False] * 9
