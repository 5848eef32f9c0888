"""--priority-adjustment-function: whom it is called for, what its answers do, and what its faults cost."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from baton import config
from baton.errors import ConfigError
from baton.runtime.priority_hook import (
    MAX_CALLS,
    Adjust,
    PriorityHook,
    load_function,
    read_priority,
)
from baton.sched.queue.priority_hook import LoadView, RequestView
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from tests.support.sched.sched_sim import Node, request


class Clock:
    """Advances by what the hook pretends to take."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def node(running: int = 1, **over: object) -> Node:
    values: dict[str, object] = {
        "num_pages": 400, "page_size": 2, "max_running_requests": running, "max_queued_requests": 5000,
        "step_tokens": 16, "priority": PriorityRule(enabled=True, preemption_threshold=5),
    }  # fmt: skip
    return Node(Limits(**(values | over)), depth=1)  # type: ignore[arg-type]


def add(
    at: Node, hook: PriorityHook, handle: int, priority: int | None = 0, now: float = 0.0
) -> None:
    req = dataclasses.replace(
        request(handle, [handle % 5] * 4, 3, ignore_eos=True), priority=priority, arrival=now
    )
    at.sched.add(req)
    hook.watch_request(handle, now)


def finish_order(at: Node) -> list[int]:
    at.run()
    return list(at.finished)


def test_answer_replaces_the_priority_in_the_order() -> None:
    hook = PriorityHook(lambda view, _: float(view.id == "r3") * 9, 0.25)
    at = node()
    for handle in range(5):
        add(at, hook, handle, priority=4 - handle)
    hook.run_due(at.sched, 0.0)
    assert finish_order(at) == [3, 0, 1, 2, 4], "the others got 0: by arrival"


def test_none_gives_a_request_its_own_priority_again() -> None:
    answers: list[float | None] = [7.0, None]
    hook = PriorityHook(lambda view, _: answers[0] if view.id == "r1" else None, 0.25)
    at = node()
    for handle in range(3):
        add(at, hook, handle)
    hook.run_due(at.sched, 0.0)
    answers.pop(0)
    hook.run_due(at.sched, 0.25)
    assert finish_order(at) == [0, 1, 2]


def test_adjusted_priority_never_preempts() -> None:
    hook = PriorityHook(lambda _, __: 1e6, 0.25)
    at = node()
    add(at, hook, 0)
    at.step()
    add(at, hook, 1)
    hook.run_due(at.sched, 0.0)
    at.run()
    assert at.sched.report.counters()["preemptions_total"] == 0


def test_it_sees_what_it_should_decide_on() -> None:
    seen: list[tuple[RequestView, LoadView]] = []

    def look(view: RequestView, load_view: LoadView) -> None:
        seen.append((view, load_view))

    hook = PriorityHook(look, 0.25)
    at = node()
    add(at, hook, 0, priority=3)
    at.step()
    add(at, hook, 1, priority=2, now=1.0)
    hook.run_due(at.sched, 3.0)
    ((view, load_view),) = seen
    assert (view.id, view.priority, view.wait_secs, view.work_tokens) == ("r1", 2, 2.0, 4)
    assert (view.generated_tokens, view.preemptions, view.tenant, view.priority_class) == (
        0,
        0,
        "",
        "",
    )
    assert (load_view.waiting, load_view.running) == (1, 1)
    assert 0 < load_view.free_pages < 400
    assert load_view.prefill_rate > 0


def test_due_at_submission_and_then_once_per_interval() -> None:
    called: list[str] = []
    hook = PriorityHook(lambda view, _: called.append(view.id), 0.25)  # type: ignore[arg-type, func-returns-value]
    at = node()
    for handle in range(2):
        add(at, hook, handle)
    for now in (0.0, 0.1, 0.24, 0.25, 0.3, 0.5):
        hook.run_due(at.sched, now)
    assert called == ["r0", "r1"] * 3
    at.run()
    hook.run_due(at.sched, 9.0)
    assert len(called) == 6, "both have ended"
    assert not hook._due


def test_at_most_256_calls_per_turn_and_every_request_has_its_turn() -> None:
    called: list[str] = []
    hook = PriorityHook(lambda view, _: called.append(view.id), 0.25)  # type: ignore[arg-type, func-returns-value]
    at = node()
    for handle in range(600):
        add(at, hook, handle)
    turns = []
    for _ in range(3):
        before = len(called)
        hook.run_due(at.sched, 0.0)
        turns.append(len(called) - before)
    assert turns == [MAX_CALLS, MAX_CALLS, 88]
    assert len(set(called)) == 600


