"""Responses in OpenAI's two formats, streamed and whole. See docs/protocol.md §6 for the stream's rules.

A format is fed deltas in order: `event(delta)` for a stream, `take(delta)` and then `whole()` otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from baton.server.http.generation import ChoiceState, Generation, TextDelta, TokenLogprobs
from baton.server.text.tokenizer import Tokenizer

encode_json = msgspec.json.Encoder().encode


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


class Answer:
    """Text and tokens of one item so far, for a whole response."""

    __slots__ = ("logprobs", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs = TokenLogprobs()

    def take(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)


class _Format(ABC):
    """Common part of chat and completion responses."""

    id_prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        self.generation = generation
        self._accepted = generation.accepted
        self._tokenizer = generation.tokenizer
        self._model = model
        # A client's rid is the response's id; otherwise the request id, so that logs of all hops meet (matches vLLM).
        # The router's ids carry the prefix already; a client's x-request-id usually does not.
        named = request_id if request_id.startswith(f"{self.id_prefix}-") else f"{self.id_prefix}-{request_id}"
        self.id = self._accepted.rid or named
        self._created = generation.created
        self._answers = [Answer() for _ in generation.tracks]

    def take(self, delta: TextDelta) -> None:
        self._answers[delta.item.index].take(delta)

    def event(self, delta: TextDelta) -> bytes:
        """SSE bytes for this delta; empty when there is nothing to show (text held back)."""
        track = delta.item
        first = not track.seen
        if not (
            delta.text or delta.finish or delta.logprobs or first or (self._accepted.return_token_ids and delta.tokens)
        ):
            return b""
        track.seen = True
        return self._events(delta, first)

    @abstractmethod
    def _events(self, delta: TextDelta, first: bool) -> bytes:
        """Stream events of one delta; `first`: nothing of this choice was sent yet."""

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {
            "id": self.id,
            "object": self.chunk_object,
            "created": self._created,
            "model": self._model,
            "choices": [choice],
        }
        if self._accepted.continuous_usage:
            chunk["usage"] = usage(self.generation)
        elif self._accepted.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def end(self) -> bytes:
        """Events after the last delta, before [DONE]."""
        if not self._accepted.include_usage:
            return b""
        return sse(
            {
                "id": self.id,
                "object": self.chunk_object,
                "created": self._created,
                "model": self._model,
                "choices": [],
                "usage": usage(self.generation),
            }
        )

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(t, a) for t, a in zip(self.generation.tracks, self._answers, strict=True)]
        return {
            "id": self.id,
            "object": self.object,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage(self.generation),
        }

    @abstractmethod
    def _choice(self, track: ChoiceState, answer: Answer) -> dict[str, Any]:
        """Entry of `choices` in the whole answer."""


class ChatFormat(_Format):
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _events(self, delta: TextDelta, first: bool) -> bytes:
        out = b""
        index = delta.item.index
        if first:
            role = {"role": "assistant", "content": ""}
            out = self._chunk({"index": index, "delta": role, "logprobs": None, "finish_reason": None})
            if not (delta.text or delta.finish or delta.logprobs or delta.tokens):
                return out
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or not delta.finish else {},
            "logprobs": None if delta.logprobs is None else {"content": chat_logprobs(self._tokenizer, delta.logprobs)},
            "finish_reason": delta.finish,
        }
        if self._accepted.return_token_ids:
            choice["token_ids"] = delta.tokens
        if delta.finish:
            choice["matched_stop"] = delta.item.matched_stop
        elif not delta.text and delta.logprobs is None and not self._accepted.return_token_ids:
            return out
        return out + self._chunk(choice)

    def _choice(self, track: ChoiceState, answer: Answer) -> dict[str, Any]:
        wanted = self._accepted.logprobs >= 0
        choice: dict[str, Any] = {
            "index": track.index,
            "message": {"role": "assistant", "content": "".join(answer.text)},
            "logprobs": {"content": chat_logprobs(self._tokenizer, answer.logprobs)} if wanted else None,
            "finish_reason": track.finish,
            "matched_stop": track.matched_stop,
        }
        if self._accepted.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice


class CompletionFormat(_Format):
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        super().__init__(generation, request_id, model)
        before = () if self._accepted.resume is None else self._accepted.resume.ids
        resumed = sum(len(self._tokenizer.token_text(i)) for i in before)
        self._offsets = [len(self._echo(t)) + resumed for t in generation.tracks]

    def _echo(self, track: ChoiceState) -> str:
        return self._accepted.echo[track.item.prompt_index] if self._accepted.echo else ""

    def _events(self, delta: TextDelta, first: bool) -> bytes:
        track = delta.item
        text = self._echo(track) + delta.text if first else delta.text
        if first and not (text or delta.finish or delta.logprobs or self._accepted.return_token_ids):
            track.seen = False
            return b""
        logprobs = None
        if delta.logprobs is not None:
            logprobs, self._offsets[track.index] = completion_logprobs(
                self._tokenizer, delta.logprobs, self._accepted.logprobs, self._offsets[track.index]
            )
        choice: dict[str, Any] = {
            "index": track.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        if self._accepted.return_token_ids:
            choice["token_ids"] = delta.tokens
        if delta.finish:
            choice["matched_stop"] = track.matched_stop
        return self._chunk(choice)

    def _choice(self, track: ChoiceState, answer: Answer) -> dict[str, Any]:
        logprobs = None
        if self._accepted.logprobs >= 0:
            logprobs, _ = completion_logprobs(
                self._tokenizer, answer.logprobs, self._accepted.logprobs, self._offsets[track.index]
            )
        choice: dict[str, Any] = {
            "index": track.index,
            "text": self._echo(track) + "".join(answer.text),
            "logprobs": logprobs,
            "finish_reason": track.finish,
            "matched_stop": track.matched_stop,
        }
        if self._accepted.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice


def _finite(value: float) -> float:
    """JSON has no -inf; OpenAI writes -9999.0 for an impossible token."""
    return max(value, -9999.0)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, rows: TokenLogprobs) -> list[dict[str, Any]]:
    """OpenAI's chat form: one object per token."""
    return [
        _entry(tokenizer, token, logprob) | {"top_logprobs": [_entry(tokenizer, i, p) for i, p in top]}
        for token, logprob, top in zip(rows.ids, rows.chosen, rows.top, strict=True)
    ]


def completion_logprobs(tokenizer: Tokenizer, rows: TokenLogprobs, k: int, offset: int) -> tuple[dict[str, Any], int]:
    """OpenAI's completion form: columns. `offset`: characters before the first token; returned: after the last."""
    texts = [tokenizer.token_text(i) for i in rows.ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    columns = {
        "tokens": texts,
        "token_logprobs": [_finite(p) for p in rows.chosen],
        "top_logprobs": [{tokenizer.token_text(i): _finite(p) for i, p in top} for top in rows.top] if k > 0 else None,
        "text_offset": offsets,
    }
    return columns, offset
