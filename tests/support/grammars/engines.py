"""Engines in this process that follow grammars, and what they answer."""

from __future__ import annotations

import itertools
import re
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from llguidance import LLMatcher

from baton.runtime.engine_loop import EngineLoop
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.grammar.waiting import GrammarQueue
from baton.runtime.runner.model_runner import ModelRunner
from baton.sched.types.events import RowError
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest
from tests.support.models.checkpoints import EOS, VOCAB

SECS = 60.0
REGEX = "start: /[a-z]{2,30}(-[0-9]{1,9}){0,5}/"
"""A grammar whose answers may end after each of many tokens."""
PATTERN = re.compile(r"[a-z]{2,30}(-[0-9]{1,9}){0,5}")
"""Regular expression for the whole text of an answer."""
_handles = itertools.count(1_000_000)


@dataclass
class GrammarAnswer:
    """Output of a request so far."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RowError | None = None


def make_store(path: Path, *, threads: int = 1, trie_size: int = VOCAB) -> GrammarStore:
    """Grammars for the checkpoints of tests. `trie_size`: ids that the tokenizer has, more than the
    model's.
    """
    source = TokenizerSource((path / "tokenizer.json").read_text(), [], [EOS])
    trie = build_trie(source, trie_size)
    return GrammarStore(trie, MaskFiller(trie.vocab_size, VOCAB, threads))


def follow_grammars(engine: EngineLoop, store: GrammarStore) -> EngineLoop:
    """The engine with these grammars."""
    engine.grammars = GrammarQueue(store)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.grammars = store
    return engine


def schema_text(schema: object) -> str:
    """Compact JSON of a schema."""
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})  # type: ignore[arg-type]


def request(prompt: list[int], params: SamplingParams, **more: object) -> ValidatedRequest:
    handle = next(_handles)
    return ValidatedRequest(
        handle,
        f"r{handle}",
        array("i", prompt),
        replace(params, stop_token_ids=(EOS,)),
        arrival=time.monotonic(),
        **more,  # type: ignore[arg-type]
    )


def run_to_end(
    engine: EngineLoop,
    requests: Iterable[ValidatedRequest],
    disturb: Callable[[list[int]], None] = lambda handles: None,
) -> list[GrammarAnswer]:
    """Answers of requests that run together. `disturb`: called before each turn with the open
    handles.
    """
    answers = {}
    for req in requests:
        engine.submit(req)
        answers[req.handle] = GrammarAnswer()
    until = time.monotonic() + SECS
    while any(answer.finish is None for answer in answers.values()):
        assert time.monotonic() < until, "the engine does not answer"
        disturb([handle for handle, answer in answers.items() if answer.finish is None])
        outputs, busy = engine.step(time.monotonic())
        for out in outputs:
            answer = answers[out.handle]
            assert answer.finish is None, "output behind the end"
            answer.tokens.extend(out.tokens)
            answer.finish = out.finish
            answer.error = out.error
        if not busy:
            time.sleep(0.001)  # a grammar is being compiled on another thread
    while engine.step(time.monotonic())[1]:
        pass
    engine.gauges()
    assert engine.not_accepting_reason is None
    assert engine.is_idle
    return list(answers.values())


def text_of(tokens: list[int]) -> str:
    """Text of tokens of the checkpoints' tokenizer, which has one per byte."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = bytes_of_alphabet()
    return bytes(byte_of[alphabet[token]] for token in tokens if token < 256).decode()


def bytes_of_alphabet() -> dict[str, int]:
    """Inverse of GPT-2's bytes_to_unicode."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
