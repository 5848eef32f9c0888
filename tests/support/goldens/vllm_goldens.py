"""Golden answers: what vLLM's parsers read in answers of the families that we and vLLM know.

`TIKTOKEN_ENCODINGS_BASE=FOLDER python -m tests.support.goldens.vllm_goldens`, with vLLM 0.33.0 installed
(`.venv-peers/vllm` of tests/clients/setup.sh), writes `engine/text/src/stream/tests/families/vllm_answers.json`; a
Rust test holds our readers to it. FOLDER is that of `harmony_goldens`.

1. Answers are drawn and written as the models of a family write them: reasoning, content, calls.
2. The parser that vLLM's server would make reads each of them: whole, token by token, and in groups of tokens.
3. What it reads is compared with what was written, without the white space around reasoning and content.
4. A difference is stored beside the answer, with the reason that `find_difference_reason` gives. A difference without
   a reason ends the script.
"""

# ruff: noqa: RUF001 -- the markers' own characters

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser import ParserManager

from tests.support.goldens import call_writers
from tests.support.goldens.call_writers import CONTENTS, NAMES, SCHEMA, Call, draw_calls

ROOT = Path(__file__).parents[3]
ANSWERS = ROOT / "engine/text/src/stream/tests/families/vllm_answers.json"
TOKENIZER = ROOT / "engine/baton/models/demo/tokenizer.json"
COUNT = 20
"""Answers of each model."""
GROUP_SIZES = [1, 5]
"""Tokens in each delta of a stream."""
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
REASONINGS = [
    "Hm.",
    'The user wants two things:\n\n1. the weather\n2. "quotes"',
    "naïve 你好 😀, a < b > c",
]
TEXTS = ["It is sunny.", 'Zwei Zeilen\n\n{"a": 1} — 你好 😀']
"""Answers without calls."""


@dataclass(frozen=True, kw_only=True)
class ModelAnswers:
    """How a model writes, and which parsers read it."""

    tool_parser: str | None = None
    """Ours. None: the model is asked without tools."""
    reasoning_parser: str | None = None
    vllm_tool_parser: str | None = None
    vllm_reasoning_parser: str | None = None
    write: Callable[[list[Call]], str] | None = None
    reasoning_marks: tuple[str, str] = ("", "")
    """Written in front of the reasoning and behind it."""
    preamble_marks: tuple[str, str] = ("", "")
    """Written in front of content and behind it, where calls follow."""
    final_marks: tuple[str, str] = ("", "")
    """The same for content that ends the answer."""
    begins_inside: bool = False
    """The prompt ends with the reasoning's begin marker."""
    added_tokens: tuple[str, ...] = ()


