"""Asks a Baton cluster through anthropic-python: turns with a tool, typed answers, counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import conversation as talk
from anthropic import beta_tool
from pydantic import BaseModel

GREEDY: Any = {"temperature": 0}
ASKED: Any = {
    "model": talk.MODEL,
    "max_tokens": talk.ANSWER_TOKENS,
    "extra_body": GREEDY,
}
QUESTION: Any = [{"role": "user", "content": talk.QUESTION}]
WEATHER_QUESTION: Any = [{"role": "user", "content": talk.WEATHER_QUESTION}]
PERSON_QUESTION: Any = [{"role": "user", "content": talk.PERSON_QUESTION}]
TOOL: Any = {
    "name": "get_weather",
    "description": talk.WEATHER_DESCRIPTION,
    "input_schema": talk.WEATHER_PARAMETERS,
}


class ListedPerson(BaseModel):
    """A person by what the library leaves in a schema: bounds become words of its descriptions."""

    name: Literal["Ann", "Bob"]
    age: Literal[20, 40, 60]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


class MessagesTurns:
    def __init__(self, client: anthropic.Anthropic) -> None:
        self.client = client
        self.api = client.messages

    def answer(self) -> str:
        return text_of(self.api.create(messages=QUESTION, **ASKED))

    def streamed(self) -> str:
        with self.api.stream(messages=QUESTION, **ASKED) as stream:
            return "".join(stream.text_stream)

    def person(self) -> ListedPerson:
        done = self.api.parse(messages=PERSON_QUESTION, output_format=ListedPerson, **ASKED)
        return done.parsed_output

    def weather(self, is_streamed: bool) -> tuple[list[str], str]:
        """Both turns by the library's own loop."""
        cities: list[str] = []

        @beta_tool(name="get_weather", description=talk.WEATHER_DESCRIPTION)
        def get_weather(city: str) -> str:
            cities.append(city)
            return talk.get_weather(city)

        runner = self.client.beta.messages.tool_runner(
            model=talk.MODEL,
            max_tokens=talk.ANSWER_TOKENS,
            messages=WEATHER_QUESTION,
            tools=[get_weather],
            stream=is_streamed,
            extra_body=GREEDY,
        )
        if not is_streamed:
            return cities, text_of(runner.until_done())
        text = ""
        for stream in runner:
            text = text_of(stream.get_final_message())
        return cities, text

    def long(self, on_first: Callable[[], None]) -> str:
        asked = {
            **ASKED,
            "max_tokens": talk.LONG_TOKENS,
            "extra_body": {**GREEDY, **talk.LONG_EXTRA},
        }
        with self.api.stream(messages=QUESTION, **asked) as stream:
            return talk.joined(stream.text_stream, str, on_first)

    def forced(self) -> dict[str, Any]:
        found = {}
        choices: Any = {
            "required": {"type": "any"},
            "named": {"type": "tool", "name": TOOL["name"]},
        }
        for kind, tool_choice in choices.items():
            done = self.api.create(
                messages=QUESTION, tools=[TOOL], tool_choice=tool_choice, **ASKED
            )
            (call,) = (block for block in done.content if block.type == "tool_use")
            found[kind] = call.name
        typed = self.api.parse(
            messages=PERSON_QUESTION, output_format=ListedPerson, tools=[TOOL], **ASKED
        )
        return {**found, "person": typed.parsed_output.model_dump()}


def counts(client: anthropic.Anthropic) -> list[int]:
    """Tokens of a prompt with a tool, counted beforehand and as the answer says."""
    asked: Any = {"model": talk.MODEL, "messages": WEATHER_QUESTION, "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    return [counted, usage.input_tokens + usage.cache_read_input_tokens]


def mistakes(client: anthropic.Anthropic) -> dict[str, Any]:
    """Errors as the library raises them."""
    changes: dict[str, Any] = {
        "negative": {"max_tokens": -1},
        "long": {"messages": [{"role": "user", "content": "word " * 5000}]},
        "model": {"model": "claude-none"},
    }
    found: dict[str, Any] = {}
    for name, change in changes.items():
        try:
            client.messages.create(**{**ASKED, "messages": QUESTION, **change})
            found[name] = "no error"
        except anthropic.APIStatusError as err:
            found[name] = [type(err).__name__, err.status_code, err.request_id is not None]
    return found


def main() -> None:
    with anthropic.Anthropic(
        base_url=sys.argv[1], api_key="none", max_retries=0, timeout=talk.TIMEOUT_SECS
    ) as client:
        turns = talk.ask_turns(MessagesTurns(client))
        facts = {"counts": counts(client), "mistakes": mistakes(client)}
        talk.finish({"messages": {**turns, **facts}})


main()
