"""Asks a Baton cluster for typed answers through instructor. Usage: ask_instructor.py URL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import conversation as talk
import httpx2
import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

ITEMS = 60
PERSON_TOKENS = 300
Word = Annotated[str, Field(min_length=4, max_length=12)]


class Report(BaseModel):
    """An object with many parts."""

    model_config = ConfigDict(extra="forbid")

    items: list[Word] = Field(min_length=ITEMS, max_length=ITEMS)


def client_of(
    url: str, mode: instructor.Mode, on_response: Callable[[], None] = lambda: None
) -> Any:
    """Client that calls `on_response` when the head of an answer has come."""
    hooks = {"response": [lambda _response: on_response()]}
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx2.Client(event_hooks=hooks, timeout=talk.TIMEOUT_SECS),
    )
    return instructor.from_openai(client, mode=mode)


def asked(question: str, max_tokens: int) -> Any:
    return {
        "model": talk.MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "max_retries": 0,
    }


def persons(client: Any) -> dict[str, Any]:
    request = asked(talk.PERSON_QUESTION, PERSON_TOKENS)
    whole = client.chat.completions.create(response_model=talk.Person, **request)
    *_, last = client.chat.completions.create_partial(response_model=talk.Person, **request)
    return {"person": whole.model_dump(), "person_streamed": last.model_dump()}


def reports(url: str) -> dict[str, Any]:
    """The same long object whole, and streamed while its node is killed."""
    mode = instructor.Mode.JSON_SCHEMA
    request = asked(talk.QUESTION, talk.LONG_TOKENS)
    whole = client_of(url, mode).chat.completions.create(response_model=Report, **request)

    def stream(on_first: Callable[[], None]) -> list[str]:
        # instructor shows a list when it is complete, so the answer's head stands for its first token.
        client = client_of(url, mode, on_response=on_first)
        *_, last = client.chat.completions.create_partial(response_model=Report, **request)
        return last.items

    return {"items": whole.items, "items_interrupted": talk.interrupted_answer(stream)}


def main() -> None:
    url = sys.argv[1]
    client = client_of(url, instructor.Mode.JSON_SCHEMA)
    found = {**persons(client), **reports(url)}
    found["forced"] = persons(client_of(url, instructor.Mode.TOOLS))
    talk.finish(found)


main()
