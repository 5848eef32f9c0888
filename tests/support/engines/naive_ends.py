"""A naive model of the end of an answer (docs/guide/answer-ends.md), for answers of the chain checkpoint.

It knows nothing of streams: after each token it looks at the whole answer so far. The rules of stop texts and
`min_tokens` are those of vLLM 0.33 (`check_stop_strings`, `check_stop`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import regex

from baton.server.text.answer_spec import Dialect
from tests.support.engines.local_engine import ReadAnswer
from tests.support.models.chain_model import CHAIN, END_THINK, EOS, IDS, THINK
from tests.support.pairwise import Case, pairs, product

GRAMMAR = " alpha beta"
OPEN_GRAMMAR = " alpha beta gamma( delta)?"
"""The model ends its answer where this one may end."""
LONG = 40
MOST_TRIES = 50
"""Random values for a pair that may exclude each other, as a `min_tokens` above the limit."""
_AXES: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (None, True),
    "include_stop_str_in_output": (None, True),
    "min_tokens": (None, 2, 3, 4, 8),
    "max_tokens": (1, 4, 7, LONG),
    "pattern": (None, GRAMMAR, OPEN_GRAMMAR),
}
TEXT_AXES: dict[str, tuple[Any, ...]] = {
    **_AXES,
    "end": ("o", "e"),
    "stop": (None, ("ha b",), ("ta",), (" ga", "mma"), ("mma</s>", "ta d")),
    "stop_token_ids": (None, (IDS["▁ga"],), (IDS["ta"],), (IDS["▁al"], EOS)),
    "skip_special_tokens": (None, False),
}
"""Settings of completions. Their answer is " alpha beta gamma", of seven tokens with its end; to the second prompt it
begins with an end token.
"""
CHAT_AXES: dict[str, tuple[Any, ...]] = {
    **_AXES,
    "stop": (None, ("ha b",), ("ta",), ("bb", "mma")),
    "stop_token_ids": (None, (IDS["▁ga"],), (IDS["ta"],), (IDS["</think>"],)),
    "thinking_token_budget": (None, 0, 1),
}
"""Settings of chats, whose answer reasons before: "ha bb"."""


def text_cases(*, is_whole: bool = False) -> list[Case]:
    """Settings with every pair of values; `is_whole`: all combinations."""
    return product(TEXT_AXES, _is_valid) if is_whole else pair_cases(TEXT_AXES, _is_valid)


def chat_cases(*, is_whole: bool = False) -> list[Case]:
    return product(CHAT_AXES, _is_valid) if is_whole else pair_cases(CHAT_AXES, _is_valid)


def pair_cases(axes: dict[str, tuple[Any, ...]], is_valid: Callable[[Case], bool]) -> list[Case]:
    """A case for each pair of values that no case before has, its other values at random: the same ones every time."""
    rng = random.Random(7)
    cases: list[Case] = []
    covered: set[object] = set()
    for (first, second), values in _value_pairs(axes):
        pair = ((first, values[0]), (second, values[1]))
        if pair in covered:
            continue
        for _ in range(MOST_TRIES):
            others = {name: rng.choice(choices) for name, choices in axes.items()}
            case = {**others, first: values[0], second: values[1]}
            if is_valid(case):
                cases.append(case)
                covered.update(pairs(case))
                break
    return cases


def _value_pairs(
    axes: dict[str, tuple[Any, ...]],
) -> Iterator[tuple[tuple[str, str], tuple[Any, Any]]]:
    for first, second in itertools.combinations(axes, 2):
        for values in itertools.product(axes[first], axes[second]):
            yield (first, second), values


def _is_valid(case: Case) -> bool:
    # No grammar of these may begin with an end token.
    is_followed = case["pattern"] is None or case.get("end") != "e"
    return is_followed and (case["min_tokens"] or 0) <= case["max_tokens"]


def settings_of(case: Case) -> dict[str, Any]:
    return {key: value for key, value in case.items() if value is not None and key != "end"}


FORCED_END = ("<0x0A>", END_THINK, "<0x0A>", "<0x0A>")
"""`\\n</think>\\n\\n`, as the tokenizer writes it."""
NAMES = {token: name for name, token in IDS.items()}
SHOWN = {"<0x0A>": "\n"}


def text_of(name: str, *, skips_special: bool = True) -> str:
    if name in ("<s>", "</s>", "<unk>") and skips_special:
        return ""
    return SHOWN.get(name, name.replace("▁", " "))


@dataclass
class NaiveAnswer:
    """An answer in the making."""

    settings: dict[str, Any]
    """Fields of a completion's or a chat's body, with `pattern` for its regular expression."""
    last: str
    """The token before."""
    reasons: bool
    """The answer begins within its reasoning."""
    output: list[str] = field(default_factory=list)
    content: str = ""
    """Of the tokens whose text is shown."""
    reasoning: str = ""
    forced: list[str] = field(default_factory=list)
    lead: bool = False
    """Newlines behind the reasoning come."""

    def run(self) -> ReadAnswer:
        if self.reasons and self.settings.get("thinking_token_budget") == 0:
            self.forced = list(FORCED_END)
        while True:
            before = self.content
            token = self._draw()
            self.output.append(token)
            self.last = token
            end = self._end_of(token)
            is_hidden = end is not None and not self.settings.get("include_stop_str_in_output")
            if not (is_hidden and end == ("stop", IDS[token])):
                self._show(token)
            found = self._stop_text(before)
            if found is not None:
                stop, place = found
                keeps = self.settings.get("include_stop_str_in_output")
                self.content = self.content[: place if keeps else place - len(stop)]
                return self._finished("stop", stop)
            if end is not None:
                return self._finished(*end)

    def _draw(self) -> str:
        if self.forced:
            return self.forced.pop(0)
        allowed = (name for name in CHAIN[self.last] if self._is_allowed(name))
        return next(allowed)

    def _is_allowed(self, name: str) -> bool:
        pattern = self.settings.get("pattern")
        if pattern is not None and not self.reasons:
            if name == "</s>":
                return regex.fullmatch(pattern, self.content) is not None
            longer = self.content + text_of(name)
            return regex.fullmatch(pattern, longer, partial=True) is not None
        is_stop = IDS[name] in self._stop_ids()
        return pattern is not None or not is_stop or len(self.output) >= self._least()

    def _stop_ids(self) -> list[int]:
        ends = [] if self.settings.get("ignore_eos") else [EOS]
        return [*self.settings.get("stop_token_ids", ()), *ends]

    def _least(self) -> int:
        return int(self.settings.get("min_tokens", 0))

    def _end_of(self, token: str) -> tuple[str, int | None] | None:
        """Reason and stop id, of the rank's conditions."""
        count = len(self.output)
        is_stop = IDS[token] in self._stop_ids() and count >= self._least()
        pattern = self.settings.get("pattern")
        if pattern is not None and not self.reasons and token == "</s>":
            return "stop", EOS
        if is_stop:
            return "stop", IDS[token]
        if pattern is not None and not self.reasons and token != END_THINK:
            whole = self.content + text_of(token)
            if regex.fullmatch(pattern, whole) and not self._goes_on(pattern, whole):
                return "stop", None
        return ("length", None) if count >= self.settings["max_tokens"] else None

    def _goes_on(self, pattern: str, text: str) -> bool:
        return any(regex.fullmatch(pattern, text + char, partial=True) for char in " adeglmt")

    def _show(self, token: str) -> None:
        if self.reasons and token == END_THINK:
            self.reasons = False
            self.lead = True
            self.reasoning = self.reasoning.rstrip("\n")
            return
        text = text_of(token, skips_special=self.settings.get("skip_special_tokens", True))
        if self.reasons:
            self.reasoning += text
            budget = self.settings.get("thinking_token_budget")
            if len(self.output) == budget:
                self.forced = list(FORCED_END)
            return
        if self.lead and text == "\n":
            return
        self.lead = False
        self.content += text

    def _stop_text(self, before: str) -> tuple[str, int] | None:
        """The stop text that is complete with the last token, and its end."""
        if len(self.output) <= self._least():
            return None
        for place in range(len(before) + 1, len(self.content) + 1):
            ends = [s for s in self.settings.get("stop", ()) if self.content[:place].endswith(s)]
            if ends:
                return max(ends, key=len), place
        return None

    def _finished(self, finish: str, matched: int | str | None) -> ReadAnswer:
        # A text without context is decoded as transformers does: the first blank is dropped. So is a newline in front.
        reasoning = self.reasoning.removeprefix(" ").removeprefix("\n")
        return ReadAnswer(self.content, reasoning, finish, matched)


