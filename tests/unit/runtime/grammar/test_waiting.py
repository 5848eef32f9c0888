"""Requests that wait for their grammar: they block no other one, and each way out of waiting
releases them.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.errors import BadRequest, EngineError, QueueFull, UnsupportedParameter
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.grammar import store as store_module
from baton.runtime.grammar.store import CompiledGrammar, GrammarOutcome, GrammarStore
from baton.runtime.grammar.waiting import GrammarQueue
from baton.sched.types.reasoning import ReasoningPhase
from baton.sched.types.request import FinishReason, Rendezvous, SamplingParams, ValidatedRequest
from tests.support.engines.engine_run import greedy, make_engine
from tests.support.grammars.chains import lark_chain
from tests.support.grammars.engines import follow_grammars, request, run_to_end
from tests.support.grammars.reasoning import make_gate

SECS = 30.0
PROMPT = [1, 2, 3]


@dataclass
class HeldStore:
    """A store whose compilations wait until they are released."""

    store: GrammarStore
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        compile_text = self.store._compile

        def wait_and_compile(text: str) -> CompiledGrammar | EngineError:
            assert self.released.wait(SECS)
            return compile_text(text)

        self.store._compile = wait_and_compile  # type: ignore[method-assign]


@pytest.fixture
def held(store: GrammarStore) -> Iterator[HeldStore]:
    made = HeldStore(store)
    yield made
    made.released.set()


@pytest.fixture
def engine(checkpoint: Path, held: HeldStore) -> Iterator[EngineLoop]:
    made = follow_grammars(make_engine(checkpoint), held.store)
    yield made
    made.close()


def constrained(text: str = 'start: "ab"') -> SamplingParams:
    return SamplingParams(max_new_tokens=20, temperature=0.0, grammar=text)


def await_event(store: GrammarStore) -> None:
    readable, _, _ = select.select([store.event_fd], [], [], SECS)
    assert readable, "the end of a compilation was not reported"


def test_other_requests_run_while_one_waits(engine: EngineLoop, held: HeldStore) -> None:
    waiting = request(PROMPT, constrained())
    engine.submit(waiting)
    assert engine.request_counts()["grammar"] == 1
    assert not engine.is_idle
    outputs, _ = engine.step(time.monotonic())
    assert outputs == []
    free = request(PROMPT, greedy(5))
    engine.submit(free)
    tokens: list[int] = []
    while len(tokens) < 5:
        for out in engine.step(time.monotonic())[0]:
            assert out.handle == free.handle
            tokens.extend(out.tokens)
    assert engine.request_counts()["grammar"] == 1
    held.released.set()
    await_event(held.store)
    finished = False
    while not finished:
        finished = any(out.finish is FinishReason.STOP for out in engine.step(time.monotonic())[0])
    assert engine.is_idle


def test_event_is_read_once_the_engine_has_seen_it(engine: EngineLoop, held: HeldStore) -> None:
    held.released.set()
    run_to_end(engine, [request(PROMPT, constrained()), request(PROMPT, constrained())])
    until = time.monotonic() + SECS
    while held.store._unread_events and time.monotonic() < until:
        engine.step(time.monotonic())
    assert select.select([held.store.event_fd], [], [], 0)[0] == []


def test_aborted_request_waits_no_longer(engine: EngineLoop, held: HeldStore) -> None:
    waiting = request(PROMPT, constrained())
    engine.submit(waiting)
    engine.abort(waiting.handle)
    assert engine.is_idle
    held.released.set()
    await_event(held.store)
    assert engine.step(time.monotonic())[0] == []
    assert engine.is_idle


def test_deadline_ends_a_waiting_request(engine: EngineLoop) -> None:
    now = time.monotonic()
    waiting = request(PROMPT, constrained(), deadline=now + 1000.0)
    engine.submit(waiting)
    assert engine.next_deadline() == now + 1000.0
    assert engine.step(now)[0] == []
    (out,) = engine.step(now + 1001.0)[0]
    assert (out.handle, out.finish) == (waiting.handle, FinishReason.ERROR)
    assert out.error is not None
    assert out.error[0] == "timeout"
    assert engine.is_idle


@pytest.mark.parametrize("aborts", [True, False])
def test_deadline_of_the_first_token_counts_where_it_aborts(
    engine: EngineLoop, aborts: bool
) -> None:
    engine.grammars.aborts_missed_deadlines = aborts
    now = time.monotonic()
    engine.submit(request(PROMPT, constrained(), ttft_deadline=now + 1.0, deadline=now + 999.0))
    outputs, _ = engine.step(now + 2.0)
    codes = [out.error[0] for out in outputs if out.error is not None]
    assert codes == (["deadline"] if aborts else [])


def test_room_of_a_waiting_request_can_be_aborted(engine: EngineLoop) -> None:
    meet = Rendezvous("h", 1, 77)
    alone = request(PROMPT, constrained())
    waiting = request(PROMPT, constrained(), rendezvous=meet)
    engine.submit(alone)
    engine.submit(waiting)
    assert engine.abort_where([5], None, all_leases=False) == 0
    assert engine.abort_where([77], None, all_leases=False) == 1
    (out,) = engine.take_outputs()
    assert out.error is not None
    assert (out.handle, out.error[0]) == (waiting.handle, "aborted")
    assert not engine.is_idle, "a request without a room waits on"
    engine.abort(alone.handle)
    assert engine.is_idle


def test_broken_ledger_ends_waiting_requests_too(engine: EngineLoop) -> None:
    engine.submit(request(PROMPT, constrained()))
    engine._stop_accepting("a test says so")
    (out,) = engine.take_outputs()
    assert out.error is not None
    assert out.error[0] == "engine_dead"


def test_compilation_that_takes_too_long_ends_its_request(
    checkpoint: Path, store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "COMPILE_LIMIT_SECS", 0.0)
    held = HeldStore(store)
    engine = follow_grammars(make_engine(checkpoint), store)
    engine.submit(request(PROMPT, constrained()))
    outputs: list[object] = []
    until = time.monotonic() + SECS
    while not outputs and time.monotonic() < until:
        outputs = list(engine.step(time.monotonic())[0])
    (out,) = outputs
    assert out.error[0] == "invalid_value"  # type: ignore[attr-defined]
    assert "was not compiled within" in out.error[1]  # type: ignore[attr-defined]
    held.released.set()
    await_event(store)
    assert engine.step(time.monotonic())[0] == []
    engine.close()


def test_too_many_waiting_texts_are_refused(
    engine: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_WAITING_TEXTS", 2)
    for _ in range(3):
        engine.submit(request(PROMPT, constrained('start: "a"')))
    engine.submit(request(PROMPT, constrained('start: "b"')))
    with pytest.raises(QueueFull):
        engine.submit(request(PROMPT, constrained('start: "c"')))
    engine.submit(request(PROMPT, constrained('start: "a"')))
    assert engine.request_counts()["grammar"] == 5


def test_store_reports_its_histograms_and_counters(store: GrammarStore) -> None:
    followed = GrammarQueue(store)
    assert followed.histograms() == {
        "grammar_compile_seconds": store.compile_seconds,
        "grammar_mask_seconds": store.filler.seconds,
    }
    assert followed.counters() == store.counters
    assert GrammarQueue(None).histograms() == {}
    assert GrammarQueue(None).counters() == {}


def test_engine_without_grammars_refuses_with_the_reason(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    engine.grammars = GrammarQueue(None, "this engine was started with --grammar off")
    with pytest.raises(UnsupportedParameter, match=r"--grammar off.*without a schema or grammar"):
        engine.submit(request(PROMPT, constrained()))
    limited = SamplingParams(reasoning=make_gate(ReasoningPhase.INSIDE, budget=1))
    with pytest.raises(UnsupportedParameter, match=r"--grammar off.*without a limit"):
        engine.submit(request(PROMPT, limited))
    assert engine.is_idle
    engine.close()


class FakeDriver:
    """Records what the loop does with rooms."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def accept(self, req: ValidatedRequest) -> None:
        self.calls.append(("accept", ""))

    def refuse(self, req: ValidatedRequest, error: EngineError) -> None:
        self.calls.append(("refuse", error.code))

    def poll(self, sched: object) -> None:
        return

    def apply_event(self, event: object, sched: object) -> None:
        return


