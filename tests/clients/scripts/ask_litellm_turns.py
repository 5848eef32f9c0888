"""Asks a Baton cluster for turns with a tool and typed answers through litellm. Usage: ask_litellm_turns.py URL."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import conversation as talk
import litellm

QUESTION: Any = [{"role": "user", "content": talk.QUESTION}]
PERSON_QUESTION: Any = [{"role": "user", "content": talk.PERSON_QUESTION}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": talk.WEATHER_DESCRIPTION,
        "parameters": talk.WEATHER_PARAMETERS,
    },
}


class ProviderTurns:
    """Conversation with one of litellm's providers by `litellm.completion`."""

    def __init__(self, provider: str, base: str) -> None:
        self.provider = provider
        self.asked: Any = {
            "model": f"{provider}/{talk.MODEL}",
            "api_base": base,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": talk.ANSWER_TOKENS,
            "num_retries": 0,
            "timeout": talk.TIMEOUT_SECS,
        }

    def answer(self) -> str:
        return litellm.completion(messages=QUESTION, **self.asked).choices[0].message.content

    def streamed(self) -> str:
        stream = litellm.completion(messages=QUESTION, stream=True, **self.asked)
        return talk.joined(stream, text_of, lambda: None)

    def person(self) -> talk.Person | None:
        done = litellm.completion(
            messages=PERSON_QUESTION, response_format=talk.Person, **self.asked
        )
        return talk.Person.model_validate_json(done.choices[0].message.content)

    def weather(self, is_streamed: bool) -> tuple[list[str], str]:
        messages: Any = [{"role": "user", "content": talk.WEATHER_QUESTION}]
        first = self._message(messages, is_streamed)
        cities = []
        messages.append(first.model_dump())
        for call in first.tool_calls:
            cities.append(json.loads(call.function.arguments)["city"])
            result = {"role": "tool", "tool_call_id": call.id, "content": talk.WEATHER_RESULT}
            messages.append(result)
        return cities, self._message(messages, is_streamed).content

    def _message(self, messages: Any, is_streamed: bool) -> Any:
        asked = {**self.asked, "messages": messages, "tools": [TOOL], "stream": is_streamed}
        done = litellm.completion(**asked)
        if is_streamed:
            done = litellm.stream_chunk_builder(list(done), messages=messages)
        return done.choices[0].message

    def long(self, on_first: Callable[[], None]) -> str:
        asked = {**self.asked, "max_tokens": talk.LONG_TOKENS, "extra_body": talk.LONG_EXTRA}
        stream = litellm.completion(messages=QUESTION, stream=True, **asked)
        return talk.joined(stream, text_of, on_first)

    def forced(self) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": "get_weather"}}
        found = {}
        for kind, tool_choice in (("required", "required"), ("named", named)):
            done = litellm.completion(
                messages=QUESTION, tools=[TOOL], tool_choice=tool_choice, **self.asked
            )
            (call,) = done.choices[0].message.tool_calls
            found[kind] = call.function.name
        return found


def text_of(part: Any) -> str | None:
    return part.choices[0].delta.content if part.choices else None


def main() -> None:
    litellm.suppress_debug_info = True
    url = sys.argv[1]
    providers = {
        "hosted_vllm": f"{url}/v1",
        "openai": f"{url}/v1",
        "openai/responses": f"{url}/v1",
        "anthropic": url,
    }
    found = {}
    for name, base in providers.items():
        # litellm drops extra_body where it translates a request to another API.
        has_extra_body = name in ("hosted_vllm", "openai")
        found[name] = talk.ask_turns(ProviderTurns(name, base), has_extra_body)
    talk.finish(found)


main()
