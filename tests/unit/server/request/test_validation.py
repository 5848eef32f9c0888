"""Validation at the edge: what it accepts, what it refuses and with which field, and which rank gets it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import build_config
from baton.errors import (
    BadRequest,
    EngineError,
    FingerprintMismatch,
    InvalidJson,
    PayloadTooLarge,
    PromptTooLong,
    UnsupportedParameter,
)
from baton.server.http.deadline_headers import with_deadline_headers
from baton.server.request import schema
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.grammar.constraint import GrammarFields
from baton.server.request.prompt.placement import seed_of_room
from baton.server.request.validation import RequestValidator
from baton.server.text import model_info
from baton.server.text.chat_template import ChatTemplate
from baton.server.text.tokenizer import Tokenizer
from tests.support.effort import examples
from tests.support.models import tiny_model

CONTEXT = 128
Make = Callable[..., RequestValidator]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("model"), context_length=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


@pytest.fixture
def make(path: Path, tokenizer: Tokenizer) -> Make:
    def validator(**flags: Any) -> RequestValidator:
        config = build_config({"model_path": str(path), "served_model_name": "tiny", **flags})
        return RequestValidator(config, model_info.load(config), tokenizer)

    return validator


@pytest.fixture(scope="module")
def unchanged(path: Path, tokenizer: Tokenizer) -> RequestValidator:
    """A validator for tests that change nothing of it: its checks of grammars are a process."""
    config = build_config({"model_path": str(path), "served_model_name": "tiny"})
    return RequestValidator(config, model_info.load(config), tokenizer)


def chat(v: RequestValidator, **body: Any) -> AcceptedRequest:
    return asyncio.run(v.chat({"messages": [{"role": "user", "content": "hello"}], **body}))


def completion(v: RequestValidator, **body: Any) -> AcceptedRequest:
    return asyncio.run(v.completion({"prompt": "hello", **body}))


def generate(v: RequestValidator, **body: Any) -> AcceptedRequest:
    if "input_ids" not in body:
        body.setdefault("text", "hello")
    return asyncio.run(v.generate(body))


def test_answers_continue_their_prompts_but_for_chats(make: Make) -> None:
    validator = make()
    assert completion(validator).continues_prompt
    assert generate(validator).continues_prompt
    assert not chat(validator).continues_prompt
    assert chat(validator, continue_final_message=True).continues_prompt


# ---- work that is bounded before it begins -----------------------------------------------------------------------


def tokenize(v: RequestValidator, **body: Any) -> Any:
    return asyncio.run(v.tokenize(body))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (chat, "messages"),
        (completion, "prompt"),
        (generate, "text"),
        (tokenize, "prompt"),
        (tokenize, "messages"),
    ],
)
def test_text_too_long_for_any_tokens_is_refused_untokenized(
    unchanged: RequestValidator, tokenizer: Tokenizer, form: Any, field: str
) -> None:
    chars = CONTEXT * tokenizer.max_chars_per_token + 1
    text = "x" * chars
    body = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    with pytest.raises(PromptTooLong) as caught:
        form(unchanged, **body)
    assert caught.value.param == field
    assert f"context length is {CONTEXT} tokens" in caught.value.message
    assert re.search(r"at least \d+ tokens", caught.value.message)


def test_longest_text_that_may_fit_is_tokenized(make: Make, tokenizer: Tokenizer) -> None:
    text = "x" * (CONTEXT * tokenizer.max_chars_per_token)
    assert len(tokenize(make(), prompt=text)) > CONTEXT
    with pytest.raises(PromptTooLong, match="the prompt has "):
        completion(make(), prompt=text)


@pytest.mark.parametrize("form", [chat, tokenize])
def test_conversation_of_many_messages_is_read_beside_the_event_loop(
    make: Make, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    threads = []

    encode = ChatTemplate.encode_chat

    def recorded(template: ChatTemplate, *args: Any) -> array[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(template, *args)

    monkeypatch.setattr(ChatTemplate, "encode_chat", recorded)
    for count in (1, 2000):
        with contextlib.suppress(PromptTooLong):
            form(make(), messages=[{"role": "user", "content": "x"}] * count)
    assert threads == [True, False]


def test_prompts_behind_one_that_is_too_long_are_not_tokenized(
    make: Make, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = tokenizer.encode_prompt
    seen = []

    def recorded(text: str, *args: Any, **options: Any) -> array[int]:
        seen.append(text)
        return encode(text, *args, **options)

    monkeypatch.setattr(tokenizer, "encode_prompt", recorded)
    long = "x " * (CONTEXT + 1)
    with pytest.raises(PromptTooLong, match=r"the prompt has \d+;"):
        completion(make(), prompt=["a", long, "b"])
    assert seen == ["a", long]


TEXT_FORMS = [("/v1/completions", "prompt", completion), ("/generate", "text", generate)]


@settings(max_examples=examples(40), deadline=None)
@given(
    excess=st.integers(-2, 2), character=st.sampled_from(["x", "é", "😀", '"', "\n"]), escaped=st.booleans(),
    form=st.sampled_from(TEXT_FORMS), in_list=st.booleans(),
)  # fmt: skip
def test_text_is_refused_unparsed_exactly_if_it_would_be_parsed(
    path: Path,
    tokenizer: Tokenizer,
    excess: int,
    character: str,
    escaped: bool,
    form: Any,
    in_list: bool,
) -> None:
    config = build_config({"model_path": str(path), "served_model_name": "tiny"})
    validator = RequestValidator(config, model_info.load(config), tokenizer)
    text = character * (validator.limits.max_prompt_chars + excess)
    url, field, parsed = form
    prompt = ["a", text] if in_list else text
    body = json.dumps({field: prompt, "model": "tiny"}, ensure_ascii=escaped).encode()
    try:
        validator.limits.refuse_oversized(url, body)
        unparsed = None
    except PromptTooLong as err:
        unparsed = err.body()
    assert (unparsed is not None) == (excess > 0)
    with pytest.raises(PromptTooLong) as caught:
        parsed(validator, **{field: prompt})
    assert unparsed in (None, caught.value.body())


def test_ids_are_refused_unparsed_exactly_if_they_would_be_parsed(make: Make) -> None:
    validator = make()
    for count in (CONTEXT - 1, CONTEXT, CONTEXT + 1):
        for url, field, parsed in (
            ("/v1/completions", "prompt", completion),
            ("/generate", "input_ids", generate),
        ):
            for ids in ([7] * count, [[7], [7] * count]):
                body = json.dumps({field: ids}).encode()
                if count <= CONTEXT:
                    validator.limits.refuse_oversized(url, body)
                    continue
                with pytest.raises(PromptTooLong) as unparsed:
                    validator.limits.refuse_oversized(url, body)
                with pytest.raises(PromptTooLong) as caught:
                    parsed(validator, **{field: ids})
                assert unparsed.value.body() == caught.value.body()


def test_messages_and_other_members_are_bounded_before_they_are_parsed(make: Make) -> None:
    validator = make()
    messages = [{"role": "user", "content": "x"}] * (12 * validator.limits.max_prompt_chars // 30)
    with pytest.raises(PromptTooLong, match="bytes of messages, at most ") as caught:
        validator.limits.refuse_oversized(
            "/v1/chat/completions", json.dumps({"messages": messages}).encode()
        )
    assert caught.value.param == "messages"
    rest = json.dumps({"messages": [], "tools": ["x"] * (1 << 20)}).encode()
    with pytest.raises(PayloadTooLarge, match="members beside the prompt have "):
        validator.limits.refuse_oversized("/v1/chat/completions", rest)
    with pytest.raises(InvalidJson, match="not a JSON object: "):
        validator.limits.refuse_oversized(
            "/v1/chat/completions", b'{"messages": [' + b" " * CONTEXT
        )


def test_too_many_ids_are_refused_before_they_are_looked_at(make: Make) -> None:
    with pytest.raises(PromptTooLong, match=f"has {CONTEXT + 1};"):
        completion(make(), prompt=[0] * CONTEXT + ["x"])


# ---- refusals ----------------------------------------------------------------------------------------------------

SHARED_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 10**400}, "invalid_value", "temperature"),
    ({"temperature": 1e300}, "invalid_value", "temperature"),
    ({"seed": 10**400}, "invalid_value", "seed"),
    ({"n": 1e300}, "invalid_value", "n"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.01}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 1.5}, "invalid_value", "top_k"),
    ({"min_p": 2}, "invalid_value", "min_p"),
    ({"presence_penalty": 2.1}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": CONTEXT}, "context_length_exceeded", "*"),
    ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
    ({"stop": [1]}, "invalid_value", "stop"),
    ({"stop": ["a"] * 17}, "invalid_value", "stop"),
    ({"stop": "x" * 2000}, "invalid_value", "stop"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "invalid_value", "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": []}, "invalid_value", "logit_bias"),
    ({"seed": "one"}, "invalid_value", "seed"),
    ({"stream": "yes"}, "invalid_value", "stream"),
    ({"stream_options": {"include_usage": 1}}, "invalid_value", "stream_options.include_usage"),
    ({"stream_options": 1}, "invalid_value", "stream_options"),
    ({"model": "other"}, "model_not_found", "model"),
    ({"model": 5}, "invalid_value", "model"),
    ({"rid": ""}, "invalid_value", "rid"),
    ({"rid": "a\nb"}, "invalid_value", "rid"),
    ({"rid": ["a", "b"]}, "unsupported_parameter", "rid"),
    ({"priority": 1.5}, "invalid_value", "priority"),
    ({"ttft_deadline_ms": 0}, "invalid_value", "ttft_deadline_ms"),
    ({"deadline_ms": "soon"}, "invalid_value", "deadline_ms"),
    ({"cache_salt": 1}, "invalid_value", "cache_salt"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"regex": "(?=a)"}, "invalid_value", "regex"),
    ({"lora_path": "x"}, "unsupported_parameter", "lora_path"),
    ({"bootstrap_room": -1}, "invalid_value", "bootstrap_room"),
    ({"bootstrap_room": 2**63}, "invalid_value", "bootstrap_room"),
    ({"bootstrap_room": "7"}, "invalid_value", "bootstrap_room"),
    ({"bootstrap_room": [1, 2]}, "invalid_value", "bootstrap_room"),
    ({"bootstrap_port": 70000}, "invalid_value", "bootstrap_port"),
    ({"bootstrap_host": 1}, "invalid_value", "bootstrap_host"),
    ({"data_parallel_rank": 1}, "invalid_value", "data_parallel_rank"),
    ({"routed_dp_rank": 1}, "invalid_value", "routed_dp_rank"),
]


@pytest.mark.parametrize(
    ("body", "code", "param"), SHARED_REFUSALS, ids=[str(b)[:60] for b, _, _ in SHARED_REFUSALS]
)
@pytest.mark.parametrize("form", [chat, completion], ids=["chat", "completion"])
def test_bad_fields_are_named(
    unchanged: RequestValidator, form: Any, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(EngineError) as caught:
        form(unchanged, **body)
    assert caught.value.code == code
    expected = ("messages" if form is chat else "prompt") if param == "*" else param
    assert caught.value.param == expected


WEATHER = {"type": "function", "function": {"name": "get_weather"}}
CHAT_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "missing_field", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": ["hi"]}, "invalid_value", "messages[0]"),
    ({"messages": [{"content": "x"}]}, "missing_field", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "missing_field", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "unsupported_parameter",
        "messages[0].content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "invalid_value",
        "messages[0].content",
    ),
    (
        {"messages": [{"role": "user", "content": "hello " * 200}]},
        "context_length_exceeded",
        "messages",
    ),
    ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
    ({"tools": [WEATHER]}, "unsupported_parameter", "tools"),
    ({"tools": [WEATHER], "tool_choice": "required"}, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": 1}, "invalid_value", "logprobs"),
    ({"max_completion_tokens": CONTEXT}, "context_length_exceeded", "messages"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_value",
        "continue_final_message",
    ),
    ({"chat_template_kwargs": "x"}, "invalid_value", "chat_template_kwargs"),
]


@pytest.mark.parametrize(
    ("body", "code", "param"), CHAT_REFUSALS, ids=[str(b)[:60] for b, _, _ in CHAT_REFUSALS]
)
def test_bad_chat_fields_are_named(
    unchanged: RequestValidator, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(EngineError) as caught:
        chat(unchanged, **body)
    assert (caught.value.code, caught.value.param) == (code, param)


COMPLETION_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "missing_field", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": [""]}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt"),
    ({"prompt": 5}, "invalid_value", "prompt"),
    ({"prompt": ["a", [1]]}, "invalid_value", "prompt"),
    ({"prompt": [[1], "a"]}, "invalid_value", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_value", "prompt"),
    ({"prompt": [10**6]}, "invalid_value", "prompt"),
    ({"prompt": [True]}, "invalid_value", "prompt"),
    ({"prompt": ["a"] * 2000}, "invalid_value", "prompt"),
    ({"prompt": [[1]] * 100, "n": 16}, "invalid_value", "n"),
    ({"prompt": [1] * CONTEXT}, "context_length_exceeded", "prompt"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"prompt_logprobs": -1}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"logprob_token_ids": [5]}, "invalid_value", "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [10**6]}, "invalid_value", "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [5] * 129}, "invalid_value", "logprob_token_ids"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"logprobs": True}, "invalid_value", "logprobs"),
]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    COMPLETION_REFUSALS,
    ids=[str(b)[:60] for b, _, _ in COMPLETION_REFUSALS],
)
def test_bad_completion_fields_are_named(
    unchanged: RequestValidator, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(EngineError) as caught:
        completion(unchanged, **body)
    assert (caught.value.code, caught.value.param) == (code, param)


GENERATE_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": None}, "missing_field", "text"),
    ({"sampling_params": [{}]}, "unsupported_parameter", "sampling_params"),
    ({"sampling_params": 0}, "invalid_value", "sampling_params"),
    ({"sampling_params": ""}, "invalid_value", "sampling_params"),
    ({"sampling_params": {"n": 1.5}}, "invalid_value", "sampling_params.n"),
    ({"sampling_params": {"top_p": 3}}, "invalid_value", "sampling_params.top_p"),
    ({"sampling_params": {"max_new_tokens": 0}}, "invalid_value", "sampling_params.max_new_tokens"),
    ({"sampling_params": {"regex": "("}}, "invalid_value", "sampling_params.regex"),
    ({"regex": "a"}, "unsupported_parameter", "regex"),
    (
        {"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
        "invalid_value",
        "sampling_params.min_new_tokens",
    ),
    ({"input_embeds": [[0.5]]}, "unsupported_parameter", "input_embeds"),
    ({"return_logprob": True, "logprob_start_len": 10**6}, "invalid_value", "logprob_start_len"),
    ({"return_logprob": True, "logprob_start_len": -2}, "invalid_value", "logprob_start_len"),
    ({"return_logprob": True, "token_ids_logprob": [[5]]}, "invalid_value", "token_ids_logprob"),
]


@pytest.mark.parametrize(
    ("body", "code", "param"), GENERATE_REFUSALS, ids=[str(b)[:60] for b, _, _ in GENERATE_REFUSALS]
)
def test_bad_generate_fields_are_named(
    unchanged: RequestValidator, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(EngineError) as caught:
        generate(unchanged, **body)
    assert (caught.value.code, caught.value.param) == (code, param)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1e300])
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
REQUESTS = (
    schema.ChatCompletionRequest,
    schema.CompletionRequest,
    schema.GenerateRequest,
    schema.GenerateSampling,
    GrammarFields,
)
FIELDS = sorted({name for request in REQUESTS for name in request.__struct_fields__} | {"tools"})
SHARING = {"priority_classes": "a:2,b:1", "tenant_config": "{}"}


@given(
    form=st.sampled_from([chat, completion, generate]),
    body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
    mode=st.sampled_from(["null", "prefill", "decode"]),
    flags=st.sampled_from([{}, SHARING]),
)
@settings(max_examples=examples(250), deadline=None)
def test_any_json_is_accepted_or_refused_on_purpose(
    path: Path,
    tokenizer: Tokenizer,
    form: Any,
    body: dict[str, Any],
    mode: str,
    flags: dict[str, Any],
) -> None:
    config = build_config({"model_path": str(path), "disaggregation_mode": mode, **flags})
    validator = RequestValidator(config, model_info.load(config), tokenizer)
    status, items = 200, ()
    try:
        items = form(validator, **body).items
    except EngineError as err:
        status = err.status
    assert status == 200 or 400 <= status < 500
    for item in items:
        assert len(item.prompt) >= 1
        assert len(item.prompt) + item.params.max_new_tokens <= CONTEXT
        assert 0 <= item.params.seed < 2**63


# ---- what is accepted --------------------------------------------------------------------------------------------


def test_defaults_of_the_three_forms(make: Make) -> None:
    v = make()
    one = chat(v).items[0]
    assert one.params.max_new_tokens == CONTEXT - len(one.prompt), (
        "chat may use what is left of the context"
    )
    assert completion(v).items[0].params.max_new_tokens == 16
    assert generate(v).items[0].params.max_new_tokens == CONTEXT - 3, (
        "128 would not fit behind the prompt"
    )
    assert completion(v, best_of=1).n == 1, "best_of is n's default, too"
    params = completion(v).items[0].params
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (1.0, 1.0, 0, -1)
    assert params.stop_token_ids == (1,), "the model's end-of-sequence id"


def test_limit_of_generate_is_sglangs_where_the_context_has_room(tmp_path: Path) -> None:
    path = tiny_model.make(tmp_path / "model", context_length=512)
    config = build_config({"model_path": str(path)})
    validator = RequestValidator(config, model_info.load(config), Tokenizer(path))
    assert generate(validator).items[0].params.max_new_tokens == 128


def test_priority_is_kept_as_given_and_refused_only_where_the_flag_says_so(make: Make) -> None:
    assert chat(make()).priority is None
    assert chat(make(), priority=0).priority == 0
    with pytest.raises(UnsupportedParameter, match="--enable-priority-scheduling"):
        chat(make(abort_on_priority_when_disabled=True), priority=0)
    both = {"abort_on_priority_when_disabled": True, "enable_priority_scheduling": True}
    assert chat(make(**both), priority=3).priority == 3


@pytest.mark.parametrize(
    ("value", "limit"), [(None, None), (True, None), (False, 0), (0, 0), (7, 7), (7.0, 7)]
)
@pytest.mark.parametrize("form", [chat, completion, generate])
def test_speculative_is_most_drafted_tokens(
    unchanged: RequestValidator, form: Any, value: Any, limit: int | None
) -> None:
    assert form(unchanged, speculative=value).draft_limit == limit


@pytest.mark.parametrize("value", [-1, 1.5, "no", [], {}])
def test_speculative_that_is_neither_a_boolean_nor_a_number_is_refused(
    unchanged: RequestValidator, value: Any
) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(unchanged, speculative=value)
    assert caught.value.param == "speculative"


@pytest.mark.parametrize("form", [chat, completion, generate])
def test_prediction_becomes_tokens_without_special_ones(
    make: Make, tokenizer: Tokenizer, form: Any
) -> None:
    drafting = make(speculative_algorithm="NGRAM")
    text = "the relay race"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [{"type": "text", "text": "the relay"}, {"type": "text", "text": " race"}]
    for content in (text, parts):
        accepted = form(drafting, prediction={"type": "content", "content": content})
        assert accepted.prediction is not None
        assert accepted.prediction.tolist() == ids
        assert accepted.ignored == ()
    empty = form(drafting, prediction={"type": "content", "content": ""}).prediction
    assert empty is not None
    assert empty.tolist() == []
    assert form(drafting, prediction=None).prediction is None


def test_prediction_is_left_out_beyond_context(make: Make, tokenizer: Tokenizer) -> None:
    text = "relay race " * CONTEXT
    drafting = make(speculative_algorithm="NGRAM")
    found = chat(drafting, prediction={"type": "content", "content": text}).prediction
    assert found is not None
    assert found.tolist() == tokenizer.encode(text, add_special_tokens=False)[:CONTEXT]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d"},
    ],
)
def test_prediction_is_checked_and_left_out_where_nothing_is_drafted_from_it(
    make: Make, flags: dict[str, str]
) -> None:
    unchanged = make(**flags)
    given = {"type": "content", "content": "hello"}
    accepted = chat(unchanged, prediction=given)
    assert accepted.prediction is None
    assert accepted.ignored == ()


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("the relay", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": ["x"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "refusal", "text": "x"}]}, "prediction.content"),
    ],
    ids=str,
)
def test_prediction_of_another_form_is_refused(
    unchanged: RequestValidator, prediction: Any, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(unchanged, prediction=prediction)
    assert caught.value.param == param


def test_deadlines_come_from_fields_and_headers_and_the_smaller_counts(make: Make) -> None:
    accepted = chat(make(), ttft_deadline_ms=1500, deadline_ms=9000)
    assert (accepted.ttft_deadline_secs, accepted.deadline_secs) == (1.5, 9.0)
    headers = {
        "x-deadline-remaining-ms": "4000",
        "x-slo-ttft-ms": "2000",
        "x-llm-d-slo-ttft-ms": "700",
    }
    merged = with_deadline_headers(accepted, headers)
    assert (merged.ttft_deadline_secs, merged.deadline_secs) == (0.7, 4.0)
    plain = chat(make())
    assert with_deadline_headers(plain, {}) == plain
    for bad in ("-1", "0", "1.5", "soon", "9" * 40):
        with pytest.raises(BadRequest, match="x-slo-ttft-ms"):
            with_deadline_headers(accepted, {"x-slo-ttft-ms": bad})


def test_generation_config_gives_openai_defaults_only(make: Make, path: Path) -> None:
    file = path / "generation_config.json"
    file.write_text('{"temperature": 0.5, "top_k": 20, "eos_token_id": [1, 2]}')
    try:
        v = make()
        params = chat(v).items[0].params
        assert (params.temperature, params.top_k, params.stop_token_ids) == (0.5, 20, (1, 2))
        assert chat(v, temperature=1, top_k=-1).items[0].params.temperature == 1.0
        assert generate(v).items[0].params.temperature == 1.0
    finally:
        file.unlink()


def test_all_forms_of_prompts(make: Make, tokenizer: Tokenizer) -> None:
    v = make()
    ids = tokenizer.encode("hello")
    assert ids[0] == 0, "completions get the tokenizer's special tokens"
    assert [list(i.prompt) for i in completion(v, prompt="hello").items] == [ids]
    assert [list(i.prompt) for i in completion(v, prompt=["hello", "hello"]).items] == [ids, ids]
    assert [list(i.prompt) for i in completion(v, prompt=ids).items] == [ids]
    assert [list(i.prompt) for i in completion(v, prompt=[ids, [5]], n=2).items] == [
        ids,
        ids,
        [5],
        [5],
    ]
    assert [i.choice for i in completion(v, prompt=[ids, [5]], n=2).items] == [0, 1, 0, 1]


def test_ids_beside_a_text_are_the_prompt(make: Make) -> None:
    """A router that tokenized already sends both; everything else of the body means what it did."""
    v = make()
    accepted = chat(v, input_ids=[5, 6, 7])
    assert [list(i.prompt) for i in accepted.items] == [[5, 6, 7]]
    assert not accepted.ignored
    assert [list(i.prompt) for i in completion(v, input_ids=[5, 6]).items] == [[5, 6]]
    many = completion(v, prompt=["a", "b"], input_ids=[[5], [6, 7]], echo=True, max_tokens=1)
    assert [list(i.prompt) for i in many.items] == [[5], [6, 7]]
    assert many.echo == ("a", "b")
    assert [list(i.prompt) for i in completion(v, prompt=["a"], input_ids=[[5]]).items] == [[5]]
    both = asyncio.run(v.generate({"text": "hello", "input_ids": [5, 6]}))
    assert [list(i.prompt) for i in both.items] == [[5, 6]]
    assert not both.answer.is_batch
    assert asyncio.run(v.generate({"text": ["a", "b"], "input_ids": [[5], [6]]})).answer.is_batch


def test_ids_that_are_too_many_are_reported_as_the_field_that_the_client_sent(make: Make) -> None:
    v = make()
    ids = [5] * (v.limits.context_length + 1)
    for form, sent in ((chat, "messages"), (completion, "prompt")):
        with pytest.raises(PromptTooLong) as err:
            form(v, input_ids=ids)
        assert err.value.param == sent


@pytest.mark.parametrize("ids", [[], [10**9], [-1], "5", [[5]], [1.0], [True], {"a": 1}])
def test_bad_ids_beside_a_text_are_named(make: Make, ids: Any) -> None:
    for form in (chat, completion):
        with pytest.raises(BadRequest) as err:
            form(make(), input_ids=ids)
        assert err.value.param == "input_ids"


def test_ids_for_another_tokenizer_are_refused(make: Make, path: Path) -> None:
    v = make()
    own = model_info.load(build_config({"model_path": str(path)})).tokenizer_fingerprint
    for form in (chat, completion):
        assert form(v, input_ids=[5, 6], tokenizer_fingerprint=own).items
        with pytest.raises(FingerprintMismatch, match="00.*" + own) as err:
            form(v, input_ids=[5, 6], tokenizer_fingerprint="00")
        assert (err.value.status, err.value.param) == (409, "input_ids")
    for prompt in ({"text": "a", "input_ids": [5]}, {"input_ids": [5]}):
        body = {**prompt, "tokenizer_fingerprint": "00"}
        with pytest.raises(FingerprintMismatch):
            asyncio.run(v.generate(body))
    assert chat(v, tokenizer_fingerprint="00").items, "without ids it says nothing"


def test_tokens_of_an_engine_with_another_fingerprint_are_not_resumed(make: Make) -> None:
    v = make()
    v.set_node_facts(CONTEXT, {"model": "a", "tokenizer": "b"})
    begun = {"ids": [5], "seed": 1, "created": 2}
    for known in ({}, {"model": "a"}, {"model": "a", "kv_layout": "c"}):
        accepted = completion(v, stream=True, baton_resume={**begun, "fingerprint": known})
        assert accepted.resume is not None
    other = {**begun, "fingerprint": {"model": "a", "tokenizer": "c"}}
    with pytest.raises(FingerprintMismatch, match="tokenizer") as err:
        completion(v, stream=True, baton_resume=other)
    assert err.value.param == "baton_resume"


def test_ids_must_be_as_many_as_the_texts(make: Make) -> None:
    for prompt, ids in ((["a", "b"], [[5]]), (["a", "b"], [5, 6]), (["a"], [5]), ("a", [[5]])):
        with pytest.raises(BadRequest) as err:
            completion(make(), prompt=prompt, input_ids=ids)
        assert err.value.param == "input_ids"


def test_content_parts_equal_plain_content(make: Make) -> None:
    v = make()
    parts = [{"type": "text", "text": "hello"}]
    assert (
        chat(v, messages=[{"role": "user", "content": parts}]).items[0].prompt
        == chat(v).items[0].prompt
    )


def test_unknown_fields_are_listed_and_known_ones_are_not(make: Make) -> None:
    v = make()
    assert chat(v, weird=1, seed=1, another={"a": 1}).ignored == ("weird", "another")
    assert generate(v, sampling_params={"strange": 1}).ignored == ("sampling_params.strange",)
    options = {"include_usage": True, "include_obfuscation": False}
    assert chat(v, stream=True, stream_options=options).ignored == (
        "stream_options.include_obfuscation",
    )


def test_null_means_absent(make: Make) -> None:
    nothing = dict.fromkeys(
        ["temperature", "stop", "tools", "response_format", "logit_bias", "seed", "rid", "stream"]
    )
    assert chat(make(), **nothing).answer.stream is False


def test_harmless_values_of_unsupported_fields_pass(make: Make) -> None:
    body = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "return_hidden_states": False,
    }
    assert chat(make(), **body).ignored == ()


def test_seeds(make: Make) -> None:
    v = make()
    assert [i.params.seed for i in completion(v, seed=7, n=3).items] == [7, 8, 9]
    assert 0 <= completion(v, seed=-1).items[0].params.seed < 2**63
    assert completion(v).items[0].params.seed != completion(v).items[0].params.seed
    d, p = make(disaggregation_mode="decode"), make(disaggregation_mode="prefill")
    meet = {"bootstrap_host": "h", "bootstrap_room": 5}
    assert (
        completion(d, **meet).items[0].params.seed
        == completion(p, **meet).items[0].params.seed
        == seed_of_room(5)
    )
    assert seed_of_room(5) != seed_of_room(6)


def test_stop_ids_and_ignore_eos(make: Make) -> None:
    v = make()
    assert completion(v, stop_token_ids=[9]).items[0].params.stop_token_ids == (9, 1)
    assert completion(v, stop_token_ids=[9], ignore_eos=True).items[0].params.stop_token_ids == (9,)


def test_generate_without_a_model_behind_a_router_that_names_one(make: Make) -> None:
    """smg 1.13 fills in "unknown"; a real name is still checked."""
    assert len(generate(make(), model="unknown", text="a").items) == 1
    with pytest.raises(EngineError, match="model 'other' is not served here"):
        generate(make(), model="other", text="a")


def test_namespaces_differ_by_salt_and_key(make: Make) -> None:
    v = make()
    bodies: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "b"},
    ]
    assert len({completion(v, **body).namespace for body in bodies}) == 4


def test_small_pool_lowers_the_context(make: Make) -> None:
    v = make()
    v.limits.context_length = 40
    prompt, answer = (item := chat(v).items[0]).prompt, item.params.max_new_tokens
    assert len(prompt) + answer == 40
    v.limits.context_length = 20
    with pytest.raises(
        EngineError,
        match=r"length is 20 tokens here, but the prompt has 3 and max_tokens asks for 18",
    ):
        completion(v, max_tokens=18)


# ---- placement ---------------------------------------------------------------------------------------------------

MEET = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}


@pytest.mark.parametrize(
    ("mode", "fields", "own", "prefill"),
    [
        ("prefill", {}, 7 % 4, 7 % 4),
        ("prefill", {"data_parallel_rank": 1}, 1, 1),
        ("prefill", {"routed_dp_rank": 2}, 2, 2),
        ("decode", {}, None, -1),
        ("decode", {"data_parallel_rank": 1}, None, 1),
        ("decode", {"data_parallel_rank": 9, "data_parallel_rank_decode": 3}, 3, 9),
        ("decode", {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 5}, 2, 5),
        ("decode", {"routed_dp_rank": 2}, 2, -1),
    ],
)
def test_ranks_of_both_halves(
    make: Make, mode: str, fields: dict[str, Any], own: int | None, prefill: int
) -> None:
    item = completion(make(disaggregation_mode=mode, dp_size=4), **MEET, **fields).items[0]
    assert item.dp_rank == own
    assert item.rendezvous is not None
    assert (item.rendezvous.host, item.rendezvous.port, item.rendezvous.room) == (
        "10.0.0.1",
        9000,
        7,
    )
    assert item.rendezvous.prefill_dp_rank == prefill


def test_one_room_per_answer(make: Make) -> None:
    v = make(disaggregation_mode="decode")
    items = completion(v, prompt=["a", "b"], n=2, **{**MEET, "bootstrap_room": [4, 9, 2, 8]}).items
    assert [i.rendezvous and i.rendezvous.room for i in items] == [4, 9, 2, 8]
    items = completion(v, n=2, **MEET).items
    assert [i.rendezvous and i.rendezvous.room for i in items] == [7, 8], (
        "a scalar numbers the batch, as in SGLang"
    )


def test_room_per_prompt_is_numbered_by_answer(make: Make) -> None:
    """sglang-router 0.3.2 and smg 1.13 send one entry per prompt of a batch; P and D derive the rest alike."""
    meet = {
        "bootstrap_host": ["p", "q"],
        "bootstrap_port": [1, 2],
        "bootstrap_room": [4, 2**63 - 1],
    }
    for mode in ("prefill", "decode"):
        items = completion(make(disaggregation_mode=mode), prompt=["a", "b"], n=2, **meet).items
        found = [(r.host, r.port, r.room) for i in items if (r := i.rendezvous)]
        assert found == [("p", 1, 4), ("p", 1, 5), ("q", 2, 2**63 - 1), ("q", 2, 0)]


def test_ipv6_bootstrap_host_may_have_brackets(make: Make) -> None:
    for host in ("::1", "[::1]"):
        (item,) = completion(
            make(disaggregation_mode="decode"), bootstrap_host=host, bootstrap_room=1
        ).items
        assert item.rendezvous is not None
        assert item.rendezvous.host == "::1"


def test_without_a_room_a_decode_node_serves_alone(make: Make) -> None:
    item = completion(make(disaggregation_mode="decode")).items[0]
    assert item.rendezvous is None
    assert item.dp_rank is None


def test_single_process_engine_ignores_rooms(make: Make) -> None:
    assert completion(make(), **MEET).items[0].rendezvous is None


def test_room_needs_a_host_on_the_decode_node(make: Make) -> None:
    with pytest.raises(EngineError) as caught:
        completion(make(disaggregation_mode="decode"), bootstrap_room=1)
    assert caught.value.param == "bootstrap_host"
    item = completion(
        make(disaggregation_mode="decode"),
        bootstrap_room=1,
        bootstrap_host="p",
        bootstrap_port=None,
    ).items[0]
    assert item.rendezvous is not None
    assert item.rendezvous.port == 8998


# ---- restrictions of the tokens ------------------------------------------------------------------------------------


def test_allowed_token_ids_become_bits(make: Make) -> None:
    v = make()
    assert completion(v).items[0].params.allowed_tokens == b""
    size = v.vocabulary.size
    allowed = completion(v, allowed_token_ids=[0, 9, size - 1, 9]).items[0].params.allowed_tokens
    bits = int.from_bytes(allowed, "little")
    assert [token for token in range(size + 8) if bits >> token & 1] == [0, 9, size - 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "no token could be drawn"), ([1, 10**6], "vocabulary has"), ([1, "2"], "token ids")],
)
@pytest.mark.parametrize(("form", "prefix"), [(chat, ""), (completion, ""), (generate, "nested")])
def test_allowed_token_ids_that_cannot_be_drawn_are_refused(
    unchanged: RequestValidator, form: Any, prefix: str, ids: list[Any], message: str
) -> None:
    fields = {"allowed_token_ids": ids}
    body = {"sampling_params": fields} if prefix else fields
    with pytest.raises(BadRequest, match=message) as caught:
        form(unchanged, **body)
    assert caught.value.param == ("sampling_params." if prefix else "") + "allowed_token_ids"


def test_bad_words_are_encoded_with_and_without_a_blank(make: Make, tokenizer: Tokenizer) -> None:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    v = make()
    words = completion(v, bad_words=["hello", "  hello", "\n"]).items[0].params.bad_words
    assert words == (encode("hello"), encode(" hello"), encode("\n"))
    with pytest.raises(BadRequest) as caught:
        completion(v, bad_words=["a", ""])
    assert caught.value.param == "bad_words"


# ---- prompts that are cut ------------------------------------------------------------------------------------------

LONG = "one two three four five six seven eight nine ten " * 20
"""More tokens than the context has."""


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_longer_prompts_are_cut_at_one_side(make: Make, tokenizer: Tokenizer, side: str) -> None:
    v = make()
    rendered = tokenize(v, messages=[{"role": "user", "content": LONG}])
    encoded = tokenizer.encode(LONG)
    ids = [3 + i % 90 for i in range(3 * CONTEXT)]
    cases: list[tuple[Any, dict[str, Any], list[int]]] = [
        (chat, {"messages": [{"role": "user", "content": LONG}]}, rendered),
        (completion, {"prompt": LONG}, encoded),
        (completion, {"prompt": ids}, ids),
        (generate, {"text": LONG}, encoded),
        (generate, {"input_ids": ids}, ids),
        (completion, {"prompt": LONG, "input_ids": ids}, ids),
        (chat, {"messages": [{"role": "user", "content": LONG}], "input_ids": ids}, ids),
    ]
    for form, body, whole in cases:
        accepted = form(v, **body, truncate_prompt_tokens=7, truncation_side=side)
        expected = whole[:7] if side == "right" else whole[-7:]
        assert accepted.items[0].prompt.tolist() == expected, body


def test_each_prompt_of_a_list_is_cut_and_short_ones_stay(make: Make) -> None:
    prompts = [[5, 6, 7, 8], [9], list(range(3, 90))]
    accepted = completion(make(), prompt=prompts, truncate_prompt_tokens=2, n=2)
    cut = [[7, 8], [7, 8], [9], [9], [88, 89], [88, 89]]
    assert [item.prompt.tolist() for item in accepted.items] == cut


def test_minus_one_leaves_room_for_the_answer(make: Make) -> None:
    v = make()
    ids = [3 + i % 90 for i in range(3 * CONTEXT)]

    def cut_to(form: Any, **body: Any) -> int:
        return len(form(v, truncate_prompt_tokens=-1, **body).items[0].prompt)

    assert cut_to(completion, prompt=ids, max_tokens=40) == CONTEXT - 40
    assert cut_to(completion, prompt=ids) == CONTEXT - 16
    assert cut_to(generate, input_ids=ids, sampling_params={"max_new_tokens": 3}) == CONTEXT - 3
    assert cut_to(chat, input_ids=ids) == CONTEXT - 1
    assert cut_to(completion, prompt=[5, 6], max_tokens=40) == 2
    with pytest.raises(BadRequest, match="no room is left for a prompt") as caught:
        cut_to(completion, prompt=ids, max_tokens=CONTEXT)
    assert caught.value.param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
    ],
)
def test_cuts_that_mean_nothing_are_refused(make: Make, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(make(), **fields)
    assert caught.value.param == param


def test_echo_repeats_what_is_left_of_a_cut_prompt(make: Make, tokenizer: Tokenizer) -> None:
    accepted = completion(make(), prompt=LONG, echo=True, truncate_prompt_tokens=5)
    assert accepted.echo == (tokenizer.decode(tokenizer.encode(LONG)[-5:]),)


def test_cut_prompt_that_is_still_too_long_is_refused(make: Make) -> None:
    ids = [3 + i % 90 for i in range(3 * CONTEXT)]
    with pytest.raises(PromptTooLong):
        completion(make(), prompt=ids, truncate_prompt_tokens=CONTEXT)


def test_bodies_with_cut_prompts_pass_the_check_of_their_size(make: Make) -> None:
    ids = [5] * (3 * CONTEXT)
    for path, body in (("/v1/completions", {"prompt": ids}), ("/generate", {"input_ids": ids})):
        raw = json.dumps(body).encode()
        with pytest.raises(PromptTooLong):
            make().limits.refuse_oversized(path, raw)
        make().limits.refuse_oversized(
            path, json.dumps(body | {"truncate_prompt_tokens": 9}).encode()
        )


# ---- small forms -----------------------------------------------------------------------------------------------------


def test_empty_stop_texts_end_no_answer(make: Make) -> None:
    assert completion(make(), stop=["", "x", ""]).answer.stops == ("x",)
    assert completion(make(), stop="").answer.stops == ()


def test_logprobs_of_a_chat_may_be_0(make: Make) -> None:
    v = make()
    asked = [chat(v, logprobs=value).answer.logprobs for value in (0, False, None, True)]
    assert asked == [0, None, None, 0]
    assert chat(v, logprobs=0, top_logprobs=3).answer.logprobs == 3
    with pytest.raises(BadRequest) as caught:
        chat(v, logprobs=2)
    assert caught.value.param == "logprobs"


def test_tokenize_takes_the_fields_of_a_chat(make: Make, tokenizer: Tokenizer) -> None:
    v = make()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = tokenize(v, messages=messages)
    open_end = tokenize(
        v, messages=messages, continue_final_message=True, add_generation_prompt=False
    )
    assert tokenizer.decode(open_end).rstrip().endswith("b")
    assert whole != open_end
    special = tokenize(v, messages=messages, add_special_tokens=True)
    assert special[-len(whole) :] == whole
