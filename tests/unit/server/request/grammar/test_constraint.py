"""Fields of structured output: which constraint they state, and with which field a mistake is refused."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.config import build_config
from baton.errors import BadRequest, InvalidJson, UnsupportedParameter
from baton.server.http.body_decoder import decode_large_object
from baton.server.http.http_utils import decode_object
from baton.server.request.grammar.checks import reader as reader_module
from baton.server.request.grammar.checks.messages import CheckReply
from baton.server.request.grammar.checks.process import CheckProcess
from baton.server.request.grammar.checks.reader import GrammarReader
from baton.server.request.grammar.json_schema import close_objects
from baton.server.request.grammar.markers import marker_tokens
from baton.server.request.grammar.request_grammar import RequestGrammar
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support.grammars.chains import lark_chain, reference_chain, rule_chain
from tests.support.models import tiny_model

Make = Callable[..., GrammarReader]
NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def make_new(path: Path) -> Iterator[Make]:
    """A new reader at each call, with a check process that starts with the first constraint."""
    made = []

    def make_reader(**flags: Any) -> GrammarReader:
        config = build_config({"model_path": str(path), **flags})
        facts = model_info.load(config)
        made.append(GrammarReader(config, marker_tokens(facts, Tokenizer(path))))
        return made[-1]

    yield make_reader
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def make(make_new: Make) -> Make:
    """The reader with these flags, one for all tests."""
    return functools.cache(make_new)


@pytest.fixture(scope="module")
def trie(path: Path) -> LLTokenizer:
    return LLTokenizer((path / "tokenizer.json").read_text(), eos_token=[1])


def read(reader: GrammarReader, body: dict[str, Any], **more: Any) -> RequestGrammar:
    return asyncio.run(reader.read(body, **more))


def accepts(trie: LLTokenizer, grammar: str, answer: str | list[int]) -> bool:
    """True if the whole answer follows the grammar. Ids for answers with marker tokens."""
    matcher = LLMatcher(trie, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = trie.tokenize_str(answer) if isinstance(answer, str) else answer
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return matcher.is_accepting()


SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "null"}},
    "required": ["b", "a"],
}
JSON_FORMS: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    },
    "without wrapper": {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    "vLLM": {"structured_outputs": {"json": SCHEMA}},
    "vLLM, text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "old vLLM": {"guided_json": SCHEMA},
    "SGLang": {"json_schema": json.dumps(SCHEMA)},
}


@pytest.mark.parametrize("body", JSON_FORMS.values(), ids=JSON_FORMS)
def test_schema_in_every_form(make: Make, trie: LLTokenizer, body: dict[str, Any]) -> None:
    text = read(make(), body).text
    assert accepts(trie, text, '{"b": 1, "a": null}')
    assert accepts(trie, text, '{"b":1,"a":null}')
    assert not accepts(trie, text, '{"a": null, "b": 1}'), "properties come in the schema's order"
    assert not accepts(trie, text, '{"b": 1}')


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ["{}", '{"x": [1]}'], ["[1]", "1"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"json_schema": "$$ANY$$"}, ["1", "[]", '{"a": "b"}'], ["{", "x"]),
        ({"guided_json": True}, ["1"], ["x"]),
        ({"regex": "a+/b"}, ["aa/b"], ["a/", "xa/b"]),
        ({"guided_regex": r"(?P<year>\d{4})"}, ["2026"], ["20"]),
        ({"structured_outputs": {"choice": ["a\nb", '"', "c"]}}, ["a\nb", '"', "c"], ["a", "cc"]),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"], ["yesno", ""]),
        ({"ebnf": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["(x"]),
        ({"guided_grammar": 'start: "q" /[0-9]/'}, ["q1"], ["q"]),
        ({"structured_outputs": {"grammar": 'root ::= "z"'}}, ["z"], ["root"]),
    ],
    ids=str,
)
def test_other_forms(
    make: Make, trie: LLTokenizer, body: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    text = read(make(), body).text
    assert [accepts(trie, text, answer) for answer in good] == [True] * len(good)
    assert [accepts(trie, text, answer) for answer in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    "body",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"temperature": 1.0}],
    ids=str,
)
def test_answers_without_a_constraint_are_free(make: Make, body: dict[str, Any]) -> None:
    assert read(make(), body) == RequestGrammar("")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {}}, "missing_field", "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "missing_field",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "missing_field",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "invalid_value",
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": NOT, "strict": True},
                }
            },
            "invalid_value",
            "response_format.json_schema.schema",
        ),
        ({"guided_json": False}, "invalid_value", "guided_json"),
        ({"guided_json": "{"}, "invalid_value", "guided_json"),
        ({"guided_json": {"maximum": float("inf")}}, "invalid_value", "guided_json"),
        ({"guided_json": {"$ref": "http://elsewhere/x"}}, "invalid_value", "guided_json"),
        (
            {"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}},
            "invalid_value",
            "guided_json",
        ),
        ({"guided_json": {"type": "string", "pattern": "(?=a)"}}, "invalid_value", "guided_json"),
        ({"regex": ""}, "invalid_value", "regex"),
        ({"regex": "("}, "invalid_value", "regex"),
        ({"regex": "(?<!a)b"}, "invalid_value", "regex"),
        ({"regex": "(a)\\1"}, "invalid_value", "regex"),
        ({"regex": "a\0"}, "invalid_value", "regex"),
        ({"ebnf": "root ::= x"}, "invalid_value", "ebnf"),
        ({"guided_grammar": "start: missing"}, "invalid_value", "guided_grammar"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        (
            {"structured_outputs": {"json_object": False}},
            "invalid_value",
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "invalid_value",
            "structured_outputs.choice",
        ),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "regex"),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
            "invalid_value",
            "guided_regex",
        ),
    ],
    ids=str,
)
def test_mistakes_name_the_field(make: Make, body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(make(), body)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


def test_text_format_does_not_count_as_a_constraint(make: Make) -> None:
    assert read(make(), {"response_format": {"type": "text"}, "regex": "a"}).text


def test_native_fields_are_nested(make: Make) -> None:
    grammar = read(make(), {"regex": "a"}, prefix="sampling_params.", is_native=True)
    assert grammar.text
    with pytest.raises(BadRequest) as caught:
        read(make(), {"regex": "("}, prefix="sampling_params.", is_native=True)
    assert caught.value.param == "sampling_params.regex"


def test_keywords_that_have_no_effect_are_named(make: Make) -> None:
    schema = {
        **NOT,
        "uniqueItems": True,
        "properties": {**NOT["properties"], "c": {"type": "string", "format": "color"}},  # type: ignore[dict-item]
    }
    ignored = read(make(), {"guided_json": schema}).ignored
    assert set(ignored) == {"guided_json:not", "guided_json:uniqueItems", "guided_json:format"}


LARGE_CONST = "9007199254740993"


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(
    "schema",
    [
        f'{{"const":{LARGE_CONST},"description":"TEXT"}}',
        f'{{"enum":[1,{LARGE_CONST}.0],"description":"TEXT"}}',
        json.dumps(f'{{"minimum":{LARGE_CONST},"type":"integer","description":"TEXT"}}'),
    ],
    ids=["const", "enum", "as text"],
)
def test_numbers_reach_the_check_with_their_digits(
    make: Make, trie: LLTokenizer, schema: str, is_large: bool
) -> None:
    body = f'{{"guided_json":{schema}}}'.replace("TEXT", "x" * 2000 if is_large else "x").encode()
    decoded = decode_large_object(body) if is_large else decode_object(body)
    grammar = read(make(), decoded).text
    assert accepts(trie, grammar, LARGE_CONST)
    assert not accepts(trie, grammar, "9007199254740992")


def test_number_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidJson, match="out of range"):
        decode_object(b'{"guided_json":{"const":1e99999999999999999999}}')


def test_schema_cannot_change_the_servers_options(make: Make, trie: LLTokenizer) -> None:
    options = {"lenient": True, "whitespace_pattern": "[ ]*", "whitespace_flexible": True}
    schema = {**SCHEMA, "x-guidance": options}
    text = read(make(), {"guided_json": schema}).text
    assert not accepts(trie, text, '{"b": 1,' + " " * 60 + '"a": null}')
    strict = {"schema": {**NOT, "x-guidance": options}, "strict": True}
    with pytest.raises(BadRequest):
        read(make(), {"response_format": {"type": "json_schema", "json_schema": strict}})


SPACED = '{"b": 1, "a": null}'
INDENTED = '{\n  "b": 1,\n  "a": null\n}'
BLANKS = '{"b": 1,' + " " * 60 + '"a": null}'


@pytest.mark.parametrize(
    ("flags", "more", "accepted"),
    [
        ({}, {}, (True, True, False)),
        ({"structured_whitespace": "any"}, {}, (True, True, True)),
        ({"structured_whitespace": "none"}, {}, (False, False, False)),
        ({}, {"disable_any_whitespace": True}, (False, False, False)),
        ({}, {"whitespace_pattern": " ?"}, (True, False, False)),
    ],
    ids=str,
)
def test_white_space_policies(
    make: Make,
    trie: LLTokenizer,
    flags: dict[str, Any],
    more: dict[str, Any],
    accepted: tuple[bool, ...],
) -> None:
    text = read(make(**flags), {"structured_outputs": {"json": SCHEMA, **more}}).text
    assert accepts(trie, text, '{"b":1,"a":null}')
    assert tuple(accepts(trie, text, each) for each in (SPACED, INDENTED, BLANKS)) == accepted


def test_closed_objects() -> None:
    schema = {
        "properties": {"properties": {"type": "string"}, "in": {"properties": {"x": True}}},
        "items": [{"properties": {}}],
        "anyOf": [{"properties": {"y": {}}, "additionalProperties": True}],
        "patternProperties": {"z": {"properties": {}}},
        "const": {"properties": {}},
    }
    closed = close_objects(schema)
    assert "additionalProperties" not in closed, "its patterns name others"
    assert closed["properties"]["in"]["additionalProperties"] is False
    assert closed["properties"]["properties"] == {"type": "string"}
    assert closed["items"][0]["additionalProperties"] is False
    assert closed["anyOf"][0]["additionalProperties"] is True
    assert closed["patternProperties"]["z"]["additionalProperties"] is False
    assert closed["const"] == {"properties": {}}


def test_nested_and_large_constraints_are_refused(make: Make) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"items": deep}
    with pytest.raises(BadRequest, match="nested more than"):
        read(make(), {"guided_json": deep})
    with pytest.raises(BadRequest, match="at most 1048576 are accepted"):
        read(make(), {"guided_choice": ["x" * 2**20]})


@pytest.mark.parametrize("flags", [{"grammar": "off"}, {"simulate": "reference"}], ids=str)
def test_engines_without_grammars_refuse(make: Make, flags: dict[str, Any]) -> None:
    reader = make(**flags)
    with pytest.raises(UnsupportedParameter) as caught:
        read(reader, {"response_format": {"type": "json_object"}})
    assert caught.value.param == "response_format"
    assert read(reader, {"response_format": {"type": "text"}}).text == ""


def test_checks_run_beside_the_event_loop(make_new: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is checked, the loop serves others; equal constraints are checked once."""
    release = threading.Event()
    threads = []
    work = CheckProcess.check

    def held(process: CheckProcess, request: bytes, param: str, cpu_secs: float) -> CheckReply:
        threads.append(threading.current_thread())
        assert release.wait(30)
        return work(process, request, param, cpu_secs)

    monkeypatch.setattr(CheckProcess, "check", held)
    reader = make_new()

    async def go() -> None:
        check = asyncio.create_task(reader.read({"regex": "a"}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not check.done()
        release.set()
        first = await check
        assert await reader.read({"regex": "a"}) == first
        assert await reader.read({"regex": "b"}) != first

    asyncio.run(go())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("limit", ["KEPT_CHARS", "KEPT_CHECKS"])
def test_kept_grammars_are_bounded(
    make_new: Make, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    reader = make_new()
    text = read(reader, {"regex": "a10"}).text
    value = 3 if limit == "KEPT_CHECKS" else 3 * len(text)
    monkeypatch.setattr(reader_module, limit, value)
    for i in range(11, 20):
        read(reader, {"regex": f"a{i}"})
    assert len(reader._kept) == 3
    assert reader._kept_chars == 3 * len(text)


HOSTILE: dict[str, dict[str, Any]] = {
    "chain of references": {"guided_json": reference_chain(5000)},
    "chain of rules": {"ebnf": rule_chain(3000)},
    "chain of rules in Lark": {"ebnf": lark_chain(20_000)},
    "nested repetitions": {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "exponential for others": {"regex": "(x+x+)+y(.*a){30}"},
    "many properties": {
        "guided_json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(1500)},
        }
    },
    "large enum": {"guided_json": {"enum": [f"value {i}" for i in range(5000)]}},
    "recursive schema": {
        "guided_json": {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}
    },
    "empty recursion": {"guided_json": {"$ref": "#"}},
    "long": {"guided_json": {"type": "string", "minLength": 20_000, "maxLength": 100_000}},
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_constraints_are_refused_or_bounded(
    make: Make, trie: LLTokenizer, body: dict[str, Any]
) -> None:
    """Checked and compiled in bounded time, or refused as the client's mistake."""
    try:
        text = read(make(), body).text
    except BadRequest:
        return
    LLMatcher(trie, text, log_level=0).compute_bitmask()
