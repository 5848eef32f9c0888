"""Logprobs that a request asks for: the fields of the three APIs as one value. Raises BadRequest.

| API | answer | prompt |
|---|---|---|
| chat | `logprobs`, `top_logprobs`, `logprob_token_ids` | `prompt_logprobs` |
| completions | `logprobs`, `logprob_token_ids` | `echo` with `logprobs`; `prompt_logprobs` |
| /generate | `return_logprob`, `top_logprobs_num`, `token_ids_logprob` | `logprob_start_len` |

Sources: OpenAI's API reference, vLLM 0.33 (`prompt_logprobs`, `logprob_token_ids`), SGLang 0.5.23
(/generate).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton.errors import UnsupportedParameter
from baton.sched.types.request import Rendezvous, SamplingParams
from baton.server.fields import bad
from baton.server.request import schema
from baton.server.request.token_ids import ModelVocabulary
from baton.server.text.answer_spec import PromptLogprobsSpec

MAX_LOGPROB_IDS = 128


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    top: int = -1
    """Alternatives at each position of the answer; -1: no logprobs."""
    token_ids: tuple[int, ...] = ()
    """Ids whose logprobs are reported at each position."""
    prompt: PromptLogprobsSpec | None = None
    """None: the answer has no logprobs of its prompts."""

    @property
    def prompt_top(self) -> int:
        """Alternatives at each position of the prompt; -1: no logprobs of it."""
        if self.prompt is None:
            return -1
        joined = self.top if self.prompt.joins_logprobs else 0
        return max(joined, self.prompt.objects or 0)


def read_chat_logprobs(
    request: schema.ChatCompletionRequest, vocabulary: ModelVocabulary
) -> RequestedLogprobs:
    # vLLM's completion form, a number, is true in a chat body too, also 0.
    is_wanted = request.logprobs is True or type(request.logprobs) is int
    for name in ("top_logprobs", "logprob_token_ids"):
        if getattr(request, name) and not is_wanted:
            raise bad(name, "needs logprobs: true")
    token_ids = _read_token_ids("logprob_token_ids", request.logprob_token_ids, vocabulary)
    objects = _read_prompt_logprobs(request.prompt_logprobs, is_stream=bool(request.stream))
    return RequestedLogprobs(
        top=(request.top_logprobs or 0) if is_wanted else -1,
        token_ids=token_ids,
        prompt=None if objects is None else PromptLogprobsSpec(objects=objects, is_once=True),
    )


def read_completion_logprobs(
    request: schema.CompletionRequest, vocabulary: ModelVocabulary
) -> RequestedLogprobs:
    if request.logprob_token_ids and request.logprobs is None:
        raise bad("logprob_token_ids", "needs logprobs")
    token_ids = _read_token_ids("logprob_token_ids", request.logprob_token_ids, vocabulary)
    objects = _read_prompt_logprobs(request.prompt_logprobs, is_stream=bool(request.stream))
    joins = bool(request.echo) and request.logprobs is not None
    prompt = None
    if joins or objects is not None:
        prompt = PromptLogprobsSpec(joins_logprobs=joins, objects=objects)
    return RequestedLogprobs(
        top=-1 if request.logprobs is None else request.logprobs,
        token_ids=token_ids,
        prompt=prompt,
    )


def read_generate_logprobs(
    request: schema.GenerateRequest, vocabulary: ModelVocabulary
) -> RequestedLogprobs:
    """Without return_logprob, the other fields have no effect (matches SGLang)."""
    if not request.return_logprob:
        return RequestedLogprobs()
    start = request.logprob_start_len
    prompt = None
    if start is not None and start >= 0:
        prompt = PromptLogprobsSpec(start=start, joins_logprobs=True)
    return RequestedLogprobs(
        top=request.top_logprobs_num or 0,
        token_ids=_read_token_ids("token_ids_logprob", request.token_ids_logprob, vocabulary),
        prompt=prompt,
    )


def check_prompt_start(rules: PromptLogprobsSpec | None, prompt_tokens: int) -> None:
    """Raise BadRequest where the logprobs of a prompt would begin behind it."""
    if rules is not None and rules.start >= prompt_tokens:
        raise bad(
            "logprob_start_len",
            f"is {rules.start}, but the prompt has {prompt_tokens} tokens; send a position within "
            "it",
        )


def check_placement(rules: PromptLogprobsSpec | None, rendezvous: Rendezvous | None) -> None:
    """Raise UnsupportedParameter for logprobs of a prompt that two nodes compute."""
    if rules is not None and rendezvous is not None:
        raise UnsupportedParameter(
            "logprobs of the prompt come from one node; leave bootstrap_room out, or send the "
            "request to a router "
            "that does so",
            param="bootstrap_room",
        )


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of one of the answers to a prompt, of which the first has the prompt's
    logprobs.
    """
    return params if choice == 0 else replace(params, prompt_logprobs=-1)


def _read_token_ids(name: str, value: Any, vocabulary: ModelVocabulary) -> tuple[int, ...]:
    """Distinct ids in the order of the request."""
    ids = vocabulary.read_ids(name, value, MAX_LOGPROB_IDS)
    return tuple(dict.fromkeys(ids))


def _read_prompt_logprobs(value: int | None, *, is_stream: bool) -> int | None:
    """`prompt_logprobs`: a stream has none of them (matches vLLM), so only 0 goes with it."""
    if not is_stream:
        return value
    if value:
        raise bad(
            "prompt_logprobs",
            f"is {value}, but a stream has no logprobs of prompts; send stream: false",
        )
    return None
