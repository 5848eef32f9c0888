"""Drives a real Engine (scheduler, model, pool) in this process, without the front: submit prompts, collect tokens."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.config import build_config
from baton.runtime import build as runtime
from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest

_handles = itertools.count(1)


FLAGS: dict[str, object] = {
    "dtype": "float32", "cpu_threads": 1, "page_size": 4, "max_total_tokens": 2048, "chunked_prefill_size": 64
}  # fmt: skip


def make_engine(
    path: Path | str, *, trace: Callable[[str], None] | None = None, **flags: object
) -> EngineLoop:
    return runtime.load_rank(
        build_config({"model_path": str(path), **FLAGS, **flags}), str(path)
    ).make_engine_loop(trace=trace)


def answer(
    engine: EngineLoop,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    stagger: int = 0,
    disturb: Callable[[list[int]], None] | None = None,
) -> list[list[int]]:
    """Tokens for every prompt, run together.

    Args:
        stagger: engine turns between two submissions.
        disturb: called before every turn with the handles that are open; it may leave requests suspended only for as
            long as it is called again.
    """
    handles = [next(_handles) for _ in prompts]
    got: dict[int, list[int]] = {h: [] for h in handles}
    open_handles = set(handles)
    todo = list(zip(handles, prompts, strict=True))
    turn = 0
    while open_handles:
        while todo and (stagger == 0 or turn >= stagger * (len(prompts) - len(todo))):
            handle, prompt = todo.pop(0)
            engine.submit(
                ValidatedRequest(
                    handle, f"r{handle}", array("i", prompt), params, arrival=time.monotonic()
                )
            )
        if disturb is not None:
            disturb(sorted(open_handles))
        outputs, busy = engine.step(time.monotonic())
        turn += 1
        for out in outputs:
            got[out.handle].extend(out.tokens)
            if out.finish is not None:
                assert out.finish is not FinishReason.ERROR, out.error
                open_handles.discard(out.handle)
        assert busy or todo or disturb or not open_handles, "the engine stopped with requests open"
    while engine.step(time.monotonic())[1]:
        pass
    engine.gauges()
    assert engine.not_accepting_reason is None
    return [got[h] for h in handles]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0.0)
