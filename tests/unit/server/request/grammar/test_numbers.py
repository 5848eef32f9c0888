"""Numbers of schemas keep their mathematical value, and those of answers are finite as doubles.

The judges are Python's decimals and jsonschema, which reads the schema and the answers with decimals.
"""

from __future__ import annotations

import decimal
import json
import math
import random
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baton.errors import BadRequest
from baton.server.fields import decode_exact, encode_exact
from baton.server.request.grammar.constraint import AnswerConstraint, ConstraintKind
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import make_call_grammar, make_grammar
from baton.server.request.grammar.schema import schema_writer
from baton.server.request.grammar.schema.number_regex import (
    NumberBound,
    NumberRange,
    has_number,
    number_texts,
    range_regexes,
)
from baton.server.request.grammar.tool_calls.call_rules import CallRules
from baton.server.request.tools import CallableTool, ChoiceMode
from tests.support.grammars.chains import reference_chain

END = 256
INT64 = (-(2**63), 2**63 - 1)
UINT64 = (0, 2**64 - 1)
EXACT = decimal.Context(prec=1000)
MOST_BYTES = 400
NO_ENDS = bytes(byte for byte in range(256) if byte not in b'"]},:')
NO_TEXT = bytes(byte for byte in range(256) if not 32 <= byte < 127)


class ByteVocabulary:
    """A token for each byte, and an end token."""

    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def trie() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(ByteVocabulary()))


