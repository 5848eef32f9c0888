"""Request fields we know and do not serve: refused when they would change the answer, never swallowed.

Each table maps a name to the values with which it changes nothing (null always does not).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import UnsupportedParameter

SHARED: dict[str, tuple[Any, ...]] = {
    "stop_regex": ([], ""), "lora_path": (), "lora_id": (), "session_params": (), "custom_params": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,), "spaces_between_special_tokens": (True,),
}  # fmt: skip
OPENAI: dict[str, tuple[Any, ...]] = SHARED | {
    "prompt_logprobs": (), "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],), "bad_words": ([],), "use_beam_search": (False,), "length_penalty": (1.0,),
    "kv_transfer_params": (), "return_tokens_as_token_ids": (False,), "logits_processors": ([],),
    "prompt_embeds": (),
    "thinking_token_budget": (), "watermark": (False,),
    "watermarking": (False,), "repetition_detection": (), "truncation_side": (), "sampling_logprobs_mode": (),
    "task": (),
    "previous_input_messages": ([],),
}  # fmt: skip
CHAT: dict[str, tuple[Any, ...]] = OPENAI | {
    "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (), "echo": (False,),
    "chat_template": (), "documents": ([],),
}  # fmt: skip
COMPLETION: dict[str, tuple[Any, ...]] = OPENAI | {
    "suffix": ("",), "include_reasoning": (True,), "thinking": (), "enable_thinking": (), "reasoning": ({},),
}  # fmt: skip
GENERATE: dict[str, tuple[Any, ...]] = SHARED | {
    # Served in sampling_params.
    "regex": (), "ebnf": (), "json_schema": (), "structural_tag": (),
    "input_embeds": (), "image_data": ([],), "video_data": ([],), "audio_data": ([],), "token_ids_logprob": ([],),
    "return_prompt_logprobs": (False,),
}  # fmt: skip
# Names without effect on the answer of this engine.
IGNORED = frozenset((
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "custom_labels", "no_logs", "log_metrics", "session_id", "background",
    "vllm_xargs", "return_text_in_logprobs", "prompt_cache_retention", "prompt_cache_options", "verbosity", "store",
    "client_metadata", "kv_hints", "ec_transfer_params", "mm_processor_kwargs", "stream_interval",
    "guided_decoding_backend", "cache_control", "betas", "include_obfuscation",
    # sglang-router sends their default, true, with every request.
    "separate_reasoning", "stream_reasoning",
    "parallel_tool_calls",
))  # fmt: skip


def refuse(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise UnsupportedParameter for a field of `table` with a value that would change the answer."""
    for field, value in body.items():
        if value is not None and field in table and value not in table[field]:
            name = prefix + field
            raise UnsupportedParameter(
                f"{name} is not supported by this version; leave it out", param=name
            )
