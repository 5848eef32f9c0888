"""Responses in OpenAI's two formats, streamed and whole. See docs/protocol.md §6 for the stream's rules.

A format is fed deltas in order: `event(delta)` for a stream, `take(delta)` and then `whole()` otherwise.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.server.response.generation import ChoiceState, Generation, TextDelta, TokenLogprobs

encode_json = msgspec.json.Encoder().encode


ID_PREFIXES = ("chatcmpl-", "cmpl-", "gnt-")
"""Prefixes of response ids: of the two formats here, and of the router's ids for /generate."""


def plain_id(request_id: str) -> str:
    """Return a request's id without the prefix of an API: `x-request-id: ID` is answered with `"id": "chatcmpl-ID"`."""
    prefix = next((p for p in ID_PREFIXES if request_id.startswith(p)), "")
    return request_id.removeprefix(prefix)


def spellings(request_id: str) -> list[str]:
    """Ids that name the same request: this one first, then those with another prefix of an API or none."""
    plain = plain_id(request_id)
    return list(dict.fromkeys((request_id, plain, *(prefix + plain for prefix in ID_PREFIXES))))


def sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(payload) + b"\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


@dataclass(slots=True)
class Answer:
    """Text and tokens of one item so far, for a whole response."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)

    def take(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)


class ResponseFormat(ABC):
    """Response of one generation in the form of an endpoint."""

    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        self.generation = generation
        self.id = generation.accepted.rid or request_id
        self._accepted = generation.accepted
        self._tokenizer = generation.tokenizer
        self._answers = [Answer() for _ in generation.tracks]

    def take(self, delta: TextDelta) -> None:
        self._answers[delta.item.index].take(delta)

    @abstractmethod
    def event(self, delta: TextDelta) -> bytes:
        """SSE bytes for this delta; empty when there is nothing to show (text held back)."""

    def end(self) -> bytes:
        """Events after the last delta, before [DONE]."""
        return b""

    @abstractmethod
    def whole(self) -> Any:
        """The response of a request without `stream`."""


class _OpenAiFormat(ResponseFormat):
    """Common part of chat and completion responses."""

    id_prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        # A client's rid is the response's id; otherwise the request id, so that logs of all hops meet (matches vLLM).
        # The router's ids carry the prefix already; a client's x-request-id usually does not.
        named = (
            request_id
            if request_id.startswith(f"{self.id_prefix}-")
            else f"{self.id_prefix}-{request_id}"
        )
        super().__init__(generation, named, model)
        self._model = model

    def event(self, delta: TextDelta) -> bytes:
        track = delta.item
        first = not track.seen
        if not (first or self._shows(delta)):
            return b""
        track.seen = True
        return self._events(delta, first)

    def _shows(self, delta: TextDelta) -> bool:
        return bool(
            delta.text
            or delta.finish
            or delta.logprobs
            or (self._accepted.return_token_ids and delta.tokens)
        )

    @abstractmethod
    def _events(self, delta: TextDelta, first: bool) -> bytes:
        """Stream events of one delta; `first`: nothing of this choice was sent yet."""

    def _delta_event(self, delta: TextDelta, shown: dict[str, Any]) -> bytes:
        track = delta.item
        choice: dict[str, Any] = {
            "index": track.index,
            **shown,
            "logprobs": None if delta.logprobs is None else self._logprobs(track, delta.logprobs),
            "finish_reason": delta.finish,
        }
        if self._accepted.return_token_ids:
            choice["token_ids"] = delta.tokens
        if delta.finish:
            choice["matched_stop"] = track.matched_stop
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._response(self.chunk_object, [choice])
        if self._accepted.continuous_usage:
            chunk["usage"] = usage(self.generation)
        elif self._accepted.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def end(self) -> bytes:
        if not self._accepted.include_usage:
            return b""
        return sse(self._response(self.chunk_object, []) | {"usage": usage(self.generation)})

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(t, a) for t, a in zip(self.generation.tracks, self._answers, strict=True)
        ]
        return self._response(self.object, choices) | {"usage": usage(self.generation)}

    def _response(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.generation.created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, track: ChoiceState, answer: Answer) -> dict[str, Any]:
        """Entry of `choices` in the whole answer."""
        choice: dict[str, Any] = {
            "index": track.index,
            **self._message(track, "".join(answer.text)),
            "logprobs": self._logprobs(track, answer.logprobs)
            if self._accepted.logprobs >= 0
            else None,
            "finish_reason": track.finish,
            "matched_stop": track.matched_stop,
        }
        if self._accepted.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice

    @abstractmethod
    def _message(self, track: ChoiceState, text: str) -> dict[str, Any]:
        """Field of a choice that holds its whole text."""

    @abstractmethod
    def _logprobs(self, track: ChoiceState, rows: TokenLogprobs) -> dict[str, Any]:
        """Logprobs of the next tokens of a choice."""


class ChatFormat(_OpenAiFormat):
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _events(self, delta: TextDelta, first: bool) -> bytes:
        out = b""
        if first:
            role = {"role": "assistant", "content": ""}
            out = self._chunk(
                {"index": delta.item.index, "delta": role, "logprobs": None, "finish_reason": None}
            )
        if not self._shows(delta):
            return out
        return out + self._delta_event(
            delta, {"delta": {"content": delta.text} if delta.text or not delta.finish else {}}
        )

    def _message(self, track: ChoiceState, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, track: ChoiceState, rows: TokenLogprobs) -> dict[str, Any]:
        """Make one object per token."""
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(i, p) for i, p in top]}
            for token, logprob, top in zip(rows.ids, rows.chosen, rows.top, strict=True)
        ]
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": finite_logprob(logprob),
            "bytes": list(raw),
        }


class CompletionFormat(_OpenAiFormat):
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        super().__init__(generation, request_id, model)
        self._offsets = [TextOffsets(len(self._echo(track))) for track in generation.tracks]
        if self._accepted.resume is not None:
            for offsets in self._offsets:
                self._place(offsets, self._accepted.resume.ids)

    def _echo(self, track: ChoiceState) -> str:
        return self._accepted.echo[track.item.prompt_index] if self._accepted.echo else ""

    def _events(self, delta: TextDelta, first: bool) -> bytes:
        track = delta.item
        text = self._echo(track) + delta.text if first else delta.text
        if first and not (
            text or delta.finish or delta.logprobs or self._accepted.return_token_ids
        ):
            track.seen = False
            return b""
        return self._delta_event(delta, {"text": text})

    def _message(self, track: ChoiceState, text: str) -> dict[str, Any]:
        return {"text": self._echo(track) + text}

    def _logprobs(self, track: ChoiceState, rows: TokenLogprobs) -> dict[str, Any]:
        """Make columns; `text_offset` counts on from the tokens of earlier events."""
        top = [self._top_entries(row) for row in rows.top]
        return {
            "tokens": [self._tokenizer.token_text(i) for i in rows.ids],
            "token_logprobs": [finite_logprob(p) for p in rows.chosen],
            "top_logprobs": top if self._accepted.logprobs > 0 else None,
            "text_offset": self._place(self._offsets[track.index], rows.ids),
        }

    def _place(self, offsets: TextOffsets, ids: Iterable[int]) -> list[int]:
        """Offsets of the next tokens of a choice in its text."""
        return [
            offsets.place(b"" if self._is_skipped(i) else self._tokenizer.token_bytes(i))
            for i in ids
        ]

    def _is_skipped(self, token_id: int) -> bool:
        """A special token that the text leaves out."""
        if not self._accepted.text.skip_special_tokens:
            return False
        decode = self._tokenizer.decode
        return not decode([token_id]) and bool(decode([token_id], skip_special_tokens=False))

    def _top_entries(self, row: list[tuple[int, float]]) -> dict[str, float]:
        """Logprobs of a position's alternatives by text, or by bytes where another has the text already."""
        entries: dict[str, float] = {}
        for token_id, logprob in row:
            raw = self._tokenizer.token_bytes(token_id)
            key = token_key(raw)
            key = bytes_key(raw) if key in entries else key
            entries.setdefault(key, finite_logprob(logprob))
        return entries


class TextOffsets:
    """Places of consecutive tokens in the text that their bytes make, counted in characters.

    All tokens that are parts of one character have its place. Bytes that become no character count as the U+FFFD that
    the text has for them.
    """

    __slots__ = ("_chars", "_decoder")

    def __init__(self, start: int) -> None:
        self._chars = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, raw: bytes) -> int:
        """Place of the next token."""
        if raw and not _is_continuation(raw[0]):  # what is before it is complete, or never will be
            self._chars += len(self._decoder.decode(b"", final=True))
        place = self._chars
        self._chars += len(self._decoder.decode(raw))
        return place


def _is_continuation(byte: int) -> bool:
    """The byte goes on with a character in UTF-8 (RFC 3629: 10xxxxxx)."""
    return byte & 0xC0 == 0x80


def token_key(raw: bytes) -> str:
    """Key of a token in `top_logprobs`: its text, or its bytes where they are no text alone."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return bytes_key(raw)


def bytes_key(raw: bytes) -> str:
    """OpenAI's spelling of a token that is part of a character: `bytes:\\xf0\\x9f`."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite_logprob(value: float) -> float:
    """JSON has no -inf; OpenAI writes -9999.0 for an impossible token."""
    return max(value, -9999.0)
