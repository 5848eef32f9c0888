"""Request fields we know and do not serve: refused when they would change the answer, never
swallowed.

Each table maps a name to the values with which it changes nothing (null always does not).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

import msgspec

from baton.errors import UnsupportedParameter

SHARED: dict[str, tuple[Any, ...]] = {
    "stop_regex": ([], ""), "lora_path": (), "lora_id": (), "session_params": (),
    "custom_logit_processor": (), "logits_processors": ([],),
    "return_hidden_states": (False,), "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,), "length_penalty": (1.0,), "watermark": (False,),
    "watermarking": (False,),
    "repetition_detection": (), "sampling_logprobs_mode": (), "task": (),
    "previous_input_messages": ([],),
    "prompt_embeds": (), "input_embeds": (), "chat_template": (), "documents": ([],),
    "audio": (), "modalities": (["text"],), "web_search_options": (),
    "suffix": ("",),
}  # fmt: skip
OPENAI: dict[str, tuple[Any, ...]] = SHARED | {
    "kv_transfer_params": (),
}  # fmt: skip
CHAT: dict[str, tuple[Any, ...]] = OPENAI | {"echo": (False,)}
COMPLETION: dict[str, tuple[Any, ...]] = OPENAI | {
    "thinking_token_budget": (), "custom_params": (),
    "include_reasoning": (True,), "thinking": (), "enable_thinking": (), "reasoning": ({},),
}  # fmt: skip
GENERATE: dict[str, tuple[Any, ...]] = SHARED | {
    # Served in sampling_params.
    "regex": (), "ebnf": (), "json_schema": (), "structural_tag": (), "custom_params": (),
    "image_data": ([],), "video_data": ([],), "audio_data": ([],),
    "return_prompt_logprobs": (False,),
}  # fmt: skip
ADVICE_ON_REASONING = (
    "the answer of /v1/completions is one text, whose reasoning is not read; "
    "use /v1/chat/completions, or leave it out"
)
ADVICE: tuple[tuple[dict[str, tuple[Any, ...]], frozenset[str], str], ...] = (
    (
        COMPLETION,
        frozenset(
            (
                "thinking_token_budget", "custom_params", "include_reasoning", "thinking",
                "enable_thinking", "reasoning"
            )
        ),
        ADVICE_ON_REASONING,
    ),
    (
        GENERATE,
        frozenset(("regex", "ebnf", "json_schema", "structural_tag", "custom_params")),
        "send it in sampling_params",
    ),
)  # fmt: skip
"""Fields of a table that are served elsewhere, and what to do instead of sending them there."""
ROUTER_DEFAULTS = frozenset((
    "separate_reasoning", "stream_reasoning", "no_logs", "log_metrics", "return_text_in_logprobs",
    "background",
))  # fmt: skip
"""Names without effect that sglang-router and smg send with every request: not worth a word."""


def refuse(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise UnsupportedParameter for a field of `table` with a value that would change the
    answer.
    """
    for field, value in body.items():
        if value is not None and field in table and value not in table[field]:
            name = prefix + field
            raise UnsupportedParameter(
                f"{name} is not supported {_find_advice(field, table)}", param=name
            )


def _find_advice(field: str, table: Mapping[str, tuple[Any, ...]]) -> str:
    """End of the sentence that refuses a field of the table."""
    for other, names, advice in ADVICE:
        if other is table and field in names:
            return f"here: {advice}"
    return "by this version; leave it out"


def find_ignored(
    body: Mapping[str, Any],
    refused: Mapping[str, tuple[Any, ...]],
    *schemas: type[msgspec.Struct],
    unused: AbstractSet[str] = frozenset(),
    prefix: str = "",
) -> list[str]:
    """Fields of `body` that have no effect: no schema and no table knows them, or they are
    `unused`.

    Raises UnsupportedParameter for a field of `refused`.
    """
    refuse(body, refused, prefix)
    unknown = body.keys() - _field_names(*schemas) - refused.keys() - ROUTER_DEFAULTS
    without_effect = unknown | (body.keys() & unused)
    return [prefix + name for name in body if name in without_effect]


@lru_cache
def _field_names(*schemas: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(name for schema in schemas for name in schema.__struct_fields__)
