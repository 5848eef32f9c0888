"""Drafts on the device: the answers without any, up to near ties, and steps that are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.runtime.engine_loop import EngineLoop
from baton.runtime.runner.cuda_runner import DeviceRunner
from tests.gpu.test_graphs import FLAGS, agree, answers, demo, prompts
from tests.parity.conftest import Reference
from tests.parity.test_draft_heads import Drafting, check_drafts, eagle3, watch_drafts
from tests.support.engines.draft_model import (
    count_drafts,
    draft_always,
    script_head,
    with_draft,
)
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import EAGLE3_LAYERS, make_eagle3
from tests.support.probes import RunnerProbe

__all__ = ["demo", "eagle3"]
"""Fixtures."""

pytestmark = pytest.mark.timeout(600)  # kernels are compiled at their first use
COUNT = 12
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
HEADS_OF_64: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def watch_replays(engine: EngineLoop) -> list[int]:
    """Tokens of the steps with drafts that are replayed."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    graphs = RunnerProbe(runner).graphs
    replayed: list[int] = []
    # Without CUDA graphs every step is eager.
    if graphs is None:
        return replayed
    load = graphs.load_step

    def watched(size: int, step: Any, indices: Any) -> None:
        if step.num_drafted_rows:
            replayed.append(len(step.token_ids))
        load(size, step, indices)

    graphs.load_step = watched
    return replayed


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 0.9, "ignore_eos": True}], ids=str)
def test_answers_are_those_without_drafts(
    demo: str, graphs: bool, sampling: dict[str, Any]
) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    flags: dict[str, Any] = {**FLAGS, "disable_cuda_graph": not graphs}
    plain = make_engine(demo, **flags)
    want = answers(plain, COUNT, **sampling)
    plain.close()
    # The flag sizes recordings and memory; the drafts are others.
    engine = make_engine(
        demo, speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, **flags
    )
    known = {
        (tuple(prompt), 0): [token for token, _ in each]
        for prompt, each in zip(prompts(COUNT), want, strict=True)
    }
    speculate(engine, ScriptedDrafter(known, 0.7, 3000), 4)
    replayed = watch_replays(engine)
    agree(answers(engine, COUNT, **sampling), want)
    assert bool(replayed) == graphs
    drafted, drawn = count_drafts(engine)
    assert 0 < drawn < drafted
    engine.close()


def test_model_that_drafts_for_itself_is_mostly_right(demo: str) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    plain = make_engine(demo, **FLAGS)
    want = answers(plain, COUNT, **GREEDY)
    plain.close()
    engine = draft_always(make_engine(demo, **FLAGS, **with_draft(demo)))
    replayed = watch_replays(engine)
    agree(answers(engine, COUNT, **GREEDY), want)
    drafted, drawn = count_drafts(engine)
    assert replayed
    assert drawn > 0.9 * drafted > 50
    engine.close()


def test_head_reads_the_states_of_recorded_steps(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    path = make_checkpoint(
        "llama", tmp_path / "m", dtype="bfloat16", num_hidden_layers=EAGLE3_LAYERS, **HEADS_OF_64
    )
    make_eagle3(path, tmp_path / "head", **HEADS_OF_64)
    flags: dict[str, Any] = {**FLAGS, "max_running_requests": 4}
    plain = make_engine(path, **flags)
    asked = [[5, 6, 7, 8], list(range(40, 110)), [9]]
    want = answer(plain, asked, greedy(24))
    plain.close()
    drafting = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(tmp_path / "head"),
        "speculative_num_steps": 3,
    }
    engine = draft_always(make_engine(path, **flags, **drafting))
    script_head(engine, {tuple(p): t for p, t in zip(asked, want, strict=True)}, 0.7)
    replayed = watch_replays(engine)
    found = answer(engine, asked, greedy(24))
    same = sum(a == b for x, y in zip(found, want, strict=True) for a, b in zip(x, y, strict=True))
    # Random weights have near ties.
    assert same > 0.5 * sum(map(len, want))
    assert replayed
    engine.close()


def test_head_drafts_what_its_formula_gives(eagle3: Drafting) -> None:
    """In float32 by plain torch, where nothing is recorded: transformers' layers are the judge."""
    reference = Reference(eagle3.path)
    engine = draft_always(
        make_engine(eagle3.path, device="cuda", attention_backend="torch", **eagle3.flags)
    )
    want = reference.answers(reference.prompts, 16)
    chains = watch_drafts(engine)
    script_head(engine, {tuple(p): t for p, t in zip(reference.prompts, want, strict=True)}, 0.6)
    assert answer(engine, reference.prompts, greedy(16)) == want
    assert len(chains) > 10
    check_drafts(chains, eagle3.head)
    engine.close()
