"""The grammar of a request: its text, checked, and names of what has no effect.

1. `read_constraint` finds the one constraint among the fields;
2. its text is made and checked by llguidance on a thread, because both take up to seconds for large
   schemas; results of the latest texts are kept;
3. the text goes to the rank as `SamplingParams.grammar`. P and D make it of the same body, by the
   same options, which are part of the fingerprint.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from llguidance import LLMatcher

from baton.config import EngineConfig
from baton.errors import BadRequest, EngineError, QueueFull, UnsupportedParameter
from baton.server.fields import bad
from baton.server.request.grammar.constraint import (
    AnswerConstraint,
    ConstraintKind,
    read_constraint,
)
from baton.server.request.grammar.ebnf.emitter import ebnf_grammar
from baton.server.request.grammar.json_schema import ignored_keywords, schema_grammar
from baton.server.request.grammar.lark import quote_text
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.structural_tag import structural_grammar
from baton.server.request.grammar.tool_calls.call_grammar import call_grammar
from baton.server.request.grammar.tool_calls.call_rules import (
    CallRules,
    any_object,
    arguments_constraint,
)
from baton.server.request.tools import ToolChoice

MAX_TEXT_BYTES = 2**20
CHECK_LIMIT_SECS = 5.0
"""llguidance's own limits end a check after some 2.5 s."""
CHECK_WORKERS = 1
MAX_WAITING = 256
KEPT_CHECKS = 1024
MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class RequestGrammar:
    """A grammar that a rank may compile."""

    text: str
    """"": the answer is free."""
    ignored: tuple[str, ...] = ()
    """Parts of the client's constraint that have no effect, as `path:keyword`."""


NO_GRAMMAR = RequestGrammar("")


