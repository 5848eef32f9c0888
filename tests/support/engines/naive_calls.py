"""A naive model of the end of a chat that calls a tool (docs/guide/answer-ends.md), for `CALL_CHAIN`.

After each token it reads the whole text behind the reasoning again, with a regular expression for calls in hermes'
format. A call is complete with the brace that closes its object, or where the answer ends behind its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import regex

from tests.support.engines.local_engine import ReadAnswer
from tests.support.engines.naive_ends import FORCED_END, LONG, pair_cases, text_of
from tests.support.models.chain_model import (
    CALL,
    CALL_CHAIN,
    CALL_PARTS,
    END_CALL,
    END_THINK,
    EOS,
    IDS,
    THINK,
)
from tests.support.pairwise import Case, product

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "sum",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
        },
    },
}
HEAD = r'<tool_call>\n\{"name": "sum", "arguments": '
COMPLETE_CALL = rf"{HEAD}(\{{\"x\":7\}}|\{{\}})\}}(?:\n?</tool_call>)?"
BEGUN_CALL = rf"{HEAD}(\{{.*)"
ONE_CALL = rf'{HEAD}\{{"x":7\}}\}}\n</tool_call>'
CALLS_ALONE = rf"{ONE_CALL}(\n{ONE_CALL})*"
"""Answers that `tool_choice: required` allows."""
CALL_AXES: dict[str, tuple[Any, ...]] = {
    "end": ("c", "e", THINK),
    "parallel_tool_calls": (False, None),
    "tool_choice": (None, "required"),
    "ignore_eos": (None, True),
    "include_stop_str_in_output": (None, True),
    "min_tokens": (None, 2, 5, 8, 12),
    "max_tokens": (1, 3, 5, 6, 8, 9, LONG),
    "stop": (None, ("ph",), ("mm",), ("x",), ("ha ga", "pha")),
    "stop_token_ids": (
        None, (IDS["pha"],), (IDS[CALL],), (IDS[CALL_PARTS[2]],), (IDS[CALL_PARTS[4]],), (IDS[END_CALL],),
    ),
    "thinking_token_budget": (None, 0, 1),
}  # fmt: skip
"""Settings of chats whose answer is " alpha", a call and " gamma"; `end`: the last token of the prompt. Behind
`<think>` the call ends a reasoning, "ha bb".
"""


def call_cases(*, is_whole: bool = False) -> list[Case]:
    """Settings with every pair of values; `is_whole`: all combinations."""
    return product(CALL_AXES, _is_valid) if is_whole else pair_cases(CALL_AXES, _is_valid)


def _is_valid(case: Case) -> bool:
    is_limited = case["thinking_token_budget"] is not None
    reasons = case["end"] == THINK
    return (reasons or not is_limited) and (case["min_tokens"] or 0) <= case["max_tokens"]


def call_body(case: Case) -> dict[str, Any]:
    """The body of a chat with these settings."""
    settings = {key: value for key, value in case.items() if value is not None and key != "end"}
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "temperature": 0,
        "chat_template_kwargs": {"end": case["end"]},
        **settings,
    }


@dataclass
class ReadText:
    """Parts of a text behind the reasoning."""

    segments: list[str]
    """Content between complete calls; the last one is open, and may end within a call."""
    calls: list[tuple[str, str]]
    """Complete calls."""


def read_text(text: str) -> ReadText:
    segments = []
    calls = []
    start = 0
    for found in regex.finditer(COMPLETE_CALL, text):
        segments.append(text[start : found.start()])
        calls.append(("sum", found[1]))
        start = found.end()
    return ReadText([*segments, text[start:]], calls)


def open_content(text: str) -> str:
    """The content behind the last call, in which a stop text is looked for."""
    return read_text(text).segments[-1].partition(CALL)[0]


@dataclass
class NaiveCallAnswer:
    """An answer in the making."""

    case: Case
    output: list[str] = field(default_factory=list)
    text: str = ""
    """Text that is shown, behind the reasoning."""
    reasoning: str = ""
    forced: list[str] = field(default_factory=list)
    lead: bool = False
    """Newlines behind the reasoning come."""

    def run(self) -> ReadAnswer:
        self.reasons = self.case["end"] == THINK
        self.last = self.case["end"]
        if self.case["thinking_token_budget"] == 0:
            self.forced = list(FORCED_END)
        while True:
            content_before = open_content(self.text)
            token = self._draw()
            self.output.append(token)
            self.last = token
            end = self._end_of(token)
            is_hidden = end is not None and not self.case["include_stop_str_in_output"]
            if not (is_hidden and end == ("stop", IDS[token])):
                self._show(token)
            if self.case["parallel_tool_calls"] is False and read_text(self.text).calls:
                return self._finished("stop", None if end is None else end[1])
            found = self._stop_text(content_before)
            if found is not None:
                return self._finished("stop", found)
            if end is not None:
                return self._finished(*end)

    def _draw(self) -> str:
        if self.forced:
            return self.forced.pop(0)
        allowed = (name for name in CALL_CHAIN[self.last] if self._is_allowed(name))
        return next(allowed)

    def _is_allowed(self, name: str) -> bool:
        if self.case["tool_choice"] is None:
            return IDS[name] not in self._stop_ids() or len(self.output) >= self._least()
        if self.reasons:
            return name != "</s>"
        if name == "</s>":
            return regex.fullmatch(CALLS_ALONE, self.text) is not None
        pattern = ONE_CALL if self.case["parallel_tool_calls"] is False else CALLS_ALONE
        return regex.fullmatch(pattern, self.text + text_of(name), partial=True) is not None

    def _stop_ids(self) -> list[int]:
        ends = [] if self.case["ignore_eos"] else [EOS]
        return [*(self.case["stop_token_ids"] or ()), *ends]

    def _least(self) -> int:
        return int(self.case["min_tokens"] or 0)

    def _end_of(self, token: str) -> tuple[str, int | None] | None:
        """Reason and stop id, of the rank's conditions."""
        count = len(self.output)
        if IDS[token] in self._stop_ids() and count >= self._least():
            return "stop", IDS[token]
        if token == "</s>" and self.case["tool_choice"] is not None:
            return "stop", EOS
        return ("length", None) if count >= self.case["max_tokens"] else None

    def _show(self, token: str) -> None:
        if self.reasons and token == END_THINK:
            self.reasons = False
            self.lead = True
            self.reasoning = self.reasoning.rstrip("\n")
            return
        if self.reasons and token == CALL:
            self.reasons = False
        text = text_of(token)
        if self.reasons:
            self.reasoning += text
            if len(self.output) == self.case["thinking_token_budget"]:
                self.forced = list(FORCED_END)
            return
        if self.lead and text == "\n":
            return
        self.lead = False
        self.text += text

    def _stop_text(self, before: str) -> str | None:
        """The stop text that is complete with the last token; the text ends with it, or in front of it."""
        content = open_content(self.text)
        if len(self.output) <= self._least() or not content.startswith(before):
            return None
        for place in range(len(before) + 1, len(content) + 1):
            ends = [stop for stop in self.case["stop"] or () if content[:place].endswith(stop)]
            if ends:
                stop: str = max(ends, key=len)
                cut = 0 if self.case["include_stop_str_in_output"] else len(stop)
                self.text = self.text[: len(self.text) - len(content) + place - cut]
                return stop
        return None

    def _finished(self, finish: str, matched: int | str | None) -> ReadAnswer:
        found = read_text(self.text)
        *between, last = found.segments
        calls = found.calls
        is_complete = bool(calls)
        begun = regex.search(BEGUN_CALL, last, regex.DOTALL)
        if begun is not None:
            last = last[: begun.start()]
            calls = [*calls, ("sum", begun[1])]
            is_complete = is_complete or begun[1].endswith("}")
        # White space behind a call is part of the content only in front of other text.
        content = "".join(between) + (last if last.strip() else "")
        if self.case["end"] != THINK:
            # A text without context is decoded as transformers does: the first blank is dropped.
            content = content.removeprefix(" ")
        if finish == "stop" and is_complete:
            finish = "tool_calls"
        reasoning = self.reasoning.removeprefix(" ").removeprefix("\n")
        return ReadAnswer(content, reasoning, finish, matched, tuple(calls))


def naive_call_answer(case: Case) -> ReadAnswer:
    """The answer to `call_body`."""
    return NaiveCallAnswer(case).run()
