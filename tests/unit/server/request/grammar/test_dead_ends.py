"""Grammars without places behind which no answer can go on: such parts are left out, or refused with their field."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.errors import BadRequest
from baton.server.request.grammar.checks.walk import byte_trie, compile_text, find_dead_end
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import (
    GrammarCheck,
    RequestGrammar,
    make_call_grammar,
    make_request_grammar,
)
from baton.server.request.grammar.tool_calls.call_rules import CallRules
from baton.server.request.tools import CallableTool, ChoiceMode

NO_MARKERS = MarkerTokens(dict)
SCORE = {"type": "integer", "minimum": 0, "maximum": 99}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/endless"}}, "required": ["n"]}


def make(body: dict[str, Any], markers: MarkerTokens = NO_MARKERS) -> RequestGrammar:
    return make_request_grammar(GrammarCheck(body), "none", markers)


def make_schema(schema: Any) -> RequestGrammar:
    named = {"name": "n", "schema": schema, "strict": True}
    return make({"response_format": {"type": "json_schema", "json_schema": named}})


compile_once = functools.lru_cache(maxsize=2)(compile_text)


def start(grammar: RequestGrammar) -> LLMatcher:
    matcher = compile_once(grammar.text).deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: RequestGrammar, answer: str) -> bool:
    """True if the whole answer follows the grammar."""
    matcher = start(grammar)
    tokens = byte_trie().tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def may_begin(grammar: RequestGrammar, text: str) -> bool:
    """True if an answer may begin with this text."""
    tokens = byte_trie().tokenize_str(text)
    return start(grammar).validate_tokens(tokens) == len(tokens)


def refusal(body: dict[str, Any]) -> tuple[str | None, str]:
    """Field and message of the error."""
    with pytest.raises(BadRequest) as caught:
        make(body)
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        (
            {"properties": {"score": SCORE}, "patternProperties": {"^score$": {"maximum": 7}}},
            {"score": 5},
        ),
        ({"patternProperties": {"^score$": SCORE}, "required": ["score"]}, {"score": 5}),
        (
            {"patternProperties": {"^(low|high)$": SCORE}, "required": ["low", "high"]},
            {"low": 1, "high": 2},
        ),
        (
            {
                "properties": {"a": {"type": "null"}},
                "patternProperties": {"^[ab]$": {}},
                "required": ["b"],
            },
            {"a": None, "b": [1]},
        ),
        ({"properties": {'é"\\': SCORE}, "patternProperties": {'^é"\\\\$': SCORE}}, {'é"\\': 1}),
        ({"properties": {"a": SCORE}, "patternProperties": {"^[^a]": False}}, {"a": 1}),
    ],
    ids=str,
)
def test_no_comma_where_no_name_is_left(more: dict[str, Any], answer: dict[str, Any]) -> None:
    """JSON Schema 2020-12 core, 10.3.2.2: a listed name that a pattern matches has to satisfy both schemas."""
    grammar = make_schema(CLOSED | more)
    text = json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
    assert accepts(grammar, text)
    assert not may_begin(grammar, text[:-1] + ",")


def test_schema_of_a_pattern_holds_for_the_names_that_are_written_out() -> None:
    pattern = {"^score$": {"maximum": 7}}
    both = make_schema(CLOSED | {"properties": {"score": SCORE}, "patternProperties": pattern})
    assert accepts(both, '{"score":7}')
    assert not may_begin(both, '{"score":8')
    assert accepts(both, "{}"), "it is not required"


def test_comma_remains_where_a_name_is_left() -> None:
    pattern = {"^(low|high)$": SCORE}
    grammar = make_schema(CLOSED | {"patternProperties": pattern, "required": ["high"]})
    assert accepts(grammar, '{"high":2,"low":1}')
    assert not may_begin(grammar, '{"high":2,"lo1')


@pytest.mark.parametrize(
    "empty",
    [
        {"$ref": "#/$defs/endless"},
        {"$ref": "#/$defs/never"},
        {"$ref": "#/$defs/ping"},
        {"anyOf": [False, {"$ref": "#/$defs/never"}]},
        {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"enum": []},
    ],
    ids=str,
)
def test_parts_without_a_value_are_left_out_or_refuse_the_schema(empty: Any) -> None:
    definitions = {
        "never": False,
        "endless": ENDLESS,
        "ping": {"type": "array", "items": {"$ref": "#/$defs/pong"}, "minItems": 1},
        "pong": {"allOf": [{"$ref": "#/$defs/ping"}]},
    }
    schema = {**CLOSED, "properties": {"a": empty, "b": {"type": "null"}}, "$defs": definitions}
    grammar = make_schema(schema)
    assert accepts(grammar, "{}")
    assert accepts(grammar, '{"b":null}')
    assert not may_begin(grammar, '{"a"')
    array = make_schema({"type": "array", "items": empty, "$defs": definitions})
    assert accepts(array, "[]")
    either = make_schema({"anyOf": [empty, {"type": "null"}], "$defs": definitions})
    assert accepts(either, "null")
    with pytest.raises(BadRequest, match=r"json_schema\.schema"):
        make_schema({**schema, "required": ["a"]})


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    "empty",
    [{"$ref": "#/$defs/endless"}, {"type": ["integer", "number"], "minimum": 1.5, "maximum": 1}],
    ids=str,
)
def test_optional_arguments_without_a_value_are_left_out(family: str, empty: Any) -> None:
    properties = {"a": empty, "b": {"type": "integer"}}
    parameters = {**CLOSED, "properties": properties, "required": ["b"]}
    tool = CallableTool("f", {**parameters, "$defs": {"endless": ENDLESS}}, "tools[0].function")
    rules = CallRules(family, (tool,), ChoiceMode.REQUIRED, is_parallel=False)
    assert make_call_grammar(rules, None, "none", NO_MARKERS).ignored == ()


@pytest.mark.parametrize(
    "empty",
    [
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "string", "format": "date", "maxLength": 5},
        {"type": "string", "pattern": "^b", "enum": ["a", "c"]},
        {"allOf": [{"type": "string", "minLength": 3}, {"maxLength": 1}]},
        {"const": None, "type": "string"},
        {
            "type": "array",
            "items": {"type": "string", "pattern": "^a$", "minLength": 2},
            "minItems": 1,
        },
        {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5},
        {"type": "number", "minimum": 9007199254740993, "maximum": 9007199254740992},
    ],
    ids=str,
)
def test_parts_without_a_value_are_left_out_beside_numbers(empty: Any) -> None:
    """Schemas with numbers are written as rules: llguidance would refuse a rule without a value."""
    count = {"type": "integer"}
    schema = {**CLOSED, "properties": {"a": empty, "b": count}}
    grammar = make_schema(schema)
    assert accepts(grammar, "{}")
    assert accepts(grammar, '{"b":1}')
    assert not may_begin(grammar, '{"a"')
    assert accepts(make_schema({"type": "array", "prefixItems": [count], "items": empty}), "[1]")
    assert accepts(make_schema({"anyOf": [empty, count]}), "1")
    with pytest.raises(BadRequest, match=r"json_schema\.schema"):
        make_schema({**schema, "required": ["a"]})


@pytest.mark.parametrize(
    ("names", "required", "good", "bad"),
    [
        (6, [], ["{}", '{"p5":1}', '{"p0":1,"p4":1,"p5":1}'], ['{"p1":1,"p0":1}', '{"p0":1,}']),
        (6, ["p4"], ['{"p4":1}', '{"p0":1,"p4":1,"p5":1}'], ["{}", '{"p0":1}', '{"p0":1,"p5":1}']),
        (1, ["p0"], ['{"p0":1}'], ["{}"]),
        (0, [], ["{}"], ['{"p0":1}']),
        (
            40,
            ["p0", "p39"],
            ['{"p0":1,"p39":1}', '{"p0":1,"p20":2,"p39":1}'],
            ['{"p0":1}', '{"p39":1}'],
        ),
    ],
)
def test_members_in_the_order_of_the_schema(
    names: int, required: list[str], good: list[str], bad: list[str]
) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(names)}
    for others in (False, {"type": "integer"}):
        schema = {"type": "object", "properties": properties, "additionalProperties": others}
        grammar = make_schema({**schema, "required": required})
        assert all(accepts(grammar, text) for text in good)
        assert not any(accepts(grammar, text) for text in bad if names or others is False)
        open_end = good[-1][:-1] + ("," if names else "") + '"x":7}'
        assert accepts(grammar, open_end) is (others is not False)


def test_objects_and_arrays_of_thousands_of_numbers() -> None:
    """Deep chains of rules would overflow the stack of the check."""
    count = 3000
    number = {"type": "integer"}
    names = [f"p{i}" for i in range(count)]
    make_schema(CLOSED | {"properties": dict.fromkeys(names, number), "required": names})
    array = make_schema({"type": "array", "prefixItems": [number] * count, "items": False})
    assert accepts(array, "[1,2]")
    assert not may_begin(array, '["')


def test_recursion_with_an_end_stays_as_it_is() -> None:
    tree = {
        "type": "object",
        "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert accepts(make_schema(tree), '{"n":{"n":null}}')


def test_dead_ends_of_merged_objects_are_refused() -> None:
    """What llguidance merges itself is found by a walk."""
    parts = [
        {"type": "object", "properties": {"score": SCORE}, "required": ["score"]},
        CLOSED | {"patternProperties": {"^score$": {}}},
    ]
    with pytest.raises(BadRequest, match="allows nothing more behind"):
        make_schema({"allOf": parts})


@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        ('root ::= "a" | b\nb ::= "x" b', ["a"], ["x"]),
        ('root ::= "a" ("," b)?\nb ::= "(" b ")" | b b', ["a"], ["a,"]),
        ('root ::= "a" c* "."\nc ::= d\nd ::= "-" c', ["a."], ["a-"]),
        ('root ::= "a" root | "b"', ["aab"], []),
    ],
)
def test_rules_that_derive_no_text_are_left_out(
    rules: str, good: list[str], bad: list[str]
) -> None:
    grammar = make({"ebnf": rules})
    assert all(accepts(grammar, text) for text in good)
    assert not any(may_begin(grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"ebnf": "root ::= root"}, "ebnf"),
        ({"ebnf": 'root ::= "a" b\nb ::= "x" b'}, "ebnf"),
        ({"guided_grammar": 'start: "a" A\nA: /x/ & /y/'}, "guided_grammar"),
        ({"guided_grammar": 'start: "a" r\nr: "b" r'}, "guided_grammar"),
        ({"regex": r"a[^\s\S]"}, "regex"),
        ({"regex": r"(?:(?:\.){30,60}){30,60}"}, "regex"),
        ({"json_schema": {"$ref": "#/$defs/e", "$defs": {"e": {"$ref": "#"}}}}, "json_schema"),
    ],
    ids=str,
)
def test_constraints_without_an_answer_are_refused_by_their_field(
    body: dict[str, Any], param: str
) -> None:
    found, message = refusal(body)
    assert found == param
    assert message.startswith(param)


@pytest.mark.parametrize(
    ("element", "param"),
    [
        ({"type": "regex", "pattern": r"[^\s\S]"}, "elements[0].pattern"),
        ({"type": "grammar", "grammar": "root ::= root"}, "elements[0].grammar"),
        ({"type": "json_schema", "json_schema": {"enum": []}}, "elements[0].json_schema"),
    ],
)
def test_empty_piece_of_a_structural_tag_is_refused_at_its_place(
    element: dict[str, Any], param: str
) -> None:
    form = {"type": "or", "elements": [element, {"type": "const_string", "value": "x"}]}
    found, _ = refusal({"response_format": {"type": "structural_tag", "format": form}})
    assert found == f"response_format.format.{param}"


@pytest.mark.parametrize("count", [2, 3000])
def test_any_number_of_choices_is_one_lexeme(count: int) -> None:
    texts = [f"category-{i:05}" for i in range(count)]
    for body in ({"guided_choice": texts}, {"structured_outputs": {"choice": texts}}):
        grammar = make(body)
        assert accepts(grammar, texts[count // 2])
        assert not accepts(grammar, texts[-1] + "0")


def test_choices_that_begin_alike_and_the_empty_choice() -> None:
    grammar = make({"guided_choice": ["", "yes", "yesterday", "yes"]})
    assert [accepts(grammar, text) for text in ("", "yes", "yesterday", "yester")] == [
        True,
        True,
        True,
        False,
    ]


def test_enums_of_objects_up_to_the_limit() -> None:
    def make_enum(count: int) -> RequestGrammar:
        values = [{"id": i} for i in range(count)]
        return make_schema(CLOSED | {"properties": {"v": {"enum": values}}, "required": ["v"]})

    grammar = make_enum(2100)
    assert accepts(grammar, '{"v":{"id":2099}}')
    assert not accepts(grammar, '{"v":{"id":2100}}')
    with pytest.raises(BadRequest, match="5001 objects and arrays, at most 5000"):
        make_enum(5001)


def test_objects_with_many_optional_properties() -> None:
    def make_object(count: int, part: Any) -> RequestGrammar:
        names = [f"p{i}" for i in range(count)]
        return make_schema(CLOSED | {"properties": dict.fromkeys(names, part)})

    assert accepts(make_object(1500, True), '{"p3":null,"p1499":"x"}')
    assert accepts(make_object(1500, {"type": "string"}), '{"p3":"","p1499":"x"}')
    with pytest.raises(BadRequest, match="limits"):
        make_object(1600, {"type": "string"})


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_multiples_need_no_more_work_than_the_limits_allow(kind: str) -> None:
    """6,997 is the largest prime that is accepted. Walks of a check are few, and each has other digits."""
    grammar = make_schema({"type": kind, "multipleOf": 6997})
    for last in range(3):
        digits = str((10**14 + last * 123_456_789_012) // 6997 * 6997)
        assert accepts(grammar, digits)
        assert not accepts(grammar, digits[:-1])
    with pytest.raises(BadRequest, match="7001, which cannot be enforced exactly"):
        make_schema({"type": kind, "multipleOf": 7001})


def test_alternatives_beyond_the_limit_are_refused() -> None:
    options = " | ".join(f'"{i}" rest' for i in range(6500))
    with pytest.raises(BadRequest, match="limits"):
        make({"guided_grammar": f'start: {options}\nrest: "." | start'})


def test_walks_are_the_same_each_time() -> None:
    text = 'start: ("," | "x" /[a-z]{3}/ R)*\nR: /x/ & /y/'
    first = find_dead_end(compile_text(text), text)
    assert first is not None
    assert first == find_dead_end(compile_text(text), text)


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["<|end|>", "<|end|> ", "x"]},
        {"regex": r"<\|end\|>|x"},
        {"ebnf": 'root ::= "<|" "end|>" | "x"'},
        {"json_schema": {"enum": ["<|end|>"]}},
        {"guided_grammar": 'start: "<|end|>" | "x"'},
        {"json_schema": {"enum": ["<|end|>", 1]}},
        {"json_schema": {"enum": ["<|end|>"], "minimum": 9007199254740993}},
    ],
    ids=str,
)
def test_text_of_a_special_token_is_not_forced_to_be_one(body: dict[str, Any]) -> None:
    """llguidance divides forced text with the tokenizer, which finds the special token in it."""
    grammar = make(body, MarkerTokens(lambda: {"<|end|>": 261}))
    assert "no_forcing" in grammar.text
    text = '"<|end|>"' if "json_schema" in body else "<|end|>"
    assert accepts(grammar, text)
    assert "no_forcing" not in make(body).text
