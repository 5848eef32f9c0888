"""The grammar of a request: its text, checked, and names of what has no effect.

1. a request without fields that constrain its answer, and without tools that must be called as
   their schemas say, has none;
2. else a process beside the front reads these fields, makes the text of the grammar and checks it
   (`checks`), because that takes up to seconds for large schemas; results of the latest checks are
   kept;
3. the text goes to the rank as `SamplingParams.grammar`. P and D make it of the same body, by the
   same options, which are part of the fingerprint.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

import msgspec

from baton.config import EngineConfig
from baton.errors import UnsupportedParameter
from baton.server.fields import encode_exact
from baton.server.request.grammar.checks.lane import CheckOrder
from baton.server.request.grammar.checks.messages import CheckSetup
from baton.server.request.grammar.checks.queue import CheckQueue
from baton.server.request.grammar.constraint import read_constraint, stated_fields
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import (
    NO_GRAMMAR,
    GrammarCheck,
    RequestGrammar,
    free_answer,
)
from baton.server.request.grammar.tool_calls.call_rules import CallRules
from baton.server.request.tools import ToolChoice

GRAMMAR_REVISION = 2
"""Counts changes of the grammars that this package makes of the same request."""
CHECK_CLIENT: ContextVar[str] = ContextVar("CHECK_CLIENT", default="")
"""Client whose request this task reads: its grammar takes turns with those of others. A server sets
it for each request; between it and this module lie the readers of all forms of requests, which have
no use for it.
"""
KEPT_CHECKS = 1024
KEPT_CHARS = 16 * 2**20
"""Length of all their texts."""


class GrammarReader:
    """Not thread-safe: called on the event loop."""

    def __init__(self, config: EngineConfig, markers: MarkerTokens) -> None:
        self._config = config
        self.checks = CheckQueue(
            lambda: CheckSetup(config.structured_whitespace, markers.ids),
            config.grammar_check_secs_per_minute,
            lambda digest: self._kept.get(digest),
        )
        self._kept: OrderedDict[bytes, RequestGrammar] = OrderedDict()
        self._kept_chars = 0

    async def read(
        self, body: Mapping[str, Any], prefix: str = "", *, is_native: bool = False
    ) -> RequestGrammar:
        """The grammar of an answer without tool calls. Raises BadRequest, UnsupportedParameter or
        QueueFull.

        Args:
            prefix: stands before the names of fields in errors.
            is_native: `body` is /generate's `sampling_params`.
        """
        stated = stated_fields(body, is_native=is_native)
        if not stated:
            return NO_GRAMMAR
        if self._reason_where_off is not None:
            self._refuse_constraint_where_off(stated, prefix, is_native=is_native)
            return NO_GRAMMAR
        return await self._check(GrammarCheck(stated, prefix, is_native))

    async def read_with_tools(
        self, body: Mapping[str, Any], choice: ToolChoice, family: str | None, *, is_parallel: bool
    ) -> RequestGrammar:
        """The grammar of an answer that may call tools, or must. Raises BadRequest,
        UnsupportedParameter or QueueFull.

        Args:
            family: format in which the model writes calls; None: it is unknown.
            is_parallel: the answer may have several calls.
        """
        if family is None:
            raise UnsupportedParameter(
                "this engine does not know how the model writes tool calls; start it with "
                "--tool-parser NAME, or leave "
                "tools out",
                param="tools",
            )
        stated = stated_fields(body)
        rules = CallRules(family, choice.tools, choice.mode, is_parallel)
        if self._reason_where_off is not None:
            self._refuse_constraint_where_off(stated, "", is_native=False)
            if choice.is_forced:
                self._refuse_where_off(choice.field)
            return free_answer(rules)
        if not stated and not choice.is_forced and not choice.strict_tools:
            return NO_GRAMMAR
        return await self._check(GrammarCheck(stated, rules=rules, choice_field=choice.field))

    async def _check(self, check: GrammarCheck) -> RequestGrammar:
        """The grammar of a check, or the one that an equal check gave."""
        request = encode_exact(check)
        key = hashlib.sha256(request).digest()
        kept = self._kept.get(key)
        if kept is None:
            order = CheckOrder(request, key, check.param, CHECK_CLIENT.get())
            kept = await self.checks.check(order)
            self._keep(key, kept)
        else:
            self._kept.move_to_end(key)
        return kept

    def _keep(self, key: bytes, grammar: RequestGrammar) -> None:
        if key in self._kept:  # an equal check has ended meanwhile
            return
        self._kept[key] = grammar
        self._kept_chars += len(grammar.text)
        while len(self._kept) > KEPT_CHECKS or self._kept_chars > KEPT_CHARS:
            _, oldest = self._kept.popitem(last=False)
            self._kept_chars -= len(oldest.text)

    def close(self) -> None:
        self.checks.close()

    @property
    def _reason_where_off(self) -> str | None:
        """Why this engine follows no grammars; None: it does."""
        if self._config.grammar == "off":
            return "this engine was started with --grammar off"
        if self._config.simulate is not None:
            return "a simulated engine has no model that could follow a grammar"
        return None

    def _refuse_constraint_where_off(
        self, stated: Mapping[str, Any], prefix: str, *, is_native: bool
    ) -> None:
        """Raise UnsupportedParameter for fields that constrain the answer."""
        for name, value in stated.items():
            if isinstance(value, msgspec.Raw):  # too large for {"type": "text"}
                self._refuse_where_off(prefix + name)
        constraint = read_constraint(stated, prefix, is_native=is_native)
        if constraint is not None:
            self._refuse_where_off(constraint.param)

    def _refuse_where_off(self, param: str) -> None:
        reason = self._reason_where_off
        if reason is not None:
            raise UnsupportedParameter(f"{reason}; send the request without {param}", param=param)


def grammar_fingerprint(config: EngineConfig) -> str:
    """Facts that decide which grammar a request gets, for P and D to compare."""
    if config.grammar == "off" or config.simulate is not None:
        return "off"
    return f"llguidance-{version('llguidance')}-{GRAMMAR_REVISION}-{config.structured_whitespace}"
