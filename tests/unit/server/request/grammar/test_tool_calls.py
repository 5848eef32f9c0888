"""Answers that follow the grammar of a format are read back as calls of the tools, whatever is drawn."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.config import build_config
from baton.errors import BadRequest, UnsupportedParameter
from baton.server.request.grammar.checks.reader import GrammarReader
from baton.server.request.grammar.constraint import AnswerConstraint, ConstraintKind
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import RequestGrammar, make_call_grammar
from baton.server.request.grammar.tool_calls.call_rules import CallRules
from baton.server.request.grammar.tool_calls.formats import call_formats
from baton.server.request.tools import CallableTool, ChoiceMode, ToolChoice
from baton.server.text.tool_formats import tool_formats
from tests.support.grammars.call_walks import (
    MarkedVocabulary,
    follows,
    make_vocabulary,
    random_answer,
    read_message,
)
from tests.support.grammars.random_schemas import random_schema

TEXT_MARKERS = {"granite": ["<tool_call>"], "phi4": ["functools"]}
"""Markers that no vocabulary of the models has as a token."""
MARKERS: dict[str, list[str]] = {
    family: [marker for marker in row.markers if marker not in TEXT_MARKERS.get(family, [])]
    for family, row in tool_formats().items()
}
"""Markers that vocabularies of the models have as tokens."""
IN_TEXT = (
    "pythonic",
    "hermes",
    "qwen3_coder",
    "deepseek_v32",
    "llama3",
    "mistral",
    "granite",
    "phi4",
)
"""Formats whose markers are text in some vocabularies."""
CASES = [*((family, True) for family in MARKERS), *((family, False) for family in IN_TEXT)]

PIECES = [
    "\n</parameter>\n",
    "</parameter>",
    "</arg_value>",
    "</\uff5cDSML\uff5cparameter>\n",
    "<parameter=a>",
    "</function>",
    "null",
    "12",
    '"',
    '"}',
    "}",
    "]",
    '"]',
    "}}",
    "\n",
    "text ",
    "<",
    "{",
    "[",
]
SEEDS = [
    (1, 2, 5, 6, 7, 24),
    pytest.param((0, 3, 4, *range(8, 24), *range(25, 32)), marks=pytest.mark.slow),
]
"""Seeds of random tools and answers. In text, the format without markers is called with seed 24
alone."""


@pytest.fixture(scope="module")
def vocabulary_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MarkedVocabulary]:
    known: dict[tuple[str, ...], MarkedVocabulary] = {}

    def vocabulary_of(family: str, has_tokens: bool) -> MarkedVocabulary:
        markers = tuple(MARKERS[family]) if has_tokens else ()
        if markers not in known:
            path: Path = tmp_path_factory.mktemp("vocabulary")
            known[markers] = make_vocabulary(path, markers)
        return known[markers]

    return vocabulary_of


def random_tools(rng: random.Random) -> tuple[CallableTool, ...]:
    names = rng.sample(("f", "fo", "get_weather", "ns.look-up", "g2"), rng.randint(1, 3))
    return tuple(
        CallableTool(name, random_parameters(rng), f"tools[{i}].function", rng.random() < 0.8)
        for i, name in enumerate(names)
    )


def random_parameters(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(("a", "city", "x-y", "n_1"), rng.randint(0, 3))
    properties = {name: random_schema(rng, 1) for name in names}
    definitions = {}
    if rng.random() < 0.3:
        properties["r"] = {"$ref": "#/$defs/part"}
        definitions = {"$defs": {"part": random_schema(rng, 1)}}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if rng.random() < 0.7],
        "additionalProperties": False,
        **definitions,
    }


def grammar_of(vocabulary: MarkedVocabulary, rules: CallRules) -> str:
    return make_call_grammar(rules, None, "bounded", vocabulary.markers).text


@pytest.mark.parametrize(("family", "has_tokens"), CASES)
@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_forced_calls_are_read_back(
    vocabulary_of: Callable[..., MarkedVocabulary],
    seeds: tuple[int, ...],
    family: str,
    has_tokens: bool,
) -> None:
    vocabulary = vocabulary_of(family, has_tokens)
    for seed in seeds:
        rng = random.Random(seed)
        tools = random_tools(rng)
        rules = CallRules(family, tools, ChoiceMode.REQUIRED, is_parallel=rng.random() < 0.5)
        grammar = grammar_of(vocabulary, rules)
        pieces = PIECES + MARKERS[family]
        answer = random_answer(vocabulary, grammar, rng, pieces, end_chance=0.3)
        message = read_message(vocabulary, family, tools, answer)
        assert not message["content"], (seed, vocabulary.trie.decode_str(answer))
        assert len(message["tool_calls"]) == 1 or rules.is_parallel
        check_calls(message, tools)


@pytest.mark.parametrize(("family", "has_tokens"), CASES)
@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_calls_in_text_follow_their_schemas(
    vocabulary_of: Callable[..., MarkedVocabulary],
    seeds: tuple[int, ...],
    family: str,
    has_tokens: bool,
) -> None:
    vocabulary = vocabulary_of(family, has_tokens)
    called = 0
    for seed in seeds:
        rng = random.Random(seed)
        tools = random_tools(rng)
        rules = CallRules(family, tools, ChoiceMode.AUTO, is_parallel=rng.random() < 0.5)
        grammar = grammar_of(vocabulary, rules)
        begins = ["\n[", *(f"\n[{tool.name}(" for tool in tools), "{", "["]
        begins += getattr(call_formats()[family], "begins", MARKERS[family]) * 2
        answer = random_answer(vocabulary, grammar, rng, PIECES + begins * 3, end_chance=0.02)
        message = read_message(vocabulary, family, tools, answer)
        called += check_calls(message, tools)
    assert called > 0


def check_calls(message: dict[str, Any], tools: tuple[CallableTool, ...]) -> int:
    calls = message.get("tool_calls", [])
    parameters = {tool.name: tool.parameters for tool in tools}
    for call in calls:
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), parameters[function["name"]])
    return len(calls)


CITY = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
F_AND_G = (
    CallableTool("f", CITY, "tools[0].function", is_strict=True),
    CallableTool("g", {"type": "object", "properties": {}}, "tools[1].function"),
)
FIXTURES = Path("engine/text/src/stream/tools/fixtures")
SAMPLES: dict[str, set[str]] = {
    "llama3": {"one call", "tag in front"},
    "mistral": {"two calls"},
    "mistral_v13": {"v13", "v11"},
    "deepseek_v3": {"one call", "two calls"},
    "deepseek_v31": {"one call"},
    "qwen3_coder": {"one call", "two calls"},
    "deepseek_v32": {"two calls", "tags of V4"},
    "pythonic": {"two calls", "with markers and JSON"},
    "gpt_oss": {
        "reasoning, then a call",
        "stop id is not read",
        "no space before the constraint",
        "no constraint",
        "content type without marker",
    },
    "glm45": {"with newlines"},
    "glm47": {"without newlines"},
    "kimi_k2": {"two calls"},
    "granite": {"list"},
    "phi4": {"list"},
    "json": {"object of the tool"},
}
"""Cases of the text layer's tests that have a format as its models write it; of other formats, the case `one call`."""
TYPED_SAMPLES = {
    "pythonic": ['<|python_start|>[f(a="x")]<|python_end|>'],
    "json": ['{"name": "f", "arguments": {"a": "x"}}'],
}
"""Further answers, of formats whose cases have other tools."""


