"""A request's grammar: its text, checked by llguidance, and names of what has no effect.
Deterministic, no I/O.

llguidance recurses in native code for rules and references that lead from one to the next, and
overflows the stack of the thread for some thousand of them: a server calls these functions in a
process of their own (`checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher

from baton.errors import BadRequest, EngineError, UnsupportedParameter
from baton.server.fields import bad
from baton.server.request.grammar.checks.walk import compile_text, find_dead_end
from baton.server.request.grammar.constraint import (
    AnswerConstraint,
    ConstraintKind,
    read_constraint,
)
from baton.server.request.grammar.ebnf.emitter import ebnf_grammar
from baton.server.request.grammar.json_schema import ignored_keywords, schema_grammar, schema_of
from baton.server.request.grammar.lark import GrammarText, quote_text, without_forcing
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.structural_tag import structural_grammar
from baton.server.request.grammar.tool_calls.call_grammar import call_grammar
from baton.server.request.grammar.tool_calls.call_rules import (
    CallRules,
    any_object,
    arguments_constraint,
)

MAX_TEXT_BYTES = 2**20
MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class RequestGrammar:
    """A grammar that a rank may compile."""

    text: str
    """"": the answer is free."""
    ignored: tuple[str, ...] = ()
    """Parts of the client's constraint that have no effect, as `path:keyword`."""


NO_GRAMMAR = RequestGrammar("")


@dataclass(frozen=True, slots=True)
class GrammarCheck:
    """The parts of a request that decide its grammar. Equal ones have equal JSON, members in the
    client's order.
    """

    stated: Mapping[str, Any]
    """`stated_fields` of the body. Large ones are JSON on the way here (`msgspec.Raw`)."""
    prefix: str = ""
    """Stands before the names of fields in errors."""
    is_native: bool = False
    """`stated` is of /generate's `sampling_params`."""
    rules: CallRules | None = None
    """None: the answer has no calls."""
    choice_field: str = ""
    """Path of the field that forces a call."""

    @property
    def param(self) -> str:
        """A field of the body that is checked."""
        return "tools" if self.rules is not None else self.prefix + next(iter(self.stated))


def make_request_grammar(
    check: GrammarCheck, whitespace: str, markers: MarkerTokens
) -> RequestGrammar:
    """The grammar of a request. Raises BadRequest or UnsupportedParameter."""
    constraint = read_constraint(check.stated, check.prefix, is_native=check.is_native)
    rules = check.rules
    if rules is None:
        return NO_GRAMMAR if constraint is None else make_grammar(constraint, whitespace, markers)
    if constraint is not None:
        refuse_constraint_with_tools(constraint, rules, check.choice_field)
    elif not rules.is_forced and not any(tool.is_strict for tool in rules.tools):
        return NO_GRAMMAR
    return make_call_grammar(rules, constraint, whitespace, markers)


def free_answer(rules: CallRules) -> RequestGrammar:
    """No grammar, where strict tools have no effect."""
    strict = (tool.place for tool in rules.tools if tool.is_strict)
    return RequestGrammar("", tuple(f"{place}.strict" for place in strict))


