"""Responses of /generate in SGLang's native form (matches SGLang 0.5.7): a stream event carries the text so far."""

from __future__ import annotations

import time
from typing import Any

from baton.server.api.openai import Answer, sse
from baton.server.http.generation import ChoiceState, Generation, TextDelta, TokenLogprobs


class GenerateFormat:
    """Same use as openai's formats."""

    def __init__(self, generation: Generation, request_id: str, model: str) -> None:
        self.generation = generation
        self.id = generation.accepted.rid or request_id
        self._answers = [Answer() for _ in generation.tracks]
        if resume := generation.accepted.resume:
            self._answers[0].text.append(generation.tracks[0].resumed_text)
            self._answers[0].tokens += resume.ids
        self._started = generation.arrived

    def take(self, delta: TextDelta) -> None:
        self._answers[delta.item.index].take(delta)

    def event(self, delta: TextDelta) -> bytes:
        self.take(delta)
        if not (delta.text or delta.finish or delta.tokens):
            return b""
        item = self._item(delta.item)
        if self.generation.accepted.is_batch:
            item["index"] = delta.item.index
        return sse(item)

    def end(self) -> bytes:
        return b""

    def whole(self) -> Any:
        items = [self._item(t) for t in self.generation.tracks]
        return items if self.generation.accepted.is_batch else items[0]

    def _item(self, track: ChoiceState) -> dict[str, Any]:
        answer = self._answers[track.index]
        meta: dict[str, Any] = {
            "id": f"{self.id}-{track.index}" if len(self._answers) > 1 else self.id,
            "finish_reason": _finish(track),
            "prompt_tokens": track.item.asked_tokens,
            "completion_tokens": track.completion_tokens,
            "cached_tokens": track.cached_tokens,
            "e2e_latency": round(time.monotonic() - self._started, 6),
        }
        if self.generation.accepted.logprobs >= 0:
            meta |= self._logprobs(answer.logprobs)
        return {"text": "".join(answer.text), "output_ids": answer.tokens, "meta_info": meta}

    def _logprobs(self, rows: TokenLogprobs) -> dict[str, Any]:
        """[logprob, token id, text] triples."""
        text = self.generation.tokenizer.token_text
        out: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [max(p, -9999.0), i, text(i)] for i, p in zip(rows.ids, rows.chosen, strict=True)
            ],
        }
        if self.generation.accepted.logprobs > 0:
            out["output_top_logprobs"] = [[[max(p, -9999.0), i, text(i)] for i, p in top] for top in rows.top]
        return out


def _finish(track: ChoiceState) -> dict[str, Any] | None:
    if track.finish is None or track.delta is not None:
        return None
    if track.finish == "length":
        return {"type": "length", "length": track.completion_tokens}
    return {"type": "stop", "matched": track.matched_stop}
