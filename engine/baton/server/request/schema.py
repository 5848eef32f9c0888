"""Bodies of requests as structs: name, type and bounds of each field that an engine serves.

Fields are absent by default (None), because some defaults depend on the model: the modules in
`dialects` have them, as they have checks across fields. A field of type Any has a form that a check
of its own knows (prompts, rooms). Sources: OpenAI's API reference, SGLang 0.5.7 (`io_struct`),
docs/protocol.md §2 for the fields of routers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from baton.config.classes import LEAST_PRIORITY, MOST_PRIORITY

INT64_MAX = 2**63 - 1
LARGEST = 1e30
"""Above any sensible number, and far from overflow in what is computed with it."""
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_BIAS = 1024
MAX_STOP_IDS = 256
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256
MAX_ITEMS = 1024
"""Prompts times n in one request: as many rows as the largest batches of the evaluation suites."""
MAX_DEADLINE_MS = 86_400_000
"""A day: longer deadlines are refused as mistakes."""
MAX_CHALLENGE_CHARS = 128
MAX_PROBES = 64
"""Prefill nodes in one request of /debug/diagnosis."""

Text = Annotated[str, Meta(max_length=4096)] | None
Key = Annotated[str, Meta(max_length=1024)] | None
Natural = Annotated[int, Meta(ge=0, le=INT64_MAX)] | None
Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)] | None
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None
Seed = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None
AnyRank = Annotated[int, Meta(ge=0, le=2**16)] | None
TokenBudget = Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None
"""A limit in tokens; -1: no limit."""
DraftLimit = bool | Annotated[int, Meta(ge=0, le=INT64_MAX)] | None
"""Tokens that may be drafted at a time; True: as many as the engine likes, False: none."""
Milliseconds = Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)] | None
StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
"""An empty one ends no answer."""
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class SamplingFields(Struct, kw_only=True):
    """Fields of a chat or completion body, or of the object `sampling_params` of /generate."""

    temperature: Annotated[float, Meta(ge=0.0, le=LARGEST)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MAX_BIAS)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: int | Annotated[list[Any], Meta(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: list[Any] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural = None
    min_new_tokens: Natural = None
    max_tokens: Natural = None
    n: Choices = None
    seed: Seed = None
    sampling_seed: Seed = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResumeFields(Struct):
    """`baton_resume`: the beginning of an answer that another engine began."""

    ids: Any = None
    seed: Natural = None
    created: Natural = None
    events: Natural = None
    fingerprint: dict[str, str] | None = None


class PredictionFields(Struct):
    """`prediction`, as OpenAI has it."""

    type: Text = None
    content: Any = None
    """A text, or an array of parts of the type text."""


class RequestFields(Struct, kw_only=True):
    """Fields of every request for tokens, beside those of sampling."""

    model: Text = None
    input_ids: Any = None
    tokenizer_fingerprint: Text = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    rid: Any = None
    request_id: Any = None
    priority: Annotated[int, Meta(ge=LEAST_PRIORITY, le=MOST_PRIORITY)] | None = None
    priority_class: Any = None
    service_tier: Any = None
    tenant: Any = None
    ttft_deadline_ms: Milliseconds = None
    deadline_ms: Milliseconds = None
    speculative: DraftLimit = None
    prediction: PredictionFields | None = None
    cache_salt: Key = None
    extra_key: Key = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    data_parallel_rank: AnyRank = None
    data_parallel_rank_decode: AnyRank = None
    routed_dp_rank: Natural = None
    disagg_prefill_dp_rank: AnyRank = None
    baton_resume: dict[str, Any] | None = None

    @property
    def continues_prompt(self) -> bool:
        """Tell an answer that continues the prompt's text from one that is a text of its own."""
        return True


class ReasoningFields(Struct):
    """`reasoning`, as /v1/responses has it."""

    effort: Text = None
    enabled: bool | None = None


class ThinkingFields(Struct):
    """`thinking`, as Anthropic's API has it."""

    type: Text = None
    budget_tokens: TokenBudget = None


class CustomParams(Struct):
    """`custom_params`, as SGLang has it."""

    thinking_budget: TokenBudget = None


class ChatCompletionRequest(RequestFields, kw_only=True):
    messages: Any = None
    max_completion_tokens: Natural = None
    logprobs: bool | Annotated[int, Meta(ge=0, le=0)] | None = None
    """0, as in completions: the logprob of each token alone."""
    top_logprobs: TopLogprobs = None
    logprob_token_ids: Any = None
    prompt_logprobs: TopLogprobs = None
    return_tokens_as_token_ids: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Text = None
    reasoning: ReasoningFields | None = None
    thinking: ThinkingFields | None = None
    thinking_token_budget: TokenBudget = None
    custom_params: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message or False


class CompletionRequest(RequestFields, kw_only=True):
    prompt: Any = None
    max_completion_tokens: Natural = None
    logprobs: TopLogprobs = None
    logprob_token_ids: Any = None
    prompt_logprobs: TopLogprobs = None
    return_tokens_as_token_ids: bool | None = None
    best_of: Positive = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class GenerateRequest(RequestFields, kw_only=True):
    text: Any = None
    prompt: Any = None
    sampling_params: Any = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs = None
    token_ids_logprob: Any = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate."""

    max_new_tokens: Natural = None
    custom_params: dict[str, Any] | None = None


class TokenizeRequest(Struct, kw_only=True):
    model: Text = None
    prompt: Any = None
    text: Any = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: Text = None
    tokens: Any = None
    input_ids: Any = None
    skip_special_tokens: bool | None = None


class AbortRequest(Struct, kw_only=True):
    abort_all: bool | None = None
    rid: Text = None
    request_id: Text = None
    bootstrap_room: Any = None


class PrefillTarget(Struct):
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class DiagnosisRequest(Struct, kw_only=True):
    """Body of /debug/diagnosis: a text to prove cluster keys by, and the prefill nodes to look
    at.
    """

    challenge: Annotated[str, Meta(max_length=MAX_CHALLENGE_CHARS)] | None = None
    prefill: Annotated[list[PrefillTarget], Meta(max_length=MAX_PROBES)] | None = None