def refuse_constraint_with_tools(
    constraint: AnswerConstraint, rules: CallRules, choice_field: str
) -> None:
    """Raise for a constraint that says nothing of tool calls, and that these would break."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return
    if rules.is_forced:
        raise bad(
            constraint.param,
            f"and {choice_field} exclude each other: the answer is a call; leave one of them out",
        )
    raise UnsupportedParameter(
        f"{constraint.param} together with tools is not supported: an answer that follows a "
        f"{constraint.kind.value} "
        "has no calls; send a JSON Schema, or tool_choice none",
        param=constraint.param,
    )


def make_grammar(
    constraint: AnswerConstraint, whitespace: str, markers: MarkerTokens
) -> RequestGrammar:
    """Make the text of a grammar and check it. Raises BadRequest or UnsupportedParameter."""
    param = constraint.param
    grammar = grammar_text(constraint, whitespace, markers)
    refuse_long_text(grammar.text, param)
    messages: list[str] = []
    for text in (*grammar.schemas, grammar.text):
        is_error, found = LLMatcher.validate_grammar_with_warnings(text)
        if is_error:
            raise refusal(constraint, found[0])
        messages += found
    refuse_dead_ends(constraint, grammar.text, whitespace)
    # The check knows no tokenizer: it warns of the marker tokens of structural tags.
    warnings = [message for message in messages if "no tokenizer" not in message]
    ignored = ignored_keywords(warnings)
    return RequestGrammar(
        spell_freely(grammar.text, constraint.value, markers),
        tuple(f"{param}:{keyword}" for keyword in ignored),
    )


def refuse_dead_ends(constraint: AnswerConstraint, text: str, whitespace: str) -> None:
    """Raise BadRequest for a grammar in which a walk meets a place where an answer could not go on.

    Args:
        text: the grammar, which llguidance compiles.
    """
    if constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        # Walks are written byte by byte, without the tokens of markers.
        text = grammar_text(constraint, whitespace, MarkerTokens(dict)).text
    matcher = compile_text(text)
    if matcher.is_error():
        return  # it names tokens of the model
    dead_end = find_dead_end(matcher, text)
    if dead_end is not None:
        raise bad(constraint.param, f"{dead_end.reason}; simplify it")


def spell_freely(text: str, value: Any, markers: MarkerTokens) -> str:
    """The grammar's text, without forced tokens where its literals may hold the text of a marker.

    Args:
        value: the client's constraint, where there is one.
    """
    written = value if isinstance(value, str) else ""
    return without_forcing(text) if markers.stand_in(text + written) else text


def make_call_grammar(
    rules: CallRules, answer: AnswerConstraint | None, whitespace: str, markers: MarkerTokens
) -> RequestGrammar:
    """Make the grammar of an answer with calls and check it, each schema first. Raises
    BadRequest.
    """
    arguments = []
    ignored: list[str] = []
    for tool in rules.tools:
        constraint = arguments_constraint(tool)
        try:
            ignored += make_grammar(constraint, whitespace, markers).ignored
        except BadRequest:
            if tool.is_strict:
                raise
            constraint = any_object(tool)
            ignored.append(tool.param)
        # Formats that write arguments one by one leave out those without a value.
        arguments.append(replace(constraint, value=schema_of(constraint)))
    if answer is not None:
        ignored += make_grammar(answer, whitespace, markers).ignored
    text = call_grammar(rules, arguments, answer, whitespace, markers)
    refuse_long_text(text, "tools")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text)
    if is_error:
        raise bad(
            "tools", f"cannot be enforced together: {short_message(messages[0])}; simplify them"
        )
    return RequestGrammar(spell_freely(text, None, markers), tuple(ignored))


def refuse_long_text(text: str, param: str) -> None:
    """Raise BadRequest for a grammar that is too long."""
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise bad(
            param,
            f"makes a grammar of {size} bytes, at most {MAX_TEXT_BYTES} are accepted; simplify it",
        )


def grammar_text(
    constraint: AnswerConstraint, whitespace: str, markers: MarkerTokens
) -> GrammarText:
    """The constraint's grammar, not checked. Raises BadRequest or UnsupportedParameter."""
    param = constraint.param
    value = constraint.value
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return schema_grammar(constraint, whitespace)
        case ConstraintKind.REGEX:
            return GrammarText(regex_grammar(value, param))
        case ConstraintKind.CHOICE:
            return GrammarText(choice_grammar(value, param))
        case ConstraintKind.GRAMMAR:
            return GrammarText(ebnf_grammar(value, param))
        case ConstraintKind.STRUCTURAL_TAG:
            return structural_grammar(value, param, whitespace, markers)


def regex_grammar(regex: str, param: str) -> str:
    """The answer as a whole matches the regex."""
    if not regex:
        raise bad(param, "is empty; leave it out, or give a regular expression")
    if "\0" in regex:
        raise bad(param, "contains the character NUL; write \\x00")
    return LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: list[str], param: str) -> str:
    """The answer is one of the texts."""
    if not choices:
        raise bad(param, "is empty; give at least one text")
    # One lexeme: as alternatives of a rule, the matcher takes 2,000 of them at most.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(quote_text, choices))}"


def refusal(constraint: AnswerConstraint, message: str) -> EngineError:
    """The error for a constraint that llguidance refuses."""
    reason = short_message(message)
    if constraint.kind is ConstraintKind.REGEX:
        # llguidance names the place in the grammar around the regex, which the client has not
        # written.
        reason = reason.rpartition("(in regex): ")[2]
    advice = ""
    if constraint.is_strict and "Unimplemented" in message:
        advice = "; remove what cannot be enforced, or leave strict out to have it ignored"
    return BadRequest(
        f"{constraint.param} is no {constraint.kind.value} that can be enforced: {reason}{advice}",
        param=constraint.param,
    )


def short_message(message: str) -> str:
    """The first line of llguidance's message, and that of the error inside it where it quotes a
    regex.
    """
    first, *others = message.split("\n")
    inner = [line for line in others if line.startswith("error: ")]
    return " ".join([first, *inner])[:MESSAGE_CHARS]