def naive_answer(settings: dict[str, Any], prompt_end: str) -> ReadAnswer:
    """The answer to a prompt whose last token is `prompt_end`."""
    return NaiveAnswer(settings, prompt_end, prompt_end == THINK).run()


def api_body(api: Dialect, settings: dict[str, Any], end: str) -> dict[str, Any]:
    """The body of a request with these settings, whose prompt ends with the character `end`."""
    fields = {key: value for key, value in settings.items() if key != "pattern"}
    pattern = settings.get("pattern")
    if api is Dialect.GENERATE:
        names = {
            "max_tokens": "max_new_tokens",
            "min_tokens": "min_new_tokens",
            "include_stop_str_in_output": "no_stop_trim",
        }
        sampling = {names.get(key, key): value for key, value in fields.items()}
        if pattern is not None:
            sampling["regex"] = pattern
        return {"text": f"g{end}", "sampling_params": {"temperature": 0, **sampling}}
    if pattern is not None:
        fields["guided_regex"] = pattern
    if api is Dialect.CHAT:
        messages = [{"role": "user", "content": "hi"}]
        return {"messages": messages, "temperature": 0, **fields}
    return {"prompt": f"g{end}", "temperature": 0, **fields}


def prompt_end_of(api: Dialect, end: str) -> str:
    """The last token of the prompt of such a request."""
    return THINK if api is Dialect.CHAT else end
