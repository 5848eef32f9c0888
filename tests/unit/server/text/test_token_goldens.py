"""Golden cases are what transformers makes of the same requests, and what the engine makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import BadRequest
from baton.server.text.chat_template import ChatTemplate, encode_chat_fields
from baton.server.text.tokenizer import Tokenizer
from tests.support.goldens import token_goldens


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(token_goldens.CASES.read_text())


@pytest.mark.parametrize("name", token_goldens.names())
def test_cases_are_transformers(golden: dict[str, Any], name: str) -> None:
    assert json.loads(json.dumps(token_goldens.model_cases(name))) == golden[name], (
        "run python -m tests.support.goldens.token_goldens"
    )


@pytest.mark.parametrize("name", token_goldens.names())
def test_cases_are_the_engines(golden: dict[str, Any], name: str) -> None:
    facts = token_goldens.facts_of(name)
    template, tokenizer = (
        ChatTemplate(facts.chat_template, facts.special_tokens),
        Tokenizer(facts.tokenizer_path),
    )
    for case in golden[name]["chats"]:
        body = case["body"]
        try:
            text = template.render_chat(encode_chat_fields(body))
        except BadRequest:
            text = None
        assert text == case["text"], body
        if text is not None:
            assert (
                tokenizer.encode(text, add_special_tokens=body.get("add_special_tokens", False))
                == case["ids"]
            )
    for case in golden[name]["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["bare_ids"]
