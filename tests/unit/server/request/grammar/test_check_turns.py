"""Turns of waiting checks against a naive model, CPU time of clients, and checks that were too slow."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.server.request.grammar.checks import history
from baton.server.request.grammar.checks.history import CheckBudget, SlowChecks
from baton.server.request.grammar.checks.turns import CheckTurns
from tests.support.effort import examples

CLIENTS = "abcd"
MAX_WAITING = 5
MAX_IN_WORK = 2


class Check:
    """Compared by identity, as the checks of requests are."""


@dataclass
class NaiveTurns:
    """All waiting checks in one list, and clients in the order of their turns."""

    waiting: list[tuple[str, Check]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    in_work: list[str] = field(default_factory=list)

    def count(self, client: str) -> int:
        return sum(each == client for each, _ in self.waiting)

    def add(self, client: str, check: Check) -> Check | None:
        if client not in self.turns:
            self.turns.append(client)
        self.waiting.append((client, check))
        if len(self.waiting) <= MAX_WAITING:
            return None
        most = max(self.count(each) for each in self.turns)
        losers = [each for each in self.turns if self.count(each) == most]
        loser = client if client in losers else losers[0]
        lost = [each for each in self.waiting if each[0] == loser][-1]
        self.drop(lost)
        return lost[1]

    def drop(self, entry: tuple[str, Check]) -> None:
        self.waiting.remove(entry)
        if not self.count(entry[0]):
            self.turns.remove(entry[0])

    def start_next(self) -> tuple[str, Check] | None:
        if len(self.in_work) == MAX_IN_WORK:
            return None
        for client in self.turns:
            if client not in self.in_work:
                entry = next(each for each in self.waiting if each[0] == client)
                self.turns.remove(client)
                self.turns.append(client)
                self.drop(entry)
                self.in_work.append(client)
                return entry
        return None


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(CLIENTS)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("start"), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=examples(150), deadline=None)
def test_turns_are_those_of_a_naive_model(steps: list[tuple[str, str | int | None]]) -> None:
    turns: CheckTurns[Check] = CheckTurns(max_waiting=MAX_WAITING, max_in_work=MAX_IN_WORK)
    model = NaiveTurns()
    added: list[tuple[str, Check]] = []
    for step, given_value in steps:
        if step == "add":
            client = str(given_value)
            check = Check()
            added.append((client, check))
            assert turns.add(client, check) is model.add(client, check)
        elif step == "remove" and added:
            entry = added[int(given_value or 0) % len(added)]
            turns.remove(*entry)  # also one that waits no longer
            if entry in model.waiting:
                model.drop(entry)
        elif step == "start":
            assert turns.start_next() == model.start_next()
        elif step == "finish" and model.in_work:
            client = model.in_work.pop(int(given_value or 0) % len(model.in_work))
            turns.finish(client)
        assert turns.waiting_count == len(model.waiting) <= MAX_WAITING
        assert len(model.in_work) == len(set(model.in_work)) <= MAX_IN_WORK


@given(
    counts=st.dictionaries(st.sampled_from(CLIENTS), st.integers(1, 9), min_size=1),
    ends=st.lists(st.integers(0, 9), min_size=40, max_size=40),
)
@settings(max_examples=examples(50), deadline=None)
def test_each_client_starts_at_most_one_check_between_two_of_another(
    counts: dict[str, int], ends: list[int]
) -> None:
    """While all have checks that wait: those of the others are started between two of one, at most one of each."""
    turns: CheckTurns[Check] = CheckTurns(max_waiting=99, max_in_work=MAX_IN_WORK)
    for client, count in counts.items():
        for _ in range(count):
            turns.add(client, Check())
    started: list[str] = []
    in_work: list[str] = []
    for end in ends:
        while (turn := turns.start_next()) is not None:
            started.append(turn[0])
            in_work.append(turn[0])
        if in_work:
            turns.finish(in_work.pop(end % len(in_work)))
    assert len(started) == sum(counts.values()), "none starves"
    for client, count in counts.items():
        places = [i for i, each in enumerate(started) if each == client]
        before_first = started[: places[0]]
        assert all(before_first.count(other) <= 1 for other in counts)
        assert len(places) == count


def test_client_that_sends_few_keeps_its_place_among_many_checks() -> None:
    turns: CheckTurns[str] = CheckTurns(max_waiting=3, max_in_work=1)
    first = [f"many {i}" for i in range(3)]
    assert [turns.add("many", check) for check in first] == [None] * 3
    assert turns.add("few", "one") == "many 2"
    assert turns.add("many", "many 3") == "many 3"
    order = []
    while (turn := turns.start_next()) is not None:
        order.append(turn[1])
        turns.finish(turn[0])
    assert order == ["many 0", "one", "many 1"]


def test_budget_fills_within_a_minute_and_is_each_clients_own() -> None:
    budget = CheckBudget(10.0)
    assert budget.wait_secs("a", 100.0) == 0.0
    budget.spend("a", 16.0, 100.0)
    assert budget.wait_secs("a", 100.0) == pytest.approx(36.0)  # 6 s overdrawn, 10 s in a minute
    assert budget.wait_secs("a", 130.0) == pytest.approx(6.0)
    assert budget.wait_secs("a", 136.1) == 0.0
    assert budget.wait_secs("b", 100.0) == 0.0
    budget.spend("a", 10.5, 1000.0)  # full again, and no fuller
    assert budget.wait_secs("a", 1000.0) == pytest.approx(3.0)


def test_budget_of_zero_limits_no_client() -> None:
    budget = CheckBudget(0.0)
    budget.spend("a", 1e9, 0.0)
    assert budget.wait_secs("a", 0.0) == 0.0


def test_remembered_clients_and_slow_checks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_CLIENTS", 2)
    monkeypatch.setattr(history, "MAX_SLOW_CHECKS", 2)
    budget = CheckBudget(1.0)
    slow = SlowChecks()
    for i in range(3):
        budget.spend(str(i), 9.0, float(i))
        slow.add(bytes([i]), float(i))
    assert [budget.wait_secs(str(i), 3.0) > 0 for i in range(3)] == [False, True, True]
    assert [slow.remaining_secs(bytes([i]), 3.0) > 0 for i in range(3)] == [False, True, True]


def test_slow_check_is_tried_again_after_ten_minutes() -> None:
    slow = SlowChecks()
    slow.add(b"digest", 50.0)
    assert slow.remaining_secs(b"digest", 50.0) == 600.0
    assert slow.remaining_secs(b"digest", 649.0) == 1.0
    assert slow.remaining_secs(b"digest", 650.0) == 0.0
    assert slow.remaining_secs(b"other", 50.0) == 0.0
