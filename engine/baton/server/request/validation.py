"""From a wire body to `AcceptedRequest`: tokens, sampling parameters, placement, or a typed 400
that names the field.

1. the body is a JSON object (http_utils.py decoded it);
2. fields are read with types and ranges; names we know but do not serve are refused when they would
   change the answer (`dialects`, `shared_fields`);
3. text becomes tokens (`prompt.reader`), the prompt is measured against the context (`limits`);
4. one `PromptItem` per prompt × choice, each with its own seed, bootstrap room and DP rank
   (`item_maker`).

Input is checked here and nowhere behind: the scheduler trusts what it gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.config import EngineConfig
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.dialects.chat import accept_chat
from baton.server.request.dialects.completion import accept_completion
from baton.server.request.dialects.generate import accept_generate
from baton.server.request.dialects.parts import ValidationParts
from baton.server.request.dialects.tokens import detokenize_body, tokenize_body
from baton.server.request.grammar.checks.reader import GrammarReader
from baton.server.request.grammar.markers import marker_tokens
from baton.server.request.item_maker import ItemMaker
from baton.server.request.limits import PromptLimits
from baton.server.request.prediction import PredictionReader
from baton.server.request.prompt.reader import PromptReader
from baton.server.request.sampling.params import read_defaults
from baton.server.request.shared_fields import SharedReader
from baton.server.request.tenancy import Tenancy
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.answer_format import AnswerFormat, load_answer_format
from baton.server.text.chat_template import ChatTemplate
from baton.server.text.model_info import ModelFacts
from baton.server.text.reasoning_format import ReasoningFormat
from baton.server.text.tokenizer import Tokenizer


class RequestValidator:
    """Checks bodies by the model's files and the engine's flags."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
    ) -> None:
        """`answer_format`: how the model writes; None: it is found out here."""
        answer_format = answer_format or load_answer_format(config, facts, tokenizer)
        self.vocabulary = ModelVocabulary(facts.vocab_size, tokenizer)
        self.vocabulary.refuse_foreign_tokenizer()
        self.eos_token_ids = _eos_ids(facts, tokenizer, self.vocabulary)
        self.tenancy = Tenancy(config)
        self.limits = PromptLimits(facts.context_length, tokenizer.max_chars_per_token)
        # A draft model reads the answer, not what the client expects of it.
        is_drafted = config.speculative_algorithm == "NGRAM"
        shared = SharedReader(
            config,
            tokenizer,
            self.vocabulary,
            self.eos_token_ids,
            read_defaults(facts),
            self.tenancy,
            PredictionReader(tokenizer, self.vocabulary, self.limits, is_drafted=is_drafted),
        )
        self.grammars = GrammarReader(config, marker_tokens(facts, tokenizer))
        has_grammars = config.grammar != "off" and config.simulate is None
        reasoning = ReasoningFormat(
            answer_format, tokenizer, facts.vocab_size, has_grammars=has_grammars
        )
        self._template = ChatTemplate(
            facts.chat_template, facts.special_tokens, facts.control_tokens
        )
        self._items = ItemMaker(config, self.vocabulary, self.limits, reasoning)
        prompts = PromptReader(
            tokenizer, self._template, self.vocabulary, self.limits, facts.tokenizer_fingerprint
        )
        self._parts = ValidationParts(
            config, facts, answer_format, shared, self.grammars, prompts, self._items
        )

    def set_node_facts(self, context_length: int, fingerprint: Mapping[str, str]) -> None:
        """All ranks have reported: the pool may hold less than the model's context, and answers
        that other engines began are compared with the fingerprint.
        """
        self.limits.context_length = context_length
        self._items.fingerprint = fingerprint

    @property
    def warnings(self) -> list[str]:
        """Sentences for the log about the model's directory."""
        found = (self.vocabulary.warning(), self._template.warning)
        return [warning for warning in found if warning is not None]

    @property
    def model_names(self) -> list[str]:
        """Names by which a request may ask for the model."""
        return self._parts.model_names

    async def chat(self, body: dict[str, Any], *, clamps_limit: bool = False) -> AcceptedRequest:
        """`clamps_limit`: a limit of the answer above what the context leaves is that."""
        return await accept_chat(self._parts, body, clamps_limit=clamps_limit)

    async def completion(self, body: dict[str, Any]) -> AcceptedRequest:
        return await accept_completion(self._parts, body)

    async def generate(self, body: dict[str, Any]) -> AcceptedRequest:
        return await accept_generate(self._parts, body)

    async def tokenize(self, body: dict[str, Any]) -> list[int] | list[list[int]]:
        return await tokenize_body(self._parts, body)

    async def detokenize(self, body: dict[str, Any]) -> str | list[str]:
        return await detokenize_body(self._parts, body)


def _eos_ids(
    facts: ModelFacts, tokenizer: Tokenizer, vocabulary: ModelVocabulary
) -> tuple[int, ...]:
    """Ids that end an answer: those of the configuration, and that of the tokenizer's eos token."""
    ids = list(facts.eos_token_ids)
    token = facts.special_tokens.get("eos_token")
    token_id = None if token is None else tokenizer.id_of(token)
    if token_id is not None:
        ids.append(token_id)
    return vocabulary.ids_within(ids)
