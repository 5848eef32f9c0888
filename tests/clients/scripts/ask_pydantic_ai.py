"""Asks a Baton cluster through pydantic-ai: OpenAI's two APIs and Anthropic's. Usage: ask_pydantic_ai.py URL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import conversation as talk
import openai
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

LIMITS: Any = {"api_key": "none", "max_retries": 0, "timeout": talk.TIMEOUT_SECS}
SETTINGS: Any = {"temperature": 0, "max_tokens": talk.ANSWER_TOKENS}
LONG: Any = {"temperature": 0, "max_tokens": talk.LONG_TOKENS, "extra_body": talk.LONG_EXTRA}


def openai_provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=f"{url}/v1", **LIMITS))


def anthropic_provider(url: str) -> AnthropicProvider:
    client = anthropic.AsyncAnthropic(base_url=url, **LIMITS)
    return AnthropicProvider(anthropic_client=client)


def model_of(url: str, api: str) -> Any:
    if api == "chat":
        return OpenAIChatModel(talk.MODEL, provider=openai_provider(url))
    if api == "responses":
        return OpenAIResponsesModel(talk.MODEL, provider=openai_provider(url))
    # Without this profile, pydantic-ai takes a model of an unknown name for one without JSON Schema output.
    profile = ModelProfile(supports_json_schema_output=True)
    return AnthropicModel(talk.MODEL, provider=anthropic_provider(url), profile=profile)


async def streamed(agent: Agent[Any, Any], question: str, on_first: Callable[[], None]) -> str:
    text = ""
    async with agent.run_stream(question) as run:
        async for delta in run.stream_text(delta=True, debounce_by=None):
            is_first = not text
            text += delta
            if is_first:
                await asyncio.to_thread(on_first)
    return text


async def weather(model: Any) -> dict[str, Any]:
    """A run in which the agent calls its tool and answers with the result, whole and streamed."""
    asked: list[str] = []

    def get_weather(city: str) -> str:
        asked.append(city)
        return talk.get_weather(city)

    tool = Tool(get_weather, name="get_weather", description=talk.WEATHER_DESCRIPTION)
    agent = Agent(model, tools=[tool], model_settings=SETTINGS)
    whole = await agent.run(talk.WEATHER_QUESTION)
    return {
        "weather": whole.output,
        "weather_streamed": await streamed(agent, talk.WEATHER_QUESTION, lambda: None),
        "cities": asked,
    }


async def ask(url: str, api: str) -> dict[str, Any]:
    model = model_of(url, api)
    agent = Agent(model, model_settings=SETTINGS)
    typed = Agent(model, output_type=NativeOutput(talk.Person), model_settings=SETTINGS)
    return {
        "answer": (await agent.run(talk.QUESTION)).output,
        "streamed": await streamed(agent, talk.QUESTION, lambda: None),
        "person": (await typed.run(talk.PERSON_QUESTION)).output.model_dump(),
        **await weather(model),
    }


async def ask_forced(url: str, api: str) -> dict[str, Any]:
    """A typed answer as a call: `tool_choice` required."""
    typed = Agent(model_of(url, api), output_type=ToolOutput(talk.Person), model_settings=SETTINGS)
    return {"person": (await typed.run(talk.PERSON_QUESTION)).output.model_dump()}


async def stream_long(url: str, api: str, on_first: Callable[[], None]) -> str:
    return await streamed(Agent(model_of(url, api), model_settings=LONG), talk.QUESTION, on_first)


def main() -> None:
    url = sys.argv[1]
    found: dict[str, Any] = {}
    for api in ("chat", "responses", "messages"):
        found[api] = asyncio.run(ask(url, api))
        found[api]["long"] = talk.interrupted_answer(
            lambda on_first, api=api: asyncio.run(stream_long(url, api, on_first))
        )
        found[api]["forced"] = asyncio.run(ask_forced(url, api))
    talk.finish(found)


main()
