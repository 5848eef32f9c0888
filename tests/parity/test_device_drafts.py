"""Drafts on the runner of GPUs, recorded steps on and off: every answer is what it is without drafts.

On CPU tensors, before a device that is always behind (tests.support.devices).
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.runtime import build
from baton.runtime.draft_model import DraftModel, LoadedHead
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.runner import head_runner
from baton.runtime.runner.step_inputs import decode_step
from tests.parity.conftest import Reference
from tests.parity.test_draft_heads import MTP, Drafting, check_drafts, eagle3, watch_drafts
from tests.parity.test_draft_model import half_llama
from tests.parity.test_preempted_tokens import storm
from tests.parity.test_speculation import (
    PROMPTS,
    SAMPLING,
    Answer,
    poison_embeddings,
    run,
    seen,
)
from tests.support.devices.device_engine import Device
from tests.support.engines.draft_model import (
    count_drafts,
    draft_always,
    script_head,
    with_draft,
)
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.engines.scripted_drafter import ScriptedDrafter, speculate
from tests.support.grammars.engines import follow_grammars, make_store
from tests.support.models.checkpoints import VOCAB, make_checkpoint
from tests.support.models.draft_heads import make_mtp
from tests.support.pairwise import pairwise
from tests.support.probes import RunnerProbe

__all__ = ["eagle3", "half_llama"]
"""Fixtures."""

MOST = 4
SENT_BACK: dict[str, Any] = {
    "max_total_tokens": 120,
    "schedule_conservativeness": 0.05,
    "page_size": 16,
}
FLAGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    # Prompts come between the steps of those that were admitted before.
    "joining": {"max_running_requests": 2, "chunked_prefill_size": 12},
    "in turn": {"disable_overlap_schedule": True, "page_size": 1},
    "sent back": SENT_BACK,
}
AXES: dict[str, Sequence[Any]] = {
    "sampling": sorted(SAMPLING),
    "drafts": ("wrong", "mixed", "right", "model", "head"),
    "graph_rows": (0, 14),
    "flags": tuple(FLAGS),
}
SHARES = {"wrong": 0.0, "mixed": 0.7, "right": 1.0, "head": 0.7}
"""Of the drafts that are right, where they are scripted."""


def mark_slow(case: dict[str, Any], number: int) -> Any:
    """A third of the recorded cases is run each time."""
    is_quick = case["graph_rows"] > 0 and number % 3 == 0
    return pytest.param(case, marks=[] if is_quick else pytest.mark.slow)


CASES = [mark_slow(case, number) for number, case in enumerate(pairwise(AXES, lambda _: True))]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@dataclass
class Steps:
    """Steps with drafts of an engine, by how they ran."""

    replayed: list[int] = field(default_factory=list)
    """Their tokens."""
    eager: list[int] = field(default_factory=list)


def watch_steps(device: Device) -> Steps:
    assert device.runner is not None
    probe = RunnerProbe(device.runner)
    steps = Steps()
    probe.watch_eager_steps(
        lambda step: steps.eager.append(len(step.token_ids)) if step.num_drafted_rows else None
    )
    if probe.graphs is not None:
        load = probe.graphs.load_step

        def watched(size: int, step: Any, indices: Any) -> None:
            if step.num_drafted_rows:
                steps.replayed.append(len(step.token_ids))
            load(size, step, indices)

        probe.graphs.load_step = watched
    return steps


def assert_equal(found: Sequence[Answer], want: Sequence[Answer]) -> None:
    for one, other in zip(found, want, strict=True):
        assert (one.tokens, one.finish) == (other.tokens, other.finish)
        for logprobs, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert (logprobs is None) == (expected is None)
            if logprobs is None or expected is None:
                continue
            assert logprobs.chosen == pytest.approx(expected.chosen, abs=1e-4)
            near = pytest.approx(list(expected.top_logprobs), abs=1e-4)
            assert list(logprobs.top_logprobs) == near


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_without_drafts(
    reference: Callable[[str], Reference],
    half_llama: Path,
    eagle3: Drafting,
    device: Device,
    case: dict[str, Any],
) -> None:
    drafts = case["drafts"]
    path = eagle3.path if drafts == "head" else reference("llama").path
    params = SAMPLING[case["sampling"]]
    store = make_store(path)
    plain = follow_grammars(make_engine(path), store)
    want = run(plain, params, PROMPTS)
    plain.close()

    flags = dict(FLAGS[case["flags"]])
    if drafts == "model":
        flags |= with_draft(half_llama, MOST)
    elif drafts == "head":
        flags |= eagle3.flags
    made = device.recorded(path, case["graph_rows"], poison=True, most_drafts=MOST, **flags)
    engine = follow_grammars(made, store)
    if drafts in ("model", "head"):
        draft_always(engine)
    else:
        speculate(engine, ScriptedDrafter(seen(want, params), SHARES[drafts], VOCAB), MOST)
    if drafts == "head":
        answers = {tuple(prompt): each.tokens for prompt, each in zip(PROMPTS, want, strict=True)}
        script_head(engine, answers, SHARES[drafts])
    steps = watch_steps(device)
    assert_equal(run(engine, params, PROMPTS), want)

    drafted, drawn = count_drafts(engine)
    # A grammar refuses wrong drafts before they are computed.
    if drafts in ("mixed", "right", "head") or not params.grammar:
        assert drafted > 0
        assert bool(steps.replayed) == bool(case["graph_rows"])
    if drafts == "right":
        assert drawn > 0
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


@pytest.mark.parametrize("variant", ["gemma3", "deepseek-v2"])
def test_windows_and_latents_in_recorded_steps(
    tmp_path: Path, device: Device, variant: str
) -> None:
    # Experts are kernels of GPUs: tests.support.devices.expert_engine.
    dense = {"first_k_dense_replace": 9} if variant == "deepseek-v2" else {}
    ref = Reference(make_checkpoint(variant, tmp_path / "m", **dense))
    want = ref.answers(ref.prompts, 24)
    engine = device.recorded(ref.path, 15, poison=True, most_drafts=MOST)
    answers = {(tuple(p), i): g for i, (p, g) in enumerate(zip(ref.prompts, want, strict=True))}
    speculate(engine, ScriptedDrafter(answers, 0.8, VOCAB), MOST)
    steps = watch_steps(device)
    found = run(engine, greedy(24), ref.prompts)
    assert [each.tokens for each in found] == want
    assert len(steps.replayed) > 5
    assert count_drafts(engine)[1] > 20
    engine.close()


def test_step_beyond_the_largest_recording_runs_eagerly(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """Four rows with four drafts each are 20 tokens."""
    path = reference("llama").path
    plain = make_engine(path)
    want = run(plain, SAMPLING["greedy"], PROMPTS)
    plain.close()
    sizes = {}
    for largest in (20, 19):
        engine = device.recorded(path, largest, most_drafts=MOST)
        drafter = ScriptedDrafter(seen(want, SAMPLING["greedy"]), 1.0, VOCAB)
        speculate(engine, drafter, MOST)
        steps = watch_steps(device)
        assert_equal(run(engine, SAMPLING["greedy"], PROMPTS), want)
        sizes[largest] = (max(steps.replayed), max(steps.eager, default=0))
        engine.close()
    assert sizes[20] == (20, 0)
    assert sizes[19][0] < sizes[19][1] == 20


def test_step_whose_drafts_name_too_many_pages_runs_eagerly(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """Pages that eight answers share are named for each of their tokens."""
    path = reference("llama").path
    flags: dict[str, Any] = {
        "page_size": 1,
        "max_total_tokens": 700,
        "max_running_requests": 8,
        "chunked_prefill_size": 4096,
    }
    shared = [(7 * i) % 250 for i in range(300)]
    asked = [[*shared, i] for i in range(8)]
    params = greedy(24)
    plain = make_engine(path, **flags)
    want = run(plain, params, asked)
    plain.close()
    engine = device.recorded(path, 40, most_drafts=MOST, **flags)
    speculate(engine, ScriptedDrafter(seen(want, params, asked), 1.0, VOCAB), MOST)
    steps = watch_steps(device)
    assert_equal(run(engine, params, asked), want)
    # The buffer holds 6 * 700 pages and 40 more.
    assert max(steps.eager) * 300 > 4240
    engine.close()


@pytest.mark.parametrize("graph_rows", [0, 14])
def test_model_that_drafts_for_itself_is_always_right(
    reference: Callable[[str], Reference], device: Device, graph_rows: int
) -> None:
    """Suspended and sent back meanwhile: no page of another text is read."""
    ref = reference("llama")
    engine = device.recorded(
        ref.path, graph_rows, poison=True, most_drafts=MOST, **SENT_BACK, **with_draft(ref.path)
    )
    draft_always(engine)
    want = ref.answers(ref.prompts, 24)
    disturb = storm(engine, random.Random(1))
    for _ in range(2):
        assert answer(engine, ref.prompts, greedy(24), disturb=disturb) == want
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 15
    engine.close()


@pytest.mark.parametrize("graph_rows", [0, 14])
def test_head_drafts_what_its_formula_gives(
    eagle3: Drafting, device: Device, monkeypatch: pytest.MonkeyPatch, graph_rows: int
) -> None:
    """Of the states of eager and of recorded steps, in front of rejected drafts and behind them,
    and of several steps that had none."""
    # Prompts are stored in parts.
    monkeypatch.setattr(head_runner, "MOST_STORED_TOKENS", 5)
    reference = Reference(eagle3.path)
    engine = device.recorded(
        eagle3.path, graph_rows, poison=True, most_drafts=3, chunked_prefill_size=16, **eagle3.flags
    )
    draft_always(engine)
    want = reference.answers(reference.prompts, 40)
    chains = watch_drafts(engine)
    answers = {tuple(p): tokens for p, tokens in zip(reference.prompts, want, strict=True)}
    script_head(engine, answers, 0.6)
    steps = watch_steps(device)
    choose = engine.sched.draft_lengths
    calls = itertools.count()

    def choose_sometimes(*offers: Any) -> dict[int, int]:
        return choose(*offers) if next(calls) // 8 % 2 else {}

    engine.sched.draft_lengths = choose_sometimes  # type: ignore[method-assign]
    assert answer(engine, reference.prompts, greedy(40)) == want
    assert bool(steps.replayed) == bool(graph_rows)
    drafted, drawn = count_drafts(engine)
    assert 0 < drawn < drafted
    assert len(chains) > 10
    check_drafts(chains, eagle3.head)
    engine.close()


@pytest.mark.parametrize("graph_rows", [0, 14])
def test_mtp_layer_that_is_right_is_accepted(
    tmp_path: Path, device: Device, graph_rows: int
) -> None:
    """A head that reads what the model's last layer gives, and shares its embedding."""
    make_mtp("glm4-moe", tmp_path / "echo", echoes=True, first_k_dense_replace=3)
    reference = Reference(tmp_path / "echo")
    engine = device.recorded(reference.path, graph_rows, poison=True, most_drafts=3, **MTP)
    draft_always(engine)
    assert answer(engine, reference.prompts, greedy(12)) == reference.answers(reference.prompts, 12)
    drafted, drawn = count_drafts(engine)
    assert drawn == drafted > 10
    engine.close()


