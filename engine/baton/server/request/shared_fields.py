"""Fields that all APIs have: sampling, options of the answer, priority, tenant, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.config import EngineConfig
from baton.errors import UnsupportedParameter
from baton.sched.types.request import SamplingParams
from baton.server import fields
from baton.server.fields import bad, first
from baton.server.request import schema
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.prediction import PredictionReader
from baton.server.request.sampling.logprobs import RequestedLogprobs
from baton.server.request.sampling.params import encode_bad_words, read_params, read_stops
from baton.server.request.schema import RequestFields, SamplingFields
from baton.server.request.tenancy import Tenancy
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.answer_spec import AnswerSpec, TokenNames
from baton.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SharedFields:
    """A request without its prompts, grammar and reasoning."""

    request: RequestFields
    accepted: AcceptedRequest
    """Without items."""
    params: SamplingParams
    """Parameters of every item, apart from its limit and seed."""
    min_name: str
    """The client's name of `min_new_tokens`."""
    seed: int | None


@dataclass(frozen=True, slots=True)
class SharedReader:
    """Reads the fields by the model's vocabulary and the engine's flags."""

    config: EngineConfig
    tokenizer: Tokenizer
    vocabulary: ModelVocabulary
    eos_token_ids: Sequence[int]
    defaults: SamplingFields
    """Values of generation_config.json; /generate has none."""
    tenancy: Tenancy
    predictions: PredictionReader

    async def read(
        self,
        request: RequestFields,
        sampling: SamplingFields,
        logprobs: RequestedLogprobs,
        ignored: Sequence[str],
        prefix: str = "",
    ) -> SharedFields:
        """Raises EngineError.

        Args:
            ignored: fields of the body without effect.
            prefix: stands before the names of sampling fields that are nested.
        """
        params = read_params(
            sampling,
            SamplingFields() if prefix else self.defaults,
            self.vocabulary,
            self.eos_token_ids,
            logprobs=logprobs,
            prefix=prefix,
        )
        min_name, min_tokens = first(sampling, "min_tokens", "min_new_tokens")
        given_options = request.stream_options or {}
        options = fields.read(schema.StreamOptions, given_options, "stream_options.")
        known_options = schema.StreamOptions.__struct_fields__
        unknown_options = [name for name in given_options if name not in known_options]
        priority_class, tenant = self.tenancy.read(request)
        if logprobs.prompt is not None and self.config.simulate is not None:
            raise UnsupportedParameter(
                "this engine simulates its device (--simulate) and computes no logprobs of "
                "prompts; leave them out",
                param="logprobs",
            )
        names_ids = getattr(request, "return_tokens_as_token_ids", None)
        answer = AnswerSpec(
            rid=_read_rid(first(request, "rid", "request_id")[1]),
            stream=request.stream or False,
            include_usage=options.include_usage or False,
            continuous_usage_stats=options.continuous_usage_stats or False,
            return_token_ids=request.return_token_ids or False,
            return_prompt_ids=bool(request.return_token_ids or request.return_prompt_token_ids),
            logprobs=logprobs.top if logprobs.top >= 0 else None,
            logprob_token_ids=logprobs.token_ids,
            token_names=TokenNames.IDS if names_ids else TokenNames.TEXTS,
            prompt_logprobs=logprobs.prompt,
            stops=read_stops(sampling),
            include_stop=bool(sampling.include_stop_str_in_output or sampling.no_stop_trim),
            skip_special_tokens=fields.value_or(sampling.skip_special_tokens, True),
            min_tokens=min_tokens or 0,
        )
        accepted = AcceptedRequest(
            items=(),
            n=sampling.n or 1,
            answer=answer,
            continues_prompt=request.continues_prompt,
            priority=self._read_priority(request.priority),
            priority_class=priority_class,
            tenant=tenant,
            ttft_deadline_secs=_to_secs(request.ttft_deadline_ms),
            deadline_secs=_to_secs(request.deadline_ms),
            namespace=_namespace_of(request),
            draft_limit=_read_draft_limit(request.speculative),
            prediction=await self.predictions.read(request.prediction),
            ignored=(*(f"stream_options.{name}" for name in unknown_options), *ignored),
        )
        # Most requests have none, and a copy of all parameters for each of them shows in profiles.
        if sampling.bad_words:
            params = replace(params, bad_words=await self._read_bad_words(sampling.bad_words))
        return SharedFields(
            request,
            accepted,
            params,
            prefix + min_name,
            first(sampling, "seed", "sampling_seed")[1],
        )

    async def _read_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of the words, encoded in a thread if there are many."""
        return await self.tokenizer.offload(
            sum(map(len, words)),
            lambda: encode_bad_words(words, self.tokenizer, self.vocabulary),
        )

    def _read_priority(self, value: int | None) -> int | None:
        config = self.config
        if (
            value is not None
            and config.abort_on_priority_when_disabled
            and not config.enable_priority_scheduling
        ):
            raise UnsupportedParameter(
                "this engine runs without --enable-priority-scheduling and refuses requests with a "
                "priority; "
                "leave priority out",
                param="priority",
            )
        return value


def _namespace_of(request: RequestFields) -> bytes:
    """Prefix of the keys under which the request's pages are cached."""
    keys = (request.cache_salt, request.extra_key)
    return "\0".join(key or "" for key in keys).encode() if any(keys) else b""


def _read_draft_limit(value: bool | int | None) -> int | None:
    if value is None or value is True:
        return None
    return int(value)


def _read_rid(value: Any) -> str | None:
    if type(value) is list and len(value) == 1:
        value = value[0]
    if type(value) is list:
        raise UnsupportedParameter("rid must be one string for the whole request", param="rid")
    if value is not None and (
        type(value) is not str or not 0 < len(value) <= 256 or not value.isprintable()
    ):
        raise bad("rid", "must be a printable string of 1 to 256 characters")
    return value


def _to_secs(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
