"""Parts of answers as a client gets them: through the running answers of the text layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from baton._native import AnswerFormat, AnswerTable
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import FinishReason
from baton.server.text.answer_spec import (
    AnswerSpec,
    ChoiceSpec,
    Dialect,
    ReadingSpec,
    ReasoningNames,
    encode_spec,
)
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.messages import TokenBatch, encoder
from tests.support.goldens.peers.cases import PeerFormat, Reading, make_reading
from tests.support.models import tiny_model
from tests.support.models.streamed_text import HANDLE, stream_spec

REASONING_MARKERS = {"think_tags": "<think>", "mistral": "[THINK]"}


def make_tokenizer(folder: Path, added_tokens: Sequence[str]) -> Tokenizer:
    """A byte-level vocabulary with markers as tokens."""
    tiny_model.make(folder)
    file = TokenizerFile.from_file(str(folder / "tokenizer.json"))
    file.add_special_tokens([AddedToken(text, normalized=False) for text in added_tokens])
    file.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


class AnswerReader:
    """Reads answers in one format. Calls of unknown tools are forwarded, as by the peers."""

    def __init__(self, folder: Path, answer_format: PeerFormat) -> None:
        self._tokenizer = make_tokenizer(folder, answer_format.added_tokens)
        native_format = AnswerFormat(
            None,
            self._tokenizer.native,
            answer_format.tool_parser or "none",
            answer_format.reasoning_parser or "none",
            unknown_tool_calls="forward",
        )
        self._answers = AnswerTable(self._tokenizer.native, native_format, [1.0])
        prompt_end = ""
        if answer_format.begins_inside:
            prompt_end = REASONING_MARKERS[answer_format.reasoning_parser or ""]
        self._prompt_end = self._tokenizer.encode(prompt_end, add_special_tokens=False)
        self._tools = json.dumps(answer_format.tools)

    def encode(self, answer: str) -> list[int]:
        return list(self._tokenizer.encode(answer, add_special_tokens=False))

    def read_whole(self, ids: Sequence[int]) -> Reading:
        ((_, body),) = self._answer_parts(ids, len(ids) or 1, is_stream=False)
        message = json.loads(body)["choices"][0]["message"]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        return make_reading(message.get("reasoning_content") or "", message["content"] or "", calls)

    def read_stream(self, ids: Sequence[int], group_size: int) -> Reading:
        """What a stream says whose tokens come in groups."""
        texts = {"reasoning_content": "", "content": ""}
        calls: list[list[str]] = []
        for _, chunk in self._answer_parts(ids, group_size, is_stream=True):
            for delta in _deltas(chunk):
                for name in texts:
                    texts[name] += delta.get(name) or ""
                for part in delta.get("tool_calls") or ():
                    if part["index"] == len(calls):
                        calls.append([part["function"]["name"], ""])
                    calls[part["index"]][1] += part["function"].get("arguments") or ""
        pairs = [(name, arguments) for name, arguments in calls]
        return make_reading(texts["reasoning_content"], texts["content"], pairs)

    def _answer_parts(
        self, ids: Sequence[int], group_size: int, *, is_stream: bool
    ) -> Iterator[tuple[int, bytes]]:
        self._answers.open(encode_spec(self._spec(is_stream=is_stream)))
        for start in range(0, max(len(ids), 1), group_size):
            group = tuple(ids[start : start + group_size])
            is_last = start + group_size >= len(ids)
            row = EmittedTokens(HANDLE, group, FinishReason.STOP if is_last else None, 0)
            fed = self._answers.feed(encoder.encode(TokenBatch(0, [row])), 0.0)
            assert fed is not None
            yield from fed.chunks

    def _spec(self, *, is_stream: bool) -> AnswerSpec:
        choice = ChoiceSpec(
            handle=HANDLE,
            counts_prompt=True,
            prompt_tokens=1,
            prompt_end=tuple(self._prompt_end),
        )
        reading = ReadingSpec(
            tools=self._tools,
            parallel_tool_calls=True,
            separate_reasoning=True,
            stream_reasoning=True,
            include_reasoning=True,
            reasoning_field=ReasoningNames.REASONING_CONTENT,
        )
        spec = stream_spec(Dialect.CHAT, choice)
        return msgspec.structs.replace(spec, stream=is_stream, reading=reading)


def _deltas(chunk: bytes) -> Iterator[dict[str, Any]]:
    for event in chunk.decode().split("\n\n"):
        data = event.removeprefix("data: ")
        if data not in ("", "[DONE]"):
            yield from (choice["delta"] for choice in json.loads(data)["choices"])
