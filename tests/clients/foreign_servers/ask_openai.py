"""Asks a router in front of another server through openai-python, prints what came back as JSON.

Usage: ask_openai.py BASE_URL. Nothing is judged here: the test compares.
"""

import json
import sys
from typing import Any

import openai

QUESTION = "What is a lease?"
LIMIT = 24


def responses(client: openai.OpenAI) -> dict[str, Any]:
    asked: Any = {
        "model": "demo",
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": LIMIT,
    }
    whole = client.responses.create(stream=False, **asked)
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1]
    return {
        "whole": whole.output_text,
        "streamed": "".join(deltas),
        "last": last.response.output_text,
        "deltas": len(deltas),
        "ends": [whole.status, last.type],
        "usage": [whole.usage.model_dump(), last.response.usage.model_dump()],
    }


def chats(client: openai.OpenAI) -> dict[str, Any]:
    chat = client.chat.completions
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": LIMIT,
    }
    whole = chat.create(**asked)
    chunks = list(chat.create(stream=True, **asked))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(choice.delta.content or "" for choice in choices),
        "ends": [whole.choices[0].finish_reason, choices[-1].finish_reason],
    }


def completions(client: openai.OpenAI) -> dict[str, Any]:
    asked: Any = {"model": "demo", "prompt": "Baton is", "temperature": 0, "max_tokens": LIMIT}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(stream=True, **asked))
    return {
        "whole": whole.choices[0].text,
        "streamed": "".join(choice.text for chunk in chunks for choice in chunk.choices),
    }


def mistakes(client: openai.OpenAI) -> dict[str, Any]:
    """Errors of responses as the library raises them."""
    changes: dict[str, Any] = {
        "model": {"model": "other"},
        "unknown member": {"extra_body": {"top_k": 3}},
    }
    found: dict[str, Any] = {}
    for name, change in changes.items():
        try:
            client.responses.create(**{"model": "demo", "input": QUESTION, **change}, stream=False)
            found[name] = "no error"
        except openai.APIStatusError as err:
            found[name] = [err.status_code, err.code, err.response.text]
    return found


def main() -> None:
    with openai.OpenAI(
        base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120.0
    ) as client:
        said = {
            "models": [model.id for model in client.models.list()],
            "responses": responses(client),
            "chat": chats(client),
            "completions": completions(client),
            "mistakes": mistakes(client),
        }
    print(json.dumps(said))


main()