def compiled(trie: LLTokenizer, schema: str, *, is_strict: bool = True) -> LLMatcher:
    constraint = AnswerConstraint(
        ConstraintKind.JSON_SCHEMA, decode_exact(schema), "schema", is_strict=is_strict
    )
    text = make_grammar(constraint, "bounded", MarkerTokens(dict)).text
    matcher = LLMatcher(trie, text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(matcher: LLMatcher, answer: str) -> bool:
    fresh = matcher.deep_copy()
    taken = fresh.validate_tokens(list(answer.encode()))
    return bool(
        taken == len(answer.encode())
        and all(map(fresh.consume_token, answer.encode()))
        and fresh.is_accepting()
    )


def refusal(schema: str) -> BadRequest:
    constraint = AnswerConstraint(ConstraintKind.JSON_SCHEMA, decode_exact(schema), "schema")
    with pytest.raises(BadRequest) as caught:
        make_grammar(constraint, "bounded", MarkerTokens(dict))
    return caught.value


def random_answer(matcher: LLMatcher, rng: random.Random, likely: bytes = b"") -> str | None:
    """An answer of bytes that the mask allows; None: it has not ended. `likely`: bytes that are drawn more often."""
    answer = bytearray()
    walk = matcher.deep_copy()
    for _ in range(MOST_BYTES):
        mask = np.frombuffer(walk.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little")[:END]
        allowed = np.flatnonzero(bits).astype(np.uint8).tobytes()
        if walk.is_accepting() and (not allowed or rng.random() < 0.2):
            return answer.decode()
        # Structure is drawn more often than text, so that answers end.
        ends = allowed.translate(None, NO_ENDS)
        preferred = bytes(set(allowed) & set(likely))
        pick = rng.random()
        printed = allowed.translate(None, NO_TEXT) or allowed
        choices = (
            preferred if preferred and pick < 0.6 else ends if ends and pick < 0.9 else printed
        )
        token = rng.choice(choices)
        answer.append(token)
        assert walk.consume_token(token)
    return None


def read_exactly(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


# ---------------------------------------------------------------------- regexes

digits = st.integers(min_value=-(10**25), max_value=10**25)
near_limits = st.sampled_from([*INT64, *UINT64, 2**53 + 1, -(2**53) - 1, 10**15, 0, 1, 9, 10, 99])
exact_integers = st.one_of(st.integers(-200, 200), digits, near_limits)
exact_decimals = st.builds(
    lambda value, places: Decimal(value).scaleb(-places, EXACT), exact_integers, st.integers(0, 12)
)
exact_values = st.one_of(exact_integers, exact_decimals)
bounds = st.none() | st.builds(NumberBound, exact_values, st.booleans())
steps = st.sampled_from([None, None, None, "0.01", "0.5", "5", "0.25", "100", "2", "8", "1000000"])
ranges = st.builds(
    lambda is_integer, least, largest, step: NumberRange(
        is_integer, least, largest, None if step is None else Fraction(step)
    ),
    st.booleans(),
    bounds,
    bounds,
    steps,
)


@given(ranges, exact_values, st.data())
def test_regex_of_range_matches_its_numbers(
    numbers: NumberRange, anywhere: int | Decimal, data: st.DataObject
) -> None:
    if not has_number(numbers):
        assert not numbers.holds(anywhere)
        return
    regexes = range_regexes(numbers)
    assert regexes is not None
    known = [bound.value for bound in (numbers.least, numbers.largest) if bound is not None]
    near = data.draw(st.sampled_from([anywhere, *known]))
    offset = data.draw(st.sampled_from(["0", "1", "-1", "0.1", "-0.1", "1e-15", "-1e-15", "10"]))
    value = EXACT.add(Decimal(near), Decimal(offset))
    text = format(value, "f")
    if numbers.is_integer and "." in text:
        text = text.rstrip("0").rstrip(".")
    is_matched = all(re.fullmatch(regex, text) for regex in regexes)
    is_written = not (numbers.is_integer and "." in text)
    if is_matched:
        assert numbers.holds(value)
    elif numbers.holds(value) and is_written:
        is_negative_zero = value == 0 and text.startswith("-")
        assert is_negative_zero, f"{text} is not matched"


@given(exact_values)
def test_texts_of_number_have_its_value(value: int | Decimal) -> None:
    for text in number_texts(value):
        assert json.loads(text, parse_float=Decimal) == value


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("1.7976931348623157e308", True),
        ("-1E+308", True),
        ("6.02214076e23", True),
        ("12.5e-99", True),
        ("9" * 80, True),
        ("1.8e308", False),
        ("999.1099E851", False),
        ("1e1000", False),
        ("9" * 400, False),
        ("0." + "1" * 400, False),
    ],
)
@pytest.mark.parametrize("schema", ['{"type":"number"}', "{}", '{"minimum":-5}'])
def test_free_number_is_finite(
    trie: LLTokenizer, schema: str, text: str, is_accepted: bool
) -> None:
    least = json.loads(schema).get("minimum")
    is_within = least is None or Decimal(text) >= least
    assert accepts(compiled(trie, schema), text) is (is_accepted and is_within)


# ---------------------------------------------------------------------- schemas


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            '{"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807}',
            ["-9223372036854775808", "9223372036854775807", "0", "-1"],
            ["-9223372036854775809", "9223372036854775808", "1.0"],
        ),
        (
            '{"type":"integer","minimum":0,"maximum":18446744073709551615}',
            ["18446744073709551615", "0"],
            ["18446744073709551616", "-1"],
        ),
        ('{"const":9007199254740993}', ["9007199254740993"], ["9007199254740992"]),
        (
            '{"enum":[1152921504606846977,1.0]}',
            ["1152921504606846977", "1", "1.0"],
            ["1152921504606847000"],
        ),
        ('{"const":18446744073709551615}', ["18446744073709551615"], ["18446744073709552000"]),
        (
            '{"const":0.1000000000000000055511151231257827}',
            ["0.1000000000000000055511151231257827"],
            ["0.1"],
        ),
        (
            '{"type":"integer","exclusiveMinimum":9007199254740992}',
            ["9007199254740993"],
            ["9007199254740992"],
        ),
        (
            '{"type":"number","maximum":0.30000000000000004}',
            ["0.30000000000000004"],
            ["0.30000000000000005"],
        ),
        ('{"type":"number","multipleOf":0.07}', [], []),
        (
            '{"type":"number","multipleOf":0.01,"minimum":0}',
            ["0.07", "19.99", "3", "0.070"],
            ["0.075", "-1"],
        ),
        ('{"type":"integer","multipleOf":10000000000}', ["30000000000", "0"], ["30000000001"]),
        (
            '{"type":"integer","multipleOf":7,"minimum":9007199254740993}',
            ["9007199254740995"],
            ["9007199254740996", "9007199254740988"],
        ),
        ('{"type":"integer","multipleOf":2.5}', ["5", "-10"], ["2", "4"]),
        (
            '{"type":"array","items":{"type":"null"},"minItems":1.0,"maxItems":2.0}',
            ["[null]"],
            ["[]"],
        ),
        ('{"type":"string","minLength":1e0,"maxLength":2.0}', ['"ab"'], ['""', '"abc"']),
        ('{"type":"object","minProperties":1.0,"maxProperties":1.0}', ['{"a":1}'], ["{}"]),
        ('{"type":["integer","null"],"enum":[1,2.5,null,"x"]}', ["1", "null"], ["2.5", '"x"']),
        (
            '{"allOf":[{"minimum":9007199254740993},{"type":"integer"}]}',
            ["9007199254740993"],
            ["9007199254740992"],
        ),
        (
            '{"$ref":"#/$defs/id","$defs":{"id":{"type":"integer","maximum":9007199254740993}}}',
            ["9007199254740993"],
            ["9007199254740994"],
        ),
    ],
)
def test_number_of_schema_keeps_its_value(
    trie: LLTokenizer, schema: str, right: list[str], wrong: list[str]
) -> None:
    if not right:
        assert refusal(schema).param == "schema"
        return
    matcher = compiled(trie, schema)
    assert [text for text in right if not accepts(matcher, text)] == []
    assert [text for text in wrong if accepts(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ('{"properties":{"a":{"const":1e400}}}', "schema.properties.a.const"),
        ('{"enum":[1,[-1e309]]}', "schema.enum[1][0]"),
        ('{"anyOf":[{"type":"number","minimum":1e-500}]}', "schema.anyOf[0].minimum"),
        (
            '{"patternProperties":{"^a":{"const":9007199254740993}}}',
            "schema.patternProperties.^a.const",
        ),
        ('{"type":"integer","minimum":9007199254740993,"maximum":9007199254740992}', "schema"),
        ('{"type":"integer","minimum":0.1,"maximum":0.9}', "schema"),
        ('{"type":"array","maxItems":2.5}', "schema"),
    ],
)
def test_number_that_cannot_be_enforced_is_refused_with_its_place(schema: str, param: str) -> None:
    assert refusal(schema).param == param


