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
    RESPONSES = "responses"
    MESSAGES = "messages"

    @property
    def has_named_events(self) -> bool:
        """Events, errors among them, have names."""
        return self in (Dialect.RESPONSES, Dialect.MESSAGES)

    @property
    def repeats_logprobs(self) -> bool:
        """The last event has the logprobs of all tokens once more."""
        return self is Dialect.RESPONSES


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
    prompt_end: Sequence[int]
    """End of the prompt, where its reasoning begins or ends; empty for an answer that is one text."""
    stop_token_ids: tuple[int, ...]
    echo: str
    """Text of the prompt, in front of the answer."""
    prompt_ids: Sequence[int] = ()
    """Ids of the client's prompt, where the answer has them or their logprobs."""
    grammar_end_ids: tuple[int, ...] = ()
    """Tokens that end the answer's grammar, also before it has its least number of tokens."""
    has_prompt_logprobs: bool = False
    """The choice has logprobs of its prompt. The rank sends them with the prompt's first choice."""


class PromptLogprobsSpec(msgspec.Struct):
    """Logprobs of the prompts in an answer."""

    start: int
    """Position of the first token that is listed; it has no logprob."""
    joins_logprobs: bool
    """They are part of the answer's own logprobs: completions with echo, and /generate."""
    objects: int | None
    """Alternatives per position in `prompt_logprobs`; None: the answer has no such member."""


class ReadingSpec(msgspec.Struct):
    """How the parts of an answer are read and sent: reasoning, content and tool calls."""

    tools: str
    """JSON: name and parameters of each tool that the answer may call."""
    calls_before: int
    """Tool calls in the conversation before the answer."""
    parallel_tool_calls: bool
    separate_reasoning: bool
    stream_reasoning: bool
    include_reasoning: bool
    reasoning_field: str
    """Member that holds the reasoning: reasoning_content, reasoning or both."""
    is_named_choice: bool = False
    """A complete call ends the answer with `stop`, not with `tool_calls`."""
    is_function_call: bool = False
    """The call is `function_call` of the message, as in OpenAI's older API."""
    is_gated: bool = False
    """A rank looks for the end of the reasoning, behind which the grammar begins."""


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
    logprob_token_ids: tuple[int, ...]
    """Ids whose logprobs stand beside the alternatives, or in their place."""
    names_tokens_by_id: bool
    """Logprobs name their tokens by id."""
    prompt_logprobs: PromptLogprobsSpec | None
    """Logprobs of the prompts; None: the answer has none."""
    returns_prompt_ids: bool
    """The answer has the ids of its prompts."""
    is_batch: bool
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int
    follows_grammar: bool
    """A grammar counts the bytes of the answer's tokens."""
    comment_seed: int | None
    """The stream reports its tokens in comments, with this seed (docs/protocol.md §2)."""
    is_metered: bool
    """The front counts the tokens of each batch, for a rate limit."""
    is_empty: bool
    """Nothing is generated: the answer ends at once, or with the logprobs of its prompts."""
    resumed_ids: tuple[int, ...]
    """Tokens that the client has from another engine."""
    resumed_events: int | None
    """Events in which they came, where events are numbered."""
    is_limited_by_context: bool
    """The context ends where the answer's limit is, before the limit that the client set."""
    facts: str
    """Facts of a translated request: JSON, or empty."""
    reading: ReadingSpec | None
    """None: the answer is one text."""
    choices: list[ChoiceSpec]


encode_spec = msgspec.msgpack.Encoder().encode
