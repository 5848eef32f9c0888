"""Formats of reasoning and tool calls that are found in a model's directory."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from baton.config import EngineConfig, build_config
from baton.server.text import model_info
from baton.server.text.answer_format import AnswerFormat, load_answer_format
from baton.server.text.tokenizer import Tokenizer
from tests.support.models import tiny_model

SILENT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)
"""Renders tools and names no format."""


def make_checkpoint(path: Path, model_type: str, template: str, **settings: Any) -> Path:
    """A model directory whose vocabulary has the tokens of Qwen3."""
    tiny_model.make(path, template=template)
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    token_config = json.loads((path / "tokenizer_config.json").read_text())
    tokens = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    added = {str(400 + index): {"content": text} for index, text in enumerate(tokens)}
    token_config |= {"added_tokens_decoder": added} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(token_config))
    return path


def load(path: Path, **flags: Any) -> tuple[model_info.ModelFacts, AnswerFormat]:
    config = build_config({"model_path": str(path), **flags})
    facts = model_info.load(config)
    return facts, load_answer_format(config, facts, Tokenizer(path))


@pytest.mark.parametrize(
    ("model_type", "template", "expected"),
    [
        ("qwen3", SILENT_TEMPLATE, ("hermes", "think_tags")),
        ("qwen3", tiny_model.TEMPLATE, (None, "think_tags")),
        ("qwen3", SILENT_TEMPLATE + "{# [TOOL_CALLS] [THINK] #}", ("mistral", "mistral")),
        ("qwen3_moe", SILENT_TEMPLATE, (None, "think_tags")),
        ("llama", SILENT_TEMPLATE, (None, None)),
    ],
    ids=["type", "template without tools", "template that names", "ambiguous type", "other type"],
)
def test_model_type_decides_where_the_template_names_no_format(
    tmp_path: Path, model_type: str, template: str, expected: tuple[str | None, str | None]
) -> None:
    path = make_checkpoint(tmp_path / "model", model_type, template)
    _, found = load(path)
    assert (found.tool_parser, found.reasoning_parser) == expected
    names = [name or "none" for name in expected]
    assert found.canonical == f"tool_parser={names[0]},reasoning_parser={names[1]}"
    _, chosen = load(path, tool_parser="llama3", reasoning_parser="none")
    assert (chosen.tool_parser, chosen.reasoning_parser) == ("llama3", None)


def test_unused_response_template_is_noticed(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3", SILENT_TEMPLATE, response_template=None)
    described = make_checkpoint(
        tmp_path / "described", "qwen3", SILENT_TEMPLATE, response_template={"version": 1}
    )
    assert not load(plain)[0].has_response_template
    assert load(described)[0].has_response_template


def test_text_layer_knows_each_treatment_of_unknown_calls(tmp_path: Path) -> None:
    """The values of the flag are those of `UnknownToolCalls` in Rust, where they are read."""
    path = make_checkpoint(tmp_path, "qwen3", SILENT_TEMPLATE)
    (flag,) = [field for field in fields(EngineConfig) if field.name == "unknown_tool_calls"]
    formats = [load(path, unknown_tool_calls=value)[1].native for value in flag.metadata["choices"]]
    assert len({native.canonical for native in formats}) == len(formats) == 2
