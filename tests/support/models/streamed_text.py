"""Text of tokens as a client gets it: through the running answers of the text layer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from baton._native import AnswerFormat, AnswerTable

from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import FinishReason
from baton.server.text.answer_spec import AnswerSpec, ChoiceSpec, Dialect, encode_spec
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.messages import TokenBatch, encoder

HANDLE = 1


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Text of a completion that continues `prompt`, whose tokens come one by one."""
    plain = AnswerFormat(None, tokenizer.native, "none", "none")
    answers = AnswerTable(tokenizer.native, plain, [1.0])
    choice = ChoiceSpec(
        handle=HANDLE,
        counts_prompt=True,
        prompt_tokens=len(prompt),
        left_context=prompt,
    )
    answers.open(encode_spec(stream_spec(Dialect.COMPLETIONS, choice)))
    text = ""
    for place, token in enumerate(ids, 1):
        finish = FinishReason.LENGTH if place == len(ids) else None
        row = EmittedTokens(HANDLE, (token,), finish, 0)
        fed = answers.feed(encoder.encode(TokenBatch(0, [row])), 0.0)
        assert fed is not None
        for _, chunk in fed.chunks:
            text += "".join(map(text_of_event, chunk.decode().split("\n\n")))
    return text


def text_of_event(event: str) -> str:
    data = event.removeprefix("data: ")
    return "" if data in ("", "[DONE]") else str(json.loads(data)["choices"][0]["text"])


def stream_spec(dialect: Dialect, choice: ChoiceSpec) -> AnswerSpec:
    """A stream of one choice without any option."""
    return AnswerSpec(
        dialect=dialect,
        request_id="r",
        model="m",
        stream=True,
        skip_special_tokens=True,
        choices=[choice],
    )
