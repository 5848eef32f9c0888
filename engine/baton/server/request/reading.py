"""How the parts of a chat answer are read: reasoning, content and tool calls."""

from __future__ import annotations

from baton.server.fields import encode_exact
from baton.server.request.schema import ChatCompletionRequest
from baton.server.request.tools import (
    ChoiceMode,
    ToolChoice,
    allows_parallel_calls,
    count_calls,
    has_functions,
)
from baton.server.text.answer_spec import ReadingSpec, ReasoningNames


def read_reading(
    request: ChatCompletionRequest,
    tools: ToolChoice,
    *,
    reads_reasoning: bool,
    is_gated: bool,
    reasoning_field: ReasoningNames,
) -> ReadingSpec | None:
    """The rules that a request states; None: its answer is one text.

    Args:
        reads_reasoning: the model's reasoning is divided from the content.
        is_gated: a rank looks for the end of the reasoning, behind which the grammar begins.
        reasoning_field: member of the answer that holds the reasoning.
    """
    if not tools.tools and not reads_reasoning:
        return None
    # `ToolSignature` of engine/text/src/stream/tools/reader.rs.
    signatures = [{"name": tool.name, "parameters": tool.parameters} for tool in tools.tools]
    return ReadingSpec(
        tools=encode_exact(signatures).decode(),
        is_named_choice=tools.mode is ChoiceMode.NAMED,
        calls_before=count_calls(request.messages) if tools.tools else 0,
        is_function_call=has_functions(request),
        is_gated=is_gated,
        parallel_tool_calls=allows_parallel_calls(request),
        separate_reasoning=request.separate_reasoning is not False,
        stream_reasoning=request.stream_reasoning is not False,
        include_reasoning=request.include_reasoning is not False,
        reasoning_field=reasoning_field,
    )