@pytest.mark.parametrize("bad", [math.nan, math.inf, "high", RuntimeError("oh")])
def test_failure_keeps_the_old_value_and_is_counted(
    bad: object, caplog: pytest.LogCaptureFixture
) -> None:
    fails = False

    def adjust(view: RequestView, _: LoadView) -> float:
        if fails and isinstance(bad, Exception):
            raise bad
        return bad if fails else float(view.id[1:])  # type: ignore[return-value]

    hook = PriorityHook(adjust, 0.25)
    at = node()
    for handle in range(4):
        add(at, hook, handle)
    hook.run_due(at.sched, 0.0)
    fails = True
    with caplog.at_level(logging.WARNING):
        hook.run_due(at.sched, 0.25)
    assert hook.errors == 4
    assert len(caplog.records) == 1
    assert not hook.is_off
    assert finish_order(at) == [3, 2, 1, 0]


def slow_hook(milliseconds: float) -> tuple[PriorityHook, list[str]]:
    clock, called = Clock(), []

    def adjust(view: RequestView, _: LoadView) -> float:
        called.append(view.id)
        clock.at += milliseconds / 1e3
        return 5.0 if view.id == "r1" else 0.0

    return PriorityHook(adjust, 0.25, clock), called


def test_slow_hook_is_switched_off_after_ten_seconds_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, called = slow_hook(0.6)
    at = node()
    for handle in range(2):
        add(at, hook, handle)
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            hook.run_due(at.sched, step * 0.25)
            assert hook.is_off == (step * 0.25 >= 10.0), "two calls of 0.6 ms per turn"
    assert [r.getMessage() for r in caplog.records] == [
        "--priority-adjustment-function is switched off: it took 1.2 ms per turn over the last 10 s, 1 ms is allowed"
    ]
    assert len(called) == 2 * 41
    add(at, hook, 2)
    hook.run_due(at.sched, 99.0)
    assert len(called) == 2 * 41
    assert finish_order(at) == [1, 0, 2], "what it said last still holds"


def test_hook_within_its_limit_stays() -> None:
    hook, _ = slow_hook(0.4)
    at = node()
    for handle in range(2):
        add(at, hook, handle)
    for step in range(400):
        hook.run_due(at.sched, step * 0.25)
    assert not hook.is_off


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("hook", "give it as module:callable"),
        ("no_such_module_here:f", "cannot be imported (ModuleNotFoundError"),
        ("math:no_such_name", "math has no no_such_name"),
        ("math:pi", "pi is a float, which cannot be called"),
        ("broken_hook:f", "cannot be imported (ZeroDivisionError"),
    ],
)
def test_wrong_name_ends_the_start_with_a_sentence(
    spec: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_hook.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        load_function(spec)
    assert caught.value.message.startswith(f"--priority-adjustment-function {spec}: ")
    assert remedy in caught.value.message


def test_hook_is_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hook.py").write_text(
        "class Hooks:\n    @staticmethod\n    def older_first(view, load):\n        return view.wait_secs\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    adjust: Adjust = load_function("my_hook:Hooks.older_first")
    assert adjust(RequestView("r", 0, "", "", 1.5, 1, 1, 0, 0), LoadView(1, 1, 1, 1.0)) == 1.5
    del sys.modules["my_hook"]


def test_flags_are_checked() -> None:
    with pytest.raises(ConfigError, match="needs --enable-priority-scheduling"):
        config.build_config({"priority_adjustment_function": "math:sin"})
    with pytest.raises(ConfigError, match="--priority-adjust-interval-ms 0: give 1 to 3600000"):
        config.build_config({"priority_adjust_interval_ms": 0})


@pytest.mark.parametrize(
    "answer",
    [True, "5", b"5", [], {}, object(), math.nan, math.inf, -math.inf, 2**31, -(2**31) - 1],
)
def test_answer_that_is_no_priority_changes_nothing_and_is_counted(answer: object) -> None:
    hook = PriorityHook(lambda view, _: answer if view.id == "r2" else None, 0.25)  # type: ignore[arg-type, return-value]
    at = node()
    for handle in range(3):
        add(at, hook, handle)
    hook.run_due(at.sched, 0.0)
    assert hook.errors == 1
    assert finish_order(at) == [0, 1, 2]


@pytest.mark.parametrize("answer", [0, -(2**31), 2**31 - 1, 0.5, np.float32(7), np.int64(-3)])
def test_numbers_within_bounds_of_requests_are_priorities(answer: float) -> None:
    assert read_priority(answer) == float(answer)


def test_hook_that_exits_is_counted_as_failed() -> None:
    hook = PriorityHook(lambda _, __: sys.exit(3), 0.25)
    at = node()
    add(at, hook, 0)
    hook.run_due(at.sched, 0.0)
    assert hook.errors == 1
