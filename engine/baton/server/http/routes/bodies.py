"""Forms of bodies that no struct of `request.schema` reads: the text layer or a router does."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from baton.server.request import schema


class ResponsesRequest(Struct, kw_only=True):
    """Beside these all fields of chat requests that /v1/responses documents."""

    input: Any
    model: schema.Text = None
    instructions: str | None = None
    max_output_tokens: schema.Natural = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    stream: bool | None = None
    prompt_cache_key: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    messages: list[Any]
    model: schema.Text = None
    system: Any = None
    tools: list[Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    tool_choice: Any = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class AddWorkerRequest(Struct, kw_only=True):
    url: str
    bootstrap_port: int | None = None
    topology: str | None = None


class AnyRequest(Struct, kw_only=True):
    """The body is the worker's to define."""
