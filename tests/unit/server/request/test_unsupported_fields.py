"""Fields that are not served, in every form of a request: those that would change the answer are refused, the others
have no effect and are named.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import BadRequest, UnsupportedParameter
from baton.server.http.body_decoder import BodyDecoder
from baton.server.http.translation import RequestTranslator
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support.models import tiny_model

REFUSED: dict[str, Any] = {
    "watermark": True,
    "watermarking": {"key": 1},
    "repetition_detection": {"max_pattern_size": 3},
    "use_beam_search": True,
    "length_penalty": 1.2,
    "logits_processors": ["x"],
    "custom_logit_processor": "x",
    "lora_path": "x",
    "documents": [{"text": "x"}],
    "chat_template": "{{ messages }}",
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "suffix": "x",
    "input_embeds": [[0.5]],
    "prompt_embeds": "x",
    "return_hidden_states": True,
    "session_params": {"id": "x"},
    "sampling_logprobs_mode": "raw_logits",
    "task": "embed",
    "previous_input_messages": [{"role": "user", "content": "x"}],
    "spaces_between_special_tokens": False,
    "stop_regex": "x+",
}
HARMLESS: dict[str, Any] = {
    "user": "x",
    "metadata": {"user_id": "x"},
    "store": False,
    "safety_identifier": "x",
    "service_tier": "auto",
    "verbosity": "low",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
    "parallel_tool_calls": False,
    "client_metadata": {},
    "vllm_xargs": {"x": 1},
    "custom_labels": {},
    "kv_hints": {},
    "ec_transfer_params": {},
    "mm_processor_kwargs": {},
    "stream_interval": 2,
    "guided_decoding_backend": "x",
    "cache_control": {"type": "ephemeral"},
    "betas": [],
    "include_obfuscation": False,
    "defer_loading": True,
}
SERVED: dict[str, frozenset[str]] = {
    "chat": frozenset(("parallel_tool_calls", "service_tier")),
    "completions": frozenset(("service_tier",)),
    "generate": frozenset(("service_tier",)),
    "responses": frozenset(
        (
            "metadata", "store", "service_tier", "prompt_cache_retention", "prompt_cache_options",
            "parallel_tool_calls", "client_metadata",
        )
    ),
    "messages": frozenset(("parallel_tool_calls", "service_tier")),
}  # fmt: skip
"""Harmless fields that are read, repeated in the answer, or come with every request of an API."""
Ask = Callable[[dict[str, Any]], Coroutine[Any, Any, AcceptedRequest]]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ask]:
    path = tiny_model.make(tmp_path_factory.mktemp("model"), context_length=128)
    config = build_config({"model_path": str(path), "served_model_name": "tiny"})
    validator = RequestValidator(config, model_info.load(config), Tokenizer(path))
    translator = RequestTranslator(validator, BodyDecoder())
    chat = {"messages": MESSAGES}
    return {
        "chat": lambda more: validator.chat(chat | more),
        "completions": lambda more: validator.completion({"prompt": "hello"} | more),
        "generate": lambda more: validator.generate({"text": "hello"} | more),
        "responses": lambda more: translator.responses(encode({"input": "hello"} | more)),
        "messages": lambda more: translator.messages(encode(chat | {"max_tokens": 3} | more)),
    }


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps({"model": "tiny"} | body).encode()


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("form", SERVED)
def test_field_that_would_change_the_answer_is_refused(
    forms: dict[str, Ask], form: str, name: str
) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        asyncio.run(forms[form]({name: REFUSED[name]}))
    assert caught.value.param == name
    asyncio.run(forms[form]({name: None}))


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("form", SERVED)
def test_field_without_effect_is_accepted_and_named(
    forms: dict[str, Ask], form: str, name: str
) -> None:
    accepted = asyncio.run(forms[form]({name: HARMLESS[name]}))
    places = {place.partition(".")[0] for place in accepted.ignored}
    assert (name in places) is (name not in SERVED[form]), accepted.ignored
    asyncio.run(forms[form]({name: None}))


@pytest.mark.parametrize("form", SERVED)
def test_hints_for_drafts_are_read_in_every_form(forms: dict[str, Ask], form: str) -> None:
    prediction = {"type": "content", "content": "hello"}
    accepted = asyncio.run(forms[form]({"speculative": 3, "prediction": prediction}))
    with pytest.raises(BadRequest, match=r"prediction\.content must be"):
        asyncio.run(forms[form]({"prediction": prediction | {"content": 3}}))
    assert accepted.draft_limit == 3
    assert not {"speculative", "prediction"} & {*accepted.ignored}


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_neutral_values_are_accepted(forms: dict[str, Ask], form: str) -> None:
    neutral = {"length_penalty": 1.0, "modalities": ["text"], "spaces_between_special_tokens": True}
    assert asyncio.run(forms[form](neutral | {"use_beam_search": False})).ignored == ()


@pytest.mark.parametrize(
    "body",
    [
        {"thinking": {"type": "sometimes"}},
        {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
        {"functions": [{"type": "custom"}]},
    ],
    ids=str,
)
def test_kinds_that_chat_does_not_know_are_refused(
    forms: dict[str, Ask], body: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest):
        asyncio.run(forms["chat"](body))


@pytest.mark.parametrize(
    ("form", "body", "advice"),
    [
        ("completions", {"thinking_token_budget": 5}, "use /v1/chat/completions, or leave it out"),
        ("completions", {"enable_thinking": True}, "use /v1/chat/completions, or leave it out"),
        ("completions", {"lora_path": "x"}, "is not supported by this version; leave it out"),
        ("generate", {"regex": "a"}, "regex is not supported here: send it in sampling_params"),
        ("generate", {"custom_params": {}}, "send it in sampling_params"),
    ],
    ids=str,
)
def test_field_that_is_served_elsewhere_is_refused_with_its_place(
    forms: dict[str, Ask], form: str, body: dict[str, Any], advice: str
) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        asyncio.run(forms[form](body))
    assert str(caught.value).endswith(advice)
