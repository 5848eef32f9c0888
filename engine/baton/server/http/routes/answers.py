"""Forms of answers, for the description of the API. Answers may have more members than these."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ErrorObject(Struct):
    """Message for people, and a `code` that is stable (docs/protocol.md §5)."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct):
    error: ErrorObject


class AnthropicErrorObject(Struct):
    type: str
    message: str
    code: str


class AnthropicErrorAnswer(Struct):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class VersionAnswer(Struct):
    version: str


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str | None


class ChatUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class TextChoice(Struct):
    index: int
    text: str
    finish_reason: str | None


class TextCompletion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: ChatUsage


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class MessageUsage(Struct):
    input_tokens: int
    output_tokens: int


class MessageAnswer(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


class TokenizeAnswer(Struct):
    """Lists of lists for several prompts."""

    tokens: list[Any]
    count: int | list[int]
    max_model_len: int


class DetokenizeAnswer(Struct):
    text: str | list[str]
    prompt: str | list[str]
