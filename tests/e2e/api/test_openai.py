"""The API as a user of openai-python sees it through router, prefill node and decode node."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.processes.cluster import Cluster, count, eventually, settled

QUESTION: Any = [{"role": "user", "content": "What is Baton?"}]


def ask(cluster: Cluster, **options: Any) -> Any:
    with cluster.client() as client:
        return client.chat.completions.create(
            **{"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **options}
        )


def test_models_lists_the_demo_model(pair: Cluster) -> None:
    with pair.client() as client:
        assert [model.id for model in client.models.list()] == ["demo"]


def test_chat_answers_with_usage_and_a_finish_reason(pair: Cluster) -> None:
    answer = ask(pair)
    assert "Baton" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_both_nodes_worked_on_the_request(pair: Cluster) -> None:
    def pulls() -> float:
        return count(pair.node("decode")["url"], "baton_kv_pulls_total", transport="shm")

    before = settled(pulls)
    pair.complete("a prompt that no other test sends", max_tokens=2)
    eventually("the pull is counted", lambda: pulls() == before + 1)


def test_stream_equals_the_whole_answer_and_ends_once(pair: Cluster) -> None:
    whole = ask(pair)
    with pair.client() as client:
        chunks = list(
            client.chat.completions.create(
                model="demo", messages=QUESTION, temperature=0, max_tokens=24, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert (
        "".join(choice.delta.content or "" for choice in choices)
        == whole.choices[0].message.content
    )
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert (
        chunks[-1].usage == whole.usage
        or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    )


def test_completion_stops_at_a_stop_string(pair: Cluster) -> None:
    free = pair.complete("Baton is", max_tokens=24)
    word = free.split()[2]
    with pair.client() as client:
        answer = client.completions.create(
            model="demo",
            prompt="Baton is",
            max_tokens=24,
            temperature=0,
            stop=[word],
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].text == free[: free.index(word)]
    assert answer.choices[0].finish_reason == "stop"


def test_several_choices_of_one_prompt(pair: Cluster) -> None:
    answer = ask(pair, n=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 1  # greedy


def test_seed_fixes_a_sampled_answer(pair: Cluster) -> None:
    first, again, *others = (
        ask(pair, temperature=2.0, seed=seed).choices[0].message.content
        for seed in (1, 1, *range(2, 10))
    )
    assert first == again
    assert set(others) != {first}


def test_logprobs_begin_with_the_prefill_nodes_token(pair: Cluster) -> None:
    entries = ask(pair, max_tokens=5, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.token == entry.top_logprobs[0].token  # greedy takes the best


def test_second_request_reuses_the_prompts_pages(pair: Cluster) -> None:
    question: Any = [{"role": "user", "content": "How do pages travel? " * 30}]
    first, second = (ask(pair, messages=question, max_tokens=4) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert second.choices[0].message.content == first.choices[0].message.content


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"max_tokens": -1}, 400, "invalid_value"),
        ({"temperature": "hot"}, 400, "invalid_value"),
        ({"messages": []}, 400, "invalid_value"),
        (
            {"max_tokens": 1, "messages": [{"role": "user", "content": "word " * 5000}]},
            400,
            "context_length_exceeded",
        ),
        ({"model": "gpt-5"}, 404, "model_not_found"),
    ],
)
def test_mistakes_are_answered_with_their_code(
    pair: Cluster, change: Any, status: int, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        ask(pair, **change)
    assert (raised.value.status_code, raised.value.code) == (status, code)


def test_mistakes_leave_nothing_behind(pair: Cluster) -> None:
    for _ in range(3):
        with pytest.raises(openai.BadRequestError):
            ask(pair, max_tokens=-1)
    pair.assert_nothing_is_held()
