"""Overtaking against its definition, written down naively."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.sched.metrics.bypass_counter import BypassCounter


class Naive:
    """Each admission looks at every waiting request."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[float, int]] = {}
        self.counts: dict[int, int] = {}

    def enter(self, handle: int, arrival: float) -> None:
        self.waiting[handle] = (arrival, handle)
        self.counts[handle] = 0

    def leave(self, handle: int) -> int:
        self.waiting.pop(handle, None)
        return self.counts.pop(handle, 0)

    def admit(self, handle: int) -> int:
        mine = self.waiting[handle]
        for other, key in self.waiting.items():
            self.counts[other] += key < mine
        return self.leave(handle)


steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "admit", "leave"]),
        st.integers(0, 60),
        st.integers(0, 2**16),
    ),
    max_size=200,
)


@given(steps)
def test_counts_equal_the_naive_ones_also_for_late_arrivals(
    script: list[tuple[str, int, int]],
) -> None:
    real, naive = BypassCounter(), Naive()
    for number, (what, arrival, pick) in enumerate(script):
        handles = sorted(naive.waiting)
        if what == "enter":
            real.enter(number, arrival)
            naive.enter(number, arrival)
        elif handles:
            handle = handles[pick % len(handles)]
            if what == "admit":
                assert real.admit(handle) == naive.admit(handle)
            else:
                real.leave(handle)
                naive.leave(handle)
        assert {h: real.count(h) for h in naive.waiting} == naive.counts
        assert len(real._keys) == len(naive.waiting)


def test_first_come_first_served_overtakes_none_and_last_come_first_served_all() -> None:
    queue = BypassCounter()
    for handle in range(5000):
        queue.enter(handle, handle * 0.1)
    assert [queue.admit(handle) for handle in range(1000)] == [0] * 1000
    assert [queue.admit(handle) for handle in range(4999, 3999, -1)] == list(range(1000))
    assert queue.count(1000) == 1000
    queue.leave(12345)
    assert 1000 in queue._waiting
    assert 4999 not in queue._waiting
