"""PageAllocator and PageLedger against plain sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.cache.ledger import LedgerError, PageLedger
from baton.cache.pages import PageAllocator, PageError
from baton.cache.radix import RadixCache


def test_fresh_pool_hands_out_ascending_runs() -> None:
    pages = PageAllocator(8)
    assert list(pages.alloc(3) or ()) == [0, 1, 2]
    assert list(pages.alloc(5) or ()) == [3, 4, 5, 6, 7]


def test_alloc_is_all_or_nothing() -> None:
    pages = PageAllocator(4)
    assert pages.alloc(5) is None
    assert pages.free_count == 4
    assert list(pages.alloc(0) or ()) == []
    assert pages.free_count == 4


@pytest.mark.parametrize("bad", [[0, 0], [0, 3], [0, -1], [0, 4]])
def test_refused_free_changes_nothing(bad: list[int]) -> None:
    pages = PageAllocator(4)
    mine = pages.alloc(2)
    assert mine is not None
    with pytest.raises(PageError, match=f"page {bad[1]}"):
        pages.free(bad)
    assert pages.free_count == 2
    pages.free(mine)
    assert sorted(pages.alloc(4) or ()) == [0, 1, 2, 3]


def test_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(1).alloc(-1)


class AllocatorMachine(RuleBasedStateMachine):
    """Owned and free pages always partition the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(9)
        self.owned: list[int] = []

    @rule(n=st.integers(0, 10))
    def alloc(self, n: int) -> None:
        got = self.pages.alloc(n)
        if n > 9 - len(self.owned):
            assert got is None
        else:
            assert got is not None
            assert len(got) == n
            assert not set(got) & set(self.owned)
            self.owned += got

    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.owned), unique=True)) if self.owned else []
        self.pages.free(some)
        self.owned = [p for p in self.owned if p not in some]

    @rule(page=st.integers(-2, 11))
    def free_one_that_may_be_foreign(self, page: int) -> None:
        if page in self.owned:
            self.pages.free([page])
            self.owned.remove(page)
        else:
            with pytest.raises(PageError):
                self.pages.free([*self.owned[:1], page])

    @invariant()
    def conserved(self) -> None:
        assert self.pages.free_count + len(self.owned) == 9
        assert len(set(self.owned)) == len(self.owned)
        assert set(self.owned) <= set(range(9))


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestAllocator = AllocatorMachine.TestCase


def test_a_page_has_another_generation_each_time_it_is_handed_out() -> None:
    allocator = PageAllocator(3)
    assert list(allocator.generations) == [0, 0, 0]
    pages = allocator.alloc(2)
    assert pages is not None
    before = {page: allocator.generations[page] for page in pages}
    allocator.free(pages)
    assert allocator.alloc(4) is None
    assert {page: allocator.generations[page] for page in pages} == before
    allocator.alloc(3)
    assert all(allocator.generations[page] == before[page] + 1 for page in pages)


def test_ledger_counts_every_state_and_names_the_loss() -> None:
    allocator = PageAllocator(10)
    cache = RadixCache(1, allocator)
    taken = allocator.alloc(6)
    assert taken is not None
    inserted = cache.insert(bytes(4 * 3), taken[:3], b"")
    ledger = PageLedger.count_pages(allocator, cache, private=2, in_transfer=1)
    assert ledger == PageLedger(free=4, cached=3, held=2, in_transfer=1)
    ledger.check(10)
    with pytest.raises(LedgerError, match="sums to 10 of 11"):
        ledger.check(11)
    with pytest.raises(LedgerError, match="still in use"):
        ledger.check_idle(10)
    cache.lock(inserted.node)
    assert PageLedger.count_pages(allocator, cache, 2, 1).gauges() == {
        'kv_pages{state="free"}': 4.0,
        'kv_pages{state="cached"}': 0.0,
        'kv_pages{state="held"}': 5.0,
        'kv_pages{state="in_transfer"}': 1.0,
    }
    PageLedger(free=9, cached=1, held=0, in_transfer=0).check_idle(10)
    with pytest.raises(LedgerError):
        PageLedger(free=11, cached=0, held=-1, in_transfer=0).check(10)
