"""Runs under another environment's Python: asks a Baton cluster through litellm, prints what came back as JSON.

Usage: ask_litellm.py BASE_URL. Nothing is judged here: the test compares.
"""

import asyncio
import json
import sys
from typing import Any

import litellm
import openai

QUESTION: Any = [{"role": "user", "content": "What is Baton?"}]
URL = sys.argv[1] + "/v1"
HERE: Any = {
    "api_base": URL,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 16,
    "num_retries": 0,
    "timeout": 90,
}
IN_FLIGHT = 16


def chats(provider: str) -> dict[str, Any]:
    asked = {"model": f"{provider}/demo", "messages": QUESTION, **HERE}
    whole = litellm.completion(**asked)
    stream = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    return {
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
        "stream_usage": [
            event.usage.completion_tokens for event in stream if getattr(event, "usage", None)
        ],
        "n": [choice.message.content for choice in litellm.completion(**asked, n=2).choices],
        "logprobs": len(
            litellm.completion(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        ),
    }


def completions() -> dict[str, Any]:
    asked = {"model": "text-completion-openai/demo", **HERE}
    stream = litellm.text_completion(prompt="A lease ends", stream=True, **asked)
    return {
        "batch": [
            c.text
            for c in litellm.text_completion(prompt=["A lease ends", "Pages"], **asked).choices
        ],
        "completion_stream": "".join(event.choices[0].text or "" for event in stream),
    }


async def at_once() -> list[str]:
    asked = {"model": "hosted_vllm/demo", **HERE}

    async def one(i: int) -> str:
        message = [{"role": "user", "content": f"Runner {i} asks?"}]
        return (await litellm.acompletion(messages=message, **asked)).choices[0].message.content

    return await asyncio.gather(*(one(i) for i in range(IN_FLIGHT)))


def mistakes() -> dict[str, Any]:
    asked = {
        "negative": {"max_tokens": -1},
        "long": {"messages": [{"role": "user", "content": "word " * 5000}]},
        "model": {"model": "hosted_vllm/gpt-5"},
    }
    found: dict[str, Any] = {}
    for name, change in asked.items():
        try:
            litellm.completion(
                **{"model": "hosted_vllm/demo", "messages": QUESTION, **HERE, **change}
            )
            found[name] = "no error"
        except openai.APIStatusError as err:  # the base of litellm's errors
            found[name] = [type(err).__name__, err.status_code]
    return found


def main() -> None:
    litellm.suppress_debug_info = True
    found = {provider: chats(provider) for provider in ("hosted_vllm", "openai")}
    print(
        json.dumps(
            {**found, **completions(), "mistakes": mistakes(), "at_once": asyncio.run(at_once())}
        )
    )


main()
