"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from baton.server import fields
from baton.server.fields import bad, first
from baton.server.request.dialects.parts import ValidationParts
from baton.server.request.prompt.forms import require_value
from baton.server.request.schema import MAX_ITEMS, DetokenizeRequest, TokenizeRequest
from baton.server.text.chat_template import encode_chat_fields


async def tokenize_body(
    parts: ValidationParts, body: dict[str, Any]
) -> list[int] | list[list[int]]:
    """Ids of `prompt` (string or array of strings) or `messages`."""
    request = fields.read(TokenizeRequest, body)
    parts.check_model(request.model)
    limit = parts.prompts.limits.limit_of_prompt(is_bounded=False)
    if request.messages is not None:
        return (await parts.prompts.read_chat(encode_chat_fields(body), limit)).tolist()
    prompt = require_value(*first(request, "prompt", "text"))
    texts = [prompt] if isinstance(prompt, str) else prompt
    if (
        type(texts) is not list
        or not all(type(text) is str for text in texts)
        or len(texts) > MAX_ITEMS
    ):
        raise bad("prompt", f"must be a string or an array of at most {MAX_ITEMS} strings")
    special = fields.value_or(request.add_special_tokens, True)
    encoded = await parts.prompts.encode_texts(texts, special, limit, "prompt")
    rows = [ids.tolist() for ids in encoded]
    return rows[0] if isinstance(prompt, str) else rows


async def detokenize_body(parts: ValidationParts, body: dict[str, Any]) -> str | list[str]:
    """Text of `tokens`, or texts of its rows."""
    request = fields.read(DetokenizeRequest, body)
    parts.check_model(request.model)
    value = require_value(*first(request, "tokens", "input_ids"))
    if type(value) is not list:
        raise bad("tokens", "must be an array of token ids")
    nested = bool(value) and type(value[0]) is list
    rows = value if nested else [value]
    for row in rows:
        parts.items.vocabulary.check_decodable(row, "tokens")
    special = fields.value_or(request.skip_special_tokens, True)
    texts = await parts.prompts.decode(rows, special)
    return texts if nested else texts[0]
