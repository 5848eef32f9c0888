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
from functools import lru_cache
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
from baton.sched.types.request import Rendezvous, SamplingParams
from baton.server import fields
from baton.server.fields import bad, first
from baton.server.request import schema, unsupported_fields
from baton.server.request.grammar.constraint import GrammarFields, NativeGrammarFields
from baton.server.request.grammar.markers import marker_tokens
from baton.server.request.grammar.reader import GrammarReader
from baton.server.request.placement import place, seed_for
from baton.server.request.resume import ResumeState, read_resume
from baton.server.request.sampling import read_defaults, read_params
from baton.server.request.schema import (
    MAX_ITEMS,
    RequestFields,
    SamplingFields,
)
from baton.server.request.tenancy import Tenancy
from baton.server.request.text_rules import ReadingRules, TextRules
from baton.server.request.token_ids import ModelVocabulary, refuse_other_tokenizer, rows_of_ids
from baton.server.request.tools import (
    ToolChoice,
    count_calls,
    read_tools,
    refuse_tools_with_grammar,
)
from baton.server.text.answer_format import AnswerFormat, load_answer_format
from baton.server.text.chat_template import ChatTemplate, encode_chat_fields
from baton.server.text.model_info import ModelFacts
from baton.server.text.native import native_extension
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


@dataclass(frozen=True, slots=True)
class PromptItem:
    """Generation: choice `choice` of prompt `prompt_index`."""

    prompt_index: int
    choice: int
    prompt: array[int]
    params: SamplingParams
    rendezvous: Rendezvous | None = None
    dp_rank: int | None = None
    """None: the front picks the least loaded rank."""

    @property
    def asked_tokens(self) -> int:
        """Length of the client's prompt."""
        return len(self.prompt) - self.params.resumed


class AcceptedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that may run. Items are ordered prompt by prompt, choices within.

    A msgspec struct: making one takes 0.3 us, copying it 0.2; as a frozen dataclass 3 and 7.
    """

    rid: str | None
    items: tuple[PromptItem, ...]
    n: int
    text: TextRules
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int = -1
    echo: tuple[str, ...] | None = None
    """Completions with echo: the text of each prompt."""
    max_tokens_zero: bool = False
    """echo with max_tokens 0: nothing to generate, the answer is the prompt."""
    return_token_ids: bool = False
    priority: int | None = None
    priority_class: str = ""
    """As the body names it, and the tenant too, until `Tenancy.resolve` decides."""
    tenant: str = ""
    ttft_deadline_secs: float | None = None
    """Wanted time to the first token, from arrival."""
    deadline_secs: float | None = None
    """The client's own limit for the whole answer, from arrival."""
    namespace: bytes = b""
    is_batch: bool = False
    """/generate answers a list when it was asked with one."""
    resume: ResumeState | None = None
    reading: ReadingRules | None = None
    """How the text is read for its parts; None: it is one text."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that had no effect."""
    is_limited_by_context: bool = False
    """Chat: the context ends where the answer's limit is, before the limit that the client set."""
    facts: str = ""
    """Facts of a translated request, for the writer of its answer: JSON."""

    @property
    def prompt_tokens(self) -> int:
        """To be computed: each prompt once, however many choices it has."""
        return (
            0
            if self.max_tokens_zero
            else sum(len(item.prompt) for item in self.items if item.choice == 0)
        )


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
        self._unused_fields = frozenset(self.tenancy.unused_fields)
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
        ignored = self._ignored_fields(body, unsupported_fields.CHAT, *CHAT_FIELDS)
        tools = read_tools(request)
        if request.top_logprobs and not request.logprobs:
            raise bad("top_logprobs", "needs logprobs: true")
        logprobs = (request.top_logprobs or 0) if request.logprobs else -1
        common = self._common_fields(request, sampling, logprobs, [*tools.ignored, *ignored])
        common = await self._with_grammar(common, body)
        if common.params.grammar:
            refuse_tools_with_grammar(tools)
        max_tokens = _max_tokens(
            1, max_completion_tokens=request.max_completion_tokens, max_tokens=sampling.max_tokens
        )
        chat = encode_chat_fields(body)
        prompts: Sequence[Sequence[int]] | None
        prompts = self._forwarded_ids(request, 1, "messages", many=False)
        if prompts is None:
            prompts = [await self._chat_ids(chat, self._prompt_limit())]
            self.vocabulary.check_encoded(prompts[0], "messages")
        else:
            await self._check_chat(chat)
        asked, default = (None, max_tokens) if clamps_limit else (max_tokens, None)
        accepted = self._accept_items(prompts, common, asked, default, "messages")
        params = accepted.items[0].params
        return msgspec.structs.replace(
            accepted,
            reading=None if common.params.grammar else self._reading_rules(request, tools),
            is_limited_by_context=max_tokens is None
            or params.max_new_tokens + params.resumed < max_tokens,
        )

    async def completion(self, body: dict[str, Any]) -> AcceptedRequest:
        request = fields.read(schema.CompletionRequest, body)
        sampling = fields.read(SamplingFields, body)
        self._check_model(request.model)
        ignored = self._ignored_fields(body, unsupported_fields.COMPLETION, *COMPLETION_FIELDS)
        if request.best_of not in (None, sampling.n or 1):
            raise UnsupportedParameter(
                "best_of other than n is not supported; leave it out", param="best_of"
            )
        echo = request.echo or False
        if echo and request.logprobs is not None:
            raise UnsupportedParameter(
                "echo together with logprobs is not supported by this version", param="logprobs"
            )
        common = self._common_fields(request, sampling, _value_or(request.logprobs, -1), ignored)
        common = await self._with_grammar(common, body)
        max_tokens = _max_tokens(
            0 if echo else 1,
            max_tokens=sampling.max_tokens,
            max_completion_tokens=request.max_completion_tokens,
        )
        raw = _prompt_list("prompt", request.prompt)
        prompts: Sequence[Sequence[int]] | None
        prompts = self._forwarded_ids(request, len(raw), "prompt", many=_is_batch(request.prompt))
        prompts = prompts or await self._prompt_ids(
            raw, "prompt", _value_or(request.add_special_tokens, True)
        )
        accepted = self._accept_items(prompts, common, max_tokens, COMPLETION_MAX_TOKENS, "prompt")
        if echo:
            texts = (
                raw
                if isinstance(raw[0], str)
                else await self._decode(prompts, accepted.text.skip_special_tokens)
            )
            accepted = msgspec.structs.replace(
                accepted, echo=tuple(texts), max_tokens_zero=max_tokens == 0
            )
        return accepted

    async def generate(self, body: dict[str, Any]) -> AcceptedRequest:
        request = fields.read(schema.GenerateRequest, body)
        ignored = self._ignored_fields(body, unsupported_fields.GENERATE, schema.GenerateRequest)
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
        ignored += self._ignored_fields(
            nested, unsupported_fields.SHARED, *NESTED_FIELDS, prefix=NESTED
        )
        name, value = first(request, "text", "prompt", "input_ids")
        if value is None:
            raise MissingField("text or input_ids is required", param="text")
        raw = _prompt_list(name, value)
        is_batch = _is_batch(value)
        logprobs = (request.top_logprobs_num or 0) if request.return_logprob else -1
        if logprobs >= 0 and request.logprob_start_len not in (-1, None):
            raise UnsupportedParameter(
                "logprobs of the prompt are not supported by this version",
                param="logprob_start_len",
            )
        common = self._common_fields(request, sampling, logprobs, ignored, NESTED)
        common = await self._with_grammar(common, nested, NESTED)
        limits = {
            NESTED + field: getattr(sampling, field) for field in ("max_new_tokens", "max_tokens")
        }
        max_tokens = _max_tokens(1, **limits)
        prompts: Sequence[Sequence[int]] | None
        prompts = (
            self._forwarded_ids(request, len(raw), name, many=is_batch)
            if name != "input_ids"
            else None
        )
        if name == "input_ids":
            refuse_other_tokenizer(request.tokenizer_fingerprint, self._facts.tokenizer_fingerprint)
        prompts = prompts or await self._prompt_ids(raw, name, True)
        accepted = self._accept_items(prompts, common, max_tokens, GENERATE_MAX_TOKENS, name)
        return msgspec.structs.replace(accepted, is_batch=is_batch or accepted.n > 1)

    async def tokenize(self, body: dict[str, Any]) -> list[int] | list[list[int]]:
        """/tokenize: `prompt` (string or array of strings) or `messages`."""
        request = fields.read(schema.TokenizeRequest, body)
        self._check_model(request.model)
        limit = self._prompt_limit(is_bounded=False)
        if request.messages is not None:
            return (await self._chat_ids(encode_chat_fields(body), limit)).tolist()
        prompt = _require_value(*first(request, "prompt", "text"))
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
        value = _require_value(*first(request, "tokens", "input_ids"))
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

    def _check_prompt_ids(self, ids: Any, param: str, *, sent: str | None = None) -> None:
        if type(ids) is list and len(ids) > self.context_length:
            raise self._too_long(f"has {len(ids)}", sent or param)
        self.vocabulary.check_ids(ids, param)

    def _prompt_limit(self, *, is_bounded: bool = True) -> ContextLimit:
        return ContextLimit(context_length=self.context_length, is_bounded=is_bounded)

    async def _chat_ids(self, chat: bytes, limit: ContextLimit) -> array[int]:
        """Token ids of the text that the chat template makes of `encode_chat_fields`."""
        return await self._tokenizer.offload(
            len(chat), lambda: self._template.encode_chat(self._tokenizer, chat, limit)
        )

    async def _check_chat(self, chat: bytes) -> None:
        """Raise BadRequest for `encode_chat_fields` that cannot be rendered."""
        await self._tokenizer.offload(len(chat), lambda: self._template.check_chat(chat))

    def _reading_rules(
        self, request: schema.ChatCompletionRequest, tools: ToolChoice
    ) -> ReadingRules | None:
        """None: the answer is one text."""
        if tools.tools and self._format.tool_parser is None:
            raise UnsupportedParameter(
                "this engine does not know how the model writes tool calls; start it with --tool-parser NAME, or leave "
                "tools out",
                param="tools",
            )
        if not tools.tools and self._format.reasoning_parser is None:
            return None
        return ReadingRules(
            tools=tools.tools,
            calls_before=count_calls(request.messages) if tools.tools else 0,
            parallel_tool_calls=_value_or(request.parallel_tool_calls, True),
            separate_reasoning=_value_or(request.separate_reasoning, True),
            stream_reasoning=_value_or(request.stream_reasoning, True),
            include_reasoning=_value_or(request.include_reasoning, True),
        )

    async def _encode_texts(
        self, texts: Sequence[str], special: bool, limit: ContextLimit, param: str
    ) -> list[array[int]]:
        """Token ids of texts, encoded in a thread if they are long. `special`: with special tokens."""
        self._refuse_too_long(texts, param)
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

    def _refuse_too_long(self, texts: Iterable[str], param: str) -> None:
        """Raise PromptTooLong for a text that cannot fit, whatever its tokens, before it is tokenized."""
        longest = max(map(len, texts), default=0)
        if longest > self.max_prompt_chars:
            least = -(-longest // self._tokenizer.max_chars_per_token)
            raise self._too_long(f"has {longest} characters, at least {least} tokens", param)

    def _too_long(self, size: str, param: str) -> PromptTooLong:
        return PromptTooLong(
            # OpenAI's words first: litellm's fallbacks (seen in 1.106) know the error by them, not by its code.
            f"this model's maximum context length is {self.context_length} tokens here, but the prompt {size}; "
            "shorten it, or start the engine with a larger --context-length or --max-total-tokens",
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
            self._check_prompt_ids(ids, "input_ids", sent=param)
            if not ids:
                raise bad("input_ids", "is empty; give at least one token")
        return rows

    async def _prompt_ids(
        self, raw: list[Any], param: str, special: bool
    ) -> Sequence[Sequence[int]]:
        """Token ids of each prompt; texts are encoded, ids are checked."""
        if len(raw) > MAX_ITEMS:
            raise BadRequest(
                f"{param} holds {len(raw)} prompts, at most {MAX_ITEMS} are accepted", param=param
            )
        if raw and isinstance(raw[0], str):
            if not all(isinstance(t, str) for t in raw):
                raise BadRequest(f"{param} must not mix texts and token ids", param=param)
            rows = await self._encode_texts(raw, special, self._prompt_limit(), param)
            for ids in rows:
                self.vocabulary.check_encoded(ids, param)
            return rows
        for ids in raw:
            self._check_prompt_ids(ids, param)
        return raw

    def _common_fields(
        self,
        request: RequestFields,
        s: SamplingFields,
        logprobs: int,
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
        accepted = AcceptedRequest(
            rid=_read_rid(first(request, "rid", "request_id")[1]),
            items=(),
            n=s.n or 1,
            text=TextRules(
                stops=(s.stop,) if isinstance(s.stop, str) else tuple(s.stop or ()),
                include_stop=bool(s.include_stop_str_in_output or s.no_stop_trim),
                skip_special_tokens=_value_or(s.skip_special_tokens, True),
                min_tokens=min_tokens or 0,
                continues_prompt=request.continues_prompt,
            ),
            stream=request.stream or False,
            include_usage=options.include_usage or False,
            continuous_usage=options.continuous_usage_stats or False,
            logprobs=logprobs,
            return_token_ids=request.return_token_ids or False,
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

    async def _with_grammar(
        self, common: _Common, body: Mapping[str, Any], prefix: str = ""
    ) -> _Common:
        """The request with the grammar of its answer; `prefix`: of /generate's nested fields."""
        grammar = await self.grammars.read(body, prefix, is_native=bool(prefix))
        if not grammar.text:
            return common
        ignored = (*common.accepted.ignored, *grammar.ignored)
        accepted = msgspec.structs.replace(common.accepted, ignored=ignored)
        params = replace(common.params, grammar=grammar.text)
        return replace(common, accepted=accepted, params=params)

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

    def _ignored_fields(
        self,
        body: dict[str, Any],
        refused: Mapping[str, tuple[Any, ...]],
        *schemas: type[msgspec.Struct],
        prefix: str = "",
    ) -> list[str]:
        """Fields of `body` that none of the schemas and tables knows. Raises UnsupportedParameter for a refused one."""
        unsupported_fields.refuse(body, refused, prefix)
        unknown = body.keys() - _field_names(*schemas) - refused.keys() - unsupported_fields.IGNORED
        unused = body.keys() & self._unused_fields
        if not unknown and not unused:
            return []
        return [prefix + name for name in body if name in unknown or name in unused]

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
        placements = place(
            request, len(prompts), n, self._config.disaggregation_mode, self._config.dp_size
        )
        items = []
        for i, ids in enumerate(prompts):
            prompt = array("i", ids)
            new = self._max_new_tokens(len(prompt), max_tokens, default, param)
            if common.params.min_new_tokens > new:
                least = common.params.min_new_tokens
                raise bad(common.min_name, f"is {least}, but the answer may have {new} tokens only")
            for choice in range(n):
                where = placements[i * n + choice]
                seed = seed_for(common.seed, where.rendezvous, choice)
                params = replace(common.params, max_new_tokens=new, seed=seed)
                items.append(PromptItem(i, choice, prompt, params, where.rendezvous, where.dp_rank))
        resume = read_resume(request, self.context_length, self.vocabulary, self.fingerprint)
        if resume is not None:
            items = [_resumed_item(items, request.stream or False, resume)]
        return msgspec.structs.replace(common.accepted, items=tuple(items), resume=resume)

    def _max_new_tokens(
        self, prompt_tokens: int, asked: int | None, default: int | None, param: str
    ) -> int:
        """The answer's limit. `asked` must fit; without it the default, or all that is left."""
        if prompt_tokens == 0:
            raise BadRequest(f"{param} is empty; give at least one token", param=param)
        left = self.context_length - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            wish = "" if asked is None else f" and max_tokens asks for {asked} more"
            raise self._too_long(f"has {prompt_tokens}{wish}", param)
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


@lru_cache
def _field_names(*schemas: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(name for schema in schemas for name in schema.__struct_fields__)


def _value_or(value: T | None, default: T) -> T:
    return default if value is None else value


def _require_value(name: str, value: Any) -> Any:
    if value is None:
        raise MissingField(f"{name} is required", param=name)
    return value


def _max_tokens(least: int, **given: int | None) -> int | None:
    """Limit of the answer by the first name that is given; None: by none."""
    for name, value in given.items():
        if value is not None and value < least:
            raise bad(name, f"is {value}, must be at least {least}")
    return next((value for value in given.values() if value is not None), None)


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


def _is_batch(value: Any) -> bool:
    """Several prompts, or a list of one: anything but a text or an array of token ids."""
    return type(value) is list and len(value) > 0 and type(value[0]) is not int


def _resumed_item(items: list[PromptItem], stream: bool, resume: ResumeState) -> PromptItem:
    """The one item of a request, behind the tokens it has already."""
    if len(items) != 1 or not stream:
        raise bad("baton_resume", "goes with one streamed answer")
    (item,) = items
    done = len(resume.ids)
    params = item.params
    if done >= params.max_new_tokens:
        raise bad("baton_resume", f"has {done} tokens, the answer may have {params.max_new_tokens}")
    params = replace(
        params,
        max_new_tokens=params.max_new_tokens - done,
        min_new_tokens=max(params.min_new_tokens - done, 0),
        seed=resume.seed,
        resumed=done,
    )
    return replace(item, prompt=item.prompt + array("i", resume.ids), params=params)


def _prompt_list(name: str, value: Any) -> list[Any]:
    """The four forms of a prompt as a list of texts or of id lists."""
    value = _require_value(name, value)
    if type(value) is str or (type(value) is list and value and type(value[0]) is int):
        value = [value]
    if type(value) is not list or not all(type(v) in (str, list) for v in value):
        raise bad(
            name,
            "must be a string, an array of strings, an array of token ids, or an array of such arrays",
        )
    if not value or any(len(v) == 0 for v in value):
        raise bad(name, "is empty; give at least one token")
    return value
