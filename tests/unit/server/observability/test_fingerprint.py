"""Fingerprints that P and D compare: equal directories are equal, each difference shows in its own aspect."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from baton.config import build_config
from baton.layers.kv_spec import FP8, KvScales, KVSpec, describe_heads
from baton.server.observability.fingerprint import fingerprint, tokenizer_hash
from baton.server.text import model_info
from tests.support.models import tiny_model


def layout_of(
    layers: int = 2,
    heads: range = range(2),
    head_dim: int = 8,
    dtype: str = "bfloat16",
    page_tokens: int = 16,
    model_hash: str = "abc",
    key_scale: float | None = None,
) -> dict[str, object]:
    """Args: `key_scale`: pages hold codes, with this scale of keys in all layers."""
    scales = () if key_scale is None else (KvScales(key=key_scale),) * layers
    group = describe_heads(
        range(layers),
        heads,
        head_dim,
        dtype=FP8 if scales else dtype,
        page_tokens=page_tokens,
        scales=scales,
    )
    return KVSpec((group,), dtype).layout(model_hash)


def of(path: Path, template: str | None = None, **coordinates: Any) -> dict[str, str]:
    facts = model_info.load(build_config({"model_path": str(path)}))
    if template is not None:
        facts = dataclasses.replace(facts, chat_template=template)
    tokenizer = tokenizer_hash(facts.tokenizer_path)
    return fingerprint(facts, tokenizer, layout_of(**coordinates), "hermes", "g1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_model.make(tmp_path / "tiny")


def test_copies_of_a_directory_are_equal(path: Path, tmp_path: Path) -> None:
    assert of(path) == of(tiny_model.make(tmp_path / "other"))


def differing(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [aspect for aspect in a if a[aspect] != b[aspect]]


@pytest.mark.parametrize(
    ("coordinates", "aspects"),
    [
        ({"page_tokens": 32}, ["page_size", "kv_layout"]),
        ({"dtype": "float16"}, ["dtype", "kv_layout"]),
        ({"key_scale": 1.0}, ["dtype", "kv_layout"]),
        ({"model_hash": "def"}, ["model"]),
        ({"heads": range(1)}, ["kv_layout"]),
        ({"heads": range(2, 4)}, ["kv_layout"]),
        ({"layers": 3, "model_hash": "def"}, ["model", "kv_layout"]),
    ],
)
def test_difference_shows_in_its_aspect(
    path: Path, coordinates: dict[str, Any], aspects: list[str]
) -> None:
    assert differing(of(path), of(path, **coordinates)) == aspects


def test_types_of_computation_and_pages_and_the_scales_show(path: Path) -> None:
    codes = of(path, key_scale=1.0)
    assert codes["dtype"] == "bfloat16, KV cache fp8_e4m3"
    assert differing(codes, of(path, key_scale=1.0, dtype="float32")) == ["dtype"]
    assert differing(codes, of(path, key_scale=0.5)) == ["kv_layout"]


def test_template_and_tokenizer(path: Path) -> None:
    before = of(path)
    assert differing(before, of(path, template="{{ messages }}")) == ["chat_template"]
    tokenizer = path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert differing(before, of(path)) == ["tokenizer"]


def test_router_knows_the_aspects(path: Path) -> None:
    source = Path(__file__).parents[4] / "router" / "core" / "src" / "pairing" / "fingerprint.rs"
    listed = re.search(r"FINGERPRINT_FIELDS: \[&str; \d+\] =\s*\[(.*?)\]", source.read_text(), re.S)
    assert listed is not None
    assert re.findall(r'"(\w+)"', listed[1]) == list(of(path))
