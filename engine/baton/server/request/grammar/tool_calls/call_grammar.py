"""The grammar of an answer with tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from baton.server.request.grammar.constraint import AnswerConstraint
from baton.server.request.grammar.lark_builder import LarkBuilder
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.tool_calls.call_format import CallScope, GrammarTool
from baton.server.request.grammar.tool_calls.call_rules import CallRules
from baton.server.request.grammar.tool_calls.formats import call_formats
from baton.server.request.tools import ChoiceMode


def call_grammar(
    rules: CallRules,
    arguments: Sequence[AnswerConstraint],
    answer: AnswerConstraint | None,
    whitespace: str,
    markers: MarkerTokens,
) -> str:
    """Text of the grammar. Equal arguments give an equal text. Raises BadRequest.

    Args:
        arguments: constraint for the arguments of each tool.
        answer: schema of an answer without calls, where the choice is auto.
        whitespace: --structured-whitespace.
    """
    builder = LarkBuilder(markers, whitespace)
    tools = tuple(
        GrammarTool(tool.name, constraint)
        for tool, constraint in zip(rules.tools, arguments, strict=True)
    )
    scope = CallScope(builder, tools, rules.is_single)
    call_format = call_formats()[rules.family]
    if rules.mode is not ChoiceMode.AUTO:
        root = call_format.calls_behind_reasoning(scope)
    elif answer is None:
        root = call_format.calls_in_text(scope)
    else:
        root = call_format.calls_or_answer(scope, builder.constraint(answer))
    return builder.text(root)
