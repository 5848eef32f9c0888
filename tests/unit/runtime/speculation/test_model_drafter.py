"""Plans of a draft model: what they compute, into which pages, and what of it counts later."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from baton.cache.pages import PageAllocator
from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.model_drafter import (
    CATCH_UP_SECS,
    FIRST_CATCH_UP_TOKENS,
    LONGEST_ROW,
    DraftLimits,
    ModelDrafter,
    TimedResult,
)
from baton.sched.types.plan import UNKNOWN_TOKEN, StepPlan, StepResult
from baton.sched.types.request import SamplingParams, ValidatedRequest
from baton.sched.types.sequence import Seq

PAGE = 4
NUM_PAGES = 200
SCRATCH = 2
SLOTS = 3


class FakeModel:
    """Draws the position of each token, and remembers which position each slot of a page holds."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.tables: dict[int, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.seconds_per_token = 0.0001

    def run(self, plans: Sequence[StepPlan]) -> list[TimedResult]:
        return [self._run_one(plan) for plan in plans]

    def _run_one(self, plan: StepPlan) -> TimedResult:
        self.plans.append(plan)
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            if row.pages:
                self.tables[row.slot] = list(row.pages)
            table = self.tables[row.slot]
            for position in range(row.start, row.start + row.n):
                slot = (table[position // PAGE], position % PAGE)
                assert slot not in written, "a slot is written twice in one plan"
                written.add(slot)
                self.slots[slot] = position
            for position in range(row.start):
                slot = (table[position // PAGE], position % PAGE)
                assert self.slots[slot] == position, "a token is read that is not there"
        assert all(row.n == 1 for row in plan.rows[: plan.num_decode])
        tokens = [row.start + row.n for row in plan.rows if row.sample]
        return StepResult(tokens), self.seconds_per_token * plan.num_tokens


class Setup:
    def __init__(self) -> None:
        self.allocator = PageAllocator(NUM_PAGES)
        self.model = FakeModel()
        pages = DraftPages(PAGE, self.allocator.generations)
        limits = DraftLimits(PAGE, NUM_PAGES, SCRATCH, max_context=1000)
        self.drafter = ModelDrafter(self.model.run, pages, limits)

    def start(self, handle: int, tokens: int, pages: array[int] | None = None) -> Seq:
        """A sequence whose last token has no page yet, if a new one begins with it."""
        params = SamplingParams(temperature=0.0, logprobs=3, grammar="g")
        req = ValidatedRequest(handle, "r", array("i", [1] * (tokens - 1)), params)
        seq = Seq(req, array("i", [1] * tokens), 100)
        seq.slot = handle
        if pages is None:
            pages = self.allocator.alloc(-(-(tokens - 1) // PAGE))
        assert pages is not None
        seq.pages = pages
        self.drafter.start(seq)
        return seq

    def take_page(self) -> int:
        pages = self.allocator.alloc(1)
        assert pages is not None
        return pages[0]

    def propose(self, *asked: tuple[Seq, int]) -> list[list[int]]:
        self.model.plans.clear()
        handles = [seq.handle for seq, _ in asked]
        drafts = self.drafter.propose(handles, [most for _, most in asked])
        return [list(each) for each in drafts]

    def rows(self) -> list[list[tuple[int, int, int]]]:
        """Sequence, first token and number of tokens of each row of each plan."""
        return [[(row.handle, row.start, row.n) for row in plan.rows] for plan in self.model.plans]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_draft_is_a_plan_and_rows_leave_when_they_have_theirs(setup: Setup) -> None:
    short = setup.start(0, 5)
    long = setup.start(1, 7)
    assert setup.propose((short, 1), (long, 3)) == [[5], [7, 8, 9]]
    assert setup.rows() == [[(0, 0, 5), (1, 0, 7)], [(1, 7, 1)], [(1, 8, 1)]]
    assert [row.tokens[0] for plan in setup.model.plans[1:] for row in plan.rows] == [
        UNKNOWN_TOKEN
    ] * 2
    (admitted, _) = setup.model.plans[0].admitted
    assert (admitted.params.grammar, admitted.params.logprobs) == ("", -1)


def test_tokens_that_came_are_computed_with_the_next_draft(setup: Setup) -> None:
    seq = setup.start(0, 7)
    setup.propose((seq, 3))
    seq.tokens.extend((7, 8))
    seq.pages.append(setup.take_page())
    assert setup.propose((seq, 1)) == [[9]]
    assert setup.rows() == [[(0, 7, 2)]]


def test_the_last_token_is_computed_again_where_nothing_came(setup: Setup) -> None:
    seq = setup.start(0, 7)
    assert setup.propose((seq, 2)) == setup.propose((seq, 2)) == [[7, 8]]
    assert setup.rows() == [[(0, 6, 1)], [(0, 7, 1)]]


def test_what_has_no_page_is_computed_in_scratch_pages_and_again(setup: Setup) -> None:
    seq = setup.start(2, 9)
    assert len(seq.pages) == 2
    assert setup.propose((seq, 8)) == [list(range(9, 17))]
    scratch = NUM_PAGES + 2 * SCRATCH
    assert setup.model.tables[2] == [*seq.pages, scratch, scratch + 1]
    seq.pages.append(setup.take_page())
    seq.tokens.extend((9, 10))
    setup.propose((seq, 1))
    assert setup.rows() == [[(2, 8, 3)]]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_page_that_was_handed_out_again_is_computed_again(setup: Setup, is_last: bool) -> None:
    seq = setup.start(0, 12)
    setup.propose((seq, 1))
    place = 2 if is_last else 1
    setup.allocator.free([seq.pages[place]])
    seq.pages[place] = setup.take_page()
    setup.propose((seq, 1))
    assert setup.rows() == [[(0, 4 * place, 12 - 4 * place)]]


def test_a_shared_prefix_is_computed_once(setup: Setup) -> None:
    first = setup.start(0, 15)
    shared = first.pages[:3]
    second = setup.start(1, 14, shared + array("i", (setup.take_page(),)))
    assert setup.propose((first, 2), (second, 2)) == [[15, 16], []]
    assert setup.propose((first, 2), (second, 2)) == [[15, 16], [14, 15]]
    assert setup.rows()[0] == [(0, 14, 1), (1, 12, 2)]


def test_a_long_text_is_caught_up_with_in_parts_before_it_has_drafts(setup: Setup) -> None:
    drafter = setup.drafter
    short = setup.start(0, 5)
    long = setup.start(1, FIRST_CATCH_UP_TOKENS + 2 * LONGEST_ROW)
    assert setup.propose((short, 1), (long, 2)) == [[5], []]
    assert drafter.is_catching_up
    assert setup.rows() == [[(1, 0, FIRST_CATCH_UP_TOKENS)], [(0, 0, 5)]]
    assert not any(row.sample for row in setup.model.plans[0].rows)
    setup.propose((long, 2))
    assert setup.propose((long, 2)) == [[len(long.tokens), len(long.tokens) + 1]]
    assert not drafter.is_catching_up


def test_a_part_takes_no_longer_than_answers_may_wait(setup: Setup) -> None:
    setup.model.seconds_per_token = CATCH_UP_SECS / 100
    seq = setup.start(0, 700)
    sizes = []
    for _ in range(30):
        setup.propose((seq, 1))
        if not setup.drafter.is_catching_up:
            break
        sizes.append(setup.rows()[0][0][2])
    assert sizes[0] == FIRST_CATCH_UP_TOKENS
    assert all(99 <= size <= 100 for size in sizes[1:-1]), sizes


def test_the_same_long_prompt_is_caught_up_with_once(setup: Setup) -> None:
    first = setup.start(0, 100)
    second = setup.start(1, 100, first.pages[:24] + array("i", (setup.take_page(),)))
    setup.propose((first, 1), (second, 1))
    assert setup.rows() == [[(0, 0, FIRST_CATCH_UP_TOKENS)]]
    assert setup.drafter.count_behind(second) == 100 - FIRST_CATCH_UP_TOKENS


def test_nothing_follows_from_logits_that_are_no_numbers(setup: Setup) -> None:
    seq = setup.start(0, 5)
    draws = iter((5, -2, 9))

    def fail(plans: Sequence[StepPlan]) -> list[TimedResult]:
        return [(StepResult([next(draws)]), 0.0) for _ in plans]

    setup.drafter._run_plans = fail
    assert setup.propose((seq, 3)) == [[5]]


def test_costs_are_known_after_the_warm_up(setup: Setup) -> None:
    setup.model.seconds_per_token = 0.004
    setup.drafter.warm_up()
    assert setup.drafter.costs.per_step == pytest.approx(0.004)
    assert all(row.pages[0] >= NUM_PAGES for plan in setup.model.plans for row in plan.rows)


def test_texts_longer_than_the_draft_model_was_made_for_are_not_drafted(setup: Setup) -> None:
    seq = setup.start(0, 500)
    assert setup.drafter.has_room(seq, 500)
    assert not setup.drafter.has_room(seq, 501)
