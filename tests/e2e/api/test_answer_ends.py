"""Ends of answers through P and D: the first token, which P draws, ends an answer as any other one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.server.text.answer_spec import Dialect
from tests.support.engines.local_engine import ReadAnswer, read_stream, read_whole
from tests.support.engines.naive_ends import (
    api_body,
    chat_cases,
    naive_answer,
    prompt_end_of,
    settings_of,
    text_cases,
)
from tests.support.models.chain_model import make_chain_checkpoint
from tests.support.processes.cluster import Cluster

PROMPT = "The relay race"
PATHS = {
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.GENERATE: "/generate",
}


def read(cluster: Cluster, api: Dialect, body: dict[str, Any]) -> ReadAnswer:
    """The answer of a cluster, asked for whole and as a stream, which must agree."""
    url = cluster.url + PATHS[api]
    whole = httpx.post(url, json=body, timeout=60)
    assert whole.status_code == 200, whole.text
    answer = read_whole(api, json.loads(whole.content))
    streamed = httpx.post(url, json={**body, "stream": True}, timeout=60)
    assert read_stream(api, streamed.content) == answer
    return answer


def complete(cluster: Cluster, **settings: Any) -> ReadAnswer:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, **settings}
    return read(cluster, Dialect.COMPLETIONS, body)


def test_first_token_ends_an_answer_as_any_other(pair: Cluster, solo: Cluster) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    _, answer = pair.post("/v1/completions", body)
    ids = answer["choices"][0]["token_ids"]
    texts = [complete(pair, max_tokens=count).content for count in range(1, 7)]
    first, second = texts[:2]
    cases: list[tuple[dict[str, Any], tuple[str, str, int | str | None]]] = [
        ({"max_tokens": 1}, (first, "length", None)),
        ({"stop": [first]}, ("", "stop", first)),
        ({"stop": [first], "max_tokens": 1}, ("", "stop", first)),
        ({"stop": [first], "include_stop_str_in_output": True}, (first, "stop", first)),
        ({"stop": [second], "min_tokens": 1}, ("", "stop", second)),
        ({"stop": [first], "min_tokens": 1}, (texts[5], "length", None)),
        ({"stop": [second], "min_tokens": 2}, (texts[5], "length", None)),
        ({"stop_token_ids": ids[:1]}, ("", "stop", ids[0])),
        ({"stop_token_ids": ids[:1], "max_tokens": 1}, ("", "stop", ids[0])),
        ({"guided_choice": [first]}, (first, "stop", None)),
        ({"guided_choice": [first], "min_tokens": 3, "ignore_eos": True}, (first, "stop", None)),
        ({"guided_choice": [first], "stop": [first]}, ("", "stop", first)),
    ]
    for settings, expected in cases:
        found = complete(pair, **settings)
        assert (found.content, found.finish, found.matched) == expected, settings
    # Another token takes the place of one that may not come yet: on two nodes the same one.
    held = {"stop_token_ids": ids[:1], "min_tokens": 2}
    assert complete(pair, **held) == complete(solo, **held)
    assert complete(pair, **held).content
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_pairs_of_conditions_and_settings(tmp_path: Path) -> None:
    """As test_answer_ends.py of the unit tests, through P and D."""
    path = make_chain_checkpoint(tmp_path / "chain")
    with Cluster.up("--model-path", str(path)) as cluster:
        texts = [(Dialect.COMPLETIONS, case) for case in text_cases()]
        chats = [(Dialect.CHAT, case) for case in chat_cases()]
        for api, case in texts + chats:
            settings = settings_of(case)
            end = case.get("end", "")
            body = api_body(api, settings, end)
            expected = naive_answer(settings, prompt_end_of(api, end))
            assert read(cluster, api, body) == expected, body
        cluster.assert_nothing_is_held()
