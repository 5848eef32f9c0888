"""Options of an answer, as `baton._native.AnswerTable.open` takes them: msgpack of `AnswerSpec`.

Made by `python -m tools.answer_spec` from `engine/text/src/dialect/write/spec.rs`; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec


class Dialect(Enum):
    """An API that generates text."""

    CHAT = "chat"
    """OpenAI's chat completions."""
    COMPLETIONS = "completions"
    """OpenAI's completions."""
    GENERATE = "generate"
    """SGLang's native API."""
    RESPONSES = "responses"
    """OpenAI's responses."""
    MESSAGES = "messages"
    """Anthropic's messages."""


class ReasoningNames(Enum):
    """Members of a chat answer that hold its reasoning."""

    REASONING_CONTENT = "reasoning_content"
    """`reasoning_content` (SGLang)."""
    REASONING = "reasoning"
    """`reasoning` (vLLM)."""
    BOTH = "both"


class TokenNames(Enum):
    """Names of tokens in logprobs."""

    TEXTS = "texts"
    """By their texts."""
    IDS = "ids"
    """`token_id:123` (`return_tokens_as_token_ids`)."""


class ChoiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of an answer: the output of one item on a rank."""

    handle: int
    """Number by which rows name the item."""
    counts_prompt: bool
    """First choice of its prompt: the one that usage counts the prompt by."""
    prompt_tokens: int
    """Length of the client's prompt."""
    left_context: Sequence[int] = ()
    """Tokens that the text continues; empty for an answer that is a text of its own."""
    prompt_end: Sequence[int] = ()
    """End of the prompt, where its reasoning begins or ends; empty for an answer that is one
    text.
    """
    stop_token_ids: Sequence[int] = ()
    grammar_end_ids: Sequence[int] = ()
    """Tokens that end the answer's grammar, also before it has its least number of tokens."""
    echo: str = ""
    """Text of the prompt, in front of the answer."""
    prompt_ids: Sequence[int] = ()
    """Ids of the client's prompt, where the answer has them or their logprobs."""


class ReadingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the parts of an answer are read and sent: reasoning, content and tool calls."""

    tools: str
    """Name and parameters of each tool that the answer may call: JSON."""
    is_named_choice: bool = False
    """A complete call ends the answer with `stop`, not with `tool_calls`: the client chose the
    tool by its name.
    """
    calls_before: int = 0
    """Tool calls in the conversation before the answer."""
    is_gated: bool = False
    """A rank looks for the end of the reasoning, behind which the grammar begins."""
    parallel_tool_calls: bool
    """False: the answer ends behind its first call."""
    is_function_call: bool = False
    """The answer has its call as OpenAI's older API has it: the request has `functions`."""
    separate_reasoning: bool
    """False: reasoning and its markers are content."""
    stream_reasoning: bool
    """False: reasoning is sent when it is complete."""
    include_reasoning: bool
    """False: reasoning is generated and not sent."""
    reasoning_field: ReasoningNames
    """Member of chat answers that holds the reasoning."""


class PromptLogprobsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of the prompts in an answer."""

    start: int = 0
    """Position of the first token that is listed; it has no logprob."""
    joins_logprobs: bool = False
    """They are part of the answer's own logprobs: completions with echo, and /generate."""
    objects: int | None = None
    """Alternatives per position in `prompt_logprobs`; None: the answer has no such member."""
    is_once: bool = False
    """The answer has them once, whatever the number of its choices. Otherwise each choice has
    those of its prompt.
    """


class AnswerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request: the choices of all its prompts."""

    dialect: Dialect = Dialect.CHAT
    """API in which it is written. It is known once the answer begins, as are the ids, the model's
    name, the times and the choices.
    """
    rid: str | None = None
    """The client's id of the request, if it states one: that of the response."""
    request_id: str = ""
    """Id of the HTTP request."""
    model: str = ""
    """Name under which the model is served."""
    created: int = 0
    """Unix seconds."""
    arrived: float = 0.0
    """Time at which the request came, on the clock of the batches [seconds]."""
    stream: bool = False
    include_usage: bool = False
    """Usage comes in an event of its own at the end."""
    continuous_usage_stats: bool = False
    """Every event has the usage so far."""
    return_token_ids: bool = False
    """Token ids stand beside the text."""
    return_prompt_ids: bool = False
    """Ids of the prompt stand beside the answer."""
    logprobs: int | None = None
    """Alternatives per position; None: no logprobs."""
    logprob_token_ids: Sequence[int] = ()
    """Ids whose logprobs stand beside the alternatives, or in their place."""
    token_names: TokenNames = TokenNames.TEXTS
    """Names of tokens in logprobs."""
    prompt_logprobs: PromptLogprobsSpec | None = None
    """Logprobs of the prompts; None: the answer has none."""
    is_batch: bool = False
    """/generate: the request asked for a list."""
    stops: Sequence[str] = ()
    """Texts that end the answer."""
    include_stop: bool = False
    """The text that ended the answer is part of it."""
    skip_special_tokens: bool
    """Special tokens have no text."""
    min_tokens: int = 0
    """Number of tokens before which no stop text ends the answer."""
    follows_grammar: bool = False
    """A grammar counts the bytes of the answer's tokens."""
    comment_seed: int | None = None
    """The stream reports its tokens in comments, with this seed (docs/protocol.md §2)."""
    is_metered: bool = False
    """The front counts the tokens of each batch, for a rate limit."""
    is_empty: bool = False
    """Nothing is generated: the answer ends at once, or with the logprobs of its prompts."""
    resumed_ids: Sequence[int] = ()
    """Tokens that the client has from another engine."""
    resumed_events: int | None = None
    """Events in which they came, where events are numbered."""
    reading: ReadingSpec | None = None
    """Reading of the answer's parts; None: the answer is one text."""
    is_limited_by_context: bool = False
    """The context ends where the answer's limit is, before the limit that the client set."""
    facts: str = ""
    """Facts of a translated request: JSON, or empty."""
    choices: Sequence[ChoiceSpec] = ()


encode_spec = msgspec.msgpack.Encoder().encode
