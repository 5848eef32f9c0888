"""Steps without requests, run before the engine says that it is ready: kernels are compiled and
loaded by them instead of by the first requests, and their memory tells how much is left for the KV
pool (memory).

1. `warmup_steps` writes the plans: every kind of step (prompts only, decode rows only, both, each
way of sampling, a chunk that samples nothing, a few tokens after a long cached prefix) small, then
the largest that the limits allow;
2. `run_warmup` executes them on a runner with a small pool (`pages_needed`), with a line of
progress each; 3. that pool and runner are dropped, and the real ones are made.

Plans are those of the scheduler in every respect, so that a runner does all of its work for
requests here.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.runtime.memory.device_memory import DeviceMemory
from baton.sched.types.plan import AdmittedSeq, Row, StateCopy, StepPlan, StopReason
from baton.sched.types.request import SamplingParams

log = logging.getLogger("baton.warmup")

TOKEN = 0
"""Every vocabulary has it."""
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, seed=3, min_p=0.05, repetition_penalty=1.1),
    SamplingParams(
        temperature=0.0,
        logprobs=2,
        logprob_token_ids=(TOKEN,),
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((TOKEN, -1.0),),
        min_new_tokens=8,
        stop_token_ids=(TOKEN,),
    ),
)
"""Rows that are sampled in different ways, in one step: together they state every parameter that
the sampler reads.
"""
PROMPT_LOGPROBS = SamplingParams(
    temperature=0.0, logprobs=20, prompt_logprobs=20, logprob_token_ids=(TOKEN,)
)
CACHED_TOKENS = 8192
"""Long enough for attention to split one row's KV among thread blocks, which takes its
workspace.
"""
FEW_TOKENS = 16
LONG_PROMPT_TOKENS = 512
"""Attention may have other kernels for long rows."""


@dataclass(frozen=True, slots=True)
class WarmupLimits:
    """Limits of a step."""

    tokens: int
    """Rows of decoding sequences and prompt tokens together."""
    prompt_tokens: int
    """At most `tokens`."""
    running: int
    context: int
    page_size: int
    drafts: int = 0
    """Most drafted tokens of a row."""
    state_pages: int = 0
    """Pages of a sequence's states; 0: no layer keeps any."""

    @property
    def own_state_pages(self) -> array[int]:
        """The first pages of the pool: all rows that need a state begin with the same one."""
        return array("i", range(self.state_pages))

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Device memory that steps took [bytes]."""

    largest: int
    """The most that any step took."""
    largest_decode: int
    """The most that the largest steps of decode rows only took, with drafts and without."""


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    decode: int
    """Rows that continue a sequence of one full page, less the token."""
    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    params: Sequence[SamplingParams] = (GREEDY,)
    samples: bool = True
    """All rows or none: the more, the more memory."""
    cached: int = 0
    """Tokens of each prompt that are in the KV pool already."""
    drafted: tuple[int, ...] = ()
    """Drafted tokens of further sequences, which continue as those of `decode`."""

    def make_plan(self, number: int, limits: WarmupLimits) -> StepPlan:
        free = itertools.count(limits.state_pages)
        known = min(limits.page_size, limits.context) - 1
        shapes = [(known, 1)] * self.decode
        shapes += [(min(known, limits.context - 1 - n), 1 + n) for n in self.drafted]
        shapes += [(self.cached, n) for n in self.prompts]
        rows = []
        admitted = []
        loads = []
        for slot, (start, n) in enumerate(shapes):
            pages = array("i", itertools.islice(free, limits.pages_for(start + n)))
            tokens = array("i", [TOKEN]) * n
            rows.append(Row(slot, slot, start, n, self.samples, tokens, 0, pages))
            # A state has seen the tokens in front of its row: else the runner refuses it.
            if start and limits.state_pages:
                loads.append(StateCopy("load", slot, start, limits.own_state_pages))
            history = array("i", [TOKEN]) * (start + n)
            params = self.params[slot % len(self.params)]
            position = 1 if params.prompt_logprobs >= 0 else None
            admitted.append(AdmittedSeq(slot, slot, params, start + n, history, position))
        return StepPlan(
            number,
            tuple(rows),
            self.decode,
            tuple(admitted),
            array("i"),
            StopReason.QUEUE_EMPTY,
            states=tuple(loads),
            drafted=self.drafted,
        )


def warmup_steps(limits: WarmupLimits) -> list[tuple[str, StepPlan]]:
    """Each with a name for people.

    The last ones are the largest of decode rows only, the largest of rows with drafts, where there
    are some, and the largest of all.
    """
    few = min(4, limits.running)
    short = min(
        2 * limits.page_size, limits.prompt_tokens, limits.context, max(1, limits.tokens - few + 1)
    )
    few_tokens = min(FEW_TOKENS, limits.prompt_tokens, limits.context)
    cached = min(CACHED_TOKENS, limits.context - few_tokens)
    long = min(LONG_PROMPT_TOKENS, limits.prompt_tokens, limits.context)
    shapes = [
        _Step("one prompt", 0, (short,)),
        _Step(f"one prompt of {long} tokens", 0, (long,)),
        _Step(f"logprobs of a prompt of {long} tokens", 0, (long,), (PROMPT_LOGPROBS,)),
        _Step("a chunk that is not a prompt's last", 0, (short,), samples=False),
        _Step(f"{few_tokens} tokens after {cached} cached ones", 0, (few_tokens,), cached=cached),
        _Step("one sequence decoding", 1, ()),
        _Step("prompt and decode rows", few - 1, (short,)),
        _Step("all ways of sampling", min(len(SAMPLINGS), limits.running), (), SAMPLINGS[-few:]),
        _Step(f"{limits.running} sequences decoding", limits.running, ()),
        *_largest_drafted_step(limits),
        _largest_step(limits),
    ]
    return [(step.name, step.make_plan(number, limits)) for number, step in enumerate(shapes)]


def _largest_drafted_step(limits: WarmupLimits) -> list[_Step]:
    """As many drafts as a step has room for, whose rows want logits, too; none where there are
    none.
    """
    each = min(limits.drafts, limits.context - 1)
    room = min(limits.running * each, limits.tokens - limits.running)
    if room <= 0:
        return []
    full_rows, left = divmod(room, each)
    drafted = (each,) * full_rows
    if left:
        drafted += (left,)
    decode = limits.running - len(drafted)
    return [_Step(f"{limits.running} sequences with {room} drafts", decode, (), drafted=drafted)]


def _largest_step(limits: WarmupLimits) -> _Step:
    """As many tokens as a step may have, and of those as many rows as can be: each wants logits."""
    prompts: list[int] = []
    tokens_left = limits.prompt_tokens
    while tokens_left and len(prompts) < limits.running:
        prompts.append(min(tokens_left, limits.context))
        tokens_left -= prompts[-1]
    decode = limits.running - len(prompts)
    most = max(limits.tokens, limits.running)
    while prompts and (excess := decode + sum(prompts) - most) > 0:
        if excess < prompts[-1]:
            prompts[-1] -= excess
        else:
            prompts.pop()
            decode += 1
    return _Step(
        f"{decode} sequences decoding with {sum(prompts)} prompt tokens", decode, tuple(prompts)
    )


def pages_needed(limits: WarmupLimits) -> int:
    """Pages of the pool that warm-up steps run on."""
    most = max(sum(len(row.pages) for row in plan.rows) for _, plan in warmup_steps(limits))
    return limits.state_pages + most


def run_warmup(
    limits: WarmupLimits, execute: Callable[[StepPlan], object], memory: DeviceMemory
) -> WarmupResult:
    """Run all steps. Raises what `execute` raises."""
    plans = warmup_steps(limits)
    before = memory.reserved_bytes()
    took = []
    for i, (name, plan) in enumerate(plans, 1):
        started = time.monotonic()
        memory.reset_peak()
        execute(plan)
        took.append(max(memory.peak_bytes() - before, 0))
        # gives back what this step leaves behind, which the next one may not be able to use
        memory.reserved_bytes()
        log.info(
            "warm-up step %d of %d: %s, %.2f s", i, len(plans), name, time.monotonic() - started
        )
    num_answering_only = 2 if plans[-2][1].drafted else 1
    return WarmupResult(max(took), max(took[-1 - num_answering_only : -1]))
