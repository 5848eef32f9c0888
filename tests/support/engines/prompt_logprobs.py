"""Requests for logprobs of prompts, and their comparison with transformers' numbers."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.plan import PromptLogprobs, TokenLogprobs
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest

TOP = 3
IDS = (7, 2, 5)
TOLERANCE = 1e-4
EVERYTHING = SamplingParams(
    max_new_tokens=1, temperature=0.0, logprobs=TOP, prompt_logprobs=TOP, logprob_token_ids=IDS
)

_handles = itertools.count(1)


@dataclass
class Asked:
    """A request, and the output of the engine for it."""

    prompt: Sequence[int]
    parts: list[PromptLogprobs] = field(default_factory=list)
    answer: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0


def ask(
    engine: EngineLoop,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    disturb: Callable[[list[int]], None] = lambda handles: None,
) -> list[Asked]:
    """Run requests together, and collect their logprobs."""
    asked = {next(_handles): Asked(prompt) for prompt in prompts}
    for (handle, request), wanted in zip(asked.items(), params, strict=True):
        engine.submit(
            ValidatedRequest(
                handle, f"r{handle}", array("i", request.prompt), wanted, arrival=time.monotonic()
            )
        )
    running = set(asked)
    while running:
        disturb(sorted(running))
        outputs, _ = engine.step(time.monotonic())
        for out in outputs:
            assert out.finish is not FinishReason.ERROR, out.error
            request = asked[out.handle]
            request.cached_tokens = out.cached_tokens
            request.tokens.extend(out.tokens)
            if out.prompt_logprobs is not None:
                assert not request.tokens, "prompt logprobs come before the first token"
                request.parts.append(out.prompt_logprobs)
            if out.logprobs is not None:
                request.answer.append(out.logprobs)
            if out.finish is not None:
                running.discard(out.handle)
    while engine.step(time.monotonic())[1]:
        pass
    engine.gauges()
    assert engine.not_accepting_reason is None
    return list(asked.values())


@dataclass
class _Table:
    """Records of consecutive positions, column by column."""

    positions: list[int]
    chosen: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray
    of_ids: np.ndarray


def _read_parts(parts: list[PromptLogprobs], num_ids: int) -> _Table:
    positions = [p for part in parts for p in range(part.position, part.position + part.count)]
    top = parts[0].top
    width = 2 + 2 * top + num_ids
    whole = b"".join(part.records for part in parts)
    integers = np.frombuffer(whole, "<i4").reshape(-1, width)
    floats = np.frombuffer(whole, "<f4").reshape(-1, width)
    return _Table(
        positions,
        floats[:, 0],
        integers[:, 1],
        integers[:, 2 : 2 + top],
        floats[:, 2 + top : 2 + 2 * top],
        floats[:, 2 + 2 * top :],
    )


def reference_logprobs(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """Logprobs by transformers' model: float32 [len(prompt), vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(prompt)])).logits[0].float().log_softmax(-1)


def check_logprobs(asked: Asked, params: SamplingParams, expected: torch.Tensor) -> None:
    """Compare all that was said with transformers' rows."""
    prompt = asked.prompt
    first = params.prompt_logprobs_start
    if len(prompt) <= first:
        assert not asked.parts
        return
    ids = params.logprob_token_ids
    table = _read_parts(asked.parts, len(ids))
    assert table.positions == list(range(first, len(prompt))), "each position once, in order"
    rows = expected[first - 1 : len(prompt) - 1]
    targets = torch.tensor(prompt[first:])
    own = rows.gather(1, targets[:, None])
    np.testing.assert_allclose(table.chosen, own[:, 0], atol=TOLERANCE)
    assert (table.ranks == (rows > own).sum(1).numpy() + 1).all()
    top = rows.topk(params.prompt_logprobs)
    np.testing.assert_allclose(table.top, top.values, atol=TOLERANCE)
    assert (table.top_ids == top.indices.numpy()).all()
    np.testing.assert_allclose(table.of_ids, rows[:, list(ids)], atol=TOLERANCE)
    is_best = table.ranks == 1
    if params.prompt_logprobs:
        assert (table.chosen[is_best] == table.top[is_best, 0]).all(), "float-equal"
        assert (table.chosen[~is_best] < table.top[~is_best, 0]).all()
    if params.logprobs >= 0:
        first_answer = asked.answer[0]
        last = expected[len(prompt) - 1]
        assert first_answer.chosen == pytest.approx(float(last[asked.tokens[0]]), abs=TOLERANCE)
        assert list(first_answer.id_logprobs) == pytest.approx(
            last[list(ids)].tolist(), abs=TOLERANCE
        )
