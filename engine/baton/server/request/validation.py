"""From a wire body to `AcceptedRequest`: tokens, sampling parameters, placement, or a typed 400 that names the field.

1. the body is a JSON object (http_utils.py decoded it);
2. fields are read with types and ranges; names we know but do not serve are refused when they would change the answer;
3. text becomes tokens (chat template, tokenizer), the prompt is measured against the context;
4. one `PromptItem` per prompt × choice, each with its own seed, bootstrap room and DP rank.

Input is checked here and nowhere behind: the scheduler trusts what it gets.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from baton.config import EngineConfig
from baton.errors import (
    BadRequest,
    InvalidJson,
    MissingField,
    PromptTooLong,
    UnsupportedParameter,
    by_code,
)
from baton.sched.types.request import SamplingParams
from baton.server import fields
from baton.server.fields import bad, first
from baton.server.request import schema, unsupported_fields
from baton.server.request.grammar.checks.reader import GrammarReader
from baton.server.request.grammar.constraint import GrammarFields, NativeGrammarFields
from baton.server.request.grammar.markers import marker_tokens
from baton.server.request.grammar.request_grammar import NO_GRAMMAR, RequestGrammar
from baton.server.request.prompt.forms import is_batch, prompt_list, require_value
from baton.server.request.prompt.items import PromptItem, resumed_item
from baton.server.request.prompt.placement import place, seed_for
from baton.server.request.prompt.truncation import read_cut
from baton.server.request.reading import read_reading
from baton.server.request.resume import ResumeState, read_resume
from baton.server.request.sampling.logprobs import (
    RequestedLogprobs,
    check_placement,
    check_prompt_start,
    params_of_choice,
    read_chat_logprobs,
    read_completion_logprobs,
    read_generate_logprobs,
)
from baton.server.request.sampling.params import (
    ReasoningLimit,
    encode_bad_words,
    read_chat_limit,
    read_custom_limit,
    read_defaults,
    read_max_tokens,
    read_params,
    read_stops,
)
from baton.server.request.schema import MAX_ITEMS, RequestFields, SamplingFields
from baton.server.request.tenancy import Tenancy
from baton.server.request.token_ids import (
    ModelVocabulary,
    refuse_other_tokenizer,
    rows_of_ids,
)
from baton.server.request.tools import ToolChoice, allows_parallel_calls, read_tools
from baton.server.text.answer_format import AnswerFormat, load_answer_format
from baton.server.text.answer_spec import AnswerSpec, Dialect, ReasoningNames, TokenNames
from baton.server.text.chat_template import ChatTemplate, encode_chat_fields
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import native_extension
from baton.server.text.reasoning_format import NOT_READ, ReasoningFormat, ReasoningRules
from baton.server.text.tokenizer import ContextLimit, Tokenizer

T = TypeVar("T")
NESTED = "sampling_params."
"""Prefix of the sampling fields in errors of /generate."""
CHAT_FIELDS = (schema.ChatCompletionRequest, SamplingFields, GrammarFields)
COMPLETION_FIELDS = (schema.CompletionRequest, SamplingFields, GrammarFields)
NESTED_FIELDS = (schema.GenerateSampling, NativeGrammarFields)
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
GENERATE_MAX_TOKENS = 128
"""SGLang's default for /generate."""


class AcceptedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may run. Items are ordered prompt by prompt, choices within.

    A msgspec struct: making one takes 0.3 us, copying it 0.2; as a frozen dataclass 3 and 7.
    """

    items: tuple[PromptItem, ...]
    n: int
    answer: AnswerSpec
    """Options of the answer. What is known when it begins, its choices above all, `Generation` adds."""
    continues_prompt: bool = False
    """The answer's text continues the prompt's."""
    echo: tuple[str, ...] | None = None
    """Completions with echo: the text of each prompt."""
    priority: int | None = None
    priority_class: str = ""
    """As the body names it, and the tenant too, until `Tenancy.resolve` decides."""
    tenant: str = ""
    ttft_deadline_secs: float | None = None
    """Wanted time to the first token, from arrival."""
    deadline_secs: float | None = None
    """The client's own limit for the whole answer, from arrival."""
    namespace: bytes = b""
    resume: ResumeState | None = None
    ignored: tuple[str, ...] = ()
    """Fields of the body that had no effect."""

    @property
    def is_computed(self) -> bool:
        """True if a rank has work with it: an answer, or the logprobs of its prompts."""
        return not self.answer.is_empty or self.answer.prompt_logprobs is not None

    @property
    def prompt_tokens(self) -> int:
        """To be computed: each prompt once, however many choices it has."""
        if not self.is_computed:
            return 0
        return sum(len(item.prompt) for item in self.items if item.choice == 0)

    def is_resumable(self, dialect: Dialect) -> bool:
        """True if another engine could send the rest of the answer.

        The last event of a response repeats all logprobs, which only the engine that computed them has, as it has
        those of the prompt.
        """
        answer = self.answer
        repeats_logprobs = dialect is Dialect.RESPONSES and answer.logprobs is not None
        is_alone = answer.stream and len(self.items) == 1
        return is_alone and not repeats_logprobs and answer.prompt_logprobs is None

    def with_options(self, **options: Any) -> AcceptedRequest:
        """The request with these options of its answer (fields of AnswerSpec)."""
        return msgspec.structs.replace(self, answer=msgspec.structs.replace(self.answer, **options))


