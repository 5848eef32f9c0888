"""Prompts that come as token ids beside their text: whose tokenizer made them, and one list for each prompt.

A router tokenizes for the engine that described itself under an address. Another engine may have taken its place since,
so the ids come with the fingerprint of the tokenizer, and an engine with another one refuses them.
"""

from __future__ import annotations

from typing import Any

from baton.errors import FingerprintMismatch
from baton.server.api.fields import bad
from baton.server.api.schema import MAX_ITEMS


def refuse_other_tokenizer(stated: str | None, own: str) -> None:
    """Raise FingerprintMismatch for ids that were made for another tokenizer than this engine's."""
    if stated is not None and stated != own:
        raise FingerprintMismatch(
            f"input_ids were made for the tokenizer {stated[:64]}, this engine's is {own or 'unknown'}; send the text "
            "alone, or tokenize with this engine's files",
            param="input_ids",
        )


def rows_of_ids(value: Any, count: int, *, many: bool) -> list[Any]:
    """`input_ids` as `count` lists: one list, or an array of lists where the body holds `many`. Raises BadRequest."""
    rows = value if many else [value]
    if type(rows) is not list or len(rows) != count or count > MAX_ITEMS:
        wanted = (
            f"an array of {min(count, MAX_ITEMS)} arrays of token ids"
            if many
            else "an array of token ids"
        )
        raise bad("input_ids", f"must be {wanted}, the prompts as they are tokenized")
    return rows
