"""Sampling parameters of a request: its own fields, else the checkpoint's defaults, else the API's.

Defaults come from generation_config.json (matches SGLang 0.5.7 and vLLM), and only for the OpenAI
endpoints. They pass the types and bounds of a request's fields (schema.SamplingFields) when the
engine starts: a value that no request may state ends the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.errors import BadRequest, ConfigError, UnsupportedParameter
from baton.sched.types.request import SamplingParams
from baton.server import fields
from baton.server.fields import bad, first
from baton.server.request.sampling.logprobs import RequestedLogprobs
from baton.server.request.schema import (
    MAX_STOP_IDS,
    ChatCompletionRequest,
    CustomParams,
    SamplingFields,
    ThinkingFields,
)
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.model_info import ModelFacts
from baton.server.text.tokenizer import Tokenizer

DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are used."""
NEUTRAL = SamplingParams()
"""Values that change nothing."""


def read_defaults(facts: ModelFacts) -> SamplingFields:
    """The defaults in generation_config.json; null counts as absent. Raises ConfigError that lists
    every mistake.
    """
    stated = {
        key: facts.generation_config[key] for key in DEFAULT_KEYS if key in facts.generation_config
    }
    mistakes: list[str] = []
    for key, value in stated.items():
        try:
            fields.read(SamplingFields, {key: value})
        except BadRequest as err:
            mistakes.append(err.message)
    if mistakes:
        file = facts.path / "generation_config.json"
        raise ConfigError(
            "\n".join(
                f"{file}: {mistake}, as in a request; correct the value or remove it"
                for mistake in mistakes
            )
        )
    return fields.read(SamplingFields, stated)


def read_params(
    stated: SamplingFields,
    defaults: SamplingFields,
    vocabulary: ModelVocabulary,
    eos_token_ids: Sequence[int],
    *,
    logprobs: RequestedLogprobs,
    prefix: str,
) -> SamplingParams:
    """Parameters of every answer of a request, apart from its limit and seed. Raises BadRequest.

    Args:
        prefix: stands before the names of fields in errors.
    """

    def choose(name: str) -> Any:
        """The request's value, else the checkpoint's, else the one that changes nothing."""
        for fields_of_source in (stated, defaults):
            value = getattr(fields_of_source, name)
            if value is not None:
                return value
        return getattr(NEUTRAL, name)

    stop_ids = vocabulary.read_ids(prefix + "stop_token_ids", stated.stop_token_ids, MAX_STOP_IDS)
    if not stated.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *eos_token_ids)))
    _, min_tokens = first(stated, "min_tokens", "min_new_tokens")
    return SamplingParams(
        min_new_tokens=min_tokens or 0,
        temperature=choose("temperature"),
        top_p=choose("top_p"),
        top_k=max(choose("top_k"), 0),
        min_p=choose("min_p"),
        presence_penalty=choose("presence_penalty"),
        frequency_penalty=choose("frequency_penalty"),
        repetition_penalty=choose("repetition_penalty"),
        stop_token_ids=stop_ids,
        ignore_eos=stated.ignore_eos or False,
        allowed_tokens=read_allowed_tokens(
            prefix + "allowed_token_ids", stated.allowed_token_ids, vocabulary
        ),
        logit_bias=vocabulary.read_bias(prefix + "logit_bias", stated.logit_bias or {}),
        logprobs=logprobs.top,
        logprob_token_ids=logprobs.token_ids,
        prompt_logprobs=logprobs.prompt_top,
        prompt_logprobs_start=1 if logprobs.prompt is None else logprobs.prompt.start + 1,
    )


def read_stops(stated: SamplingFields) -> tuple[str, ...]:
    """Texts that end the answer. An empty one ends none."""
    stop = stated.stop
    return tuple(filter(None, (stop,) if isinstance(stop, str) else stop or ()))


def read_max_tokens(least: int, **given: int | None) -> int | None:
    """Limit of the answer by the first name that is given; None: by none."""
    for name, value in given.items():
        if value is not None and value < least:
            raise bad(name, f"is {value}, must be at least {least}")
    return next((value for value in given.values() if value is not None), None)


class ReasoningLimit(NamedTuple):
    """Limit of an answer's reasoning, as a request states it."""

    param: str
    """The client's field."""
    budget: int | None
    """Most tokens; None: no limit."""


NO_LIMIT = ReasoningLimit("", None)


def read_chat_limit(request: ChatCompletionRequest) -> ReasoningLimit:
    """The limit in vLLM's field, else in SGLang's, else in Anthropic's."""
    if request.thinking_token_budget is not None:
        return _make_limit("thinking_token_budget", request.thinking_token_budget)
    if request.custom_params is not None:
        return read_custom_limit(request.custom_params)
    thinking = request.thinking or ThinkingFields()
    return _make_limit("thinking.budget_tokens", thinking.budget_tokens)


def read_custom_limit(given: Mapping[str, Any] | None, prefix: str = "") -> ReasoningLimit:
    """The limit in `custom_params`. Raises BadRequest, and UnsupportedParameter for another member.

    Args:
        prefix: stands before the names of fields in errors.
    """
    name = f"{prefix}custom_params"
    stated = given or {}
    custom = fields.read(CustomParams, stated, f"{name}.")
    for unknown in stated.keys() - CustomParams.__struct_fields__:
        raise UnsupportedParameter(
            f"{name}.{unknown} is not supported by this version; leave it out",
            param=f"{name}.{unknown}",
        )
    return _make_limit(f"{name}.thinking_budget", custom.thinking_budget)


def _make_limit(param: str, budget: int | None) -> ReasoningLimit:
    return ReasoningLimit(param, None if budget == -1 else budget)


def read_allowed_tokens(name: str, value: list[Any] | None, vocabulary: ModelVocabulary) -> bytes:
    """`SamplingParams.allowed_tokens`. Raises BadRequest for no ids, and for ids that the model
    lacks.
    """
    if value is None:
        return b""
    if not value:
        raise bad(
            name, "is empty, so no token could be drawn; give at least one id, or leave it out"
        )
    vocabulary.check_ids(value, name)
    bits = bytearray(-(-vocabulary.size // 8))
    for token_id in value:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def encode_bad_words(
    words: Sequence[str], tokenizer: Tokenizer, vocabulary: ModelVocabulary
) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, with and without a blank before it: at the start of a text and within
    it.

    Leading white space of a word counts for nothing (matches vLLM 0.33), unless there is nothing
    else. Words that the model cannot write, because it lacks their tokens, need no ban.
    """
    spellings = []
    for word in words:
        bare = word.lstrip()
        spellings += [bare, " " + bare] if bare else [word]
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    known = [tokens for tokens in encoded if tokens and max(tokens) < vocabulary.size]
    return tuple(dict.fromkeys(known))
