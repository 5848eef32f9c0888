"""Asks a Baton cluster through langchain: OpenAI's two APIs and Anthropic's. Usage: ask_langchain.py URL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import conversation as talk
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Parts(BaseModel):
    """Baton as JSON, as the demo model was taught it."""

    name: str
    parts: list[str]


def openai_model(url: str, max_tokens: int, extra: dict[str, Any], **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=talk.MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        timeout=talk.TIMEOUT_SECS,
        extra_body=extra,
        **more,
    )


def chat_model(url: str, max_tokens: int, extra: dict[str, Any]) -> ChatOpenAI:
    return openai_model(url, max_tokens, extra, use_responses_api=False)


def responses_model(url: str, max_tokens: int, extra: dict[str, Any]) -> ChatOpenAI:
    return openai_model(url, max_tokens, extra, use_responses_api=True)


def messages_model(url: str, max_tokens: int, extra: dict[str, Any]) -> ChatAnthropic:
    return ChatAnthropic(
        model=talk.MODEL,
        base_url=url,
        api_key="none",
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        timeout=talk.TIMEOUT_SECS,
        model_kwargs={"extra_body": extra},
    )


MODELS = {"chat": chat_model, "responses": responses_model, "messages": messages_model}


def weather(model: Any) -> dict[str, Any]:
    """An agent that calls its tool and answers with the result, whole and streamed."""
    asked: list[str] = []

    @tool(description=talk.WEATHER_DESCRIPTION)
    def get_weather(city: str) -> str:
        asked.append(city)
        return talk.get_weather(city)

    agent = create_agent(model, tools=[get_weather])
    messages = {"messages": [{"role": "user", "content": talk.WEATHER_QUESTION}]}
    whole = agent.invoke(messages)
    streamed = [
        part.text
        for part, about in agent.stream(messages, stream_mode="messages")
        if part.type == "AIMessageChunk"
    ]
    return {
        "cities": asked,
        "weather": whole["messages"][-1].text,
        "weather_streamed": "".join(streamed),
    }


def typed(model: Any, kind: type[BaseModel], method: str, question: str) -> dict[str, Any]:
    found: BaseModel = model.with_structured_output(kind, method=method).invoke(question)
    return found.model_dump()


def ask_forced(model: Any) -> dict[str, Any]:
    return {"person": typed(model, talk.Person, "function_calling", talk.PERSON_QUESTION)}


def ask(model: Any) -> dict[str, Any]:
    return {
        "answer": model.invoke(talk.QUESTION).text,
        "streamed": talk.joined(model.stream(talk.QUESTION), text_of, lambda: None),
        "person": typed(model, talk.Person, "json_schema", talk.PERSON_QUESTION),
        **weather(model),
    }


def text_of(part: Any) -> str:
    return str(part.text)


def long_answer(url: str, api: str) -> str:
    model = MODELS[api](url, talk.LONG_TOKENS, talk.LONG_EXTRA)

    def stream(on_first: Callable[[], None]) -> str:
        return talk.joined(model.stream(talk.QUESTION), text_of, on_first)

    return talk.interrupted_answer(stream)


def main() -> None:
    url = sys.argv[1]
    found: dict[str, Any] = {}
    for api, make_model in MODELS.items():
        model = make_model(url, talk.ANSWER_TOKENS, {})
        found[api] = {**ask(model), "long": long_answer(url, api)}
        if api != "messages":  # Anthropic's API has no JSON mode
            found[api]["json_mode"] = typed(model, Parts, "json_mode", "Describe Baton as JSON")
        found[api]["forced"] = ask_forced(model)
    talk.finish(found)


main()