def test_long_chains_and_large_schemas_are_left_whole(
    trie: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(trie, encode_exact(reference_chain(500)).decode())
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    monkeypatch.setattr(schema_writer, "MAX_WRITTEN_CHARS", 100)
    assert accepts(compiled(trie, schema), '{"a":5}')


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"id": NUMBER}}\n</tool_call>',
    "pythonic": "[f(id=NUMBER)]",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=id>\nNUMBER\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>id</arg_key><arg_value>NUMBER</arg_value></tool_call>",
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ('{"const":9007199254740993}', "9007199254740993", "9007199254740992"),
        ('{"enum":["x",1.0]}', "1.0", "2"),
        (
            '{"type":"integer","minimum":9223372036854775808}',
            "9223372036854775808",
            "9223372036854775807",
        ),
        ('{"type":["string","number"],"minLength":1.0}', "5", ""),
        ('{"type":"number"}', "1e308", "1e309"),
    ],
)
def test_number_of_tool_schema_keeps_its_value(
    trie: LLTokenizer, family: str, schema: str, right: str, wrong: str
) -> None:
    parameters = {"type": "object", "properties": {"id": decode_exact(schema)}, "required": ["id"]}
    parameters["additionalProperties"] = False
    tool = CallableTool("f", parameters, "tools[0].function", is_strict=True)
    rules = CallRules(family, (tool,), ChoiceMode.NAMED, is_parallel=False)
    text = make_call_grammar(rules, None, "bounded", MarkerTokens(dict)).text
    matcher = LLMatcher(trie, text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert accepts(matcher, CALLS[family].replace("NUMBER", right))
    assert not accepts(matcher, CALLS[family].replace("NUMBER", wrong))


def random_number_schema(rng: random.Random, depth: int = 2) -> Any:
    """A schema with large, fine and odd numbers."""
    kinds = ["integer", "number", "listed", "plain", "multiple"]
    if depth:
        kinds += ["object", "array", "any", "all", "open"]
    match rng.choice(kinds):
        case "integer":
            bounds = sorted(
                rng.choice([*INT64, *UINT64, 2**53 + 1, rng.randint(-999, 999)]) for _ in "ab"
            )
            return {"type": "integer", "minimum": bounds[0], "maximum": bounds[1]}
        case "number":
            value = Decimal(rng.randint(-(10**20), 10**20)).scaleb(-rng.randint(0, 22))
            return {"type": "number", rng.choice(["minimum", "maximum", "exclusiveMinimum"]): value}
        case "listed":
            values = [
                2**53 + 1,
                Decimal("1.0"),
                Decimal("-2.50"),
                Decimal("1E+2"),
                2**64 - 1,
                "x",
                None,
            ]
            return {"enum": rng.sample(values, 3)}
        case "plain":
            return {"type": rng.choice(["integer", "number", "boolean", ["integer", "null"]])}
        case "multiple":
            step = rng.choice([7, Decimal("0.01"), 1000, Decimal("2.5"), 64])
            return {"type": rng.choice(["integer", "number"]), "multipleOf": step}
        case "object":
            names = rng.sample(["a", "b", 'q"', "é"], rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_number_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.5],
                "additionalProperties": rng.random() < 0.2 and random_number_schema(rng, 0),
            }
        case "array":
            least = rng.randint(0, 2)
            schema = {
                "type": "array",
                "items": random_number_schema(rng, depth - 1),
                "minItems": Decimal(f"{least}.0"),
            }
            if rng.random() < 0.5:
                schema["prefixItems"] = [random_number_schema(rng, 0)]
            return schema | {"maxItems": least + rng.randint(0, 2)}
        case "any":
            return {
                "anyOf": [random_number_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            }
        case "all":
            part = random_number_schema(rng, 0)
            return {"allOf": [part, {"minimum": -(2**63)}], "maximum": 2**64 - 1}
        case _:
            return {} if rng.random() < 0.3 else {"type": "object"}


def check_random_schema(trie: LLTokenizer, seed: int, answers: int) -> int:
    """Number of answers to a random schema, each of which the schema allows by exact arithmetic."""
    rng = random.Random(seed)
    schema = random_number_schema(rng)
    try:
        matcher = compiled(trie, encode_exact(schema).decode(), is_strict=False)
    except BadRequest:
        return 0
    validator = jsonschema.Draft202012Validator(schema)
    ended = 0
    for _ in range(answers):
        answer = random_answer(
            matcher, rng, likely=b"0123456789.eE-" if rng.random() < 0.5 else b""
        )
        if answer is None:
            continue
        ended += 1
        with decimal.localcontext(EXACT):
            validator.validate(read_exactly(answer))
        json.loads(answer, parse_float=refuse_infinite, parse_int=refuse_infinite)
    return ended


def refuse_infinite(text: str) -> float:
    value = float(text)
    assert math.isfinite(value), text
    return value


def test_random_answers_are_valid_by_exact_arithmetic(trie: LLTokenizer) -> None:
    assert sum(check_random_schema(trie, seed, answers=3) for seed in range(40)) > 60


@pytest.mark.slow
def test_many_random_answers_are_valid_by_exact_arithmetic(trie: LLTokenizer) -> None:
    assert sum(check_random_schema(trie, seed, answers=10) for seed in range(1000, 3000)) > 10_000