def sample_texts(family: str) -> list[str]:
    cases = json.loads(
        (FIXTURES / f"{family.removesuffix('45').removesuffix('47')}.json").read_text()
    )
    samples = SAMPLES.get(family, {"one call"})
    texts = [case["text"].removesuffix("<|call|>") for case in cases if case["name"] in samples]
    texts += TYPED_SAMPLES.get(family, [])
    assert len(texts) == len(samples)
    return texts


@pytest.mark.parametrize("family", MARKERS)
def test_samples_of_the_format_are_allowed(
    vocabulary_of: Callable[..., MarkedVocabulary], family: str
) -> None:
    vocabulary = vocabulary_of(family, has_tokens=True)
    rules = CallRules(family, F_AND_G, ChoiceMode.REQUIRED, is_parallel=True)
    grammar = grammar_of(vocabulary, rules)
    for text in sample_texts(family):
        assert follows(vocabulary, grammar, text), (text, grammar)
        assert not follows(vocabulary, grammar, text + "text")
        assert not follows(vocabulary, grammar, text.replace("f", "zz", 1))
        assert not follows(vocabulary, grammar, text.replace("x", "5")), text
        assert not follows(vocabulary, grammar, "text" + text)


@pytest.mark.parametrize("family", ["json", "llama3"])
def test_lists_with_other_elements_are_no_text_beside_strict_calls(
    vocabulary_of: Callable[..., MarkedVocabulary], family: str
) -> None:
    """Calls behind an element that is none are read, and must be those of the grammar."""
    vocabulary = vocabulary_of(family, has_tokens=True)
    rules = CallRules(family, F_AND_G, ChoiceMode.AUTO, is_parallel=True)
    grammar = grammar_of(vocabulary, rules)
    assert follows(vocabulary, grammar, "[1] text")
    call = '{"name": "f", "arguments": {"a": "5"}}'
    for text in (f"[1, {call}]", f'\n["a", {call}]', f"[[{call}], {call}]"):
        assert not follows(vocabulary, grammar, text)


