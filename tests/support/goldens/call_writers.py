"""Answers that call tools, as models of each family write them, drawn at random.

Without SGLang and vLLM: `tool_call_goldens` and `vllm_goldens` read the same answers with either.
"""

# ruff: noqa: RUF001 -- the markers' own characters

from __future__ import annotations

import json
import random
from typing import Any

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


def write_hermes(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n{write_call_object(call, 'arguments')}\n</tool_call>" for call in calls
    )


def write_llama3(calls: list[Call]) -> str:
    return "; ".join(write_call_object(call, "parameters") for call in calls)


def write_mistral(calls: list[Call]) -> str:
    return f"[TOOL_CALLS]{write_call_list(calls)}"


def write_granite(calls: list[Call]) -> str:
    return f"<|tool_call|>{write_call_list(calls)}"


def write_phi4(calls: list[Call]) -> str:
    return f"functools{write_call_list(calls)}"


def write_gpt_oss(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"
        for name, arguments in calls
    )


def write_call_list(calls: list[Call]) -> str:
    return f"[{', '.join(write_call_object(call, 'arguments') for call in calls)}]"


def write_call_object(call: Call, arguments_name: str) -> str:
    name, arguments = call
    return dumped({"name": name, arguments_name: arguments})


def draw_calls(rng: random.Random) -> list[Call]:
    def draw_arguments() -> dict[str, Any]:
        names = rng.sample(list(VALUES), rng.randrange(4))
        return {name: rng.choice(VALUES[name]) for name in names}

    return [(rng.choice(NAMES), draw_arguments()) for _ in range(rng.choice([1, 1, 2, 3]))]
