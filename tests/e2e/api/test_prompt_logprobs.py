"""Logprobs of prompts through the router, as the three APIs have them: transformers' numbers, from one node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import baton.models
from tests.support.processes.cluster import Cluster, count, settled

DEMO = Path(baton.models.__file__).parent / "demo"
TOLERANCE = 1e-4
TEXT = "The router picks one prefill node and one decode node, naïve 😀 but quick."
LONG = [3 + (i * i * 7) % 3000 for i in range(700)]
"""More than one chunk."""


class Scorer:
    """transformers with the demo model."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO)
        self._model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Row i: log-softmax of what follows token i."""
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def of_prompt(self, ids: list[int]) -> list[float]:
        """Logprobs of the tokens behind the first one."""
        rows = self.logprobs(ids)[:-1]
        return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer()


def complete(cluster: Cluster, **body: Any) -> dict[str, Any]:
    status, answer = cluster.post("/v1/completions", {"model": "demo", "temperature": 0, **body})
    assert status == 200, answer
    return answer


def nodes_alone(cluster: Cluster) -> tuple[float, float]:
    """Requests that P answered itself, and those that D computed alone."""
    return (
        count(cluster.url, "baton_router_local_answers_total"),
        count(cluster.url, "baton_router_local_prefills_total", why="prompt_logprobs"),
    )


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_with_logprobs(pair: Cluster, scorer: Scorer, max_tokens: int) -> None:
    by_prefill, by_decode = nodes_alone(pair)
    ids = scorer.tokenizer(TEXT)["input_ids"]
    prompts = [ids, LONG, ids[:1]]
    answer = complete(pair, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens)
    is_short = max_tokens <= 1
    assert nodes_alone(pair) == (by_prefill + is_short, by_decode + (not is_short))
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        found = choice["logprobs"]
        new = len(found["tokens"]) - len(prompt)
        assert new == max_tokens or choice["finish_reason"] == "stop"
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        assert {len(found[name]) for name in columns} == {len(prompt) + new}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        expected = scorer.of_prompt(prompt)
        given = found["token_logprobs"][1 : len(prompt)]
        assert given == pytest.approx(expected, abs=TOLERANCE)
        best = scorer.logprobs(prompt)[:-1].argmax(-1).tolist()
        pairs = zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True)
        is_greedy = [logprob == max(top.values()) for logprob, top in pairs]
        assert is_greedy[: len(prompt) - 1] == [
            token == likeliest for token, likeliest in zip(prompt[1:], best, strict=True)
        ]
        assert all(is_greedy[len(prompt) - 1 :]), "the answer is greedy"
        assert choice["text"].startswith(scorer.tokenizer.decode(prompt, skip_special_tokens=True))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    if max_tokens <= 1:
        assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)


def test_stop_token_stands_at_the_end(pair: Cluster, scorer: Scorer) -> None:
    """lm-eval cuts exactly one token off."""
    ids = scorer.tokenizer(TEXT)["input_ids"]
    likeliest = int(scorer.logprobs(ids)[-1].argmax())
    choice = complete(
        pair, prompt=ids, echo=True, logprobs=1, max_tokens=1, stop_token_ids=[likeliest]
    )["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(ids) + 1


def test_offsets_and_texts_cover_the_echo(pair: Cluster) -> None:
    choice = complete(pair, prompt=TEXT, echo=True, logprobs=0, max_tokens=3)["choices"][0]
    found = choice["logprobs"]
    assert found["top_logprobs"] is None
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if "\ufffd" not in token and token != "<|bos|>":
            assert choice["text"].startswith(token, offset)


def test_stream_has_the_columns_of_the_whole_answer(pair: Cluster) -> None:
    body = {"prompt": LONG, "echo": True, "logprobs": 2, "max_tokens": 5, "ignore_eos": True}
    whole = complete(pair, **body)["choices"][0]["logprobs"]
    with pair.client() as client:
        events = [
            event.choices[0]
            for event in client.completions.create(
                model="demo", temperature=0, stream=True, prompt=LONG, echo=True, logprobs=2,
                max_tokens=5, extra_body={"ignore_eos": True},
            )
        ]  # fmt: skip
    assert len(events[0].logprobs.tokens) >= len(LONG)
    for name in ("tokens", "text_offset"):
        streamed = [value for event in events for value in getattr(event.logprobs, name)]
        assert streamed == whole[name]
    logprobs = [value for event in events for value in event.logprobs.token_logprobs]
    assert logprobs[1:] == pytest.approx(whole["token_logprobs"][1:], abs=TOLERANCE)


def test_prompt_logprobs_of_vllm(pair: Cluster, scorer: Scorer) -> None:
    ids = scorer.tokenizer(TEXT)["input_ids"]
    rows = scorer.logprobs(ids)
    choice = complete(
        pair, prompt=ids, prompt_logprobs=2, max_tokens=1, n=2, return_token_ids=True
    )["choices"][1]
    assert choice["prompt_token_ids"] == ids
    first, *found = choice["prompt_logprobs"]
    assert first is None
    for token, row, entry in zip(ids[1:], rows, found, strict=False):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(row[token]), abs=TOLERANCE)
        # Tokens whose logprobs are as close as the two computations may be in either order.
        surely_above = int((row > row[token] + TOLERANCE).sum())
        perhaps_above = int((row > row[token] - TOLERANCE).sum())
        assert surely_above < own["rank"] <= perhaps_above
        top = row.topk(2).indices.tolist()
        assert entry.keys() == {str(token), *map(str, top)}
        assert [entry[str(other)]["rank"] for other in top] == [1, 2]
    assert len(found) == len(ids) - 1
    assert found[0][str(ids[1])]["decoded_token"] == scorer.tokenizer.decode([ids[1]])


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_prompt_share_its_logprobs(pair: Cluster, stream: bool) -> None:
    """The first choice computes them; the others find the prompt's pages in the cache."""
    ids = [5 + stream, *LONG]
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 4, "n": 3, "seed": 1}
    extra = {"ignore_eos": True}
    node = pair.node("decode")["url"]
    computed = count(node, "baton_prompt_tokens_computed_total")
    if stream:
        with pair.client() as client:
            events = list(
                client.completions.create(
                    model="demo", temperature=1.0, stream=True, extra_body=extra, **body
                )
            )
        choices = [choice for event in events for choice in event.choices]
        columns = [
            [value for choice in choices if choice.index == i for value in rows_of(choice)]
            for i in range(3)
        ]
    else:
        answer = complete(pair, **{**body, **extra, "temperature": 1.0})
        columns = [
            list(
                zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
            )
            for choice in answer["choices"]
        ]
    prompts = [column[: len(ids)] for column in columns]
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[0][0][1] is None
    assert all(logprob < 0 for _, logprob in prompts[0][1:])
    assert [len(column) for column in columns] == [len(ids) + 4] * 3
    settled(lambda: count(node, "baton_prompt_tokens_computed_total"))
    computed = count(node, "baton_prompt_tokens_computed_total") - computed
    assert len(ids) <= computed < 2 * len(ids)


