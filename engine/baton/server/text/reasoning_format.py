"""Gates of answers: how a rank finds the end of an answer's reasoning, from the model's format.

P and D make the same gate of the same prompt; the markers are part of the fingerprint
(`AnswerFormat.canonical`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baton.sched.types.reasoning import (
    ReasoningGate,
    ReasoningMarker,
    ReasoningMessage,
    ReasoningPhase,
)
from baton.sched.types.request import SamplingParams
from baton.server.text.answer_format import AnswerFormat
from baton.server.text.tokenizer import Tokenizer

MAX_CONTEXT_TOKENS = 64
"""Longest end of a prompt that is looked at to read its answer, unless the answer continues it."""


def end_of_prompt(prompt: array[int], *, continues_prompt: bool) -> array[int]:
    """The part of a prompt that decides in which phase its answer begins.

    Args:
        continues_prompt: the message that the answer continues may have begun far in front.
    """
    return prompt if continues_prompt else prompt[-MAX_CONTEXT_TOKENS:]


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """Rules of a request for the reasoning of its answers."""

    is_read: bool = False
    """The reasoning is divided from what follows it."""
    continues_prompt: bool = False
    """The answer continues the prompt's last message."""
    has_tools: bool = False
    """The answer may call tools."""
    budget: int | None = None
    """Most tokens; None: no limit."""


NOT_READ = ReasoningRules()


class ReasoningFormat:
    """How the model's reasoning begins and ends, in tokens."""

    def __init__(
        self,
        answer_format: AnswerFormat,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        has_grammars: bool,
    ) -> None:
        """
        Args:
            vocab_size: ids that the model knows.
            has_grammars: the ranks can restrict an answer's tokens.
        """
        self._format = answer_format
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._has_grammars = has_grammars
        self._begins = tuple(self._markers("reasoning_begin"))
        self._ends = tuple(self._markers("reasoning_end"))
        calls = self._markers("call_begin")
        self._call_ids = tuple(marker.ids[0] for marker in calls if not marker.text)
        self._header = self._encode(answer_format.content_header)
        self._forced_end = self._without_added_blanks(answer_format.forced_reasoning_end)
        self._message = self._read_message(answer_format.reasoning_message)

    def can_be_limited(self, *, has_tools: bool, continues_prompt: bool, has_grammar: bool) -> bool:
        """True if the reasoning of such an answer can be ended at its limit."""
        # A grammar with calls has the messages of the reasoning in itself.
        starts_with_grammar = has_grammar and (has_tools or continues_prompt)
        has_ends = bool(self._ends) or (self._message is not None and not starts_with_grammar)
        return self._has_grammars and has_ends and bool(self._forced_end)

    def add_gate(
        self, params: SamplingParams, prompt: array[int], rules: ReasoningRules
    ) -> SamplingParams:
        """The parameters of answers to a prompt, with the gate if the rank needs it."""
        is_needed = bool(params.grammar) or rules.budget is not None
        if not is_needed or not rules.is_read:
            return params
        gate = self.make_gate(prompt, rules)
        if gate is None:
            return params
        if not params.grammar:
            gate = replace(gate, lead_newlines=None)
        return replace(params, reasoning=gate)

    def make_gate(self, prompt: array[int], rules: ReasoningRules) -> ReasoningGate | None:
        """The gate of an answer to this prompt; None: it has no reasoning in front."""
        if self._header:
            if rules.budget is None and (rules.has_tools or rules.continues_prompt):
                return None
            return self._channel_gate(prompt, rules)
        if not self._ends:
            return None
        end = end_of_prompt(prompt, continues_prompt=rules.continues_prompt)
        phase, has_text = self._format.reasoning_start(self._tokenizer, end)
        if phase is ReasoningPhase.CONTENT:
            return None
        return ReasoningGate(
            start=phase,
            has_text=has_text,
            begins=self._begins,
            ends=self._ends,
            call_ids=self._call_ids,
            is_ended_by_calls=rules.has_tools,
            lead_newlines=self._format.lead_newlines,
            budget=rules.budget,
            forced_end=() if rules.budget is None else self._forced_end,
        )

    def _channel_gate(self, prompt: array[int], rules: ReasoningRules) -> ReasoningGate:
        """All messages in front of that with the content are passed over."""
        gate = ReasoningGate(start=ReasoningPhase.INSIDE, ends=(ReasoningMarker(self._header),))
        if rules.budget is None or self._message is None:
            return gate
        forced_end = self._forced_end
        if rules.has_tools:
            # The message behind the reasoning may be a call: its header is the model's.
            forced_end = forced_end[: -len(self._header)]
        message = self._message
        end = end_of_prompt(prompt, continues_prompt=rules.continues_prompt)
        if _ends_inside(message, end):
            message = replace(message, starts_inside=True)
        return replace(gate, budget=rules.budget, forced_end=forced_end, message=message)

    def _read_message(self, marks: tuple[str, list[str]] | None) -> ReasoningMessage | None:
        if marks is None:
            return None
        header, ends = marks
        message = ReasoningMessage(self._encode(header), tuple(map(self._encode, ends)))
        return message if message.header and all(message.ends) else None

    def _markers(self, role: str) -> Iterator[ReasoningMarker]:
        for marker in self._format.markers:
            if marker.role != role:
                continue
            if marker.token_id is None:
                yield ReasoningMarker(self._encode(marker.text), marker.text)
            elif marker.token_id < self._vocab_size:
                yield ReasoningMarker((marker.token_id,))

    def _without_added_blanks(self, text: str | None) -> tuple[int, ...]:
        """Tokens of a text within an answer: SentencePiece's tokenizers write a blank in front of
        what they take for the beginning of a text.
        """
        ids = []
        rest = b"" if text is None else text.encode()
        for token in self._encode(text):
            token_bytes = self._tokenizer.token_bytes(token)
            if token_bytes == b" " and not rest.startswith(b" "):
                continue
            ids.append(token)
            rest = rest[len(token_bytes) :]
        return tuple(ids)

    def _encode(self, text: str | None) -> tuple[int, ...]:
        """Tokens of a text; none where the model lacks one of them."""
        if text is None:
            return ()
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tuple(ids) if max(ids, default=0) < self._vocab_size else ()


def _ends_inside(message: ReasoningMessage, prompt: array[int]) -> bool:
    """True if a prompt ends within the text of such a message."""
    for end in range(len(prompt), 0, -1):
        if _stands_before(message.header, prompt, end):
            return True
        if any(_stands_before(ids, prompt, end) for ids in message.ends):
            return False
    return False


def _stands_before(ids: tuple[int, ...], prompt: array[int], end: int) -> bool:
    """True if these tokens stand directly in front of a position."""
    start = end - len(ids)
    return start >= 0 and tuple(prompt[start:end]) == ids
