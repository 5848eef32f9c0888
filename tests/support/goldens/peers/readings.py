"""Golden readings: what the parsers of Dynamo and of smg read in the answers of `cases`.

`python -m tests.support.goldens.peers.readings` builds the program in `program/` (411 crates, about ten minutes on
one core; no part of the repository's workspace), runs it and writes `tests/unit/server/text/peers/readings.json`. The
test beside that file compares our readers with all peers; differences that it finds need a reason there.

Other versions of the peers: change `program/Cargo.toml`, run `cargo update` in that folder, then this command.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.goldens.peers.cases import READINGS, PeerCase, PeerFormat, load_answers

PROGRAM = Path(__file__).with_name("program")


@dataclass(frozen=True)
class PeerNames:
    """Names of the parsers of each peer; None: it has none."""

    dynamo: str | None = None
    smg: str | None = None


TOOL_PARSERS = {
    "hermes": PeerNames("hermes", "qwen"),
    "qwen3_coder": PeerNames("qwen3_coder", "qwen_coder"),
    "llama3": PeerNames("llama3_json", "llama"),
    "pythonic": PeerNames("pythonic", "pythonic"),
    "mistral": PeerNames("mistral", "mistral"),
    "mistral_v13": PeerNames(),  # both know the older form alone
    "deepseek_v3": PeerNames("deepseek_v3", "deepseek"),
    "deepseek_v31": PeerNames("deepseek_v3_1", "deepseek31"),
    "deepseek_v32": PeerNames("deepseek_v3_2", "deepseek32"),
    "gpt_oss": PeerNames(),  # Dynamo's parser loads a vocabulary from the network, smg has none
    "glm45": PeerNames("glm47", "glm45_moe"),
    "glm47": PeerNames("glm47", "glm47_moe"),
    "kimi_k2": PeerNames("kimi_k2", "kimik2"),
    "granite": PeerNames(),
    "phi4": PeerNames("phi4"),
    "json": PeerNames(smg="json"),
}
REASONING_PARSERS = {
    "think_tags": PeerNames("qwen3", "qwen3"),
    "mistral": PeerNames("mistral"),
    "granite": PeerNames("granite"),
    "gpt_oss": PeerNames("gpt_oss"),
}
REASONING_PARSERS_BESIDE_TOOLS = {
    "qwen3_coder": PeerNames("nemotron_v3", "nano_v3"),
    "glm45": PeerNames("glm45", "glm45"),
    "glm47": PeerNames("glm45", "glm45"),
    "kimi_k2": PeerNames("kimi_k25", "kimi_k25"),
    "deepseek_v3": PeerNames("deepseek_v3", "base"),
    "deepseek_v31": PeerNames("deepseek_v3_1", "deepseek_v31"),
    "deepseek_v32": PeerNames("deepseek_v3_2", "deepseek_v31"),
}
"""Parsers of models that the format of their calls names."""


def name_parsers(answer_format: PeerFormat) -> dict[str, dict[str, str | None]]:
    """Parsers of each peer that has one for every part of the format."""
    tool_parser = answer_format.tool_parser
    reasoning_parser = answer_format.reasoning_parser
    tools = TOOL_PARSERS[tool_parser] if tool_parser else None
    reasoning = None
    if reasoning_parser is not None:
        plain = REASONING_PARSERS[reasoning_parser]
        reasoning = REASONING_PARSERS_BESIDE_TOOLS.get(tool_parser or "", plain)
    named = {}
    for peer in ("dynamo", "smg"):
        names = {
            stage: getattr(parsers, peer) if parsers else None
            for stage, parsers in (("tools", tools), ("reasoning", reasoning))
        }
        lacks_tools = tools is not None and names["tools"] is None
        lacks_reasoning = reasoning is not None and names["reasoning"] is None
        if not lacks_tools and not lacks_reasoning:
            named[peer] = names
    return named


def read_answers(cases: list[PeerCase]) -> list[dict[str, Any]]:
    """Per answer, what each peer reads."""
    lines = [
        json.dumps(
            {
                "answer": case.answer,
                "tools": case.format.tools,
                "begins_inside": case.format.begins_inside,
                "peers": name_parsers(case.format),
            }
        )
        for case in cases
    ]
    subprocess.run(["cargo", "build", "--locked", "-j", "1"], cwd=PROGRAM, check=True)
    output = subprocess.run(
        [PROGRAM / "target/debug/peer-parsers"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def write_line(case: PeerCase, peers: dict[str, Any]) -> str:
    read = {
        peer: {name: value for name, value in parts.items() if value}
        for peer, parts in peers.items()
    }
    line = {"format": case.format.name, "answer": case.answer, "peers": read}
    return json.dumps(line, ensure_ascii=False)


def main() -> None:
    cases = load_answers()
    read = read_answers(cases)
    lines = [write_line(case, peers) for case, peers in zip(cases, read, strict=True)]
    READINGS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
