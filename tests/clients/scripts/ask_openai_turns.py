"""Asks a Baton cluster for turns with a tool and typed answers through openai-python."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import conversation as talk
import openai

QUESTION: Any = [{"role": "user", "content": talk.QUESTION}]
WEATHER_QUESTION: Any = [{"role": "user", "content": talk.WEATHER_QUESTION}]
PERSON_QUESTION: Any = [{"role": "user", "content": talk.PERSON_QUESTION}]
FUNCTION: Any = {
    "name": "get_weather",
    "description": talk.WEATHER_DESCRIPTION,
    "parameters": {**talk.WEATHER_PARAMETERS, "additionalProperties": False},
    "strict": True,
}
CHAT: Any = {"model": talk.MODEL, "temperature": 0, "max_tokens": talk.ANSWER_TOKENS}
CHAT_TOOLS: Any = {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES: Any = {"model": talk.MODEL, "temperature": 0, "max_output_tokens": talk.ANSWER_TOKENS}
RESPONSES_TOOLS: Any = {**RESPONSES, "tools": [{"type": "function", **FUNCTION}]}


class ChatTurns:
    def __init__(self, client: openai.OpenAI) -> None:
        self.api = client.chat.completions

    def answer(self) -> str:
        return self.api.create(messages=QUESTION, **CHAT).choices[0].message.content

    def streamed(self) -> str:
        with self.api.stream(messages=QUESTION, **CHAT) as stream:
            return "".join(event.delta for event in stream if event.type == "content.delta")

    def person(self) -> talk.Person:
        done = self.api.parse(messages=PERSON_QUESTION, response_format=talk.Person, **CHAT)
        return done.choices[0].message.parsed

    def weather(self, is_streamed: bool) -> tuple[list[str], str]:
        messages = list(WEATHER_QUESTION)
        first = self._message(messages, is_streamed)
        cities = []
        messages.append(first.to_dict())
        for call in first.tool_calls:
            arguments = json.loads(call.function.arguments)
            cities.append(arguments["city"])
            result = {"role": "tool", "tool_call_id": call.id, "content": talk.WEATHER_RESULT}
            messages.append(result)
        return cities, self._message(messages, is_streamed).content

    def _message(self, messages: Any, is_streamed: bool) -> Any:
        if not is_streamed:
            return self.api.create(messages=messages, **CHAT_TOOLS).choices[0].message
        with self.api.stream(messages=messages, **CHAT_TOOLS) as stream:
            stream.until_done()
            return stream.get_final_completion().choices[0].message

    def long(self, on_first: Callable[[], None]) -> str:
        asked = {**CHAT, "max_tokens": talk.LONG_TOKENS, "extra_body": talk.LONG_EXTRA}
        with self.api.stream(messages=QUESTION, **asked) as stream:
            return talk.joined(
                (event for event in stream if event.type == "content.delta"),
                lambda event: event.delta,
                on_first,
            )

    def forced(self) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": "get_weather"}}
        found = {}
        for kind, tool_choice in (("required", "required"), ("named", named)):
            done = self.api.create(messages=QUESTION, tool_choice=tool_choice, **CHAT_TOOLS)
            (call,) = done.choices[0].message.tool_calls
            found[kind] = call.function.name
        typed = self.api.parse(messages=PERSON_QUESTION, response_format=talk.Person, **CHAT_TOOLS)
        return {**found, "person": typed.choices[0].message.parsed.model_dump()}


class ResponsesTurns:
    def __init__(self, client: openai.OpenAI) -> None:
        self.api = client.responses

    def answer(self) -> str:
        return self.api.create(input=talk.QUESTION, **RESPONSES).output_text

    def streamed(self) -> str:
        with self.api.stream(input=talk.QUESTION, **RESPONSES) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        return "".join(deltas)

    def person(self) -> talk.Person:
        done = self.api.parse(input=talk.PERSON_QUESTION, text_format=talk.Person, **RESPONSES)
        return done.output_parsed

    def weather(self, is_streamed: bool) -> tuple[list[str], str]:
        items: list[Any] = list(WEATHER_QUESTION)
        first = self._response(items, is_streamed)
        cities = []
        items += [item.to_dict() for item in first.output]
        for call in first.output:
            if call.type == "function_call":
                cities.append(json.loads(call.arguments)["city"])
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": talk.WEATHER_RESULT,
                    }
                )
        return cities, self._response(items, is_streamed).output_text

    def _response(self, items: Any, is_streamed: bool) -> Any:
        if not is_streamed:
            return self.api.create(input=items, **RESPONSES_TOOLS)
        with self.api.stream(input=items, **RESPONSES_TOOLS) as stream:
            return stream.get_final_response()

    def long(self, on_first: Callable[[], None]) -> str:
        asked = {
            **RESPONSES,
            "max_output_tokens": talk.LONG_TOKENS,
            "extra_body": talk.LONG_EXTRA,
        }
        with self.api.stream(input=talk.QUESTION, **asked) as stream:
            return talk.joined(
                (event for event in stream if event.type == "response.output_text.delta"),
                lambda event: event.delta,
                on_first,
            )

    def forced(self) -> dict[str, Any]:
        named = {"type": "function", "name": "get_weather"}
        found = {}
        for kind, tool_choice in (("required", "required"), ("named", named)):
            done = self.api.create(input=talk.QUESTION, tool_choice=tool_choice, **RESPONSES_TOOLS)
            (call,) = (item for item in done.output if item.type == "function_call")
            found[kind] = call.name
        typed = self.api.parse(
            input=talk.PERSON_QUESTION, text_format=talk.Person, **RESPONSES_TOOLS
        )
        return {**found, "person": typed.output_parsed.model_dump()}


def main() -> None:
    with openai.OpenAI(
        base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=talk.TIMEOUT_SECS
    ) as client:
        apis = {"chat": ChatTurns(client), "responses": ResponsesTurns(client)}
        talk.finish({name: talk.ask_turns(api) for name, api in apis.items()})


main()
