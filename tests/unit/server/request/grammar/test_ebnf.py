"""Grammars in EBNF mean what a naive reading says, whatever lexemes their translation has."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.errors import BadRequest
from baton.server.request.grammar.ebnf.emitter import ebnf_grammar
from baton.server.request.grammar.ebnf.parser import EbnfError, parse_grammar
from baton.server.request.grammar.ebnf.recursion import (
    recursive_rules,
    without_simple_recursion,
)
from tests.support.effort import examples
from tests.support.grammars.naive_ebnf import Node, words_of, write_rules
from tests.support.models.checkpoints import EOS, VOCAB, write_tokenizer

LETTERS = "ab-"
NAMES = ("root", "x", "foo-bar")
LONGEST = 5
TEXTS = [
    "".join(chars) for n in range(LONGEST + 1) for chars in itertools.product(LETTERS, repeat=n)
]

JSON = r"""
root   ::= object   # llama.cpp's grammar of JSON
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return LLTokenizer((path / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=[EOS])


def accepts(trie: LLTokenizer, base: LLMatcher, text: str) -> bool:
    matcher = base.deep_copy()
    tokens = trie.tokenize_str(text)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    assert matcher.consume_tokens(tokens) or not tokens
    return matcher.is_accepting()


def compiled(trie: LLTokenizer, text: str) -> LLMatcher:
    lark = ebnf_grammar(text, "ebnf")
    matcher = LLMatcher(trie, lark, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), lark)
    return matcher


leaves = st.one_of(
    st.text(LETTERS, max_size=3).map(lambda text: ("text", text)),
    st.frozensets(st.sampled_from(LETTERS), min_size=1).map(lambda chars: ("chars", chars)),
    st.sampled_from(NAMES).map(lambda name: ("ref", name)),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("seq", parts)),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("alt", parts)),
        st.tuples(inner, st.sampled_from([(0, 1), (0, None), (1, None), (0, 2), (2, 3)])).map(
            lambda pair: ("rep", pair[0], *pair[1])
        ),
    ),
    max_leaves=6,
)


@given(bodies=st.tuples(nodes, nodes, nodes))
@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
def test_translation_accepts_what_the_grammar_describes(
    trie: LLTokenizer, bodies: tuple[Node, Node, Node]
) -> None:
    rules = dict(zip(NAMES, bodies, strict=True))
    expected = words_of(rules, LONGEST)
    try:
        lark = ebnf_grammar(write_rules(rules), "ebnf")
    except BadRequest:
        assert not expected, "a grammar without any text, such as root ::= root, is refused"
        return
    matcher = LLMatcher(trie, lark, log_level=0)
    # The only word may be the empty one.
    assume(expected or not matcher.is_error())
    assert not matcher.is_error(), (matcher.get_error(), lark)
    assert {text for text in TEXTS if accepts(trie, matcher, text)} == expected, lark


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"a": [1, 2.5, {"b": "x,}"}], "c": true}', True),
        ('{"a":\n  "b\\u00e9", "é": null}', True),
        ('{"a" }', False),
        ('{"a": 01}', False),
        ("[]", False),
    ],
)
def test_grammar_of_json(trie: LLTokenizer, text: str, is_valid: bool) -> None:
    assert accepts(trie, compiled(trie, JSON), text) is is_valid


def test_strings_of_a_recursive_grammar_are_one_lexeme() -> None:
    """Character by character each mask would take a step of the parser per character of each token."""
    lark = ebnf_grammar(JSON, "ebnf")
    (string,) = [line for line in lark.splitlines() if "0-9A-Fa-f" in line]
    assert string.startswith("R_")