class GrammarReader:
    """Not thread-safe: called on the event loop."""

    def __init__(self, config: EngineConfig, markers: MarkerTokens) -> None:
        self._config = config
        self._markers = markers
        self._pool = ThreadPoolExecutor(CHECK_WORKERS, thread_name_prefix="grammar")
        self._waiting = 0
        self._kept: OrderedDict[bytes, RequestGrammar] = OrderedDict()

    async def read(
        self, body: Mapping[str, Any], prefix: str = "", *, is_native: bool = False
    ) -> RequestGrammar:
        """The grammar of an answer without tool calls. Raises BadRequest, UnsupportedParameter or QueueFull.

        Args:
            prefix: stands before the names of fields in errors.
            is_native: `body` is /generate's `sampling_params`.
        """
        constraint = read_constraint(body, prefix, is_native=is_native)
        if constraint is None:
            return NO_GRAMMAR
        self._refuse_where_off(constraint.param)
        whitespace = self._config.structured_whitespace
        return await self._make(
            constraint.param,
            grammar_key(constraint),
            lambda: make_grammar(constraint, whitespace, self._markers),
        )

    async def read_with_tools(
        self, body: Mapping[str, Any], choice: ToolChoice, family: str | None, *, is_parallel: bool
    ) -> RequestGrammar:
        """The grammar of an answer that may call tools, or must. Raises BadRequest, UnsupportedParameter or QueueFull.

        Args:
            family: format in which the model writes calls; None: it is unknown.
            is_parallel: the answer may have several calls.
        """
        if family is None:
            raise UnsupportedParameter(
                "this engine does not know how the model writes tool calls; start it with --tool-parser NAME, or leave "
                "tools out",
                param="tools",
            )
        constraint = read_constraint(body)
        if constraint is not None:
            refuse_constraint_with_tools(constraint, choice)
            self._refuse_where_off(constraint.param)
        if choice.is_forced:
            self._refuse_where_off(choice.field)
        elif constraint is None:
            strict_tools = choice.strict_tools
            if not strict_tools or self._reason_where_off is not None:
                return RequestGrammar("", tuple(f"{tool.place}.strict" for tool in strict_tools))
        rules = CallRules(family, choice.tools, choice.mode, is_parallel)
        whitespace = self._config.structured_whitespace
        return await self._make(
            "tools",
            grammar_key(constraint, rules),
            lambda: make_call_grammar(rules, constraint, whitespace, self._markers),
        )

    async def _make(
        self, param: str, key: bytes, work: Callable[[], RequestGrammar]
    ) -> RequestGrammar:
        """The grammar that `work` makes, or that it made before for the same key."""
        kept = self._kept.get(key)
        if kept is None:
            kept = await self._offload(param, work)
            self._kept[key] = kept
            if len(self._kept) > KEPT_CHECKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _reason_where_off(self) -> str | None:
        """Why this engine follows no grammars; None: it does."""
        if self._config.grammar == "off":
            return "this engine was started with --grammar off"
        if self._config.simulate is not None:
            return "a simulated engine has no model that could follow a grammar"
        return None

    def _refuse_where_off(self, param: str) -> None:
        reason = self._reason_where_off
        if reason is not None:
            raise UnsupportedParameter(f"{reason}; send the request without {param}", param=param)

    async def _offload(self, param: str, work: Callable[[], RequestGrammar]) -> RequestGrammar:
        """Run `work` on the thread for grammars. A check that takes too long is left alone and ends
        by itself.
        """
        if self._waiting >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} grammars wait to be checked; try again later", retry_after_secs=1
            )
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._on_done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), CHECK_LIMIT_SECS)
        except asyncio.TimeoutError:
            raise bad(
                param, f"was not checked within {CHECK_LIMIT_SECS:g} s; simplify it, or try again"
            ) from None

    def _on_done(self, future: asyncio.Future[RequestGrammar]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # of a check that nothing waits for any more


def grammar_key(constraint: AnswerConstraint | None, rules: CallRules | None = None) -> bytes:
    """Equal arguments have equal keys; keys of JSON objects keep their order."""
    return hashlib.sha256(msgspec.json.encode((constraint, rules))).digest()


def refuse_constraint_with_tools(constraint: AnswerConstraint, choice: ToolChoice) -> None:
    """Raise for a constraint that says nothing of tool calls, and that these would break."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return
    if choice.is_forced:
        raise bad(
            constraint.param,
            f"and {choice.field} exclude each other: the answer is a call; leave one of them out",
        )
    raise UnsupportedParameter(
        f"{constraint.param} together with tools is not supported: an answer that follows a {constraint.kind.value} "
        "has no calls; send a JSON Schema, or tool_choice none",
        param=constraint.param,
    )


def make_grammar(
    constraint: AnswerConstraint, whitespace: str, markers: MarkerTokens
) -> RequestGrammar:
    """Make the text of a grammar and check it. Raises BadRequest or UnsupportedParameter."""
    param = constraint.param
    text = grammar_text(constraint, whitespace, markers)
    refuse_long_text(text, param)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text)
    if is_error:
        raise refusal(constraint, messages[0])
    # The check knows no tokenizer: it warns of the marker tokens of structural tags.
    warnings = [message for message in messages if "no tokenizer" not in message]
    ignored = ignored_keywords(warnings)
    return RequestGrammar(text, tuple(f"{param}:{keyword}" for keyword in ignored))


def make_call_grammar(
    rules: CallRules, answer: AnswerConstraint | None, whitespace: str, markers: MarkerTokens
) -> RequestGrammar:
    """Make the grammar of an answer with calls and check it, each schema first. Raises BadRequest."""
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
        arguments.append(constraint)
    if answer is not None:
        ignored += make_grammar(answer, whitespace, markers).ignored
    text = call_grammar(rules, arguments, answer, whitespace, markers)
    refuse_long_text(text, "tools")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text)
    if is_error:
        raise bad(
            "tools", f"cannot be enforced together: {short_message(messages[0])}; simplify them"
        )
    return RequestGrammar(text, tuple(ignored))


def refuse_long_text(text: str, param: str) -> None:
    """Raise BadRequest for a grammar that is too long."""
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise bad(
            param,
            f"makes a grammar of {size} bytes, at most {MAX_TEXT_BYTES} are accepted; simplify it",
        )


def grammar_text(constraint: AnswerConstraint, whitespace: str, markers: MarkerTokens) -> str:
    """Text of the constraint's grammar, not checked. Raises BadRequest or UnsupportedParameter."""
    param = constraint.param
    value = constraint.value
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return schema_grammar(constraint, whitespace)
        case ConstraintKind.REGEX:
            return regex_grammar(value, param)
        case ConstraintKind.CHOICE:
            return choice_grammar(value, param)
        case ConstraintKind.GRAMMAR:
            return ebnf_grammar(value, param)
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
    return "start: " + " | ".join(map(quote_text, choices))


def refusal(constraint: AnswerConstraint, message: str) -> EngineError:
    """The error for a constraint that llguidance refuses."""
    reason = short_message(message)
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


def grammar_fingerprint(config: EngineConfig) -> str:
    """Facts that decide which grammar a request gets, for P and D to compare."""
    if config.grammar == "off" or config.simulate is not None:
        return "off"
    return f"llguidance-{version('llguidance')}-{config.structured_whitespace}"
