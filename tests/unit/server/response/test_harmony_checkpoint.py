"""Answers of a gpt-oss checkpoint are read in harmony's format without a flag: calls and
reasoning."""

from __future__ import annotations

from pathlib import Path

from baton.server.text.answer_spec import Dialect
from tests.support.engines.local_engine import LocalEngine, ReadAnswer
from tests.support.engines.naive_calls import TOOL
from tests.support.models.harmony_chain import make_harmony_checkpoint


def ask(path: Path, answer: tuple[str, ...]) -> ReadAnswer:
    engine = LocalEngine(make_harmony_checkpoint(path, answer))
    try:
        body = {
            "messages": [{"role": "user", "content": "Add."}],
            "temperature": 0,
            "max_tokens": 12,
        }
        return engine.read(Dialect.CHAT, body | {"tools": [TOOL]})
    finally:
        engine.close()


def test_call_of_a_tool_is_read(tmp_path: Path) -> None:
    call = (
        "<|channel|>", "commentary to=functions.sum ", "<|constrain|>", "json", "<|message|>",
        '{"x": 7}', "<|call|>",
    )  # fmt: skip
    answer = ask(tmp_path / "m", call)
    assert answer.calls == (("sum", '{"x": 7}'),)
    assert not answer.content
    assert answer.finish == "tool_calls"


def test_channels_are_told_apart(tmp_path: Path) -> None:
    thought = ("<|channel|>", "analysis", "<|message|>", "Seven, then.", "<|return|>")
    answer = ask(tmp_path / "thought", thought)
    assert (answer.reasoning, answer.content) == ("Seven, then.", "")
    final = ("<|channel|>", "final", "<|message|>", "It is 7.", "<|return|>")
    answer = ask(tmp_path / "final", final)
    assert (answer.reasoning, answer.content) == ("", "It is 7.")
    assert answer.finish == "stop"
