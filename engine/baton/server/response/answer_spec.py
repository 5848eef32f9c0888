"""Rules by which the text layer writes an answer, as `baton._native.AnswerTable.open` takes them.

The field names are those of the Rust struct (engine/text/src/answers/spec.rs); it is encoded as msgpack.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec


class Dialect(Enum):
    """API in which an answer is written: `Dialect` of engine/text/src/dialect/mod.rs."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"


class ChoiceSpec(msgspec.Struct):
    """Choice of an answer: the output of one item on a rank."""

    handle: int
    """Number by which the rank's rows name the item."""
    counts_prompt: bool
    """First choice of its prompt: the one that usage counts the prompt by."""
    prompt_tokens: int
    """Length of the client's prompt."""
    left_context: Sequence[int]
    """Tokens that the text continues; empty for an answer that is a text of its own."""
    stop_token_ids: tuple[int, ...]
    echo: str
    """Text of the prompt, in front of the answer."""


class AnswerSpec(msgspec.Struct):
    """Answer to a request: the choices of all its prompts."""

    dialect: Dialect
    rid: str | None
    """The client's id of the request, if it states one: that of the response."""
    request_id: str
    model: str
    created: int
    """Unix seconds."""
    arrived: float
    """Monotonic seconds."""
    is_stream: bool
    includes_usage: bool
    has_continuous_usage: bool
    returns_token_ids: bool
    logprobs: int
    """Alternatives per position; -1: no logprobs."""
    is_batch: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int
    comment_seed: int | None
    """The stream reports its tokens in comments, with this seed (docs/protocol.md §2)."""
    is_metered: bool
    """The front counts the tokens of each batch, for a rate limit."""
    is_empty: bool
    """Nothing is generated: the answer ends at once."""
    resumed_ids: tuple[int, ...]
    """Tokens that the client has from another engine."""
    choices: list[ChoiceSpec]


encode_spec = msgspec.msgpack.Encoder().encode
