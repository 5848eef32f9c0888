"""Random answers that follow a grammar of tool calls, and what the text layer reads in them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from baton._native import AnswerFormat, AnswerTable
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from baton.config import build_config
from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import FinishReason
from baton.server.request.grammar.markers import MarkerTokens, marker_tokens
from baton.server.request.tools import CallableTool
from baton.server.text import model_info
from baton.server.text.answer_spec import (
    ChoiceSpec,
    Dialect,
    ReadingSpec,
    ReasoningNames,
    encode_spec,
)
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.messages import TokenBatch, encoder
from tests.support.models import tiny_model
from tests.support.models.streamed_text import HANDLE, stream_spec

EOS = 1
LONG = 500
"""Tokens after which an answer ends where it may."""
MAX_TOKENS = 5000


@dataclass(frozen=True)
class MarkedVocabulary:
    """A byte-level vocabulary with markers of a format as tokens."""

    tokenizer: Tokenizer
    trie: LLTokenizer
    markers: MarkerTokens

    def ids_of(self, text: str) -> list[int]:
        """Ids of a text, with the markers in it as tokens."""
        return [
            token
            for part in self.markers.split(text)
            for token in ([part] if isinstance(part, int) else self.trie.tokenize_str(part))
        ]


def make_vocabulary(path: Path, markers: Sequence[str]) -> MarkedVocabulary:
    tiny_model.make(path)
    file = TokenizerFile.from_file(str(path / "tokenizer.json"))
    file.add_special_tokens([AddedToken(text, normalized=False) for text in markers])
    file.save(str(path / "tokenizer.json"))
    config_file = path / "config.json"
    config = json.loads(config_file.read_text()) | {"vocab_size": file.get_vocab_size()}
    config_file.write_text(json.dumps(config))
    facts = model_info.load(build_config({"model_path": str(path)}))
    tokenizer = Tokenizer(path)
    return MarkedVocabulary(
        tokenizer,
        LLTokenizer((path / "tokenizer.json").read_text(), eos_token=[EOS]),
        marker_tokens(facts, tokenizer),
    )


def follows(vocabulary: MarkedVocabulary, grammar: str, answer: str) -> bool:
    """True if the whole answer follows the grammar."""
    matcher = start_matcher(vocabulary, grammar)
    ids = vocabulary.ids_of(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def start_matcher(vocabulary: MarkedVocabulary, grammar: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary.trie, grammar, log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    return matcher


def random_answer(
    vocabulary: MarkedVocabulary,
    grammar: str,
    rng: random.Random,
    pieces: Sequence[str],
    *,
    end_chance: float,
) -> list[int]:
    """Tokens of an answer drawn from those that the grammar allows.

    Args:
        pieces: texts that are tried now and then, for a drawn token seldom ends a text.
        end_chance: chance that an answer ends where it may.
    """
    matcher = start_matcher(vocabulary, grammar)
    tried = [vocabulary.ids_of(piece) for piece in pieces]
    answer: list[int] = []
    while not matcher.is_stopped():
        assert len(answer) < MAX_TOKENS, f"no end: {vocabulary.trie.decode_str(answer[-200:])!r}"
        is_ending = len(answer) > LONG or rng.random() < end_chance
        if is_ending and matcher.is_accepting():
            break
        step = [_random_token(matcher, rng)]
        if rng.random() < 0.3:
            piece = rng.choice(tried)
            if matcher.validate_tokens(piece) == len(piece):
                step = piece
        if step == [EOS]:
            break
        assert matcher.consume_tokens(step), matcher.get_error()
        answer += step
    assert matcher.is_accepting(), matcher.get_error()
    return answer


def _random_token(matcher: LLMatcher, rng: random.Random) -> int:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    allowed = [token for token in range(mask.bit_length()) if mask >> token & 1]
    return rng.choice([token for token in allowed if token != EOS] or [EOS])


def read_message(
    vocabulary: MarkedVocabulary, family: str, tools: Sequence[CallableTool], ids: Sequence[int]
) -> dict[str, Any]:
    """The chat message that a client gets for an answer of these tokens."""
    native = vocabulary.tokenizer.native
    answers = AnswerTable(native, AnswerFormat(None, native, family, "none"), [1.0])
    choice = ChoiceSpec(
        handle=HANDLE,
        counts_prompt=True,
        prompt_tokens=1,
    )
    signatures = [{"name": tool.name, "parameters": tool.parameters} for tool in tools]
    reading = ReadingSpec(
        tools=json.dumps(signatures),
        parallel_tool_calls=True,
        separate_reasoning=True,
        stream_reasoning=True,
        include_reasoning=True,
        reasoning_field=ReasoningNames.REASONING_CONTENT,
    )
    spec = msgspec.structs.replace(stream_spec(Dialect.CHAT, choice), stream=False, reading=reading)
    answers.open(encode_spec(spec))
    row = EmittedTokens(HANDLE, tuple(ids), FinishReason.STOP, 0)
    fed = answers.feed(encoder.encode(TokenBatch(0, [row])), 0.0)
    assert fed is not None
    body = json.loads(b"".join(chunk for _, chunk in fed.chunks))
    message: dict[str, Any] = body["choices"][0]["message"]
    return message
