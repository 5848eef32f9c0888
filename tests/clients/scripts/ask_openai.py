"""Runs under another environment's Python: asks a Baton cluster through openai-python, prints what came back as JSON.

Usage: ask_openai.py BASE_URL. Nothing is judged here: the test compares.
"""

import asyncio
import json
import sys
from typing import Any

import openai

QUESTION: Any = [{"role": "user", "content": "What is Baton?"}]
GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 16}
IN_FLIGHT = 16


def chats(client: openai.OpenAI) -> dict[str, Any]:
    chat = client.chat.completions
    whole = chat.create(messages=QUESTION, **GREEDY)
    stream = list(
        chat.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is Baton?"}]}]
    with chat.stream(messages=QUESTION, **{**GREEDY, "max_tokens": 400}) as helper:
        kinds = {event.type for event in helper}
        helped = helper.get_final_completion().choices[0].message.content
    with chat.create(messages=QUESTION, stream=True, **{**GREEDY, "max_tokens": 1500}) as left:
        next(iter(left))  # and leave
    raw = chat.with_raw_response.create(
        messages=QUESTION, extra_headers={"x-request-id": "from-openai"}, **GREEDY
    )
    logprobs = (
        chat.create(messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY).choices[0].logprobs
    )
    several = chat.create(messages=QUESTION, n=2, **GREEDY)
    extra = chat.create(
        messages=QUESTION, extra_body={"ignore_eos": True}, **{**GREEDY, "max_tokens": 300}
    )
    renamed = chat.create(messages=QUESTION, model="demo", temperature=0, max_completion_tokens=16)
    return {
        "models": [model.id for model in client.models.list()],
        "chat": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "usage": [
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
            whole.usage.total_tokens,
        ],
        "stream": "".join(c.delta.content or "" for event in stream for c in event.choices),
        "stream_finish": [
            c.finish_reason for event in stream for c in event.choices if c.finish_reason
        ],
        "stream_usage": stream[-1].usage.completion_tokens,
        "helper": helped,
        "helper_events": sorted(kinds),
        "parts": chat.create(messages=parts, **GREEDY).choices[0].message.content,
        "request_id": [raw.headers["x-request-id"], whole._request_id is not None],
        "logprobs": "".join(entry.token for entry in logprobs.content),
        "n": [choice.message.content for choice in several.choices],
        "extra_body": extra.usage.completion_tokens,
        "max_completion_tokens": renamed.choices[0].message.content,
    }


def completions(client: openai.OpenAI) -> dict[str, Any]:
    create = client.completions.create
    stream = create(prompt="A lease ends", stream=True, **GREEDY)
    return {
        "batch": [c.text for c in create(prompt=["A lease ends", "Pages"], **GREEDY).choices],
        "ids": create(prompt=[5, 6, 7], **GREEDY).choices[0].text,
        "completion_stream": "".join(event.choices[0].text for event in stream),
    }


async def at_once(url: str) -> list[str]:
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=90
    ) as client:

        async def one(i: int) -> str:
            made = client.completions.create(
                prompt=f"Runner {i} says", stream=bool(i % 2), **GREEDY
            )
            if i % 2:
                return "".join([event.choices[0].text async for event in await made])
            return (await made).choices[0].text

        return await asyncio.gather(*(one(i) for i in range(IN_FLIGHT)))


def mistakes(client: openai.OpenAI) -> dict[str, Any]:
    asked = {
        "negative": lambda: client.chat.completions.create(
            messages=QUESTION, **{**GREEDY, "max_tokens": -1}
        ),
        "long": lambda: client.completions.create(prompt="word " * 5000, **GREEDY),
        "long, streamed": lambda: client.completions.create(
            prompt="word " * 5000, stream=True, **GREEDY
        ),
        "model": lambda: client.chat.completions.create(
            messages=QUESTION, **{**GREEDY, "model": "gpt-5"}
        ),
        "embeddings": lambda: client.embeddings.create(
            model="demo", input="hello", encoding_format="float"
        ),
    }
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            ask()
            found[name] = "no error"
        except openai.APIStatusError as err:
            said = [err.status_code, err.code, err.param, err.type, err.request_id is not None]
            found[name] = [type(err).__name__, *said, bool(err.message)]
    return found


def main() -> None:
    url = sys.argv[1] + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=90) as client:
        found = {**chats(client), **completions(client), "mistakes": mistakes(client)}
    print(
        json.dumps({"version": openai.__version__, **found, "at_once": asyncio.run(at_once(url))})
    )


main()