class RequestValidator:
    """Holds what a check needs to know. `context_length` may shrink once, when the ranks report their pool."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
    ) -> None:
        """`answer_format`: how the model writes; None: it is found out here."""
        self._config = config
        self._facts = facts
        self._tokenizer = tokenizer
        self._format = answer_format or load_answer_format(config, facts, tokenizer)
        self._template = ChatTemplate(facts.chat_template, facts.special_tokens)
        self.tenancy = Tenancy(config)
        self._find_ignored = partial(
            unsupported_fields.find_ignored, unused=frozenset(self.tenancy.unused_fields)
        )
        self.model_names = sorted({facts.name, config.model_path, str(facts.path), "default"})
        self.context_length = facts.context_length
        self.fingerprint: Mapping[str, str] = {}
        """The node's, once its ranks have reported their layout."""
        eos = {
            tokenizer.id_of(t) for t in (facts.special_tokens.get("eos_token"),) if t is not None
        }
        self.vocabulary = ModelVocabulary(facts.vocab_size, tokenizer)
        self.eos_token_ids = self.vocabulary.ids_within(
            (*facts.eos_token_ids, *(i for i in eos if i is not None))
        )
        self._defaults = read_defaults(facts)
        self.grammars = GrammarReader(config, marker_tokens(facts, tokenizer))
        has_grammars = config.grammar != "off" and config.simulate is None
        self._reasoning = ReasoningFormat(
            self._format, tokenizer, facts.vocab_size, has_grammars=has_grammars
        )

    @property
    def warnings(self) -> list[str]:
        """Sentences for the log about the model's directory."""
        found = (self.vocabulary.warning(), self._template.warning)
        return [warning for warning in found if warning is not None]

    @property
    def max_prompt_chars(self) -> int:
        """Longest text of a prompt, whatever its tokens. Routers read it in /get_server_info."""
        return self.context_length * self._tokenizer.max_chars_per_token

    def refuse_oversized(self, path: str, body: bytes) -> None:
        """Raise PromptTooLong or PayloadTooLarge for JSON that is too long for any answer, by the router's rule.

        Raises InvalidJson for such a body that is no JSON object. Cost: about 1 ns per byte, without the GIL; nothing
        for bodies with fewer bytes than a prompt may have tokens.
        """
        if len(body) <= self.context_length:
            return
        oversized_body = native_extension().oversized_body
        try:
            refusal = oversized_body(path, body, self.context_length, self.max_prompt_chars)
        except ValueError as err:
            raise InvalidJson(str(err)) from err
        if refusal is not None:
            code, message, param = refusal
            raise by_code(code)(message, param=param)

    # ---- the three request forms -------------------------------------------------------------------------------

    async def chat(self, body: dict[str, Any], *, clamps_limit: bool = False) -> AcceptedRequest:
        """`clamps_limit`: a limit of the answer above what the context leaves is that."""
        request = fields.read(schema.ChatCompletionRequest, body)
        sampling = fields.read(SamplingFields, body)
        self._check_model(request.model)
        ignored = self._find_ignored(body, unsupported_fields.CHAT, *CHAT_FIELDS)
        tools = read_tools(request)
        logprobs = read_chat_logprobs(request, self.vocabulary)
        common = self._common_fields(request, sampling, logprobs, ignored)
        common = await self._with_bad_words(common, sampling)
        if tools.tools:
            common = await self._with_call_grammar(common, body, request, tools)
        else:
            common = await self._with_grammar(common, body)
        common = self._with_reasoning(
            common, read_chat_limit(request), is_read=True, has_tools=bool(tools.tools)
        )
        max_tokens = read_max_tokens(
            1, max_completion_tokens=request.max_completion_tokens, max_tokens=sampling.max_tokens
        )
        chat = encode_chat_fields(body)
        prompts: Sequence[Sequence[int]] | None
        prompts = self._forwarded_ids(request, 1, "messages", many=False)
        if prompts is None:
            prompts = [await self._chat_ids(chat, self._limit_of(request))]
            self.vocabulary.check_encoded(prompts[0], "messages")
        else:
            await self._check_chat(chat)
        asked, default = (None, max_tokens) if clamps_limit else (max_tokens, None)
        accepted = self._accept_items(prompts, common, asked, default, "messages")
        params = accepted.items[0].params
        return accepted.with_options(
            reading=read_reading(
                request,
                tools,
                reads_reasoning=self._format.reasoning_parser is not None,
                is_gated=bool(params.grammar) and params.reasoning is not None,
                reasoning_field=ReasoningNames(self._config.reasoning_field),
            ),
            is_limited_by_context=max_tokens is None
            or params.max_new_tokens + params.resumed < max_tokens,
        )

    async def completion(self, body: dict[str, Any]) -> AcceptedRequest:
        request = fields.read(schema.CompletionRequest, body)
        sampling = fields.read(SamplingFields, body)
        self._check_model(request.model)
        ignored = self._find_ignored(body, unsupported_fields.COMPLETION, *COMPLETION_FIELDS)
        if request.best_of not in (None, sampling.n or 1):
            raise UnsupportedParameter(
                "best_of other than n is not supported; leave it out", param="best_of"
            )
        echo = request.echo or False
        logprobs = read_completion_logprobs(request, self.vocabulary)
        common = self._common_fields(request, sampling, logprobs, ignored)
        common = await self._with_bad_words(common, sampling)
        common = await self._with_grammar(common, body)
        max_tokens = read_max_tokens(
            0 if echo else 1,
            max_tokens=sampling.max_tokens,
            max_completion_tokens=request.max_completion_tokens,
        )
        raw = prompt_list("prompt", request.prompt)
        prompts: Sequence[Sequence[int]] | None
        prompts = self._forwarded_ids(request, len(raw), "prompt", many=is_batch(request.prompt))
        prompts = prompts or await self._prompt_ids(
            request, raw, "prompt", _value_or(request.add_special_tokens, True)
        )
        accepted = self._accept_items(prompts, common, max_tokens, COMPLETION_MAX_TOKENS, "prompt")
        if echo:
            if isinstance(raw[0], str) and request.truncate_prompt_tokens is None:
                texts = raw
            else:
                items = (item for item in accepted.items if item.choice == 0)
                rows = [item.prompt[: item.asked_tokens] for item in items]
                texts = await self._decode(rows, accepted.answer.skip_special_tokens)
            accepted = msgspec.structs.replace(accepted, echo=tuple(texts))
            return accepted.with_options(is_empty=max_tokens == 0)
        return accepted

    async def generate(self, body: dict[str, Any]) -> AcceptedRequest:
        request = fields.read(schema.GenerateRequest, body)
        ignored = self._find_ignored(body, unsupported_fields.GENERATE, schema.GenerateRequest)
        if (
            request.model != "unknown"
        ):  # smg 1.13 adds this one: the native body has no such field in SGLang
            self._check_model(request.model)
        nested = _value_or(request.sampling_params, {})
        if type(nested) is list:
            raise UnsupportedParameter(
                "sampling_params must be one object for all prompts", param="sampling_params"
            )
        if type(nested) is not dict:
            raise bad("sampling_params", "must be an object")
        sampling = fields.read(schema.GenerateSampling, nested, NESTED)
        ignored += self._find_ignored(
            nested, unsupported_fields.SHARED, *NESTED_FIELDS, prefix=NESTED
        )
        name, value = first(request, "text", "prompt", "input_ids")
        if value is None:
            raise MissingField("text or input_ids is required", param="text")
        raw = prompt_list(name, value)
        many = is_batch(value)
        logprobs = read_generate_logprobs(request, self.vocabulary)
        common = self._common_fields(request, sampling, logprobs, ignored, NESTED)
        common = await self._with_bad_words(common, sampling)
        common = await self._with_grammar(common, nested, NESTED)
        limit = read_custom_limit(sampling.custom_params, NESTED)
        common = self._with_reasoning(common, limit, is_read=False)
        limits = {
            NESTED + field: getattr(sampling, field) for field in ("max_new_tokens", "max_tokens")
        }
        max_tokens = read_max_tokens(1, **limits)
        prompts: Sequence[Sequence[int]] | None
        prompts = (
            self._forwarded_ids(request, len(raw), name, many=many) if name != "input_ids" else None
        )
        if name == "input_ids":
            refuse_other_tokenizer(request.tokenizer_fingerprint, self._facts.tokenizer_fingerprint)
        prompts = prompts or await self._prompt_ids(request, raw, name, True)
        accepted = self._accept_items(prompts, common, max_tokens, GENERATE_MAX_TOKENS, name)
        return accepted.with_options(is_batch=many or accepted.n > 1)

    async def tokenize(self, body: dict[str, Any]) -> list[int] | list[list[int]]:
        """/tokenize: `prompt` (string or array of strings) or `messages`."""
        request = fields.read(schema.TokenizeRequest, body)
        self._check_model(request.model)
        limit = self._prompt_limit(is_bounded=False)
        if request.messages is not None:
            return (await self._chat_ids(encode_chat_fields(body), limit)).tolist()
        prompt = require_value(*first(request, "prompt", "text"))
        texts = [prompt] if isinstance(prompt, str) else prompt
        if (
            type(texts) is not list
            or not all(type(t) is str for t in texts)
            or len(texts) > MAX_ITEMS
        ):
            raise bad("prompt", f"must be a string or an array of at most {MAX_ITEMS} strings")
        special = _value_or(request.add_special_tokens, True)
        rows = [ids.tolist() for ids in await self._encode_texts(texts, special, limit, "prompt")]
        return rows[0] if isinstance(prompt, str) else rows

    async def detokenize(self, body: dict[str, Any]) -> str | list[str]:
        request = fields.read(schema.DetokenizeRequest, body)
        self._check_model(request.model)
        value = require_value(*first(request, "tokens", "input_ids"))
        if type(value) is not list:
            raise bad("tokens", "must be an array of token ids")
        nested = bool(value) and type(value[0]) is list
        rows = value if nested else [value]
        for row in rows:
            self.vocabulary.check_decodable(row, "tokens")
        texts = await self._decode(rows, _value_or(request.skip_special_tokens, True))
        return texts if nested else texts[0]

    # ---- parts -------------------------------------------------------------------------------------------------

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self.model_names:
            raise self._facts.not_served(model)

    def _check_prompt_ids(
        self, request: RequestFields, ids: Any, param: str, *, sent: str | None = None
    ) -> None:
        is_cut = request.truncate_prompt_tokens is not None
        if type(ids) is list and len(ids) > self.context_length and not is_cut:
            raise self._too_long(f"has {len(ids)}", sent or param)
        self.vocabulary.check_ids(ids, param)

    def _prompt_limit(self, *, is_bounded: bool = True) -> ContextLimit:
        return ContextLimit(context_length=self.context_length, is_bounded=is_bounded)

    def _limit_of(self, request: RequestFields) -> ContextLimit:
        """Longest prompt of a request before it is cut."""
        if request.truncate_prompt_tokens is None:
            return self._prompt_limit()
        chars: int = native_extension().CUT_TEXT_CHARS
        tokens = max(self.context_length, chars // self._tokenizer.max_chars_per_token)
        return ContextLimit(context_length=tokens, is_bounded=False)

    async def _chat_ids(self, chat: bytes, limit: ContextLimit) -> array[int]:
        """Token ids of the text that the chat template makes of `encode_chat_fields`."""
        return await self._tokenizer.offload(
            len(chat), lambda: self._template.encode_chat(self._tokenizer, chat, limit)
        )

    async def _check_chat(self, chat: bytes) -> None:
        """Raise BadRequest for `encode_chat_fields` that cannot be rendered."""
        await self._tokenizer.offload(len(chat), lambda: self._template.check_chat(chat))

    async def _encode_texts(
        self, texts: Sequence[str], special: bool, limit: ContextLimit, param: str
    ) -> list[array[int]]:
        """Token ids of texts, encoded in a thread if they are long. `special`: with special tokens."""
        self._refuse_too_long(texts, limit, param)
        encode = self._tokenizer.encode_prompt
        return await self._tokenizer.offload(
            sum(map(len, texts)),
            lambda: [encode(text, special, limit, param=param) for text in texts],
        )

    async def _decode(self, rows: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
        return await self._tokenizer.offload(
            sum(map(len, rows)),
            lambda: self._tokenizer.decode_batch(rows, skip_special_tokens=skip_special),
        )

    def _refuse_too_long(self, texts: Iterable[str], limit: ContextLimit, param: str) -> None:
        """Raise PromptTooLong for a text that cannot fit, whatever its tokens, before it is tokenized."""
        longest = max(map(len, texts), default=0)
        if longest > limit.context_length * self._tokenizer.max_chars_per_token:
            least = -(-longest // self._tokenizer.max_chars_per_token)
            raise self._too_long(f"has {longest} characters, at least {least} tokens", param)

    def _too_long(self, size: str, param: str, remedy: str = "shorten it") -> PromptTooLong:
        return PromptTooLong(
            # OpenAI's words first: litellm's fallbacks (seen in 1.106) know the error by them, not by its code.
            f"this model's maximum context length is {self.context_length} tokens here, but the prompt {size}; "
            f"{remedy}, or start the engine with a larger --context-length or --max-total-tokens",
            param=param,
        )

    def _forwarded_ids(
        self, request: RequestFields, count: int, param: str, *, many: bool
    ) -> list[list[int]] | None:
        """`input_ids` beside messages or texts: one list of ids, or one for each prompt where the body holds `many`.

        They are the same prompts, tokenized by a router with this engine's tokenizer and template (it states the
        fingerprint), and take the place of the texts. A prompt that is too long is reported as `param`, which the
        client sent. Raises FingerprintMismatch.
        """
        if request.input_ids is None:
            return None
        refuse_other_tokenizer(request.tokenizer_fingerprint, self._facts.tokenizer_fingerprint)
        rows = rows_of_ids(request.input_ids, count, many=many)
        for ids in rows:
            self._check_prompt_ids(request, ids, "input_ids", sent=param)
            if not ids:
                raise bad("input_ids", "is empty; give at least one token")
        return rows

    async def _prompt_ids(
        self, request: RequestFields, raw: list[Any], param: str, special: bool
    ) -> Sequence[Sequence[int]]:
        """Token ids of each prompt; texts are encoded, ids are checked."""
        if len(raw) > MAX_ITEMS:
            raise BadRequest(
                f"{param} holds {len(raw)} prompts, at most {MAX_ITEMS} are accepted", param=param
            )
        if raw and isinstance(raw[0], str):
            if not all(isinstance(t, str) for t in raw):
                raise BadRequest(f"{param} must not mix texts and token ids", param=param)
            rows = await self._encode_texts(raw, special, self._limit_of(request), param)
            for ids in rows:
                self.vocabulary.check_encoded(ids, param)
            return rows
        for ids in raw:
            self._check_prompt_ids(request, ids, param)
        return raw

    def _common_fields(
        self,
        request: RequestFields,
        s: SamplingFields,
        logprobs: RequestedLogprobs,
        ignored: list[str],
        prefix: str = "",
    ) -> _Common:
        """Everything the three forms share. `prefix` stands before the names of sampling fields that are nested."""
        defaults = SamplingFields() if prefix else self._defaults
        params = read_params(
            s, defaults, self.vocabulary, self.eos_token_ids, logprobs=logprobs, prefix=prefix
        )
        min_name, min_tokens = first(s, "min_tokens", "min_new_tokens")
        given_options = request.stream_options or {}
        options = fields.read(schema.StreamOptions, given_options, "stream_options.")
        known_options = schema.StreamOptions.__struct_fields__
        keys = (request.cache_salt, request.extra_key)
        priority_class, tenant = self.tenancy.read(request)
        if logprobs.prompt is not None and self._config.simulate is not None:
            raise UnsupportedParameter(
                "this engine simulates its device (--simulate) and computes no logprobs of prompts; leave them out",
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
            stops=read_stops(s),
            include_stop=bool(s.include_stop_str_in_output or s.no_stop_trim),
            skip_special_tokens=_value_or(s.skip_special_tokens, True),
            min_tokens=min_tokens or 0,
        )
        accepted = AcceptedRequest(
            items=(),
            n=s.n or 1,
            answer=answer,
            continues_prompt=request.continues_prompt,
            priority=self._read_priority(request.priority),
            priority_class=priority_class,
            tenant=tenant,
            ttft_deadline_secs=_to_secs(request.ttft_deadline_ms),
            deadline_secs=_to_secs(request.deadline_ms),
            namespace="\0".join(k or "" for k in keys).encode() if any(keys) else b"",
            ignored=(
                *(f"stream_options.{n}" for n in given_options if n not in known_options),
                *ignored,
            ),
        )
        return _Common(
            request, accepted, params, prefix + min_name, first(s, "seed", "sampling_seed")[1]
        )

    async def _with_bad_words(self, common: _Common, sampling: SamplingFields) -> _Common:
        """The request with the tokens of its bad words, encoded in a thread if there are many."""
        words = sampling.bad_words
        if not words:
            return common
        encoded = await self._tokenizer.offload(
            sum(map(len, words)),
            lambda: encode_bad_words(words, self._tokenizer, self.vocabulary),
        )
        return replace(common, params=replace(common.params, bad_words=encoded))

    async def _with_grammar(
        self, common: _Common, body: Mapping[str, Any], prefix: str = ""
    ) -> _Common:
        """The request with the grammar of its answer; `prefix`: of /generate's nested fields."""
        return _constrained(common, await self.grammars.read(body, prefix, is_native=bool(prefix)))

    async def _with_call_grammar(
        self,
        common: _Common,
        body: Mapping[str, Any],
        request: schema.ChatCompletionRequest,
        tools: ToolChoice,
    ) -> _Common:
        """The request with the grammar of an answer that may call `tools`, where there is one."""
        is_parallel = allows_parallel_calls(request)
        family = self._format.tool_parser
        grammar = await self.grammars.read_with_tools(body, tools, family, is_parallel=is_parallel)
        return _constrained(common, grammar)

    def _with_reasoning(
        self, common: _Common, limit: ReasoningLimit, *, is_read: bool, has_tools: bool = False
    ) -> _Common:
        """The request with the rules for its reasoning; `is_read`: it is divided from the content."""
        accepted = common.accepted
        budget = limit.budget
        continues = accepted.continues_prompt
        can_be_limited = self._reasoning.can_be_limited(
            has_tools=has_tools,
            continues_prompt=continues,
            has_grammar=bool(common.params.grammar),
        )
        if budget is not None and not can_be_limited:
            accepted = msgspec.structs.replace(accepted, ignored=(*accepted.ignored, limit.param))
            budget = None
        rules = ReasoningRules(is_read or budget is not None, continues, has_tools, budget)
        return replace(common, accepted=accepted, reasoning=rules)

    def _read_priority(self, value: int | None) -> int | None:
        config = self._config
        if (
            value is not None
            and config.abort_on_priority_when_disabled
            and not config.enable_priority_scheduling
        ):
            raise UnsupportedParameter(
                "this engine runs without --enable-priority-scheduling and refuses requests with a priority; "
                "leave priority out",
                param="priority",
            )
        return value

    def _accept_items(
        self,
        prompts: Sequence[Sequence[int]],
        common: _Common,
        max_tokens: int | None,
        default: int | None,
        param: str,
    ) -> AcceptedRequest:
        request = common.request
        n = common.accepted.n
        count = len(prompts) * n
        if count > MAX_ITEMS:
            raise BadRequest(
                f"{len(prompts)} prompts with n {n} give {count} answers, at most {MAX_ITEMS} are accepted",
                param="n",
            )
        answer_tokens = default if max_tokens is None else max_tokens
        cut = read_cut(request, self.context_length, max(answer_tokens or 0, 1))
        if cut is not None:
            prompts = [cut.cut(ids) for ids in prompts]
        placements = place(
            request, len(prompts), n, self._config.disaggregation_mode, self._config.dp_size
        )
        prompt_logprobs = common.accepted.answer.prompt_logprobs
        items = []
        for i, ids in enumerate(prompts):
            prompt = array("i", ids)
            prompt_params = self._reasoning.add_gate(common.params, prompt, common.reasoning)
            new = self._max_new_tokens(len(prompt), max_tokens, default, param)
            check_prompt_start(prompt_logprobs, len(prompt))
            if common.params.min_new_tokens > new:
                least = common.params.min_new_tokens
                raise bad(common.min_name, f"is {least}, but the answer may have {new} tokens only")
            for choice in range(n):
                where = placements[i * n + choice]
                seed = seed_for(common.seed, where.rendezvous, choice)
                # Where only the prompt's logprobs are asked for, its first token comes with them.
                params = replace(prompt_params, max_new_tokens=max(new, 1), seed=seed)
                params = params_of_choice(params, choice)
                check_placement(prompt_logprobs, where.rendezvous)
                items.append(PromptItem(i, choice, prompt, params, where.rendezvous, where.dp_rank))
        resume = read_resume(request, self.context_length, self.vocabulary, self.fingerprint)
        if resume is None:
            return msgspec.structs.replace(common.accepted, items=tuple(items))
        item = resumed_item(items, request.stream or False, resume)
        accepted = msgspec.structs.replace(common.accepted, items=(item,), resume=resume)
        return accepted.with_options(resumed_ids=resume.ids, resumed_events=resume.events)

    def _max_new_tokens(
        self, prompt_tokens: int, asked: int | None, default: int | None, param: str
    ) -> int:
        """The answer's limit. `asked` must fit; without it the default, or all that is left."""
        if prompt_tokens == 0:
            raise BadRequest(f"{param} is empty; give at least one token", param=param)
        left = self.context_length - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            if asked is None or left < 1:
                raise self._too_long(f"has {prompt_tokens}", param)
            raise self._too_long(
                f"has {prompt_tokens} and max_tokens asks for {asked} more",
                param,
                remedy=f"lower max_tokens to {left}, shorten the prompt",
            )
        if asked is not None:
            return asked
        return left if default is None else min(default, left)


@dataclass(frozen=True, slots=True)
class _Common:
    """A request before its prompts are placed."""

    request: RequestFields
    accepted: AcceptedRequest
    """Without items."""
    params: SamplingParams
    """Parameters of every item, apart from its limit and seed."""
    min_name: str
    seed: int | None
    reasoning: ReasoningRules = NOT_READ


def _constrained(common: _Common, grammar: RequestGrammar) -> _Common:
    """The request with the grammar of its answer."""
    if grammar == NO_GRAMMAR:
        return common
    ignored = (*common.accepted.ignored, *grammar.ignored)
    accepted = msgspec.structs.replace(common.accepted, ignored=ignored)
    accepted = accepted.with_options(follows_grammar=bool(grammar.text))
    params = replace(common.params, grammar=grammar.text)
    return replace(common, accepted=accepted, params=params)


def _value_or(value: T | None, default: T) -> T:
    return default if value is None else value


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
