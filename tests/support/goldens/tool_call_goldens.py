"""Golden tool calls: what SGLang's parsers read in answers of the families that we and they know.

`python -m tests.support.goldens.tool_call_goldens`, with SGLang 0.5.23 installed, writes
`engine/text/src/stream/tests/families/peer_calls.json`; a Rust test holds our readers to it. The answers are
well-formed: in others the parsers differ from each other, and from one call to the next. Answers that SGLang reads as
other calls than were written are printed and left out: it drops Python calls with negative numbers, and writes text
that reads `true` in GLM's tags as `True`.
"""

# ruff: noqa: RUF001 -- the markers' own characters

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

ROOT = Path(__file__).parents[3]
CALLS = ROOT / "engine/text/src/stream/tests/families/peer_calls.json"
COUNT = 20

Call = tuple[str, dict[str, Any]]

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "options": {"type": "object"},
    },
}
NAMES = ["f", "g", "get_weather"]
VALUES: dict[str, list[Any]] = {
    "text": [
        "x",
        "two\nlines",
        "007",
        "true",
        "naïve 你好 😀",
        "quote \" and ' and \\",
        "a < b > c {}[](),=",
    ],
    "count": [0, -5, 123456789012],
    "ratio": [0.5, -2.25, 1e-07],
    "flag": [True, False],
    "items": [[], [1, "a", None, {"b": [True]}]],
    "options": [{}, {"k": "v", "n": {"m": [1.5]}}],
}
CONTENTS = ["", "I look it up.\n\n", "Zuerst \u2014 das:\n"]


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_qwen3_coder(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{raw(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def write_glm45(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def write_glm47(calls: list[Call]) -> str:
    return "".join(
        f"<tool_call>{name}"
        + "".join(
            f"<arg_key>{k}</arg_key><arg_value>{raw(v)}</arg_value>" for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def write_deepseek_v32(calls: list[Call]) -> str:
    invokes = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{raw(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in arguments.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{invokes}</｜DSML｜function_calls>"


def write_deepseek_v3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def write_deepseek_v31(calls: list[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def write_kimi_k2(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumped(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def write_mistral_v13(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)


def write_pythonic(calls: list[Call]) -> str:
    inner = ", ".join(
        f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{inner}]"


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


def draw_calls(rng: random.Random) -> list[Call]:
    def draw_arguments() -> dict[str, Any]:
        names = rng.sample(list(VALUES), rng.randrange(4))
        return {name: rng.choice(VALUES[name]) for name in names}

    return [(rng.choice(NAMES), draw_arguments()) for _ in range(rng.choice([1, 1, 2, 3]))]


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
