"""Values of a request that a model and its sampler can compute with, checked before the request
joins a batch.

The front has checked them against the same model and reports them to clients (`server.request`).
Here they are checked once more, because the values of one request are computed together with those
of all others: an id beyond the embedding or a parameter that the sampler cannot use would end the
step, and the process with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from baton.errors import BadRequest, PromptTooLong
from baton.sched.types.request import SamplingParams, ValidatedRequest

INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a loaded model."""

    vocab_size: int
    max_context: int
    """Longest prompt + answer [tokens]."""

    def check_request(self, req: ValidatedRequest) -> None:
        """Raise BadRequest or PromptTooLong for a request that this model cannot compute.

        Cost: microseconds.
        """
        tokens = len(req.prompt)
        if not tokens:
            raise BadRequest("the prompt is empty; give at least one token")
        longest = tokens + max(req.params.max_new_tokens, 1)
        if longest > self.max_context:
            raise PromptTooLong(
                f"prompt and answer may have {longest} tokens together, this model takes "
                f"{self.max_context}; shorten the prompt or lower max_tokens"
            )
        ids = np.frombuffer(req.prompt, np.int32)
        lowest = int(ids.min())
        highest = int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise BadRequest(
                f"the prompt has the token id {lowest if lowest < 0 else highest}, but the model's "
                f"vocabulary has {self.vocab_size} ids, 0 to {self.vocab_size - 1}; leave that "
                "token out"
            )
        for token_id in req.params.logprob_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise BadRequest(
                    f"logprobs of the token id {token_id} are asked for, but the model's "
                    f"vocabulary has {self.vocab_size} ids, 0 to {self.vocab_size - 1}; leave that "
                    "id out"
                )
        for problem in _find_mistakes(req.params, tokens, self.vocab_size):
            raise BadRequest(f"{problem}; correct the request's sampling parameters")


def _find_mistakes(params: SamplingParams, prompt_tokens: int, vocab_size: int) -> list[str]:
    """Parameters for which a draw is not defined, one phrase each."""
    checks = {
        "temperature": 0 <= params.temperature < math.inf,
        "top_p": 0 < params.top_p <= 1,
        "top_k": 0 <= params.top_k <= INT64_MAX,
        "min_p": 0 <= params.min_p <= 1,
        "presence_penalty": math.isfinite(params.presence_penalty),
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "repetition_penalty": 0 < params.repetition_penalty < math.inf,
        "max_new_tokens": params.max_new_tokens >= 1,
        "min_new_tokens": params.min_new_tokens >= 0,
        "prompt_logprobs": params.prompt_logprobs >= -1,
        "prompt_logprobs_start": params.prompt_logprobs_start >= 1,
        "resumed": 0 <= params.resumed <= prompt_tokens,
    }
    mistakes = [
        f"{name} is {getattr(params, name)}, with which no token can be drawn"
        for name, is_valid in checks.items()
        if not is_valid
    ]
    if any(token_id < 0 for token_id in params.stop_token_ids):
        mistakes.append(f"stop_token_ids has {min(params.stop_token_ids)}, which is no token id")
    for token_id, amount in params.logit_bias:
        if token_id < 0 or not math.isfinite(amount):
            mistakes.append(f"logit_bias adds {amount} to token id {token_id}")
    if params.allowed_tokens:
        allowed = int.from_bytes(params.allowed_tokens, "little")
        if not 0 < allowed < 1 << vocab_size:
            highest = allowed.bit_length() - 1
            mistakes.append(
                f"allowed_token_ids go up to {highest}, the model's ids from 0 to {vocab_size - 1}"
            )
    if any(not word or min(word) < 0 for word in params.bad_words):
        mistakes.append("bad_words has an entry that is no sequence of token ids")
    return mistakes
