"""Sampling parameters of a request: its own fields, else the checkpoint's defaults, else the API's.

Defaults come from generation_config.json (matches SGLang 0.5.7 and vLLM), and only for the OpenAI endpoints. They pass
the types and bounds of a request's fields (schema.SamplingFields) when the engine starts: a value that no request may
state ends the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.errors import BadRequest, ConfigError
from baton.sched.types.request import SamplingParams
from baton.server import fields
from baton.server.fields import first
from baton.server.request.schema import MAX_STOP_IDS, SamplingFields
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.model_info import ModelFacts

DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are used."""


def read_defaults(facts: ModelFacts) -> SamplingFields:
    """The defaults in generation_config.json; null counts as absent. Raises ConfigError that lists every mistake."""
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
    logprobs: int,
    prefix: str,
) -> SamplingParams:
    """Parameters of every answer of a request, apart from its limit and seed. Raises BadRequest.

    Args:
        prefix: stands before the names of fields in errors.
    """

    def choose(name: str, neutral: Any) -> Any:
        """The request's value, else the checkpoint's, else the one that changes nothing."""
        value = getattr(stated, name)
        if value is None:
            value = getattr(defaults, name)
        return neutral if value is None else value

    stop_ids = vocabulary.read_ids(prefix + "stop_token_ids", stated.stop_token_ids, MAX_STOP_IDS)
    if not stated.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *eos_token_ids)))
    _, min_tokens = first(stated, "min_tokens", "min_new_tokens")
    return SamplingParams(
        min_new_tokens=min_tokens or 0,
        temperature=choose("temperature", 1.0),
        top_p=choose("top_p", 1.0),
        top_k=max(choose("top_k", 0), 0),
        min_p=choose("min_p", 0.0),
        presence_penalty=choose("presence_penalty", 0.0),
        frequency_penalty=choose("frequency_penalty", 0.0),
        repetition_penalty=choose("repetition_penalty", 1.0),
        stop_token_ids=stop_ids,
        ignore_eos=stated.ignore_eos or False,
        logit_bias=vocabulary.read_bias(prefix + "logit_bias", stated.logit_bias or {}),
        logprobs=logprobs,
    )
