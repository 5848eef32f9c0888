"""Answers that parsers of peers have read, and what each peer read in them.

Answers come from four files: `answers.json` beside the test has those written for the purpose, the others are the
goldens of SGLang (`tool_call_goldens`), vLLM (`vllm_goldens`) and openai-harmony (`harmony_goldens`).
`readings.json` adds what Dynamo and smg read in all of them (`readings`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.goldens.call_writers import NAMES, SCHEMA

ROOT = Path(__file__).parents[4]
FAMILIES = ROOT / "engine/text/src/stream/tests/families"
PEERS = ROOT / "tests/unit/server/text/peers"
READINGS = PEERS / "readings.json"


@dataclass(frozen=True)
class PeerFormat:
    """How a model writes its answers. Parsers are named as in docs/guide/tools.md."""

    name: str
    tool_parser: str | None
    reasoning_parser: str | None
    begins_inside: bool
    """The prompt ends within the reasoning."""
    added_tokens: tuple[str, ...]
    """Markers that are tokens."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools of every request."""
        if self.tool_parser is None:
            return []
        return [{"name": name, "parameters": SCHEMA} for name in NAMES]


@dataclass(frozen=True)
class Reading:
    """Parts of an answer, without the white space around texts."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments: their JSON in one form, or the text where it is no JSON."""


@dataclass(frozen=True)
class PeerCase:
    format: PeerFormat
    answer: str
    readings: dict[str, Reading] = field(default_factory=dict)
    """By the name of the peer."""
    is_written: bool = False
    """Written for this comparison. The others are read in pieces by tests in Rust."""


def make_reading(reasoning: str, content: str, calls: Sequence[tuple[str, str]]) -> Reading:
    read = tuple((name, normalize_arguments(arguments)) for name, arguments in calls)
    return Reading(reasoning.strip(), content.strip(), read)


def normalize_arguments(text: str) -> str:
    """One form of the JSON texts that say the same. Of a key that is given twice, the last value counts."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def load_cases() -> list[PeerCase]:
    """All answers with all readings; a peer that fails on an answer reads nothing."""
    cases = load_answers()
    read = {(line["format"], line["answer"]): line for line in json.loads(READINGS.read_text())}
    for case in cases:
        line = read[case.format.name, case.answer]
        for peer, parts in line["peers"].items():
            if "error" in parts:
                continue
            case.readings[peer] = make_reading(
                parts.get("reasoning", ""), parts.get("content", ""), parts.get("calls", ())
            )
    return cases


def load_answers() -> list[PeerCase]:
    """All answers, with the readings of vLLM, SGLang and openai-harmony."""
    return [*_written_answers(), *_sglang_answers(), *_vllm_answers(), *_harmony_answers()]


def _written_answers() -> Iterator[PeerCase]:
    for group in json.loads((PEERS / "answers.json").read_text()):
        answer_format = PeerFormat(
            group["format"],
            group["tool_parser"],
            group["reasoning_parser"],
            group["begins_inside"],
            tuple(group["added_tokens"]),
        )
        for answer in group["answers"]:
            yield PeerCase(answer_format, answer, is_written=True)


def _sglang_answers() -> Iterator[PeerCase]:
    markers = {
        model["tool_parser"]: tuple(model["added_tokens"])
        for model in json.loads((FAMILIES / "vllm_answers.json").read_text())
    }
    lines = json.loads((FAMILIES / "peer_calls.json").read_text())
    for line in {(line["family"], line["answer"]): line for line in lines}.values():
        family = line["family"]
        name = f"{family} (SGLang)"
        answer_format = PeerFormat(name, family, None, False, markers[family])
        yield PeerCase(answer_format, line["answer"], {"sglang": _golden_reading(line)})


def _vllm_answers() -> Iterator[PeerCase]:
    for model in json.loads((FAMILIES / "vllm_answers.json").read_text()):
        names = " + ".join(name or "none" for name in model["vllm"])
        answer_format = PeerFormat(
            f"{names} (vLLM)",
            model["tool_parser"],
            model["reasoning_parser"],
            model["begins_inside"],
            tuple(model["added_tokens"]),
        )
        for answer in _without_repetition(model["answers"]):
            whole = [diff for diff in answer.get("differences", ()) if diff["how"] == "whole"]
            read = whole[0] if whole else answer
            yield PeerCase(answer_format, answer["answer"], {"vllm": _golden_reading(read)})


def _harmony_answers() -> Iterator[PeerCase]:
    roles = ("start", "channel", "constrain", "message", "end", "call", "return")
    markers = tuple(f"<|{role}|>" for role in roles)
    answer_format = PeerFormat("gpt_oss (openai-harmony)", "gpt_oss", "gpt_oss", False, markers)
    for line in json.loads((FAMILIES / "harmony_answers.json").read_text()):
        yield PeerCase(
            answer_format, line["answer"], {"harmony": _harmony_reading(line["messages"])}
        )


def _harmony_reading(messages: Sequence[dict[str, Any]]) -> Reading:
    """Messages of one kind are lines of one text."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    calls = []
    for message in messages:
        if message["recipient"] is not None:
            calls.append((message["recipient"].removeprefix("functions."), message["text"]))
        elif message["text"]:
            texts[message["channel"] == "analysis"].append(message["text"])
    return make_reading("\n".join(texts[True]), "\n".join(texts[False]), calls)


def _without_repetition(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({line["answer"]: line for line in lines}.values())


def _golden_reading(line: dict[str, Any]) -> Reading:
    calls = [
        (name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        for name, arguments in line["calls"]
    ]
    return make_reading(line.get("reasoning", ""), line["content"], calls)
