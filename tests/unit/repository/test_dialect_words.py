"""Fields, events and paths of an API stand in the text layer alone; the router asks it for them."""

from __future__ import annotations

import re

import pytest

from tests.structure.sources import product_rust, rust_code

WORDS = (
    "[DONE]",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    ": baton ",
    "baton_resume",
    "x-baton-emit-tokens",
    "chatcmpl-",
    "cmpl-",
    "gnt-",
    "meta_info",
    "input_token_logprobs",
    "choices",
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
)
"""Parts of what an API says, which only `engine/text/src/dialect` writes and reads."""
STRING_LITERAL = re.compile(r'r#"(.*?)"#|"((?:[^"\\]|\\.)*)"', re.DOTALL)


def words_in(code: str) -> list[str]:
    """Words of an API in the string literals of Rust code."""
    uncommented = re.sub(r"^\s*//.*", "", code, flags=re.MULTILINE)
    literals = "\n".join(raw or plain for raw, plain in STRING_LITERAL.findall(uncommented))
    return [word for word in WORDS if re.search(rf"(?<![\w.-]){re.escape(word)}(?!\w)", literals)]


def test_router_has_no_words_of_an_api() -> None:
    found = {path: words_in(rust_code(path)) for path in product_rust("router/src")}
    assert found
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('// "[DONE]" in a comment', []),
        (r'const END: &[u8] = b"data: [DONE]\n\n";', ["[DONE]"]),
        (r'const USAGE: &str = "\"prompt_tokens\":1";', ["prompt_tokens"]),
        ('const RAW: &str = r#"{"choices":[]}"#;', ["choices"]),
        ('const METRIC: &str = "baton_counted_prompt_tokens_total";', []),
    ],
)
def test_words_are_found_in_string_literals_as_whole_words(line: str, words: list[str]) -> None:
    assert words_in(line) == words
