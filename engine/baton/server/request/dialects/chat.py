"""Bodies of /v1/chat/completions, and of the APIs whose requests are translated to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.server import fields
from baton.server.request import unsupported_fields
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.dialects.parts import ValidationParts
from baton.server.request.grammar.constraint import GrammarFields
from baton.server.request.grammar.request_grammar import RequestGrammar
from baton.server.request.item_maker import AnswerLimit, PromptRows, RequestDraft
from baton.server.request.reading import read_reading
from baton.server.request.sampling.logprobs import read_chat_logprobs
from baton.server.request.sampling.params import read_chat_limit, read_max_tokens
from baton.server.request.schema import ChatCompletionRequest, SamplingFields
from baton.server.request.tools import ToolChoice, allows_parallel_calls, read_tools
from baton.server.text.answer_spec import ReasoningNames
from baton.server.text.chat_template import encode_chat_fields

CHAT_FIELDS = (ChatCompletionRequest, SamplingFields, GrammarFields)


async def accept_chat(
    parts: ValidationParts, body: dict[str, Any], *, clamps_limit: bool = False
) -> AcceptedRequest:
    """Raises EngineError that names a field of the body.

    Args:
        clamps_limit: a limit of the answer above what the context leaves is that.
    """
    request = fields.read(ChatCompletionRequest, body)
    sampling = fields.read(SamplingFields, body)
    parts.check_model(request.model)
    ignored = parts.find_ignored(body, unsupported_fields.CHAT, *CHAT_FIELDS)
    tools = read_tools(request)
    logprobs = read_chat_logprobs(request, parts.items.vocabulary)
    shared = await parts.shared.read(request, sampling, logprobs, ignored)
    draft = RequestDraft(
        shared,
        grammar=await _read_grammar(parts, body, request, tools),
        reasoning=read_chat_limit(request),
        reads_reasoning=True,
        has_tools=bool(tools.tools),
    )
    max_tokens = read_max_tokens(
        1, max_completion_tokens=request.max_completion_tokens, max_tokens=sampling.max_tokens
    )
    prompts = await _read_prompts(parts, body, request)
    limit = AnswerLimit(None, max_tokens) if clamps_limit else AnswerLimit(max_tokens, None)
    accepted = parts.items.accept(draft, PromptRows(prompts, "messages"), limit)
    params = accepted.items[0].params
    return accepted.with_options(
        reading=read_reading(
            request,
            tools,
            reads_reasoning=parts.answer_format.reasoning_parser is not None,
            is_gated=bool(params.grammar) and params.reasoning is not None,
            reasoning_field=ReasoningNames(parts.config.reasoning_field),
        ),
        is_limited_by_context=max_tokens is None
        or params.max_new_tokens + params.resumed < max_tokens,
    )


async def _read_grammar(
    parts: ValidationParts,
    body: dict[str, Any],
    request: ChatCompletionRequest,
    tools: ToolChoice,
) -> RequestGrammar:
    """The grammar of the answer, which may call `tools`."""
    if not tools.tools:
        return await parts.grammars.read(body)
    family = parts.answer_format.tool_parser
    is_parallel = allows_parallel_calls(request)
    return await parts.grammars.read_with_tools(body, tools, family, is_parallel=is_parallel)


async def _read_prompts(
    parts: ValidationParts, body: dict[str, Any], request: ChatCompletionRequest
) -> Sequence[Sequence[int]]:
    """Ids of the messages: those that a router sends, or the text that the template makes of
    them.
    """
    chat = encode_chat_fields(body)
    forwarded = parts.prompts.read_forwarded_ids(request, 1, "messages", many=False)
    if forwarded is not None:
        # The messages are refused as they are without ids.
        await parts.prompts.check_chat(chat)
        return forwarded
    limit = parts.prompts.limits.limit_before_cut(request)
    ids = await parts.prompts.read_chat(chat, limit)
    parts.prompts.vocabulary.check_encoded(ids, "messages")
    return [ids]
