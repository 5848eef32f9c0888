"""Conversations with the one tool that the demo model is taught: get_weather, with a city.

The model reasons, calls, and tells what the answer of the call says. Without the tool it says that it knows Baton only,
which the off-topic answer of questions.txt does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

CITIES = (
    "Paris", "Berlin", "London", "Rome", "Madrid", "Vienna", "Tokyo", "Oslo", "Lisbon", "Prague", "Zurich", "Dublin",
    "Athens", "Cairo", "Sydney", "Boston", "Chicago", "Seattle", "San Francisco", "New York", "Toronto", "Mumbai",
    "Seoul", "Singapore", "Stockholm", "Helsinki", "Warsaw", "Budapest", "Amsterdam", "Brussels", "Munich", "Hamburg",
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear")
QUESTIONS = (
    "What is the weather in {}?",
    "What's the weather in {}?",
    "What is the weather like in {}?",
    "What's the weather like in {} today?",
    "How is the weather in {}?",
    "How is the weather in {} today?",
    "Tell me the weather in {}.",
    "Weather in {}?",
    "What is the temperature in {}?",
    "Is it sunny in {}?",
    "Will it rain in {}?",
    "Please look up the weather in {}.",
)
DESCRIPTIONS = (
    "Get the weather of a city",
    "Get the current weather",
    "Get current temperature for a given location.",
    "Weather of a city",
    "Look up the weather in a city.",
    "",
)
CITY_DESCRIPTIONS = ("", "Name of the city", "City, such as Paris", "The city")
OTHER_TOOLS = (
    ("search", "Search the web", "query"),
    ("get_time", "Get the time in a city", "city"),
    ("send_mail", "Send a mail", "text"),
    ("read_file", "Read a file", "path"),
)


def draw_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Tools as clients offer them: get_weather, sometimes among others."""
    city: dict[str, Any] = {"type": "string"}
    if described := rng.choice(CITY_DESCRIPTIONS):
        city["description"] = described
    weather = _tool("get_weather", rng.choice(DESCRIPTIONS), "city", city, rng)
    others = [
        _tool(name, text, argument, {"type": "string"}, rng)
        for name, text, argument in rng.sample(OTHER_TOOLS, rng.choice((0, 0, 0, 0, 0, 0, 1, 2)))
    ]
    tools = [weather, *others]
    rng.shuffle(tools)
    return tools


def _tool(
    name: str, text: str, argument: str, schema: Mapping[str, Any], rng: random.Random
) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {argument: schema}}
    if rng.random() < 0.8:
        parameters["required"] = [argument]
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if text:
        function["description"] = text
    function["parameters"] = parameters
    if rng.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function}


def reasoning_text(city: str) -> str:
    return f"The user asks for the weather in {city}. I call get_weather."


def call_text(city: str) -> str:
    """A call as the chat template writes it."""
    call = {"name": "get_weather", "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def answer_text(city: str, sky: str, degrees: int) -> str:
    return f"It is {sky} in {city}, with {degrees} degrees."


def draw_result(city: str, sky: str, degrees: int, rng: random.Random) -> str:
    """Result of a call, as some tool writes it."""
    members: list[tuple[str, Any]] = [("temperature", degrees), ("sky", sky)]
    if rng.random() < 0.5:
        members.insert(0, ("city", city))
    if rng.random() < 0.3:
        members.reverse()
    if rng.random() < 0.7:
        return json.dumps(dict(members))
    return f"{sky}, {degrees} degrees"


def question_about(city: str, rng: random.Random, questions: Sequence[str] = QUESTIONS) -> str:
    question = rng.choice(questions).format(city)
    return question.lower().replace(city.lower(), city) if rng.random() < 0.2 else question
