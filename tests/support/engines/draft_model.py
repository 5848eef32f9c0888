"""Engines with a draft model or head that drafts in every step it can."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.runtime.engine_loop import EngineLoop
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep, HeadDrafter
from baton.runtime.speculation.model_drafter import TimedResult
from baton.runtime.speculation.model_speculator import ModelSpeculator
from baton.sched.types.plan import StepPlan


def with_draft(path: Path | str, most: int = 4) -> dict[str, Any]:
    """Flags for a draft model."""
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(path),
        "speculative_num_draft_tokens": most,
    }


def draft_always(engine: EngineLoop) -> EngineLoop:
    """Let drafts count as free, so that the times of this machine decide nothing."""
    assert isinstance(engine.speculator, ModelSpeculator)
    engine.sched.observe = lambda *_: None  # type: ignore[method-assign]
    times = engine.speculator._model._step_times  # type: ignore[attr-defined]
    times.observe = lambda *_: None  # type: ignore[method-assign]
    times.a = 0.0
    times.b = 0.0
    return engine


def count_drafts(engine: EngineLoop) -> tuple[int, int]:
    """Drafted tokens so far, and those of them that were drawn."""
    counters = engine.sched.stats.counters()
    drafted, drawn = (
        counters[f"spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")
    )
    return int(drafted), int(drawn)


def script_drafts(
    engine: EngineLoop, answers: Mapping[tuple[int, ...], Sequence[int]], right: float
) -> None:
    """Let the draft model compute all that it would, and draft tokens of which this share is right.

    Args:
        answers: by prompt.
    """
    assert isinstance(engine.speculator, ModelSpeculator)
    drafter = engine.speculator._model
    run_plans = drafter._run_plans
    rng = random.Random(0)

    def draw(handle: int, position: int) -> int:
        seq = drafter._seqs[handle]
        answer = answers.get(tuple(seq.req.prompt), ())
        place = position - seq.prompt_len
        # The first answers to a prompt are not known yet.
        if place >= len(answer):
            return 0
        token = answer[place]
        return token if rng.random() < right else token ^ 1

    def run_scripted(plans: Sequence[StepPlan]) -> list[TimedResult]:
        results = []
        for plan, (result, seconds) in zip(plans, run_plans(plans), strict=True):
            tokens = [draw(row.handle, row.start + row.n) for row in plan.rows if row.sample]
            results.append((replace(result, tokens=tokens), seconds))
        return results

    drafter._run_plans = run_scripted


def drafter_of(engine: EngineLoop) -> HeadDrafter:
    """That of an engine with a head."""
    assert isinstance(engine.speculator, ModelSpeculator)
    drafter = engine.speculator._model
    assert isinstance(drafter, HeadDrafter)
    return drafter


def script_head(
    engine: EngineLoop, answers: Mapping[tuple[int, ...], Sequence[int]], right: float
) -> None:
    """`script_drafts` for a head."""
    drafter = drafter_of(engine)
    run_drafts = drafter._run_drafts
    rng = random.Random(0)

    def draw(slot: int, number: int) -> int:
        (seq,) = [seq for seq in drafter._seqs.values() if seq.slot == slot]
        answer = answers.get(tuple(seq.req.prompt), ())
        place = len(seq.tokens) - seq.prompt_len + number
        token = answer[place] if place < len(answer) else 0
        return token if rng.random() < right else token ^ 1

    def run_scripted(rows: Sequence[DraftRow]) -> list[DraftStep]:
        return [
            step._replace(tokens=[draw(slot, number) for slot in step.slots])
            for number, step in enumerate(run_drafts(rows))
        ]

    drafter._run_drafts = run_scripted