def test_numbers_that_are_none_end_no_answer_in_rejected_places(
    reference: Callable[[str], Reference], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong drafts are a token whose states are NaN."""
    path = reference("llama").path
    params = SAMPLING["seeded"]
    plain = make_engine(path)
    want = run(plain, params, PROMPTS)
    plain.close()
    used = {token for prompt in PROMPTS for token in prompt}
    used |= {token for each in want for token in each.tokens}
    poison = min(set(range(VOCAB)) - used)
    for graph_rows in (0, 8):
        with monkeypatch.context() as patch:
            poison_embeddings(patch, poison)
            engine = device.recorded(path, graph_rows, most_drafts=MOST)
            speculate(engine, ScriptedDrafter(seen(want, params), 0.5, VOCAB, wrong=poison), MOST)
            assert_equal(run(engine, params, PROMPTS), want)
        drafted, drawn = count_drafts(engine)
        assert 0 < drawn < drafted
        engine.close()


def test_other_ranks_compute_the_same_rows(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """They are sent the drafts, and learn which ones counted by where the next rows begin."""
    path = reference("llama").path
    orders: list[bytes] = []
    params = SAMPLING["penalties"]
    plain = make_engine(path)
    want = run(plain, params, PROMPTS)
    plain.close()
    first = device.late(path, broadcast=orders.append)
    speculate(first, ScriptedDrafter(seen(want, params), 0.7, VOCAB), MOST)
    assert_equal(run(first, params, PROMPTS), want)
    leader = device.runner
    device.late(path)
    executor = device.runner
    assert leader is not None
    assert executor is not None
    assert any(decode_step(order)[0].num_drafted_rows for order in orders)
    for order in orders:
        assert (decode_step(order)[0].token_ids >= 0).all()
        executor.execute_remote(order)  # raises StepMismatch where its arrays differ
    assert torch.equal(RunnerProbe(executor).kv_pool.data, RunnerProbe(leader).kv_pool.data)
    first.close()


@pytest.mark.parametrize("drafts", ["model", "head"])
def test_start_on_a_gpu_records_the_steps_that_drafts_need(
    reference: Callable[[str], Reference],
    eagle3: Drafting,
    device: Device,
    drafts: str,
) -> None:
    """Eight rows: two answers with three drafts each. A draft model has recordings of two."""
    ref = reference("llama") if drafts == "model" else Reference(eagle3.path)
    flags = with_draft(ref.path, 3) if drafts == "model" else dict(eagle3.flags)
    made: list[DraftModel | LoadedHead] = []
    attach = build._attach_draft

    def attach_noted(*args: Any) -> Any:
        made.append(attach(*args))
        return made[-1]

    device.monkeypatch.setattr(build, "_attach_draft", attach_noted)
    engine = device.started(ref.path, max_running_requests=2, **flags)
    draft_always(engine)
    assert device.runner is not None
    steps = watch_steps(device)
    assert answer(engine, ref.prompts, greedy(24)) == ref.answers(ref.prompts, 24)
    assert RunnerProbe(device.runner).graphs.sizes == (1, 2, 4, 8)
    assert len(steps.replayed) > 5
    assert not steps.eager
    drafted, drawn = count_drafts(engine)
    (what_drafts,) = made
    if isinstance(what_drafts, DraftModel):
        assert RunnerProbe(what_drafts.runner).graphs.sizes == (1, 2)
        assert drawn == drafted > 30
    engine.close()


def test_drafts_pause_and_the_token_table_goes_on(
    reference: Callable[[str], Reference], device: Device
) -> None:
    """Steps without drafts are planned ahead again behind those with some."""
    path = reference("llama").path
    params = SAMPLING["greedy"]
    plain = make_engine(path)
    want = run(plain, params, PROMPTS)
    plain.close()
    engine = device.recorded(path, 20, poison=True, most_drafts=MOST)

    class Pausing(ScriptedDrafter):
        def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
            found = super().propose(handles, most)
            return found if self._rng.random() < 0.4 else [array("i") for _ in found]

    speculate(engine, Pausing(seen(want, params), 0.7, VOCAB), MOST)
    modes: list[tuple[bool, bool]] = []
    watch_tables(engine, device, modes)
    assert_equal(run(engine, params, PROMPTS), want)
    assert {(True, False), (False, True)} <= set(modes)
    engine.close()


def watch_tables(engine: EngineLoop, device: Device, modes: list[tuple[bool, bool]]) -> None:
    """By step: whether it has drafts, and whether it reads the token table."""
    assert device.runner is not None
    execute = device.runner.execute

    def watched(plan: Any) -> Any:
        has_open = any(token < 0 for row in plan.rows for token in row.tokens)
        modes.append((bool(plan.drafted), has_open))
        return execute(plan)

    device.runner.execute = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("graph_rows", [0, 8])
def test_models_with_states(
    reference: Callable[[str], Reference], device: Device, graph_rows: int
) -> None:
    """Steps without drafts are replayed, between steps with some."""
    ref = reference("qwen3-next")
    prompts = ref.prompts
    want = ref.answers(prompts, 40)
    script = {(tuple(p), 0): tokens for p, tokens in zip(prompts, want, strict=True)}
    engine = device.recorded(ref.path, graph_rows, page_size=4, state_snapshot_tokens=8)
    speculate(engine, ScriptedDrafter(script, 0.7, VOCAB), most=MOST)
    assert answer(engine, prompts, greedy(40)) == want
    assert answer(engine, prompts, greedy(40), disturb=storm(engine, random.Random(2))) == want
    drafted, drawn = count_drafts(engine)
    assert 0 < drawn < drafted
    assert (device.recorder.replays > 0) == (graph_rows > 0)
    engine.close()
