"""Golden tool calls: what SGLang's parsers read in answers of the families that we and they know.

`python -m tests.support.goldens.tool_call_goldens`, with SGLang 0.5.23 installed, writes
`engine/text/src/stream/tests/families/peer_calls.json`; a Rust test holds our readers to it. The answers are
well-formed: in others the parsers differ from each other, and from one call to the next. Answers that SGLang reads as
other calls than were written are printed and left out: it drops Python calls with negative numbers, and writes text
that reads `true` in GLM's tags as `True`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from tests.support.goldens.call_writers import (
    CONTENTS,
    NAMES,
    SCHEMA,
    Call,
    draw_calls,
    write_deepseek_v3,
    write_deepseek_v31,
    write_deepseek_v32,
    write_glm45,
    write_glm47,
    write_kimi_k2,
    write_mistral_v13,
    write_pythonic,
    write_qwen3_coder,
)

ROOT = Path(__file__).parents[3]
CALLS = ROOT / "engine/text/src/stream/tests/families/peer_calls.json"
COUNT = 20

FAMILIES: dict[str, tuple[str, Callable[[list[Call]], str]]] = {
    "qwen3_coder": ("qwen3_coder", write_qwen3_coder),
    "glm45": ("glm45", write_glm45),
    "glm47": ("glm47", write_glm47),
    "deepseek_v32": ("deepseekv32", write_deepseek_v32),
    "deepseek_v3": ("deepseekv3", write_deepseek_v3),
    "deepseek_v31": ("deepseekv31", write_deepseek_v31),
    "kimi_k2": ("kimi_k2", write_kimi_k2),
    "mistral_v13": ("mistral", write_mistral_v13),
    "pythonic": ("pythonic", write_pythonic),
}
"""Our family → SGLang's name for it, and a writer of its format."""


def read_calls(parser_name: str, answer: str) -> dict[str, Any]:
    tools = [
        Tool(type="function", function=Function(name=name, parameters=SCHEMA)) for name in NAMES
    ]
    content, calls = FunctionCallParser(tools, parser_name).parse_non_stream(answer)
    read = [[call.name, json.loads(call.parameters)] for call in calls]
    return {"content": content.strip(), "calls": read}


def main() -> None:
    rng = random.Random(7)
    lines = []
    for family, (parser_name, write) in FAMILIES.items():
        for _ in range(COUNT):
            drawn = draw_calls(rng)
            content = rng.choice(CONTENTS)
            answer = content + write(drawn)
            read = read_calls(parser_name, answer)
            written = {"content": content.strip(), "calls": [list(call) for call in drawn]}
            if read != written:
                print(f"{family}: {answer!r} is read as {read}")
                continue
            lines.append(
                json.dumps({"family": family, "answer": answer, **read}, ensure_ascii=False)
            )
    CALLS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