def test_schemas_are_followed_as_far_as_they_can_be(
    vocabulary_of: Callable[..., MarkedVocabulary],
) -> None:
    markers = vocabulary_of("hermes", has_tokens=True).markers
    schemas: list[dict[str, Any]] = [
        {"properties": {"a": {"not": {"type": "string"}}}},
        {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}},
    ]
    tools = tuple(
        CallableTool(f"f{i}", schema, f"tools[{i}].function") for i, schema in enumerate(schemas)
    )
    made = make_call_grammar(
        CallRules("hermes", tools, ChoiceMode.REQUIRED, is_parallel=True), None, "bounded", markers
    )
    assert made.ignored == (
        "tools[0].function.parameters:not",
        "tools[1].function.parameters",
    )
    for tool in tools:
        strict = replace(tool, is_strict=True)
        rules = CallRules("hermes", (strict,), ChoiceMode.AUTO, is_parallel=True)
        with pytest.raises(BadRequest) as caught:
            make_call_grammar(rules, None, "bounded", markers)
        assert caught.value.param == tool.param


@pytest.mark.parametrize("family", MARKERS)
def test_answer_is_calls_or_follows_the_schema(
    vocabulary_of: Callable[..., MarkedVocabulary], family: str
) -> None:
    vocabulary = vocabulary_of(family, has_tokens=True)
    answer = AnswerConstraint(
        ConstraintKind.JSON_SCHEMA, {"enum": [17]}, "response_format", is_strict=True
    )
    rules = CallRules(family, F_AND_G, ChoiceMode.AUTO, is_parallel=True)
    grammar = make_call_grammar(rules, answer, "bounded", vocabulary.markers).text
    number = "<|channel|>final<|message|>17" if family == "gpt_oss" else "17"
    assert follows(vocabulary, grammar, number)
    assert not follows(vocabulary, grammar, number + "text")
    assert not follows(vocabulary, grammar, "text")
    sample = sample_texts(family)[0]
    assert follows(vocabulary, grammar, sample)
    assert not follows(vocabulary, grammar, sample + number)


VALUES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string"}, ["", "5", "null", "a\nb", " x "], ["a</parameter>", "a\n<parameter=b>c"]),
    ({"type": ["string", "null"]}, ["text", "null", "5", "None "], []),
    ({"type": ["string", "integer"]}, ["text", "5", "5 apples", "5.5", " 7"], []),
    ({"type": ["string", "integer"], "minimum": 1}, ["text", "5"], ["0", "5.5", " 0"]),
    (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "null"}}]},
        ["text", "[]", "[null]", "a [1]"],
        ["[1]", " [1]", "(1,)"],
    ),
    ({"anyOf": [{"type": "string"}, {"enum": [5, None]}]}, ["text", "5", "null"], ["6", "(6)"]),
    ({"anyOf": [{"type": "boolean"}, {"enum": ["x"]}]}, ["true", "x"], ["True", "y"]),
    ({"enum": ["5", 5, "a"]}, ["5", "a"], ["b", '"5"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\nab"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a|b"}, [], []),
    ({"type": "string", "pattern": r"\d$"}, ["a5", "5"], ["5a", "٣"]),
    ({"type": "string", "format": "date"}, ["2026-11-26"], ["2026-13-26", "today"]),
    ({"$ref": "#/$defs/n"}, ["3"], ["3.5", "x"]),
    ({}, ["3", "text", "[1]"], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES, ids=str)
def test_raw_values_follow_the_schema(
    vocabulary_of: Callable[..., MarkedVocabulary],
    schema: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    vocabulary = vocabulary_of("qwen3_coder", has_tokens=True)
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer"}},
    }
    tool = CallableTool("f", parameters, "tools[0].function", is_strict=True)
    rules = CallRules("qwen3_coder", (tool,), ChoiceMode.REQUIRED, is_parallel=False)
    if not good:
        with pytest.raises(BadRequest, match="anchor in an alternative"):
            grammar_of(vocabulary, rules)
        return
    grammar = grammar_of(vocabulary, rules)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for value in good:
        answer = text.format(value)
        assert follows(vocabulary, grammar, answer), value
        message = read_message(vocabulary, "qwen3_coder", (tool,), vocabulary.ids_of(answer))
        check_calls(message, (tool,))
    for value in bad:
        assert not follows(vocabulary, grammar, text.format(value)), value


@pytest.mark.parametrize("mode", ChoiceMode)
def test_engine_without_grammars_refuses_forced_calls_alone(
    tmp_path: Path, mode: ChoiceMode
) -> None:
    config = build_config({"model_path": str(tmp_path), "grammar": "off"})
    reader = GrammarReader(config, MarkerTokens(dict))
    choice = ToolChoice(F_AND_G, mode)

    def read() -> RequestGrammar:
        return asyncio.run(reader.read_with_tools({}, choice, "hermes", is_parallel=True))

    if mode is ChoiceMode.AUTO:
        assert read() == RequestGrammar("", ("tools[0].function.strict",))
        return
    with pytest.raises(UnsupportedParameter) as caught:
        read()
    assert caught.value.param == "tool_choice"
