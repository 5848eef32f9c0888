"""Golden files of the router's tokenizer: what transformers makes of requests, for five models.

`python -m tests.support.goldens.token_goldens` writes `tests/contract/golden/tokens/cases.json`; a Python test holds it
to what transformers and the engine give now, a Rust test (router/src/request/tokenize/tests.rs) to what the router
gives.

They are the demo model and four folders as a checkpoint has them, each with another place for its template. Their
templates are written for these tests after the manner of the families they are named after. Their tokenizers were
trained here (`--train` does it again) on the text below and docs/: small, but with the regular expressions, normalizers
and byte fallback of those families.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from baton.config import build_config
from baton.server.text import model_info
from baton.server.text.chat_template import ChatTemplate
from tests.support.goldens.rendering import normalize

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests/contract/golden/tokens"
CASES = FOLDER / "cases.json"
STYLES = ("chatml", "llama3", "mistral", "gemma")
DEMO = ROOT / "engine/baton/models/demo"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <eine> Stadt & 'mehr'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "default": None},
                "days": {"type": "number", "maximum": 1e3},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SYSTEM = {"role": "system", "content": "You are terse.  "}
LONG = (
    "The relay runner hands the baton over; it must not be dropped. Isn't that what we'd call disaggregation? "
    "It costs 1234567 tokens, or 12.5%, and\n\n\n  indented\tlines   too.\r\n"
)
ODD = "  naïve café — 你好\uff0c世界 👩‍👩‍👧 ﬁ Å Å \u00a0\u2003x\u0301 ٣٤ #!?...~~ <|im_end|> </s> <eos> [INST] "

CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"messages": [SYSTEM, {"role": "user", "content": LONG}]},
    {
        "messages": [{"role": "user", "content": ODD}],
        "chat_template_kwargs": {"date_string": "26 Jul 2024"},
    },
    {
        "messages": [
            SYSTEM,
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": " <think>\nhm\n</think>\n\nYes. "},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}],
            },
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well, I "},
        ],
        "continue_final_message": True,
    },
    {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}],
        "add_generation_prompt": False,
    },
    {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {
        "messages": [{"role": "user", "content": "Hi"}],
        "add_special_tokens": True,
        "reasoning_effort": "high",
    },
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [SYSTEM, {"role": "user", "content": "Weather?"}], "tools": [TOOL, TOOL]},
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call00001",
                        "type": "function",
                        "function": {
                            "name": "get_weather",
                            "arguments": {"city": "Köln", "days": 1.0, "x": [None, True]},
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call00001", "content": '{"sky": "grey"}'},
            {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
        ],
        "tools": [TOOL],
    },
    # Templates that insist on alternation refuse these.
    {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    {"messages": [{"role": "assistant", "content": "a"}]},
]
TEXTS = ["Hi", LONG, ODD, LONG * 3 + ODD, "a" * 200, " leading", "\n", "😀" * 9]


def names() -> list[str]:
    return [*STYLES, "demo"]


def path_of(name: str) -> Path:
    return DEMO if name == "demo" else FOLDER / name  # an absolute path stands for itself


def facts_of(name: str) -> model_info.ModelFacts:
    tokenizer = path_of(name)
    return model_info.load(build_config({"model_path": "demo", "tokenizer_path": str(tokenizer)}))


def tokenizer_of(facts: model_info.ModelFacts) -> Any:
    """transformers' own, with the folder's files."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(facts.tokenizer_path / "tokenizer.json"),
        chat_template=facts.chat_template,
        clean_up_tokenization_spaces=False,
        **facts.special_tokens,
    )


def body_of(name: str, conversation: dict[str, Any]) -> dict[str, Any]:
    """The request; where the template asks for the date, it gets one."""
    if name != "llama3":
        return conversation
    return {
        **conversation,
        "chat_template_kwargs": {
            "date_string": "1 Jan 2026",
            **conversation.get("chat_template_kwargs", {}),
        },
    }


def rendered(tokenizer: Any, template: ChatTemplate, body: dict[str, Any]) -> str | None:
    """The prompt's text; None: the template refuses, or drops the tools. Normalization has goldens of its own
    (message_goldens.py)."""
    import jinja2

    if body.get("tools") and "renders_tools=true" not in template.caps:
        return None
    continues = body.get("continue_final_message", False)
    kwargs = dict(body.get("chat_template_kwargs", {}))
    if "reasoning_effort" in body:
        kwargs.setdefault("reasoning_effort", body["reasoning_effort"])
        for switch in ("enable_thinking", "thinking"):
            kwargs.setdefault(switch, body["reasoning_effort"] != "none")
    try:
        return str(
            tokenizer.apply_chat_template(
                normalize(template, body["messages"]),
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", not continues),
                continue_final_message=continues,
                tokenize=False,
                **kwargs,
            )
        )
    except (jinja2.TemplateError, TypeError):
        return None


def model_cases(name: str) -> dict[str, Any]:
    facts = facts_of(name)
    tokenizer = tokenizer_of(facts)
    template = ChatTemplate(facts.chat_template, facts.special_tokens)

    def ids(text: str, special: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    chats = []
    for conversation in CONVERSATIONS:
        body = body_of(name, conversation)
        text = rendered(tokenizer, template, body)
        special = body.get("add_special_tokens", False)
        chats.append(
            {"body": body, "text": text, "ids": None if text is None else ids(text, special)}
        )
    texts = [{"text": text, "ids": ids(text, True), "bare_ids": ids(text, False)} for text in TEXTS]
    return {"fingerprint": facts.tokenizer_fingerprint, "chats": chats, "texts": texts}


def cases() -> dict[str, Any]:
    return {name: model_cases(name) for name in names()}


def train() -> None:
    """The four tokenizers."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    corpus = [LONG, ODD, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]

    def made(style: str, model: Any, special: list[str], **parts: Any) -> Any:
        tokenizer = Tokenizer(model)
        for part, value in parts.items():
            setattr(tokenizer, part, value)
        is_bytes = style in ("chatml", "llama3")
        fallback = [] if is_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.train_from_iterator(
            corpus,
            trainers.BpeTrainer(
                vocab_size=700,
                special_tokens=[*special, *fallback],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if is_bytes else [],
                limit_alphabet=256 if is_bytes else 80,
                show_progress=False,
            ),
        )
        return tokenizer

    def split(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    marks = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    chatml = made(
        "chatml",
        models.BPE(),
        marks,
        normalizer=normalizers.NFC(),
        pre_tokenizer=split(words + r"\p{N}" + rest),
        decoder=decoders.ByteLevel(),
    )
    # As Qwen has them: known to the tokenizer, and no special tokens.
    chatml.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)]
    )
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    llama3 = made(
        "llama3",
        models.BPE(ignore_merges=True),
        [f"<|{name}|>" for name in names],
        pre_tokenizer=split(words + r"\p{N}{1,3}" + rest),
        decoder=decoders.ByteLevel(),
    )
    llama3.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    mistral = made(
        "mistral",
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=True),
    )
    mistral.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    gemma = made(
        "gemma",
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=pre_tokenizers.Split(Regex("▁(?=[^▁])|\n"), behavior="merged_with_next"),
    )
    gemma.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    for style, tokenizer in zip(STYLES, (chatml, llama3, mistral, gemma), strict=True):
        tokenizer.save(str(FOLDER / style / "tokenizer.json"), pretty=False)


def main() -> None:
    if "--train" in sys.argv[1:]:
        train()
    CASES.write_text(
        json.dumps(cases(), ensure_ascii=False, indent=None, separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    main()
