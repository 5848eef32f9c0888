"""Beginning and end of an answer's reasoning, from the answer's tokens.

    UNDECIDED → INSIDE → BEHIND → CONTENT
        └───────────────────────────┘

* UNDECIDED: white space, and the beginning of a begin marker, decide nothing;
* INSIDE: ends with an end marker; in answers that may call tools, also with a call's begin marker,
  which belongs to the answer already. A reasoning that has reached its limit is ended by force;
  Where the reasoning is messages (gpt-oss), the messages in front of the content are INSIDE, and
  only the text of those with reasoning counts and is ended at the limit;
* BEHIND: tokens of newlines alone belong to neither side, up to the number that models write. A
  begin marker begins a second block;
* CONTENT: markers are text.

These are the rules of the text layer, which reads the same answer (`ReasoningReader` of
engine/text/src/stream/reasoning/reader.rs). Deterministic: the state depends on the gate and the
tokens alone.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Callable, Iterable

from baton.sched.types.reasoning import (
    ReasoningGate,
    ReasoningMarker,
    ReasoningMessage,
    ReasoningPhase,
)


class TokenPlace(enum.Enum):
    """Part of an answer that a token belongs to."""

    REASONING = "reasoning"
    """The reasoning, its markers, or the newlines behind them."""
    ANSWER = "answer"


class ReasoningTracker:
    def __init__(self, gate: ReasoningGate, token_bytes: Callable[[int], bytes]) -> None:
        self.phase = gate.start
        self.lead_newlines = gate.lead_newlines
        """Behind: so many further newlines are no part of the answer; None: any number."""
        self.has_overrun = False
        """The token with the end of a marker holds text of the answer too."""
        self._gate = gate
        self._token_bytes = token_bytes
        self._head = b""
        """Undecided: the answer so far."""
        self._head_ids: list[int] = []
        """Undecided: its tokens without white space in front."""
        self._is_blank = not gate.has_text
        """Inside: there is only white space yet."""
        self._tail = b""
        """Inside: end of the text, where an end marker is looked for."""
        self._recent_ids: list[int] = []
        """Inside: the last tokens, likewise."""
        self._token_count = 0
        """Tokens of the reasoning, without its markers and its forced end."""
        self._forced_count: int | None = None
        """Tokens of the forced end so far; None: the reasoning has not reached its limit."""
        self._end_texts = [marker.text.encode() for marker in gate.ends if marker.text]
        self._longest_end_text = max(map(len, self._end_texts), default=0)
        self._end_ids = [marker.ids for marker in gate.ends if not marker.text]
        self._begin_ids = [marker.ids for marker in gate.begins if not marker.text]
        self._message = gate.message
        self._is_in_message = gate.message is not None and gate.message.starts_inside
        """Inside: the next token is text of a message of reasoning, or ends it."""
        message_ids = [] if gate.message is None else [gate.message.header, *gate.message.ends]
        self._longest_ids = max(map(len, [*self._end_ids, *message_ids]), default=0)
        if self.phase is ReasoningPhase.INSIDE and (self._message is None or self._is_in_message):
            self._check_budget()

    def advance(self, token: int) -> TokenPlace:
        """Take over the answer's next token."""
        match self.phase:
            case ReasoningPhase.UNDECIDED:
                return self._advance_undecided(token)
            case ReasoningPhase.INSIDE:
                return self._advance_inside(token)
            case ReasoningPhase.BEHIND:
                return self._advance_behind(token)
            case ReasoningPhase.CONTENT:
                return TokenPlace.ANSWER

    def fork(self) -> ReasoningTracker:
        """A copy that goes on by itself."""
        copied = copy.copy(self)
        copied._head_ids = self._head_ids.copy()
        copied._recent_ids = self._recent_ids.copy()
        return copied

    @property
    def forced_token(self) -> int | None:
        """The only token that may come next."""
        last = self._last_marker_token()
        return self._limit_token() if last is None else last

    def _last_marker_token(self) -> int | None:
        """Inside: the last token of an end marker whose other tokens are there.

        gpt-oss writes words between the two, which would hide the marker.
        """
        if self.phase is ReasoningPhase.INSIDE:
            for ids in self._end_ids:
                if len(ids) > 1 and tuple(self._recent_ids[1 - len(ids) :]) == ids[:-1]:
                    return ids[-1]
        return None

    def _limit_token(self) -> int | None:
        """The next token of the end of a reasoning at its limit."""
        is_over = self.phase not in (ReasoningPhase.INSIDE, ReasoningPhase.BEHIND)
        forced_end = self._gate.forced_end
        if is_over or self._forced_count is None or self._forced_count >= len(forced_end):
            return None
        return forced_end[self._forced_count]

    @property
    def is_at_limit(self) -> bool:
        """The reasoning has as many tokens as it may have."""
        return self._forced_count is not None

    @property
    def second_header_id(self) -> int | None:
        """The token that would make the header of another message of reasoning, behind the limit.

        Headers of all messages begin alike.
        """
        message = self._message
        if message is None or self._forced_count is None or self.phase is not ReasoningPhase.INSIDE:
            return None
        shared = _count_shared(message.header, self._end_ids)
        return message.header[shared] if self._has_recent(message.header[:shared]) else None

    def begin_ids(self) -> list[int]:
        """Undecided: tokens with which a begin marker begins, or goes on."""
        done = len(self._head_ids)
        return [
            marker.ids[done]
            for marker in self._gate.begins
            if done < len(marker.ids) and list(marker.ids[:done]) == self._head_ids
        ]

    def open_ends(self) -> list[bytes]:
        """Inside: what is missing of the end markers that the text may be in the middle of."""
        return [
            text[length:]
            for text in self._end_texts
            for length in range(1, len(text))
            if self._tail.endswith(text[:length])
        ]

    def _advance_undecided(self, token: int) -> TokenPlace:
        self._head += self._token_bytes(token)
        head = self._head.lstrip()
        if not head:
            return TokenPlace.ANSWER
        self._head_ids.append(token)
        for marker in self._gate.begins:
            if self._has_begun(marker, head):
                self._begin_block(head[len(marker.text) :] if marker.text else b"")
                return TokenPlace.REASONING
        if not any(self._may_begin(marker, head) for marker in self._gate.begins):
            self.phase = ReasoningPhase.CONTENT
        return TokenPlace.ANSWER

    def _has_begun(self, marker: ReasoningMarker, head: bytes) -> bool:
        if marker.text:
            return head.startswith(marker.text.encode())
        return list(marker.ids) == self._head_ids

    def _may_begin(self, marker: ReasoningMarker, head: bytes) -> bool:
        if marker.text:
            return marker.text.encode().startswith(head)
        return list(marker.ids[: len(self._head_ids)]) == self._head_ids

    def _begin_block(self, text: bytes) -> None:
        """`text`: the beginning of the reasoning that came with the marker."""
        self.phase = ReasoningPhase.INSIDE
        self._is_blank = True
        self._tail = b""
        self._recent_ids = []
        self._append_text(text)
        self._check_budget()

    def _advance_inside(self, token: int) -> TokenPlace:
        if token == self._limit_token():
            self._count_forced()
        elif self._begins_call(token):
            self.phase = ReasoningPhase.CONTENT
            return TokenPlace.ANSWER
        if self._ends_with(token):
            self._end_block(b"")
            return TokenPlace.REASONING
        repeats_marker = self._is_blank and (token,) in self._begin_ids
        if not repeats_marker:
            self._append_text(self._token_bytes(token))
        behind = self._find_end()
        if behind is not None:
            self._end_block(behind)
        elif self._message is not None:
            self._advance_message(self._message)
        elif self._forced_count is None:
            self._count_token()
        return TokenPlace.REASONING

    def _advance_message(self, message: ReasoningMessage) -> None:
        if not self._is_in_message:
            self._is_in_message = self._has_recent(message.header)
            if self._is_in_message:
                self._check_budget()
        elif any(self._has_recent(ids) for ids in message.ends):
            self._is_in_message = False
        elif self._forced_count is None:
            self._count_token()

    def _begins_call(self, token: int) -> bool:
        """True if the token begins a call that ends the reasoning."""
        gate = self._gate
        return gate.is_ended_by_calls and token in gate.call_ids

    def _ends_with(self, token: int) -> bool:
        """True if the token is the last one of an end marker."""
        self._recent_ids.append(token)
        del self._recent_ids[: -self._longest_ids or None]
        return any(self._has_recent(ids) for ids in self._end_ids)

    def _has_recent(self, ids: tuple[int, ...]) -> bool:
        return tuple(self._recent_ids[-len(ids) :]) == ids

    def _append_text(self, text: bytes) -> None:
        if not text:
            return
        self._is_blank = self._is_blank and not text.strip()
        if self._end_texts:
            # All but the new text was searched before.
            kept = self._tail[-(self._longest_end_text - 1) :]
            self._tail = kept + text

    def _find_end(self) -> bytes | None:
        """The text behind the first end marker that is recognized by its characters."""
        places = [(self._tail.find(text), text) for text in self._end_texts if text in self._tail]
        if not places:
            return None
        start, text = min(places)
        return self._tail[start + len(text) :]

    def _end_block(self, behind: bytes) -> None:
        """`behind`: text that came with the marker's last token."""
        self.phase = ReasoningPhase.BEHIND
        self.lead_newlines = self._gate.lead_newlines
        if behind.strip(b"\n"):
            self.phase = ReasoningPhase.CONTENT
            self.has_overrun = True

    def _advance_behind(self, token: int) -> TokenPlace:
        text = self._token_bytes(token)
        # Of a free answer the text layer drops carriage returns, too.
        newlines = b"\r\n" if self.lead_newlines is None else b"\n"
        is_newlines = bool(text) and not text.strip(newlines)
        if token == self._limit_token():
            self._count_forced()
            if is_newlines and self.lead_newlines is not None:
                # The text layer does not know the limit: these are newlines like others to it.
                self.lead_newlines = max(self.lead_newlines - len(text), 0)
            return TokenPlace.REASONING
        if (token,) in self._begin_ids:
            self._begin_block(b"")
            return TokenPlace.REASONING
        if is_newlines and self._count_lead_newlines(len(text)):
            return TokenPlace.REASONING
        self.phase = ReasoningPhase.CONTENT
        return TokenPlace.ANSWER

    def _count_lead_newlines(self, newlines: int) -> bool:
        """Count newlines in front of the answer. Returns False if these are part of it."""
        if self.lead_newlines is None:
            return True
        if newlines > self.lead_newlines:
            return False
        self.lead_newlines -= newlines
        return True

    def _count_token(self) -> None:
        self._token_count += 1
        self._check_budget()

    def _check_budget(self) -> None:
        budget = self._gate.budget
        if budget is not None and self._token_count >= budget:
            self._forced_count = 0

    def _count_forced(self) -> None:
        assert self._forced_count is not None, "a token is forced only at the limit"
        self._forced_count += 1


def _count_shared(header: tuple[int, ...], others: list[tuple[int, ...]]) -> int:
    """Tokens with which `header` and the first of the others begin alike."""
    pairs = zip(header, others[0], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def tokens_of_answer(
    gate: ReasoningGate, token_bytes: Callable[[int], bytes], output: Iterable[int]
) -> list[int]:
    """The tokens behind the reasoning: the end of `output`. Of an undecided output, none."""
    tracker = ReasoningTracker(gate, token_bytes)
    answer: list[int] = []
    for token in output:
        if tracker.advance(token) is TokenPlace.ANSWER:
            answer.append(token)
        else:
            answer.clear()
    return [] if tracker.phase is ReasoningPhase.UNDECIDED else answer
