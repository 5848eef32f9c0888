"""Responses of /generate in SGLang's native form (matches SGLang 0.5.7): a stream event carries the text so far."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from baton.server.response.generation import ChoiceState, Generation, TextDelta, TokenLogprobs
from baton.server.response.openai import ResponseFormat, finite_logprob, sse


class GenerateFormat(ResponseFormat):
    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        super().__init__(generation, request_id, model)
        if resume := self._accepted.resume:
            self._answers[0].text.append(generation.tracks[0].resumed_text)
            self._answers[0].tokens += resume.ids

    def event(self, delta: TextDelta) -> bytes:
        self.take(delta)
        if not (delta.text or delta.finish or delta.tokens):
            return b""
        item = self._item(delta.item)
        if self._accepted.is_batch:
            item["index"] = delta.item.index
        return sse(item)

    def whole(self) -> Any:
        items = [self._item(t) for t in self.generation.tracks]
        return items if self._accepted.is_batch else items[0]

    def _item(self, track: ChoiceState) -> dict[str, Any]:
        answer = self._answers[track.index]
        meta: dict[str, Any] = {
            "id": f"{self.id}-{track.index}" if len(self._answers) > 1 else self.id,
            "finish_reason": _finish(track),
            "prompt_tokens": track.item.asked_tokens,
            "completion_tokens": track.completion_tokens,
            "cached_tokens": track.cached_tokens,
            "e2e_latency": round(time.monotonic() - self.generation.arrived, 6),
        }
        if self._accepted.logprobs >= 0:
            meta |= self._logprobs(answer.logprobs)
        return {"text": "".join(answer.text), "output_ids": answer.tokens, "meta_info": meta}

    def _logprobs(self, rows: TokenLogprobs) -> dict[str, Any]:
        """[logprob, token id, text] triples."""

        def triples(row: Iterable[tuple[int, float]]) -> list[list[Any]]:
            return [[finite_logprob(p), i, self._tokenizer.token_text(i)] for i, p in row]

        out: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": triples(zip(rows.ids, rows.chosen, strict=True)),
        }
        if self._accepted.logprobs > 0:
            out["output_top_logprobs"] = [triples(top) for top in rows.top]
        return out


def _finish(track: ChoiceState) -> dict[str, Any] | None:
    if track.finish is None or track.delta is not None:
        return None
    if track.finish == "length":
        return {"type": "length", "length": track.completion_tokens}
    return {"type": "stop", "matched": track.matched_stop}
