"""Golden answers of gpt-oss: which messages openai-harmony reads in them.

`TIKTOKEN_ENCODINGS_BASE=FOLDER python -m tests.support.goldens.harmony_goldens` writes
`engine/text/src/stream/tests/families/harmony_answers.json`; a Rust test holds the reader of gpt-oss to it. FOLDER has
`o200k_base.tiktoken`: a line with the base64 of each token and its id.

The answers are those that openai-harmony accepts: all messages have an end marker and a header, but the last may be
cut.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from openai_harmony import (
    HarmonyEncoding,
    HarmonyEncodingName,
    Role,
    StreamableParser,
    load_harmony_encoding,
)

ROOT = Path(__file__).parents[3]
ANSWERS = ROOT / "engine/text/src/stream/tests/families/harmony_answers.json"
COUNT = 120

TEXTS = [
    "Hm.",
    "I look up the weather.\n\nIt takes a moment.",
    "  spaces  ",
    "naïve café — 你好 😀",
    "to=functions.f is a recipient, {braces} and `code`",
    "a < b && c > d <|channel> |end|>",
    "",
]
OBJECTS: list[dict[str, Any]] = [
    {},
    {"a": "x"},
    {"a": 'quote " brace } bracket ]', "b": [1, 2.5, None, {"c": "é😀\n"}]},
    {"text": "to=functions.g json"},
]
CALL_HEADERS = [
    "<|channel|>commentary to={} <|constrain|>json<|message|>",
    "<|channel|>commentary to={}<|constrain|>json<|message|>",
    "<|channel|>commentary to={} json<|message|>",
    "<|channel|>commentary to={}<|message|>",
    " to={}<|channel|>commentary <|constrain|>json<|message|>",
    " to={}<|channel|>commentary json<|message|>",
    " to={}<|channel|>commentary<|message|>",
    "<|channel|>analysis to={} <|constrain|>json<|message|>",
]


def draw_call(rng: random.Random) -> str:
    name = rng.choice(["f", "g", "ns.get-data"])
    header = rng.choice(CALL_HEADERS).format(f"functions.{name}")
    arguments = json.dumps(
        rng.choice(OBJECTS), ensure_ascii=False, indent=rng.choice([None, None, 1])
    )
    return f"{header}{arguments}"


def draw_answer(rng: random.Random) -> str:
    messages = [
        f"<|channel|>analysis<|message|>{rng.choice(TEXTS)}"
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    messages += [
        f"<|channel|>commentary<|message|>{rng.choice(TEXTS)}" for _ in range(rng.choice([0, 0, 1]))
    ]
    ends = ["<|end|>"] * len(messages)
    if rng.random() < 0.6:
        calls = [draw_call(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        messages += calls
        ends += ["<|call|>"] * len(calls)
    else:
        messages.append(f"<|channel|>final<|message|>{rng.choice(TEXTS)}")
        ends.append("<|return|>")
    answer = "<|start|>assistant".join(
        message + end for message, end in zip(messages, ends, strict=True)
    )
    last_end = ends[-1]
    kind = rng.choice(["whole", "stop id is not read", "cut"])
    if kind == "whole":
        return answer
    answer = answer.removesuffix(last_end)
    text_bytes = len(answer) - answer.rindex("<|message|>") - len("<|message|>")
    # Both readers take text that begins an object for a call.
    cut = rng.randrange(max(text_bytes - 2, 1)) if kind == "cut" else 0
    return answer[: len(answer) - cut]


def read_messages(encoding: HarmonyEncoding, answer: str) -> list[dict[str, Any]]:
    parser = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in encoding.encode(answer, allowed_special="all"):
        parser.process(token)
    parser.process_eos()
    return [
        {
            "channel": message.channel,
            "recipient": message.recipient,
            "text": "".join(part.text for part in message.content),
        }
        for message in parser.messages
    ]


def main() -> None:
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    rng = random.Random(7)
    answers = sorted({draw_answer(rng) for _ in range(COUNT)})
    cases = [{"answer": answer, "messages": read_messages(encoding, answer)} for answer in answers]
    lines = [json.dumps(case, ensure_ascii=False) for case in cases]
    ANSWERS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
