"""Answers that a request asks for: one for each prompt and choice."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from baton.sched.types.request import Rendezvous, SamplingParams
from baton.server.fields import bad
from baton.server.request.resume import ResumeState


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


def resumed_item(items: list[PromptItem], stream: bool, resume: ResumeState) -> PromptItem:
    """The one item of a request, behind the tokens it has already."""
    if len(items) != 1 or not stream or items[0].params.prompt_logprobs >= 0:
        raise bad("baton_resume", "goes with one streamed answer without logprobs of its prompt")
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