NO_TEXT_IN_FRONT = ("llama3", "pythonic")
"""Formats whose calls are the whole answer."""
THINK_MARKS = ("<think>\n", "\n</think>\n\n")
CLOSING_MARK = ("", "\n</think>\n\n")
DEEPSEEK_TOKENS = (
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
QWEN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
GLM_TOKENS = (*QWEN_TOKENS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

MODELS = [
    ModelAnswers(
        tool_parser="hermes",
        reasoning_parser="think_tags",
        vllm_tool_parser="hermes",
        vllm_reasoning_parser="qwen3",
        write=call_writers.write_hermes,
        reasoning_marks=THINK_MARKS,
        added_tokens=QWEN_TOKENS,
    ),
    ModelAnswers(
        tool_parser="hermes",
        vllm_tool_parser="granite4",
        write=call_writers.write_hermes,
        added_tokens=("<tool_call>", "</tool_call>"),
    ),
    ModelAnswers(
        tool_parser="qwen3_coder",
        reasoning_parser="think_tags",
        vllm_tool_parser="qwen3_xml",
        vllm_reasoning_parser="qwen3",
        write=call_writers.write_qwen3_coder,
        reasoning_marks=CLOSING_MARK,
        begins_inside=True,
        added_tokens=QWEN_TOKENS,
    ),
    ModelAnswers(
        tool_parser="llama3",
        vllm_tool_parser="llama3_json",
        write=call_writers.write_llama3,
        added_tokens=("<|python_tag|>",),
    ),
    ModelAnswers(
        tool_parser="pythonic",
        vllm_tool_parser="pythonic",
        write=call_writers.write_pythonic,
    ),
    ModelAnswers(
        tool_parser="pythonic",
        vllm_tool_parser="llama4_pythonic",
        write=call_writers.write_pythonic,
        added_tokens=("<|python_start|>", "<|python_end|>"),
    ),
    ModelAnswers(
        tool_parser="mistral",
        vllm_tool_parser="mistral",
        write=call_writers.write_mistral,
        added_tokens=("[TOOL_CALLS]",),
    ),
    ModelAnswers(
        tool_parser="mistral_v13",
        reasoning_parser="mistral",
        vllm_tool_parser="mistral",
        vllm_reasoning_parser="mistral",
        write=call_writers.write_mistral_v13,
        reasoning_marks=("[THINK]", "[/THINK]"),
        added_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    ModelAnswers(
        tool_parser="deepseek_v3",
        reasoning_parser="think_tags",
        vllm_tool_parser="deepseek_v3",
        vllm_reasoning_parser="deepseek_r1",
        write=call_writers.write_deepseek_v3,
        reasoning_marks=CLOSING_MARK,
        begins_inside=True,
        added_tokens=DEEPSEEK_TOKENS,
    ),
    ModelAnswers(
        tool_parser="deepseek_v31",
        reasoning_parser="think_tags",
        vllm_tool_parser="deepseek_v31",
        vllm_reasoning_parser="deepseek_v3",
        write=call_writers.write_deepseek_v31,
        reasoning_marks=("", "</think>"),
        begins_inside=True,
        added_tokens=DEEPSEEK_TOKENS,
    ),
    ModelAnswers(
        tool_parser="deepseek_v32",
        reasoning_parser="think_tags",
        vllm_tool_parser="deepseek_v32",
        vllm_reasoning_parser="deepseek_v3",
        write=call_writers.write_deepseek_v32,
        reasoning_marks=("", "</think>"),
        begins_inside=True,
        added_tokens=("<think>", "</think>", "｜DSML｜"),
    ),
    ModelAnswers(
        tool_parser="glm45",
        reasoning_parser="think_tags",
        vllm_tool_parser="glm45",
        vllm_reasoning_parser="glm45",
        write=call_writers.write_glm45,
        reasoning_marks=("<think>", "</think>\n"),
        added_tokens=GLM_TOKENS,
    ),
    ModelAnswers(
        tool_parser="glm47",
        reasoning_parser="think_tags",
        vllm_tool_parser="glm47",
        vllm_reasoning_parser="glm47",
        write=call_writers.write_glm47,
        reasoning_marks=("", "</think>"),
        begins_inside=True,
        added_tokens=GLM_TOKENS,
    ),
    ModelAnswers(
        tool_parser="kimi_k2",
        reasoning_parser="think_tags",
        vllm_tool_parser="kimi_k2",
        vllm_reasoning_parser="kimi_k2",
        write=call_writers.write_kimi_k2,
        reasoning_marks=("<think>", "</think>"),
        added_tokens=(
            "<think>",
            "</think>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    ModelAnswers(
        tool_parser="granite",
        vllm_tool_parser="granite",
        write=call_writers.write_granite,
        added_tokens=("<|tool_call|>",),
    ),
    ModelAnswers(
        reasoning_parser="granite",
        vllm_reasoning_parser="granite",
        reasoning_marks=("Here is my thought process:\n\n", "\n\nHere is my response:\n\n"),
    ),
    ModelAnswers(
        tool_parser="phi4",
        vllm_tool_parser="phi4_mini_json",
        write=call_writers.write_phi4,
        added_tokens=("<|tool_call|>", "<|/tool_call|>"),
    ),
    ModelAnswers(
        tool_parser="gpt_oss",
        reasoning_parser="gpt_oss",
        vllm_tool_parser="openai",
        vllm_reasoning_parser="openai_gptoss",
        write=call_writers.write_gpt_oss,
        reasoning_marks=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        preamble_marks=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        final_marks=("<|channel|>final<|message|>", "<|return|>"),
        added_tokens=(
            "<|start|>",
            "<|channel|>",
            "<|constrain|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
    ),
]


@dataclass(frozen=True)
class AnswerReading:
    """Parts of an answer, without the white space around texts."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Name and arguments; text where they are not JSON."""


@dataclass(frozen=True)
class DrawnAnswer:
    text: str
    written: AnswerReading


def draw_answer(rng: random.Random, model: ModelAnswers) -> DrawnAnswer:
    reasons = model.reasoning_parser is not None and (model.begins_inside or rng.random() < 0.7)
    reasoning = rng.choice(REASONINGS) if reasons else ""
    calls = draw_calls(rng) if model.write is not None and rng.random() < 0.8 else []
    if not calls:
        content = rng.choice(TEXTS)
    elif model.tool_parser in NO_TEXT_IN_FRONT:
        content = ""
    else:
        content = rng.choice(CONTENTS)
    text = reasoning.join(model.reasoning_marks) if reasons else ""
    if content:
        text += content.join(model.preamble_marks if calls else model.final_marks)
    if model.write is not None and calls:
        text += model.write(calls)
    return DrawnAnswer(text, AnswerReading(reasoning, content.strip(), list(calls)))


class VllmServer:
    """The part of vLLM's server that reads a model's answers."""

    def __init__(self, model: ModelAnswers) -> None:
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))
        self.tokenizer.add_tokens(list(model.added_tokens), special_tokens=True)
        self.parser_class = ParserManager.get_parser(
            tool_parser_name=model.vllm_tool_parser,
            reasoning_parser_name=model.vllm_reasoning_parser,
            enable_auto_tools=True,
            is_harmony=model.tool_parser == "gpt_oss",
            tokenizer=self.tokenizer,
        )
        prompt = "hi<think>" if model.begins_inside else "hi"
        self.prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        self.request = ChatCompletionRequest.model_validate(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "tools": TOOLS,
                "tool_choice": "auto",
            }
        )

    def _make_parser(self) -> Any:
        thinking = {"enable_thinking": True, "thinking": True}
        return self.parser_class(self.tokenizer, self.request.tools, chat_template_kwargs=thinking)

    def read_whole(self, text: str) -> AnswerReading:
        parser = self._make_parser()
        parser.set_prompt_token_ids(self.prompt_ids)
        ids = self._encode(text)
        reasoning, content, calls = parser.parse(
            text, self.request, enable_auto_tools=True, model_output_token_ids=ids
        )
        pairs = [(call.name, call.arguments) for call in calls or []]
        return make_reading(reasoning or "", content or "", pairs)

    def read_stream(self, text: str, group_size: int) -> AnswerReading:
        parser = self._make_parser()
        reasoning = ""
        content = ""
        calls: dict[int, list[str]] = {}
        deltas = list(self._cut(text, group_size))
        for index, (delta_text, delta_ids) in enumerate(deltas):
            delta = parser.parse_delta(
                delta_text,
                delta_ids,
                self.request,
                self.prompt_ids,
                finished=index == len(deltas) - 1,
            )
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for part in delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                function = part.function
                if function is not None:
                    call[0] += function.name or ""
                    call[1] += function.arguments or ""
        pairs = [(name, arguments) for name, arguments in calls.values()]
        return make_reading(reasoning, content, pairs)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _cut(self, text: str, group_size: int) -> Iterator[tuple[str, list[int]]]:
        """Texts and ids of groups of tokens. A group that ends within a character is longer."""
        ids = self._encode(text)
        stream = DecodeStream(skip_special_tokens=False)
        group: list[int] = []
        group_text = ""
        for index, token_id in enumerate(ids):
            piece = stream.step(self.tokenizer.backend_tokenizer, token_id)
            group.append(token_id)
            group_text += piece or ""
            is_last = index == len(ids) - 1
            if is_last or (len(group) >= group_size and piece):
                yield group_text, group
                group = []
                group_text = ""


class HarmonyServer(VllmServer):
    """gpt-oss: vLLM reads ids of its own encoding, and no text."""

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = get_encoding().encode(text, allowed_special="all")
        return ids

    def _cut(self, text: str, group_size: int) -> Iterator[tuple[str, list[int]]]:
        ids = self._encode(text)
        for start in range(0, len(ids), group_size):
            yield "", ids[start : start + group_size]


def make_reading(reasoning: str, content: str, pairs: list[tuple[str, str]]) -> AnswerReading:
    calls = [(name, read_arguments(arguments)) for name, arguments in pairs]
    return AnswerReading(reasoning.strip(), content.strip(), calls)


def read_arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Difference:
    """A reading of an answer by vLLM that differs from the text written."""

    how: str
    reason: str
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


def find_difference_reason(
    model: ModelAnswers, answer: DrawnAnswer, group_size: int | None, read: AnswerReading
) -> str:
    """Why vLLM reads something else than was written.

    Args:
        group_size: tokens in each delta of the stream; None: the answer was read whole.
    Raises:
        ValueError: no reason is known.
    """
    written = answer.written
    is_streamed = group_size is not None
    if read == replace(written, reasoning=written.content, content=""):
        return "vLLM takes text without a begin marker for reasoning; ours is content"
    if model.vllm_tool_parser == "llama3_json" and is_streamed and "{}" in answer.text:
        return "vLLM streams a call without arguments as an empty text; ours are an empty object"
    if model.vllm_tool_parser in ("deepseek_v3", "deepseek_v31") and (group_size or 1) > 1:
        return (
            "vLLM's stream loses text, arguments or calls where a delta ends one and begins the next; ours has the "
            "same parts however it is cut"
        )
    if model.vllm_reasoning_parser == "granite" and is_streamed:
        return (
            "vLLM's stream keeps the begin of the end marker in the reasoning; ours holds it back"
        )
    if model.vllm_tool_parser == "phi4_mini_json" and is_streamed:
        return (
            "vLLM's parser of Phi-4 sends nothing in streams, be it calls or text; ours sends both"
        )
    if model.vllm_tool_parser == "phi4_mini_json" and "]" in answer.text[:-1]:
        return "vLLM ends the list of calls at the first bracket; ours knows lists and strings"
    if model.vllm_tool_parser == "phi4_mini_json" and read == replace(written, content=""):
        return "vLLM drops the text in front of the calls; ours is content"
    raise ValueError(f"{model.vllm_tool_parser} reads {answer.text!r} as {read}")


def find_differences(
    server: VllmServer, model: ModelAnswers, answer: DrawnAnswer
) -> list[Difference]:
    differences = []
    for group_size in (None, *GROUP_SIZES):
        if group_size is None:
            how = "whole"
            read = server.read_whole(answer.text)
        else:
            how = f"stream, {group_size} tokens each"
            read = server.read_stream(answer.text, group_size)
        if read != answer.written:
            reason = find_difference_reason(model, answer, group_size, read)
            differences.append(Difference(how, reason, read.reasoning, read.content, read.calls))
    return differences


def read_model(rng: random.Random, model: ModelAnswers) -> str:
    """JSON of the model's answers, a line for each."""
    server = HarmonyServer(model) if model.tool_parser == "gpt_oss" else VllmServer(model)
    lines = []
    for _ in range(COUNT):
        answer = draw_answer(rng, model)
        differences = find_differences(server, model, answer)
        line: dict[str, Any] = {"answer": answer.text, **asdict(answer.written)}
        if differences:
            line["differences"] = [asdict(difference) for difference in differences]
        lines.append(json.dumps(line, ensure_ascii=False))
    head = {
        "tool_parser": model.tool_parser,
        "reasoning_parser": model.reasoning_parser,
        "vllm": [model.vllm_tool_parser, model.vllm_reasoning_parser],
        "begins_inside": model.begins_inside,
        "added_tokens": model.added_tokens,
    }
    opening = json.dumps(head, ensure_ascii=False).removesuffix("}")
    return opening + ', "answers": [\n' + ",\n".join(lines) + "\n]}"


def main() -> None:
    logging.disable(logging.CRITICAL)
    rng = random.Random(7)
    models = [read_model(rng, model) for model in MODELS]
    ANSWERS.write_text("[\n" + ",\n".join(models) + "\n]\n")


if __name__ == "__main__":
    main()
