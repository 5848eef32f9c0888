"""Structural tags: free text, and tagged parts that follow their own grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from baton.errors import BadRequest, UnsupportedParameter
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.structural_tag import structural_grammar
from tests.support.models import tiny_model
from tests.unit.server.request.grammar.test_constraint import accepts

PAD = 2
"""Id of <pad>, which stands for a marker token here."""


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path: Path = tiny_model.make(tmp_path_factory.mktemp("model"))
    return LLTokenizer((path / "tokenizer.json").read_text(), eos_token=[1])


def grammar(value: Any) -> str:
    markers = MarkerTokens(lambda: {"<s>": 0, "</s>": 1, "<pad>": PAD})
    return structural_grammar(value, "tag", "bounded", markers).text


def tokens_of(trie: LLTokenizer, *parts: str | int) -> list[int]:
    return [
        token
        for part in parts
        for token in ([part] if isinstance(part, int) else trie.tokenize_str(part))
    ]


NUMBER = {"type": "integer"}
LEGACY = {
    "triggers": ["<f=", "<g>"],
    "structures": [
        {"begin": "<f=add>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=sub>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<g>", "schema": {"type": "null"}, "end": ""},
    ],
}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("hello", True),
        ("a < b and <f and <", True),
        ("hello <f=add>12</f> and <f=sub>true</f><g>null bye", True),
        ("<f=add>x", False),
        ("<f=other>", False),
        ("text <f=add>12</f><f=add>true</f>", False),
        ("<f=add>12", False),
    ],
)
def test_legacy_form(trie: LLTokenizer, text: str, is_valid: bool) -> None:
    assert accepts(trie, grammar(LEGACY), text) is is_valid


def test_markers_are_tokens(trie: LLTokenizer) -> None:
    text = grammar(
        {
            "triggers": ["<pad>"],
            "structures": [{"begin": "<pad>call ", "schema": NUMBER, "end": "<pad>."}],
        }
    )
    assert accepts(trie, text, tokens_of(trie, "so: ", PAD, "call 7", PAD, ".", " done"))
    assert not accepts(trie, text, tokens_of(trie, PAD, "call x"))
    assert not accepts(trie, text, tokens_of(trie, PAD, "other"))
    assert not accepts(trie, text, tokens_of(trie, PAD, "call 7."))
    assert accepts(trie, text, "free")


TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": NUMBER},
    "end": "</a>",
}
TEXT_TAG = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "!!"]}
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const_string": ({"type": "const_string", "value": "hi"}, ["hi"], ["h", "hihi"]),
    "regex": ({"type": "regex", "pattern": "[a-z]/[0-9]"}, ["a/1"], ["a1"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x"]),
    "any_text": ({"type": "any_text"}, ["", "anything\nat all"], []),
    "sequence": (
        {"type": "sequence", "elements": [TAG, {"type": "const_string", "value": ";"}, TAG]},
        ["<a>1</a>;<a>2</a>"],
        ["<a>1</a>"],
    ),
    "text before a literal": (
        {
            "type": "sequence",
            "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}, TAG],
        },
        ["bla END<a>1</a>", "END<a>1</a>"],
        ["bla", "bla END"],
    ),
    "text before a tag": (
        {"type": "sequence", "elements": [{"type": "any_text"}, TAG]},
        ["bla <a>1</a>"],
        ["bla", "<a>1</a>x", "<a>x"],
    ),
    "or": (
        {"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]},
        ["no", "<a>1</a>"],
        ["", "nono"],
    ),
    "optional": ({"type": "optional", "content": TAG}, ["", "<a>1</a>"], ["<a>1</a><a>1</a>"]),
    "star": ({"type": "star", "content": TAG}, ["", "<a>1</a><a>1</a>"], ["x"]),
    "plus": ({"type": "plus", "content": TAG}, ["<a>1</a><a>1</a>"], [""]),
    "repeat": (
        {"type": "repeat", "content": TAG, "min": 1, "max": 2},
        ["<a>1</a>", "<a>1</a>" * 2],
        ["", "<a>1</a>" * 3],
    ),
    "tag with text": (TEXT_TAG, ["<t>hello</t>", "<t>a <b!!"], ["<t>", "<t>a</t>b"]),
    "triggered_tags": (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]},
        ["", "bla <a>1</a> bla <a>2</a>", "<b"],
        ["<a>x", "<ab"],
    ),
    "at least one": (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], "at_least_one": True},
        ["<a>1</a>", "<a>1</a> text <a>2</a>"],
        ["", "text"],
    ),
    "only one": (
        {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": [TAG],
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<a>1</a>"],
        ["<a>1</a> text", ""],
    ),
    "stop after first": (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], "stop_after_first": True},
        ["text <a>1</a>", "text"],
        ["<a>1</a> text"],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [TAG, TEXT_TAG], "separator": ", "},
        ["", "<a>1</a>", "<a>1</a>, <t>x</t>"],
        ["<a>1</a><a>2</a>", "x"],
    ),
}


@pytest.mark.parametrize(("form", "good", "bad"), FORMATS.values(), ids=FORMATS)
def test_formats(trie: LLTokenizer, form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    text = grammar({"format": form})
    assert [accepts(trie, text, each) for each in good] == [True] * len(good), text
    assert [accepts(trie, text, each) for each in bad] == [False] * len(bad), text


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (5, "tag"),
        ({}, "tag.structures"),
        ({"triggers": ["x"], "structures": []}, "tag.structures"),
        ({"triggers": ["x"], "structures": [{"begin": "y"}]}, "tag.structures[0].begin"),
        ({"format": 5}, "tag.format"),
        ({"format": {"type": "const_string"}}, "tag.format.value"),
        ({"format": {"type": "sequence", "elements": []}}, "tag.format.elements"),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "any_text"}, {"type": "regex", "pattern": "a"}],
                }
            },
            "tag.format.elements[0]",
        ),
        ({"format": {"type": "star", "content": {"type": "any_text"}}}, "tag.format.content"),
        ({"format": {"type": "repeat", "content": TAG, "min": 3, "max": 1}}, "tag.format.max"),
        ({"format": {"type": "grammar", "grammar": "x"}}, "tag.format.grammar"),
    ],
    ids=str,
)
def test_mistakes_name_the_place(value: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar(value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "tag.format.type"),
        ({"type": "any_text", "excludes": ["x"]}, "tag.format.excludes"),
        ({"type": "json_schema", "json_schema": {}, "style": "xml"}, "tag.format.style"),
    ],
    ids=str,
)
def test_forms_that_are_not_served_are_named(form: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        grammar({"format": form})
    assert caught.value.param == param