def rows_of(choice: Any) -> list[tuple[str, float | None]]:
    return list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True))


def test_chat_has_prompt_logprobs_and_ids_once(pair: Cluster, scorer: Scorer) -> None:
    by_prefill, by_decode = nodes_alone(pair)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is Baton?"}],
        "temperature": 0,
        "max_tokens": 3,
        "n": 2,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    status, answer = pair.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert nodes_alone(pair) == (by_prefill, by_decode + 1)
    ids = answer["prompt_token_ids"]
    found = [
        entry[str(token)]["logprob"]
        for token, entry in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
    ]
    assert found == pytest.approx(scorer.of_prompt(ids), abs=TOLERANCE)
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        assert [e["token"] for e in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert entries[0]["top_logprobs"][0]["token"] == entries[0]["token"]
    status, refused = pair.post(
        "/v1/chat/completions", {**body, "prompt_logprobs": 1, "stream": True}
    )
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("start", [0, 3])
def test_generate_lists_input_logprobs(pair: Cluster, scorer: Scorer, start: int) -> None:
    ids = scorer.tokenizer(TEXT)["input_ids"]
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
        "token_ids_logprob": [9, 5],
    }
    status, answer = pair.post("/generate", body)
    assert status == 200, answer
    meta = answer["meta_info"]
    rows = scorer.logprobs([*ids, *answer["output_ids"]])
    listed = meta["input_token_logprobs"]
    assert [entry[1] for entry in listed] == ids[start:]
    assert listed[0][0] is None
    assert [entry[0] for entry in listed[1:]] == pytest.approx(
        scorer.of_prompt(ids)[start:], abs=TOLERANCE
    )
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_token_ids_logprobs"][0] is None
    given = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    for row, top in zip(rows[start:], given, strict=False):
        assert [entry[1] for entry in top] == row.topk(2).indices.tolist()
    given = meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]
    assert len(given) == len(ids) - start - 1 + 2
    for row, of_ids in zip(rows[start:], given, strict=False):
        assert [entry[1] for entry in of_ids] == [9, 5]
        expected = row[[9, 5]].tolist()
        assert [entry[0] for entry in of_ids] == pytest.approx(expected, abs=TOLERANCE)
    beyond = {**body, "logprob_start_len": len(ids)}
    status, refused = pair.post("/generate", beyond)
    assert (status, refused["error"]["param"]) == (400, "logprob_start_len")