@pytest.mark.parametrize("end", ["abort", "deadline", "compile error"])
def test_prefill_room_of_a_waiting_request_is_given_up(
    engine: EngineLoop, held: HeldStore, end: str
) -> None:
    driver = FakeDriver()
    engine.driver = driver  # type: ignore[assignment]
    now = time.monotonic()
    text = "start: missing" if end == "compile error" else 'start: "x"'
    meet = Rendezvous("h", 1, 5)
    waiting = request(PROMPT, constrained(text), rendezvous=meet, deadline=now + 1000.0)
    engine.submit(waiting)
    assert driver.calls == [("accept", "")]
    if end == "abort":
        engine.abort(waiting.handle)
    elif end == "deadline":
        engine.step(now + 1001.0)
    else:
        held.released.set()
        await_event(held.store)
        engine.step(now)
    codes = {"abort": "aborted", "deadline": "timeout", "compile error": "invalid_value"}
    assert driver.calls[1:] == [("refuse", codes[end])]
    assert engine.is_idle


LIMITS = [("KEPT_GRAMMARS", "_sweep_size", 4), ("KEPT_CHARS", "_sweep_chars", 4 * 10)]
"""Constant of the store, its first use, and what four grammars of eleven characters pass."""


@pytest.mark.parametrize(("limit", "sweep_limit", "value"), LIMITS)
def test_pins_of_ended_requests_are_released(
    engine: EngineLoop,
    held: HeldStore,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    sweep_limit: str,
    value: int,
) -> None:
    held.released.set()
    monkeypatch.setattr(held.store, sweep_limit, value)
    monkeypatch.setattr(store_module, limit, value)
    for i in range(10, 22):
        text = f'start: "{i}"'
        assert len(text) == 11
        run_to_end(engine, [request(PROMPT, constrained(text))])
    assert len(held.store._pinned) <= 5
    assert 3 <= len(held.store._kept) <= 4
    assert held.store._kept_chars == 11 * len(held.store._kept)
    assert held.store._pinned_chars == 11 * len(held.store._pinned)


def test_grammar_outlives_the_cache_while_its_request_waits(
    engine: EngineLoop, held: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEPT_GRAMMARS", 1)
    held.released.set()
    requests = [request(PROMPT, constrained(f'start: "answer {i}"')) for i in range(6)]
    answers = run_to_end(engine, requests)
    assert all(answer.finish is FinishReason.STOP for answer in answers)


def test_error_of_the_library_ends_the_request(
    engine: EngineLoop, held: HeldStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("internal")

    monkeypatch.setattr(store_module, "LLMatcher", broken)
    held.released.set()
    (answer,) = run_to_end(engine, [request(PROMPT, constrained())])
    assert answer.error is not None
    assert answer.error[0] == "grammar_failed"
    assert BadRequest is not None


def test_chain_of_rules_longer_than_fronts_accept_is_compiled(store: GrammarStore) -> None:
    """Twice as long as what overflows the stack of a process that checks grammars."""
    assert not store.request(1, lark_chain(6000))
    await_event(store)
    assert store.take_outcomes() == [GrammarOutcome(1, None)]
