"""Text of tokens as a client gets it: through the running answers of the text layer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from baton._native import AnswerFormat, AnswerTable

from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import FinishReason
from baton.server.response.answer_spec import AnswerSpec, ChoiceSpec, Dialect, encode_spec
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
        prompt_end=(),
        stop_token_ids=(),
        echo="",
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
        rid=None,
        request_id="r",
        model="m",
        created=0,
        arrived=0.0,
        is_stream=True,
        includes_usage=False,
        has_continuous_usage=False,
        returns_token_ids=False,
        logprobs=-1,
        logprob_token_ids=(),
        names_tokens_by_id=False,
        prompt_logprobs=None,
        returns_prompt_ids=False,
        is_batch=False,
        stops=(),
        include_stop=False,
        skip_special_tokens=True,
        min_tokens=0,
        follows_grammar=False,
        comment_seed=None,
        is_metered=False,
        is_empty=False,
        resumed_ids=(),
        resumed_events=None,
        is_limited_by_context=False,
        facts="",
        reading=None,
        choices=[choice],
    )