def test_logprobs_of_stated_ids_take_the_place_of_alternatives(
    pair: Cluster, scorer: Scorer
) -> None:
    body = {"prompt": TEXT, "logprobs": 0, "max_tokens": 2, "logprob_token_ids": [9, 5]}
    found = complete(pair, **body, return_token_ids=True, return_tokens_as_token_ids=True)
    choice = found["choices"][0]
    rows = scorer.logprobs(choice["prompt_token_ids"] + choice["token_ids"])
    start = len(choice["prompt_token_ids"]) - 1
    for i, top in enumerate(choice["logprobs"]["top_logprobs"]):
        for token in (9, 5, choice["token_ids"][i]):
            expected = float(rows[start + i][token])
            assert top[f"token_id:{token}"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("field", ["return_token_ids", "return_prompt_token_ids"])
def test_first_event_of_a_stream_has_the_ids_of_the_prompt(pair: Cluster, field: str) -> None:
    question = [{"role": "user", "content": "What is Baton?"}]
    for path, prompt in (
        ("/v1/chat/completions", {"messages": question}),
        ("/v1/completions", {"prompt": TEXT}),
    ):
        body = {"model": "demo", "max_tokens": 3, "stream": True, field: True, **prompt}
        text = httpx.post(pair.url + path, json=body, timeout=60).text
        lines = [
            line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")
        ]
        first, *others = [json.loads(line) for line in lines[:-1]]
        holder = first if path.startswith("/v1/chat") else first["choices"][0]
        assert len(holder["prompt_token_ids"]) > 3
        assert "prompt_token_ids" not in json.dumps(others)
        has_ids = any("token_ids" in choice for event in others for choice in event["choices"])
        assert has_ids == (field == "return_token_ids")


def test_prefill_and_decode_nodes_refuse_to_share_the_work(pair: Cluster) -> None:
    body = {"model": "demo", "prompt": TEXT, "echo": True, "logprobs": 1, "bootstrap_room": 5}
    body["bootstrap_host"] = "127.0.0.1"
    for role in ("prefill", "decode"):
        answer = httpx.post(pair.node(role)["url"] + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "bootstrap_room"


def test_streams_with_prompt_logprobs_are_not_resumable(pair: Cluster) -> None:
    body = {
        "model": "demo", "prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 4, "stream": True
    }  # fmt: skip
    url = pair.node("decode")["url"] + "/v1/completions"
    answer = httpx.post(url, json=body, headers={"x-baton-emit-tokens": "1"}, timeout=60)
    assert ": baton" not in answer.text
    plain = {**body, "echo": False}
    answer = httpx.post(url, json=plain, headers={"x-baton-emit-tokens": "1"}, timeout=60)
    assert ": baton" in answer.text


def test_prompt_logprobs_leave_nothing_behind(pair: Cluster) -> None:
    settled(lambda: nodes_alone(pair))
    pair.assert_nothing_is_held()
