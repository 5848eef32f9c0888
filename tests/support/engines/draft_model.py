"""Engines with a draft model that drafts in every step it can."""

from __future__ import annotations

from pathlib import Path

from baton.runtime.engine_loop import EngineLoop
from baton.runtime.speculation.speculator import ModelSpeculator


def with_draft(path: Path | str, most: int = 4) -> dict[str, object]:
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
    times = engine.speculator._model._step_times
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
