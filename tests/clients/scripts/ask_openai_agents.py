"""Asks a Baton cluster through openai-agents: a run with a tool, a typed answer, streams."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import conversation as talk
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


def agent_of(model: Any, **changes: Any) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=talk.ANSWER_TOKENS)
    return Agent(**{"name": "Demo", "model": model, "model_settings": settings, **changes})


async def streamed(agent: Agent, question: str, on_first: Callable[[], None]) -> str:
    text = ""
    async for event in Runner.run_streamed(agent, question).stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            is_first = not text
            text += event.data.delta
            if is_first:
                await asyncio.to_thread(on_first)
    return text


async def weather(model: Any) -> dict[str, Any]:
    """A run in which the agent calls its tool and answers with the result."""
    asked: list[str] = []

    def get_weather(city: str) -> str:
        asked.append(city)
        return talk.get_weather(city)

    get_weather.__doc__ = talk.WEATHER_DESCRIPTION
    agent = agent_of(model, tools=[function_tool(get_weather)])
    run = await Runner.run(agent, talk.WEATHER_QUESTION)
    turn = Runner.run_streamed(agent, talk.WEATHER_QUESTION)
    items = [
        event.item.type
        async for event in turn.stream_events()
        if event.type == "run_item_stream_event"
    ]
    return {
        "cities": asked,
        "weather": run.final_output,
        "weather_streamed": turn.final_output,
        "items": items,
    }


async def ask(url: str, kind: str) -> dict[str, Any]:
    async with AsyncOpenAI(
        base_url=url + "/v1", api_key="none", max_retries=0, timeout=talk.TIMEOUT_SECS
    ) as client:
        model = MODELS[kind](model=talk.MODEL, openai_client=client)
        plain = await Runner.run(agent_of(model), talk.QUESTION)
        person = await Runner.run(agent_of(model, output_type=talk.Person), talk.PERSON_QUESTION)
        return {
            "answer": plain.final_output,
            "streamed": await streamed(agent_of(model), talk.QUESTION, lambda: None),
            "person": person.final_output.model_dump(),
            **await weather(model),
        }


async def ask_forced(url: str, kind: str) -> dict[str, Any]:
    """An agent with a tool and a typed answer sends both on every turn."""
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = MODELS[kind](model=talk.MODEL, openai_client=client)
        tools = [function_tool(talk.get_weather)]
        typed = agent_of(model, tools=tools, output_type=talk.Person)
        settings = ModelSettings(
            temperature=0, max_tokens=talk.ANSWER_TOKENS, tool_choice="get_weather"
        )
        named = agent_of(
            model, tools=tools, model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        return {
            "person": (await Runner.run(typed, talk.PERSON_QUESTION)).final_output.model_dump(),
            "result": (await Runner.run(named, talk.QUESTION)).final_output,
        }


async def stream_long(url: str, kind: str, on_first: Callable[[], None]) -> str:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = MODELS[kind](model=talk.MODEL, openai_client=client)
        settings = ModelSettings(
            temperature=0, max_tokens=talk.LONG_TOKENS, extra_body=talk.LONG_EXTRA
        )
        return await streamed(agent_of(model, model_settings=settings), talk.QUESTION, on_first)


def main() -> None:
    url = sys.argv[1]
    found: dict[str, Any] = {}
    for kind in MODELS:
        found[kind] = asyncio.run(ask(url, kind))
        found[kind]["long"] = talk.interrupted_answer(
            lambda on_first, kind=kind: asyncio.run(stream_long(url, kind, on_first))
        )
        found[kind]["forced"] = asyncio.run(ask_forced(url, kind))
    talk.finish(found)


main()
