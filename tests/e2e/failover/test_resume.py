"""An answer is continued by an engine that did not begin it: every cut gives what the first engine would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.timeout(240)

DRAWN: dict[str, Any] = {
    "temperature": 0.9, "seed": 7, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2,
    "max_tokens": 24, "min_tokens": 12, "stop": ["zzz", " the end of"], "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


def streamed(
    url: str, path: str, body: dict[str, Any]
) -> list[tuple[dict[str, Any] | None, dict[str, Any]]]:
    """Events of a stream, each with the comment in front of it."""
    out, comment = [], None
    with httpx.stream(
        "POST", url + path, json=body, headers={"x-baton-emit-tokens": "1"}, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith(": baton "):
                comment = json.loads(line.removeprefix(": baton "))
            elif line.startswith("data: {"):
                out.append((comment, json.loads(line.removeprefix("data: "))))
                comment = None
    return out


def resume_points(
    whole: list[tuple[dict[str, Any] | None, dict[str, Any]]],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place of each event with a comment, and the `baton_resume` of a client that has read so far."""
    ids: list[int] = []
    members: dict[str, Any] = {}
    for place, (comment, _) in enumerate(whole):
        if comment is None:
            continue
        ids += comment["ids"]
        members |= {name: value for name, value in comment.items() if name != "ids"}
        yield place, {**members, "ids": list(ids)}


def shown(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer a client makes of the events."""
    if path == "/generate":
        last = events[-1]
        return {
            "text": last["text"],
            "ids": last["output_ids"],
            "finish": last["meta_info"]["finish_reason"],
        }
    choices = [choice for event in events for choice in event["choices"]]
    texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices]
    usage = {k: events[-1]["usage"][k] for k in ("prompt_tokens", "completion_tokens")}
    logprobs = [c["logprobs"] for c in choices if c.get("logprobs")]
    columns = [
        entry for lp in logprobs for entry in (lp["content"] if "content" in lp else _rows(lp))
    ]
    return {
        "text": "".join(texts),
        "finish": choices[-1]["finish_reason"],
        "usage": usage,
        "logprobs": columns,
    }


def _rows(lp: dict[str, Any]) -> list[Any]:
    return list(zip(lp["tokens"], lp["text_offset"], strict=True))


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/completions", {"prompt": "Baton is", "logprobs": 2, "echo": False}),
        ("/v1/completions", {"prompt": "Baton is", "echo": True}),
        (
            "/v1/completions",
            {
                "prompt": "The router is",
                "truncate_prompt_tokens": 2,
                "bad_words": ["the", "prefill node", "decode node"],
                "allowed_token_ids": list(range(3, 3000)),
            },
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "What is Baton? \u00e9\U0001f3c3"}]},
        ),
        ("/generate", {"text": "Baton is"}),
    ],
)
def test_every_cut_is_continued_as_if_nothing_had_been(
    two_workers: Cluster, path: str, form: dict[str, Any]
) -> None:
    body: dict[str, Any] = {**form, **DRAWN}
    if path == "/generate":
        names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
        keys = ("stream", "stream_options", "seed")
        sampling = {names.get(k, k): v for k, v in DRAWN.items() if k not in keys} | {
            "sampling_seed": 7
        }
        body = {**form, "stream": True, "sampling_params": sampling}
    else:
        body["model"] = "demo"
    first, second = (two_workers.node("worker", i)["url"] for i in (0, 1))
    for _ in range(20):  # a client on a busy machine gets many tokens in one event
        whole = streamed(first, path, body)
        if sum(comment is not None for comment, _ in whole) >= 12:
            break
    events = [event for _, event in whole]
    wanted = shown(path, events)
    cuts = 0
    for at, resume in resume_points(whole):
        if at % 4 and at < len(whole) - 6:
            continue
        resumed = streamed(second, path, {**body, "baton_resume": resume})
        assert shown(path, events[: at + 1] + [event for _, event in resumed]) == wanted, at
        cuts += 1
    assert cuts >= 3
    assert not any("role" in c.get("delta", {}) for _, e in resumed for c in e.get("choices", ()))
    if path != "/generate":
        assert {e["created"] for _, e in resumed} == {resume["created"]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ids": []}, "at least one"),
        ({"seed": None}, "at least one"),
        ({"ids": [10**7]}, "ids"),
        ({"ids": [1] * 24}, "the answer may have 24"),
    ],
)
def test_invalid_resume_members_are_refused(
    two_workers: Cluster, change: dict[str, Any], why: str
) -> None:
    resume = {"ids": [1, 2], "seed": 7, "created": 1, **change}
    body = {"model": "demo", "prompt": "Baton is", **DRAWN, "baton_resume": resume}
    answer = httpx.post(two_workers.node("worker")["url"] + "/v1/completions", json=body)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
