"""The last step of a check: one `PromptItem` per prompt and choice, with its limit, seed and
place.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from baton.config import EngineConfig
from baton.errors import BadRequest
from baton.server.fields import bad
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.grammar.request_grammar import NO_GRAMMAR, RequestGrammar
from baton.server.request.limits import PromptLimits
from baton.server.request.prompt.items import PromptItem, resumed_item
from baton.server.request.prompt.placement import place, seed_for
from baton.server.request.prompt.truncation import read_cut
from baton.server.request.resume import read_resume
from baton.server.request.sampling.logprobs import (
    check_placement,
    check_prompt_start,
    params_of_choice,
)
from baton.server.request.sampling.params import NO_LIMIT, ReasoningLimit
from baton.server.request.schema import MAX_ITEMS
from baton.server.request.shared_fields import SharedFields
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.reasoning_format import ReasoningFormat, ReasoningRules


@dataclass(frozen=True, slots=True)
class AnswerLimit:
    """Most tokens of an answer."""

    asked: int | None
    """Must fit into the context."""
    default: int | None
    """Where none is asked for; less if less is left. `None`: all that is left."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Token ids of a request's prompts."""

    ids: Sequence[Sequence[int]]
    param: str
    """The client's field."""


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """All of a request but its prompts."""

    shared: SharedFields
    grammar: RequestGrammar = NO_GRAMMAR
    reasoning: ReasoningLimit = NO_LIMIT
    reads_reasoning: bool = False
    """The reasoning is divided from the content."""
    has_tools: bool = False


@dataclass(slots=True)
class ItemMaker:
    """Makes an accepted request of a draft and its prompts."""

    config: EngineConfig
    vocabulary: ModelVocabulary
    limits: PromptLimits
    reasoning: ReasoningFormat
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """The node's, once its ranks have reported their layout."""

    def accept(
        self, draft: RequestDraft, prompts: PromptRows, limit: AnswerLimit
    ) -> AcceptedRequest:
        """Raises EngineError for prompts that do not fit, or that cannot be placed."""
        shared = draft.shared
        request = shared.request
        rules = self._reasoning_rules(draft)
        accepted = _with_grammar(draft)
        if draft.reasoning.budget is not None and rules.budget is None:
            ignored = (*accepted.ignored, draft.reasoning.param)
            accepted = msgspec.structs.replace(accepted, ignored=ignored)
        items = self._make_items(draft, rules, prompts, limit)
        resume = read_resume(request, self.limits.context_length, self.vocabulary, self.fingerprint)
        if resume is None:
            return msgspec.structs.replace(accepted, items=tuple(items))
        item = resumed_item(items, request.stream or False, resume)
        accepted = msgspec.structs.replace(accepted, items=(item,), resume=resume)
        return accepted.with_options(resumed_ids=resume.ids, resumed_events=resume.events)

    def _reasoning_rules(self, draft: RequestDraft) -> ReasoningRules:
        """Rules for the reasoning, without a limit where the model's reasoning cannot be ended."""
        continues = draft.shared.accepted.continues_prompt
        budget = draft.reasoning.budget
        can_be_limited = self.reasoning.can_be_limited(
            has_tools=draft.has_tools,
            continues_prompt=continues,
            has_grammar=bool(draft.grammar.text),
        )
        if not can_be_limited:
            budget = None
        is_read = draft.reads_reasoning or budget is not None
        return ReasoningRules(is_read, continues, draft.has_tools, budget)

    def _make_items(
        self, draft: RequestDraft, rules: ReasoningRules, prompts: PromptRows, limit: AnswerLimit
    ) -> list[PromptItem]:
        shared = draft.shared
        n = shared.accepted.n
        rows = self._cut_prompts(draft, prompts, limit)
        placements = place(
            shared.request, len(rows), n, self.config.disaggregation_mode, self.config.dp_size
        )
        params = shared.params
        # Most requests have none, and a copy of all parameters for each of them shows in profiles.
        if draft.grammar.text:
            params = replace(params, grammar=draft.grammar.text)
        prompt_logprobs = shared.accepted.answer.prompt_logprobs
        items = []
        for i, ids in enumerate(rows):
            prompt = array("i", ids)
            prompt_params = self.reasoning.add_gate(params, prompt, rules)
            new = self.limits.max_new_tokens(len(prompt), limit.asked, limit.default, prompts.param)
            check_prompt_start(prompt_logprobs, len(prompt))
            if params.min_new_tokens > new:
                least = params.min_new_tokens
                raise bad(shared.min_name, f"is {least}, but the answer may have {new} tokens only")
            for choice in range(n):
                where = placements[i * n + choice]
                seed = seed_for(shared.seed, where.rendezvous, choice)
                # Where only the prompt's logprobs are asked for, its first token comes with them.
                choice_params = replace(prompt_params, max_new_tokens=max(new, 1), seed=seed)
                choice_params = params_of_choice(choice_params, choice)
                check_placement(prompt_logprobs, where.rendezvous)
                items.append(
                    PromptItem(i, choice, prompt, choice_params, where.rendezvous, where.dp_rank)
                )
        return items

    def _cut_prompts(
        self, draft: RequestDraft, prompts: PromptRows, limit: AnswerLimit
    ) -> Sequence[Sequence[int]]:
        """The prompts, cut if the request says so. Raises BadRequest for too many answers."""
        n = draft.shared.accepted.n
        count = len(prompts.ids) * n
        if count > MAX_ITEMS:
            raise BadRequest(
                f"{len(prompts.ids)} prompts with n {n} give {count} answers, at most {MAX_ITEMS} "
                "are accepted",
                param="n",
            )
        answer_tokens = limit.default if limit.asked is None else limit.asked
        cut = read_cut(draft.shared.request, self.limits.context_length, max(answer_tokens or 0, 1))
        if cut is None:
            return prompts.ids
        return [cut.cut(ids) for ids in prompts.ids]


def _with_grammar(draft: RequestDraft) -> AcceptedRequest:
    """The accepted request with what its grammar says of the answer."""
    accepted = draft.shared.accepted
    if draft.grammar == NO_GRAMMAR:
        return accepted
    ignored = (*accepted.ignored, *draft.grammar.ignored)
    accepted = msgspec.structs.replace(accepted, ignored=ignored)
    return accepted.with_options(follows_grammar=bool(draft.grammar.text))
