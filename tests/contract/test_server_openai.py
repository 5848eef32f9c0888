"""openai-python against the front with a scripted rank: what an application sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.processes.front import FakeEngine, fake_engine, model, script_fields

HELLO: list[Any] = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    flags = ["--model-path", model(), "--served-model-name", "tiny"]
    with fake_engine(*flags, "--speculative-algorithm", "NGRAM") as running:
        yield running


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    r = client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body=script_fields(reply="Grüße 😀", cached=8)
    )
    assert r.object == "chat.completion"
    assert r.model == "tiny"
    assert r.id.startswith("chatcmpl-")
    assert r.choices[0].message.role == "assistant"
    assert r.choices[0].message.content == "Grüße 😀"
    assert r.choices[0].finish_reason == "stop"
    assert r.usage is not None
    assert r.usage.prompt_tokens_details is not None
    assert r.usage.prompt_tokens_details.cached_tokens == 8
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True},
            extra_body=script_fields(reply="Grüße 😀 the relay", step=0.001),
        )
    )  # fmt: skip
    *content, last = chunks
    assert content[0].choices[0].delta.role == "assistant"
    assert content[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in content) == "Grüße 😀 the relay"
    assert [c.choices[0].finish_reason for c in content if c.choices[0].finish_reason] == ["stop"]
    assert content[-1].choices[0].finish_reason == "stop"
    assert all(c.usage is None for c in content)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens > 0
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_prediction_goes_to_rank_and_counts_of_drafts_come_back(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        n=2,
        stream=stream,
        prediction={"type": "content", "content": "the relay race"},
        extra_body=script_fields(reply="the relay", drafts=[5, 2]) | {"speculative": 4},
        **options,
    )
    usage = list(answer)[-1].usage if stream else answer.usage
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 4)
    for submit in engine.ledger()["submits"][-2:]:
        assert len(submit["prediction"]) > 1
        assert submit["draft_limit"] == 4


def test_answer_without_drafts_has_no_counts_of_them(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        prediction={"type": "content", "content": "the relay race"},
        extra_body=script_fields(reply="the relay"),
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is None
    client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body=script_fields(reply="the relay")
    )
    last = engine.ledger()["submits"][-1]
    assert (last["prediction"], last["draft_limit"]) == ([], None)


def test_stop_string_across_tokens_aborts_the_rank(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    r = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stop=["lay ra"],
        extra_body=script_fields(reply="the relay race goes on", step=0.01),
    )
    assert r.choices[0].message.content == "the re"
    assert r.choices[0].finish_reason == "stop"
    assert r.choices[0].model_dump()["matched_stop"] == "lay ra"
    assert r.usage is not None
    ledger = engine.ledger()
    assert ledger["aborts"][-1] == ledger["submits"][-1]["handle"]
    assert ledger["running"] == 0
    assert r.usage.completion_tokens < 10


def test_stop_string_can_be_kept(client: openai.OpenAI) -> None:
    body = script_fields(reply="the relay race") | {"include_stop_str_in_output": True}
    r = client.completions.create(
        model="tiny", prompt="x", stop=" ra", max_tokens=50, extra_body=body
    )
    assert r.choices[0].text == "the relay ra"


def test_stopping_token_does_not_show(client: openai.OpenAI, engine: FakeEngine) -> None:
    ids = engine_tokens(engine, "hello the baton")
    stop = ids[1]
    body = script_fields(tokens=ids) | {"stop_token_ids": [stop]}
    r = client.completions.create(model="tiny", prompt="x", max_tokens=50, extra_body=body)
    assert r.choices[0].text == "hello" or "hello".startswith(r.choices[0].text)
    assert r.choices[0].model_dump()["matched_stop"] == stop
    assert r.usage is not None
    assert r.usage.completion_tokens == 2


def engine_tokens(engine: FakeEngine, text: str) -> list[int]:
    import httpx

    body = {"prompt": text, "add_special_tokens": False}
    return list(httpx.post(engine.url + "/tokenize", json=body).json()["tokens"])


def test_completion_batch_with_choices(client: openai.OpenAI) -> None:
    r = client.completions.create(model="tiny", prompt=["hello", "the relay"], n=2, max_tokens=3)
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    assert [c.finish_reason for c in r.choices] == ["length"] * 4
    assert r.choices[0].text == r.choices[1].text == "hello"
    assert r.choices[2].text == "the relay"
    assert r.usage is not None
    assert r.usage.prompt_tokens == 6, "each prompt once"
    assert r.usage.completion_tokens == 12


def test_completion_stream_of_a_batch(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for chunk in client.completions.create(
        model="tiny", prompt=["hello", "world"], max_tokens=4, stream=True, echo=True
    ):
        choice = chunk.choices[0]
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            assert choice.index not in finishes
            finishes[choice.index] = choice.finish_reason
    assert set(texts) == {0, 1}
    assert texts[0].startswith("hello")
    assert texts[1].startswith("world")
    assert finishes == {0: "length", 1: "length"}


def test_echo_without_generation(client: openai.OpenAI, engine: FakeEngine) -> None:
    before = len(engine.ledger()["submits"])
    r = client.completions.create(model="tiny", prompt="the relay", max_tokens=0, echo=True)
    assert r.choices[0].text == "the relay"
    assert r.choices[0].finish_reason == "length"
    assert len(engine.ledger()["submits"]) == before, "nothing was asked of the rank"
    chunks = list(
        client.completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=0, echo=True, stream=True
        )
    )
    assert len(chunks) == 1
    assert chunks[0].choices[0].finish_reason == "length"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": script_fields(reply="é", burst=3),
    }
    r = client.chat.completions.create(model="tiny", messages=HELLO, **options)
    assert r.choices[0].logprobs is not None
    content = r.choices[0].logprobs.content
    assert content is not None
    assert r.usage is not None
    assert len(content) == r.usage.completion_tokens
    assert bytes(b for t in content[:-1] for b in t.bytes or []).decode() == "é"
    assert all(len(t.top_logprobs) == 2 for t in content)
    streamed = [
        token
        for chunk in client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, **options
        )
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == content


def test_completion_logprobs(client: openai.OpenAI) -> None:
    r = client.completions.create(
        model="tiny",
        prompt="x",
        logprobs=1,
        max_tokens=9,
        extra_body=script_fields(reply="the relay"),
    )
    logprobs = r.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["the", " relay", "</s>"]
    assert logprobs.text_offset == [0, 3, 9]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert [len(t) for t in logprobs.top_logprobs or []] == [2] * 3, (
        "the token itself is listed, too"
    )
    r = client.completions.create(
        model="tiny", prompt="x", logprobs=0, max_tokens=9, extra_body=script_fields(reply="the")
    )
    assert r.choices[0].logprobs is not None
    assert r.choices[0].logprobs.tokens == ["the", "</s>"]
    assert r.choices[0].logprobs.top_logprobs is None


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.owned_by) == ("tiny", "sglang")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_errors_arrive_with_code_param_and_request_id(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=-1, extra_headers={"x-request-id": "abc-1"}
        )
    err = caught.value
    assert (err.code, err.param, err.type) == (
        "invalid_value",
        "temperature",
        "invalid_request_error",
    )
    assert err.request_id == "abc-1"
    assert "temperature is -1, must be at least 0" in str(err)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unknown", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
def test_rank_errors_before_the_first_token_have_their_status(
    client: openai.OpenAI, stream: bool
) -> None:
    body = script_fields(error=["queue_full", "too many"])
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, extra_body=body)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
    assert caught.value.response.headers["retry-after"] == "1"


def test_error_in_mid_stream_raises_and_keeps_what_came(client: openai.OpenAI) -> None:
    body = script_fields(error=["kv_transfer_failed", "PEER_DEAD"], error_after=3, step=0.005)
    got = ""
    code = None
    try:
        for chunk in client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_body=body
        ):
            got += chunk.choices[0].delta.content or ""
    except openai.APIError as err:
        code = err.code
    assert code == "kv_transfer_failed"
    assert got


def test_ids(client: openai.OpenAI, engine: FakeEngine) -> None:
    r = client.completions.create(
        model="tiny", prompt="x", max_tokens=1, extra_body={"rid": "mine"}
    )
    assert r.id == "mine"
    assert engine.last_submit()["rid"] == "mine"
    r = client.completions.create(
        model="tiny", prompt="x", max_tokens=1, extra_headers={"x-request-id": "q7"}
    )
    assert r.id == "cmpl-q7"
    assert engine.last_submit()["rid"] == "q7"


def test_parameters_reach_the_rank(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, top_p=0.5, seed=11, presence_penalty=0.5, max_completion_tokens=3,
        logit_bias={"5": -100}, extra_body={"top_k": 4, "min_p": 0.1, "priority": 3, "extra_key": "tenant"},
    )  # fmt: skip
    seen = engine.last_submit()
    params = seen["params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (
        0.0,
        0.5,
        4,
        0.1,
    )
    assert (params["seed"], params["max_new_tokens"], params["logit_bias"]) == (
        11,
        3,
        [[5, -100.0]],
    )
    assert (seen["priority"], seen["namespace"]) == (3, "\0tenant")
