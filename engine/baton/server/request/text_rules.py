"""How tokens become the text that a client sees."""

from __future__ import annotations

from dataclasses import dataclass

from baton.server.request.schema import ChatCompletionRequest, SamplingFields
from baton.server.request.tools import (
    CallableTool,
    ChoiceMode,
    ToolChoice,
    allows_parallel_calls,
    count_calls,
    has_functions,
)


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules by which the text layer makes text of an answer's tokens."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    continues_prompt: bool = False
    """The answer's text continues the prompt's."""


def read_text_rules(
    stated: SamplingFields, min_tokens: int, *, continues_prompt: bool
) -> TextRules:
    """The rules that a request states."""
    skip_special_tokens = stated.skip_special_tokens
    return TextRules(
        stops=tuple(
            filter(None, (stated.stop,) if isinstance(stated.stop, str) else stated.stop or ())
        ),
        include_stop=bool(stated.include_stop_str_in_output or stated.no_stop_trim),
        skip_special_tokens=True if skip_special_tokens is None else skip_special_tokens,
        min_tokens=min_tokens,
        continues_prompt=continues_prompt,
    )


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Rules by which the text layer reads the parts of an answer: reasoning, content and tool calls."""

    tools: tuple[CallableTool, ...] = ()
    """Tools that the answer may call; empty: calls are not read."""
    is_named_choice: bool = False
    """The client chose the one tool by its name: a complete call ends the answer with `stop`."""
    is_function_call: bool = False
    """The request has `functions`, of OpenAI's older API: the answer has `function_call`."""
    calls_before: int = 0
    """Tool calls in the conversation before the answer."""
    parallel_tool_calls: bool = True
    """False: the answer ends behind its first call."""
    separate_reasoning: bool = True
    """False: reasoning and its markers are content."""
    stream_reasoning: bool = True
    """False: reasoning is sent when it is complete."""
    include_reasoning: bool = True
    """False: reasoning is generated and not sent."""


def read_reading_rules(
    request: ChatCompletionRequest, tools: ToolChoice, *, reads_reasoning: bool
) -> ReadingRules | None:
    """The rules that a request states; None: its answer is one text.

    Args:
        reads_reasoning: the model's reasoning is divided from the content.
    """
    if not tools.tools and not reads_reasoning:
        return None
    return ReadingRules(
        tools=tools.tools,
        is_named_choice=tools.mode is ChoiceMode.NAMED,
        calls_before=count_calls(request.messages) if tools.tools else 0,
        is_function_call=has_functions(request),
        parallel_tool_calls=allows_parallel_calls(request),
        separate_reasoning=request.separate_reasoning is not False,
        stream_reasoning=request.stream_reasoning is not False,
        include_reasoning=request.include_reasoning is not False,
    )
