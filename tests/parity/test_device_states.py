"""States of sequences on a GPU, on CPU tensors: the tokens of transformers, with recorded decode
steps and without.

The stand-ins are those of test_decode_graphs.py: copies around a recorded step are the product's,
what was recorded is done again without any Python, and memory that a replay does not write is
garbage.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from baton.layers.kv_spec import ROLLING_SNAPSHOT_TOKENS
from baton.layers.recurrent_state import StepStates
from baton.runtime.engine_loop import EngineLoop
from tests.parity.conftest import Reference
from tests.parity.test_device_pools import Rig
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import storm
from tests.parity.test_states import check_next_turns
from tests.support.devices.device_engine import Device
from tests.support.engines.engine_run import answer, greedy
from tests.support.probes import RunnerProbe

STEPS = 16
LENGTHS = [1, 3, 5, 63, 64, 65, 70, 130]
"""Around taps of the convolution, pages, chunks and snapshots."""
SMALL: dict[str, object] = {
    "max_total_tokens": 400,
    "schedule_conservativeness": 0.05,
    "state_snapshot_tokens": 16,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def close(engine: EngineLoop) -> None:
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


@pytest.mark.parametrize("graph_rows", [0, 5])
@pytest.mark.parametrize(
    "flags",
    [
        {"state_snapshot_tokens": 16},
        SMALL,
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                {"page_size": 1, "chunked_prefill_size": 7},
                {"state_snapshot_tokens": 16, "page_size": 16, "disable_overlap_schedule": True},
                {"max_running_requests": 3, "chunked_prefill_size": 12},
                {"disable_radix_cache": True},
            )
        ),
    ],
    ids=str,
)
def test_tokens_are_transformers_with_graphs_and_without(
    reference: Callable[[str], Reference],
    stateful: str,
    device: Device,
    flags: dict[str, object],
    graph_rows: int,
) -> None:
    """Prompts in chunks, rows that join, leave and are preempted, and prefixes with a snapshot."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = device.recorded(ref.path, graph_rows, poison=bool(graph_rows), **flags)
    assert answer(engine, prompts, greedy(STEPS)) == want
    again = answer(engine, prompts[::-1], greedy(STEPS), stagger=2)
    assert again == want[::-1], "slots have states of other sequences"
    assert (device.recorder.replays > 10) == bool(graph_rows)
    hits = engine.sched.hit_tokens["device"]
    assert (hits > 0) == (not flags.get("disable_radix_cache"))
    if "max_total_tokens" in flags:
        assert engine.sched.report.counters()["retractions_total"] > 0
    close(engine)


@pytest.mark.parametrize("graph_rows", [5, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["cache", pytest.param("recompute", marks=pytest.mark.slow)])
def test_suspended_and_resumed_the_tokens_are_transformers(
    reference: Callable[[str], Reference],
    stateful: str,
    device: Device,
    mode: str,
    graph_rows: int,
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = device.recorded(
        ref.path,
        graph_rows,
        page_size=16,
        chunked_prefill_size=64,
        preemption_mode=mode,
        state_snapshot_tokens=32,
    )
    assert answer(engine, prompts, greedy(STEPS), disturb=storm(engine, random.Random(4))) == want
    assert engine.sched.report.counters()["suspensions_total"] > 5
    assert engine.sched.hit_tokens["rematch"] > 0, "states are restored from snapshots"
    close(engine)


@pytest.mark.slow
def test_replayed_rows_leave_snapshots_with_which_the_next_turn_begins(
    reference: Callable[[str], Reference], stateful: str, device: Device
) -> None:
    """Rolling ones, of rows that cross their borders in recorded steps."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(6), [9, 60])
    long = 2 * ROLLING_SNAPSHOT_TOKENS
    engine = device.recorded(ref.path, 2, poison=True, page_size=16)
    answers = answer(engine, prompts, greedy(long))
    assert answers == ref.answers(prompts, long)
    check_next_turns(engine, ref, prompts, answers)
    close(engine)


def test_launched_ahead_by_the_native_kernels_the_tokens_are_transformers(
    reference: Callable[[str], Reference], stateful: str, device: Device
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = device.late(ref.path, **SMALL)
    for _ in range(2):
        assert answer(engine, prompts, greedy(STEPS)) == want
    assert engine.sched.report.counters()["retractions_total"] > 0
    close(engine)


def test_other_ranks_have_the_same_states(
    reference: Callable[[str], Reference], stateful: str, device: Device
) -> None:
    ref = reference(stateful)
    prompts = prompts_of(random.Random(3), LENGTHS)
    orders: list[bytes] = []
    flags: dict[str, object] = {"state_snapshot_tokens": 16}
    first = device.late(ref.path, broadcast=orders.append, **flags)
    assert answer(first, prompts, greedy(STEPS)) == ref.answers(prompts, STEPS)
    leader = device.runner
    device.late(ref.path, **flags)
    executor = device.runner
    assert leader is not None
    assert executor is not None
    for order in orders:
        executor.execute_remote(order)
    one, other = RunnerProbe(leader), RunnerProbe(executor)
    assert torch.equal(one.slot_states, other.slot_states)
    assert torch.equal(one.kv_pool.data, other.kv_pool.data)
    close(first)


@pytest.mark.parametrize("via", ["cuda_ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_states_go_from_one_device_to_another_when_their_step_has_ended(
    reference: Callable[[str], Reference], stateful: str, via: str
) -> None:
    """The stand-in of the device announces no page that a step still writes."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(8), [1, 7, 8, 9, 33, 64, 65, 96])
    want = ref.answers(prompts, STEPS)
    flags = {"page_size": 8, "chunked_prefill_size": 48, "state_snapshot_tokens": 32}
    with Rig(ref.path, [via], late=True, **flags) as rig:
        assert rig.pair.answer(prompts, greedy(STEPS)) == want
        assert rig.pair.answer(prompts[::-1], greedy(STEPS)) == want[::-1]
        assert rig.p_gpu.announced > 0


@pytest.mark.slow
def test_suspended_on_either_device_the_tokens_are_transformers(
    reference: Callable[[str], Reference], stateful: str
) -> None:
    """A prompt whose pages D reads loses its slot on P, and its state is parked in own pages."""
    ref = reference(stateful)
    prompts = prompts_of(random.Random(4), [1, 15, 16, 17, 33, 64, 70, 130])
    want = ref.answers(prompts, STEPS)
    rng = random.Random(5)
    flags = {"page_size": 8, "chunked_prefill_size": 16, "state_snapshot_tokens": 32}
    with Rig(ref.path, ["cuda_ipc"], late=True, **flags) as rig:
        for _ in range(2):
            answers = rig.pair.answer(
                prompts, greedy(STEPS), lambda half, handles: storm(half.engine, rng)(handles)
            )
            assert answers == want
            rig.pair.p.engine.sched.flush_cache()
        assert rig.pair.p.engine.sched.report.counters()["suspensions_total"] > 0


def test_step_whose_layers_copy_states_is_not_replayed(
    reference: Callable[[str], Reference],
    stateful: str,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ref = reference(stateful)
    (prompt,) = prompts_of(random.Random(9), [5])
    engine = device.recorded(ref.path, 1)
    assert answer(engine, [prompt], greedy(4)) == ref.answers([prompt], 4)
    replays = device.recorder.replays
    assert replays > 0
    monkeypatch.setattr(StepStates, "copies_within", property(lambda _: True))
    assert answer(engine, [prompt], greedy(4)) == ref.answers([prompt], 4)
    assert device.recorder.replays == replays
    close(engine)
