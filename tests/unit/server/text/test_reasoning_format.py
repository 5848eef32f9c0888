"""The rank finds the end of a reasoning where the text layer, which clients see, finds it."""

from __future__ import annotations

import json
import shutil
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from baton._native import AnswerTable
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import build_config
from baton.runtime.grammar.reasoning_tracker import ReasoningTracker, tokens_of_answer
from baton.sched.types.events import EmittedTokens
from baton.sched.types.reasoning import ReasoningPhase
from baton.sched.types.request import FinishReason
from baton.server.text import model_info
from baton.server.text.answer_format import AnswerFormat, load_answer_format
from baton.server.text.answer_spec import (
    ChoiceSpec,
    Dialect,
    ReadingSpec,
    ReasoningNames,
    encode_spec,
)
from baton.server.text.reasoning_format import ReasoningFormat, ReasoningRules
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.messages import TokenBatch, encoder
from tests.support.effort import examples
from tests.support.models.streamed_text import HANDLE, stream_spec

TEXTS = ("<think>", "</think>", "\n", "a", " ", "<", "Hello", "\r", "\n\n")
"""Pieces of answers beside the markers of calls."""
CALL_MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "glm47": ("<tool_call>", "<arg_key>", "</tool_call>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),  # noqa: RUF001
}
PROMPTS = ("", "<think>\n", "<think>\n\n</think>\n\n", "<think>\nso", "</think>", "</think>x")
"""Ends of prompts behind the assistant's header."""


@pytest.fixture(scope="module", params=CALL_MARKERS)
def tool_parser(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(tool_parser: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo model's, with the markers of a format as tokens."""
    folder = tmp_path_factory.mktemp(tool_parser)
    shutil.copytree(model_info.resolve("demo"), folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = tokenizer["added_tokens"]
    known = {token["content"] for token in added}
    next_id = 1 + max(*(token["id"] for token in added), *tokenizer["model"]["vocab"].values())
    for marker in CALL_MARKERS[tool_parser]:
        if marker not in known:
            added.append({**added[-1], "id": next_id, "content": marker})
            next_id += 1
    file.write_text(json.dumps(tokenizer))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def answer_format(tool_parser: str, tokenizer: Tokenizer) -> AnswerFormat:
    config = build_config({"model_path": "demo", "tool_parser": tool_parser})
    return load_answer_format(config, model_info.load(config), tokenizer)


def read_answer(
    tokenizer: Tokenizer,
    answer_format: AnswerFormat,
    prompt: array[int],
    tokens: list[int],
    tools: str,
    *,
    is_gated: bool,
) -> tuple[int, dict[str, Any]]:
    """Tokens of the reasoning, as the usage of the answer counts them, and the message."""
    choice = ChoiceSpec(
        handle=HANDLE,
        counts_prompt=True,
        prompt_tokens=len(prompt),
        prompt_end=prompt.tolist(),
    )
    reading = ReadingSpec(
        tools=tools,
        parallel_tool_calls=True,
        separate_reasoning=True,
        stream_reasoning=True,
        include_reasoning=True,
        reasoning_field=ReasoningNames.REASONING_CONTENT,
        is_gated=is_gated,
    )
    spec = msgspec.structs.replace(
        stream_spec(Dialect.CHAT, choice),
        stream=False,
        reading=reading,
        follows_grammar=is_gated,
    )
    answers = AnswerTable(tokenizer.native, answer_format.native, [1.0])
    answers.open(encode_spec(spec))
    row = EmittedTokens(HANDLE, tuple(tokens), FinishReason.LENGTH, 0)
    fed = answers.feed(encoder.encode(TokenBatch(0, [row])), 0.0)
    assert fed is not None
    ((_, chunk),) = fed.chunks
    answer = json.loads(chunk)
    reasoning_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return int(reasoning_tokens), answer["choices"][0]["message"]


@pytest.mark.parametrize("is_gated", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_rank_and_text_layer_find_the_same_end(
    tool_parser: str,
    tokenizer: Tokenizer,
    answer_format: AnswerFormat,
    prompt: str,
    has_tools: bool,
    is_gated: bool,
    data: st.DataObject,
) -> None:
    """The content behind it is the text that a grammar counts, to the newline."""
    known_pieces = (*TEXTS, *CALL_MARKERS[tool_parser])
    pieces = data.draw(st.lists(st.sampled_from(known_pieces), min_size=1, max_size=10))
    prompt_ids = array("i", tokenizer.encode(f"<|assistant|>{prompt}", add_special_tokens=False))
    ids = {piece: tokenizer.encode(piece, add_special_tokens=False)[0] for piece in known_pieces}
    tokens = [ids[piece] for piece in pieces]
    reasoning = ReasoningFormat(answer_format, tokenizer, tokenizer.vocab_size, has_grammars=True)
    rules = ReasoningRules(is_read=True, has_tools=has_tools, budget=100)
    gate = reasoning.make_gate(prompt_ids, rules)
    if gate is not None and not is_gated:
        gate = replace(gate, lead_newlines=None)
    counted = 0
    if gate is not None:
        tracker = ReasoningTracker(gate, tokenizer.token_bytes)
        for place, token in enumerate(tokens, 1):
            was_inside = tracker.phase is ReasoningPhase.INSIDE
            tracker.advance(token)
            is_end = was_inside and tracker.phase is ReasoningPhase.BEHIND
            if is_end or tracker.phase is ReasoningPhase.INSIDE:
                counted = place
    tools = '[{"name": "f", "parameters": {}}]' if has_tools else "[]"
    reasoning_tokens, message = read_answer(
        tokenizer, answer_format, prompt_ids, tokens, tools, is_gated=is_gated and gate is not None
    )
    assert reasoning_tokens == counted
    if gate is None or not is_gated or has_tools or tracker.phase is ReasoningPhase.UNDECIDED:
        return
    answer = tokens_of_answer(gate, tokenizer.token_bytes, tokens)
    assert (message["content"] or "") == b"".join(map(tokenizer.token_bytes, answer)).decode()


ENDING_MARKERS: dict[str, set[str]] = {
    "hermes": {"<tool_call>"},
    "glm47": {"<tool_call>"},
    "kimi_k2": {"<|tool_calls_section_begin|>", "<|tool_call_begin|>"},
    "deepseek_v31": set(),
}
"""vLLM and SGLang end a reasoning at these tokens, llama.cpp at both of Kimi K2."""


def test_call_within_a_line_ends_a_reasoning(
    tool_parser: str, tokenizer: Tokenizer, answer_format: AnswerFormat
) -> None:
    reasoning = ReasoningFormat(answer_format, tokenizer, tokenizer.vocab_size, has_grammars=True)
    prompt = array("i", tokenizer.encode("<|assistant|><think>", add_special_tokens=False))
    gate = reasoning.make_gate(prompt, ReasoningRules(is_read=True, has_tools=True, budget=100))
    assert gate is not None
    found = set()
    for marker in CALL_MARKERS[tool_parser]:
        tracker = ReasoningTracker(gate, tokenizer.token_bytes)
        for token in tokenizer.encode(f"Let me look it up.{marker}", add_special_tokens=False):
            tracker.advance(token)
        if tracker.phase is ReasoningPhase.CONTENT:
            found.add(marker)
    assert found == ENDING_MARKERS[tool_parser]
