"""Questions that every client script asks, and the script's side of the talk with its test.

A script gets the router's URL as its argument, asks through its library, and ends with `finish`. Nothing is judged
in a script: the test compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

MODEL = "demo"
QUESTION = "What is Baton?"
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_RESULT = '{"temperature": 21, "sky": "sunny"}'
WEATHER_DESCRIPTION = "Get the weather of a city"
WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
PERSON_QUESTION = "A person, please."
ANSWER_TOKENS = 60
LONG_TOKENS = 1900
LONG_EXTRA = {"min_tokens": 800}
"""Member of the body that makes an answer long; it ends by itself soon after."""
MAX_TRIES = 5
TIMEOUT_SECS = 90.0


class Person(BaseModel):
    """A person. The bounds keep a model of few words from writing to its limit."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return WEATHER_RESULT


def signal(name: str) -> str:
    """Report to the test how far the script is, and wait for its reply."""
    print(name, flush=True)
    return input()


def signal_streaming() -> None:
    """Report that an answer is under way; returns once the test has killed a node."""
    signal("streaming")


def interrupted_answer(stream: Callable[[Callable[[], None]], T]) -> T:
    """A long answer during which the test killed the decode node that wrote it.

    Args:
        stream: reads a streamed answer and returns it; calls its argument after the first part.
    """
    for _ in range(MAX_TRIES):
        signal("ready")
        answer = stream(signal_streaming)
        if signal("streamed") == "resumed":
            return answer
    raise SystemExit(f"in {MAX_TRIES} tries the answer was complete before the kill")


def joined(parts: Any, text_of: Callable[[Any], str | None], on_first: Callable[[], None]) -> str:
    """Text of all parts of a stream; `on_first` is called once the first text has come."""
    text = ""
    for part in parts:
        is_first = not text
        text += text_of(part) or ""
        if is_first and text:
            on_first()
    return text


class Turns(Protocol):
    """Requests that `ask_turns` makes through one API of a library."""

    def answer(self) -> str: ...
    def streamed(self) -> str: ...
    def person(self) -> Any: ...
    def weather(self, is_streamed: bool) -> tuple[list[str], str]: ...
    def long(self, on_first: Callable[[], None]) -> str: ...
    def forced(self) -> dict[str, Any]: ...


def ask_turns(api: Turns, has_extra_body: bool = True) -> dict[str, Any]:
    """Plain, streamed and typed answers, turns with a tool, and an interrupted answer.

    Args:
        has_extra_body: whether the library passes LONG_EXTRA on; without it no answer is long enough to interrupt.
    """
    person = api.person()
    cities, weather = api.weather(is_streamed=False)
    cities_streamed, weather_streamed = api.weather(is_streamed=True)
    found = {
        "answer": api.answer(),
        "streamed": api.streamed(),
        "person": person and person.model_dump(),
        "cities": cities + cities_streamed,
        "weather": weather,
        "weather_streamed": weather_streamed,
        "long": interrupted_answer(api.long) if has_extra_body else None,
    }
    return {**found, "forced": api.forced()}


def finish(found: dict[str, Any]) -> None:
    """Print what the script found, as its last line."""
    print(json.dumps(found), flush=True)
