"""Bodies of /generate, SGLang's native API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.errors import MissingField, UnsupportedParameter
from baton.server import fields
from baton.server.fields import bad, first
from baton.server.request import unsupported_fields
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.dialects.parts import ValidationParts
from baton.server.request.grammar.constraint import NativeGrammarFields
from baton.server.request.item_maker import AnswerLimit, PromptRows, RequestDraft
from baton.server.request.prompt.forms import is_batch, prompt_list
from baton.server.request.sampling.logprobs import read_generate_logprobs
from baton.server.request.sampling.params import read_custom_limit, read_max_tokens
from baton.server.request.schema import GenerateRequest, GenerateSampling

NESTED = "sampling_params."
"""Prefix of the sampling fields in errors."""
NESTED_FIELDS = (GenerateSampling, NativeGrammarFields)
GENERATE_MAX_TOKENS = 128
"""SGLang's default for /generate."""


async def accept_generate(parts: ValidationParts, body: dict[str, Any]) -> AcceptedRequest:
    """Raises EngineError that names a field of the body."""
    request = fields.read(GenerateRequest, body)
    ignored = parts.find_ignored(body, unsupported_fields.GENERATE, GenerateRequest)
    # smg 1.13 adds this name: the native body has no such field in SGLang.
    if request.model != "unknown":
        parts.check_model(request.model)
    nested = _read_nested(request)
    sampling = fields.read(GenerateSampling, nested, NESTED)
    ignored += parts.find_ignored(nested, unsupported_fields.SHARED, *NESTED_FIELDS, prefix=NESTED)
    name, value = first(request, "text", "prompt", "input_ids")
    if value is None:
        raise MissingField("text or input_ids is required", param="text")
    raw = prompt_list(name, value)
    many = is_batch(value)
    logprobs = read_generate_logprobs(request, parts.items.vocabulary)
    shared = await parts.shared.read(request, sampling, logprobs, ignored, NESTED)
    draft = RequestDraft(
        shared,
        grammar=await parts.grammars.read(nested, NESTED, is_native=True),
        reasoning=read_custom_limit(sampling.custom_params, NESTED),
    )
    limits = {
        NESTED + field: getattr(sampling, field) for field in ("max_new_tokens", "max_tokens")
    }
    limit = AnswerLimit(read_max_tokens(1, **limits), GENERATE_MAX_TOKENS)
    prompts = await _read_prompts(parts, request, raw, name, many=many)
    accepted = parts.items.accept(draft, PromptRows(prompts, name), limit)
    return accepted.with_options(is_batch=many or accepted.n > 1)


def _read_nested(request: GenerateRequest) -> dict[str, Any]:
    nested = fields.value_or(request.sampling_params, {})
    if type(nested) is list:
        raise UnsupportedParameter(
            "sampling_params must be one object for all prompts", param="sampling_params"
        )
    if type(nested) is not dict:
        raise bad("sampling_params", "must be an object")
    return nested


async def _read_prompts(
    parts: ValidationParts, request: GenerateRequest, raw: list[Any], name: str, *, many: bool
) -> Sequence[Sequence[int]]:
    """Ids of the prompts, where `input_ids` may be the prompts themselves."""
    forwarded: Sequence[Sequence[int]] | None = None
    if name == "input_ids":
        parts.prompts.refuse_other_tokenizer(request)
    else:
        forwarded = parts.prompts.read_forwarded_ids(request, len(raw), name, many=many)
    return forwarded or await parts.prompts.read_prompts(request, raw, name, True)