def test_lexemes_that_would_swallow_what_follows_are_divided(trie: LLTokenizer) -> None:
    matcher = compiled(trie, 'root ::= a b\na ::= [a-z]+\nb ::= "z" | "(" root ")"')
    assert accepts(trie, matcher, "xyz")
    assert accepts(trie, matcher, "a(bz)")
    assert not accepts(trie, matcher, "z")


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= "a"\n | "b"\n', ["a", "b"], ["ab"]),
        (r'root ::= "\u0041\x42\U00000043" [\u0044-\u0046]', ["ABCE"], ["ABCG"]),
        (r"root ::= [a\-z]+", ["a-z"], ["b"]),
        (r"root ::= [\]\[/^]+", ["][/^"], ["\\"]),
        (r"root ::= [^\]\n]{2}", ["ab", "é1"], ["a]", "a\n"]),
        (
            'root ::= foo-bar foo_bar start\nfoo-bar ::= "x"\nfoo_bar ::= "y"\nstart ::= "z"',
            ["xyz"],
            ["xy"],
        ),
        ('root ::= .{2} # comment "\n', ["a\n", "öä"], ["a"]),
        ('root ::= "" | "a"{2,}', ["", "aa", "aaaa"], ["a"]),
        ('root ::= x\nx ::= "a" x | "b"', ["b", "aaab"], ["a"]),
        ('root ::= x\nx ::= x "a" | "b"', ["b", "baa"], ["a"]),
        ('root ::= ("a" root)?', ["", "aaa"], ["b"]),
    ],
)
def test_forms(trie: LLTokenizer, text: str, good: list[str], bad: list[str]) -> None:
    matcher = compiled(trie, text)
    assert [accepts(trie, matcher, each) for each in good] == [True] * len(good)
    assert [accepts(trie, matcher, each) for each in bad] == [False] * len(bad)


def test_deep_right_recursion_is_repetition(trie: LLTokenizer) -> None:
    matcher = compiled(trie, 'root ::= x\nx ::= [a-c] x | "d"')
    assert accepts(trie, matcher, "abc" * 3000 + "d")


def test_simple_recursion_is_rewritten() -> None:
    rules = parse_grammar('root ::= x y\nx ::= "a" x | "b"\ny ::= "(" y ")" | "c"')
    assert recursive_rules(rules) == {"root", "x", "y"}
    assert recursive_rules(without_simple_recursion(rules)) == {"root", "y"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rule 'root'"),
        ('start2 ::= "a"', "no rule 'root'"),
        ("root ::= other", "uses other, which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a" )', "not expected"),
        ('root ::= "a', "cannot be read"),
        ("root ::= 'a'", "cannot be read"),
        ('root ::= (= "a") "b"', "look-ahead"),
        ('root ::= TagDispatch("a", b)', "TagDispatch"),
        ("root ::= [b-a]", "is empty"),
        (r"root ::= [^\u0000-\U0010FFFF]", "holds no character"),
        (r'root ::= "\xZZ"', "hexadecimal"),
        (r'root ::= "\uD800"', "no character of Unicode"),
        ('root ::= "a"{3,2}', "smaller number first"),
        ('root ::= "a"{99999}', "must be from 0 to"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than"),
        ('"a" ::= "b"', "behind no rule name"),
        ('"a"', "where a rule begins"),
    ],
)
def test_texts_that_are_no_grammar(text: str, message: str) -> None:
    with pytest.raises(EbnfError, match=message.replace("(", r"\(")):
        parse_grammar(text)
    with pytest.raises(BadRequest, match="guided_grammar is no grammar in EBNF"):
        ebnf_grammar(text, "guided_grammar")


@given(st.text(st.sampled_from('root::= "ab[]^-\\x|*+?(){1,}#.\n'), max_size=40))
@settings(max_examples=examples(300), deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        ebnf_grammar("root ::= " + text, "ebnf")
    except BadRequest:
        return


def test_lark_passes_through() -> None:
    for text in ('start: "a"\n', "%llguidance {}\nstart: /x/\n"):
        assert ebnf_grammar(text, "ebnf") == text


def test_large_grammars_are_translated_in_bounded_time(trie: LLTokenizer) -> None:
    """Many rules in conflict, and repetitions of repetitions, whose automata would be too large."""
    rules = [f'r{i} ::= [a-z]{{0,200}} r{(i + 1) % 60} | "{i}" root' for i in range(60)]
    lark = ebnf_grammar('root ::= r0 | "."\n' + "\n".join(rules), "ebnf")
    assert "start:" in lark
    nested = 'root ::= x root "b" | "c"\nx ::= (((("a"{0,100}){0,100}){0,100}){0,100})'
    assert "start:" in ebnf_grammar(nested, "ebnf")
