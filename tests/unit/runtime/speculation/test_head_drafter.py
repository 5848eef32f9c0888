"""Which entries a head's drafts follow from, by the plans of the model's steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from baton.cache.pages import PageAllocator
from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.head_drafter import DraftRow, DraftStep, HeadDrafter
from baton.sched.types.plan import Row, StepPlan, StopReason
from baton.sched.types.request import SamplingParams, ValidatedRequest
from baton.sched.types.sequence import Seq

PAGE = 4


class Setup:
    def __init__(self) -> None:
        self.allocator = PageAllocator(50)
        pages = DraftPages(PAGE, self.allocator.generations)
        self.drafter = HeadDrafter(self.run_drafts, pages, PAGE, max_context=40)
        self.rows: list[DraftRow] = []
        """Those of the last call."""
        self.failing_step = -1
        """The draft of this number has no most likely token."""

    def run_drafts(self, rows: Sequence[DraftRow]) -> list[DraftStep]:
        self.rows = list(rows)
        steps = []
        for number in range(max(row.drafts for row in rows)):
            left = [row for row in rows if row.drafts > number]
            tokens = [-2 if number == self.failing_step else row.slot * 10 + number for row in left]
            steps.append(DraftStep([row.slot for row in left], tokens, 0.25))
        return steps

    def start(self, slot: int, tokens: int, pages: array[int] | None = None) -> Seq:
        req = ValidatedRequest(slot, "r", array("i", [1] * tokens), SamplingParams())
        seq = Seq(req, array("i", [1] * tokens), 100)
        seq.slot = slot
        seq.pages = self.take_pages(-(-tokens // PAGE)) if pages is None else pages
        self.drafter.start(seq)
        return seq

    def take_pages(self, count: int) -> array[int]:
        pages = self.allocator.alloc(count)
        assert pages is not None
        return pages

    def compute(self, seq: Seq, start: int, end: int) -> None:
        """Plan a row of the sequence."""
        sent = seq.pages_sent_to_runner
        tokens = seq.tokens[start:end]
        row = Row(seq.handle, seq.slot, start, end - start, True, tokens, sent, seq.pages[sent:])
        plan = StepPlan(
            step=1,
            rows=(row,),
            num_decode=0,
            admitted=(),
            new_pages=array("i"),
            stopped_by=StopReason.DECODE_ONLY,
        )
        self.drafter.on_planned(plan)
        seq.pages_sent_to_runner = len(seq.pages)

    def entries(self, seq: Seq) -> list[int]:
        """Positions of the entries that a draft of the sequence follows from."""
        self.drafter.propose([seq.handle], [1])
        (row,) = self.rows
        assert (row.slot, row.position) == (seq.slot, len(seq.tokens) - 1)
        slots = [page * PAGE + slot for page in seq.pages for slot in range(PAGE)]
        return [slots.index(entry) for entry in row.entries.tolist()]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_first_token_has_no_entry(setup: Setup) -> None:
    seq = setup.start(0, 10)
    setup.compute(seq, 0, 6)
    setup.compute(seq, 6, 9)
    assert setup.entries(seq) == list(range(1, 9))


def test_found_prefix_keeps_its_entries(setup: Setup) -> None:
    first = setup.start(0, 9)
    setup.compute(first, 0, 8)
    second = setup.start(1, 14, first.pages[:2] + setup.take_pages(2))
    setup.compute(second, 8, 13)
    assert setup.entries(second) == [*range(1, 8), *range(9, 13)]


def test_token_behind_pages_that_a_prompt_adopts_has_no_entry(setup: Setup) -> None:
    """Between two parts of a prompt another sequence computed the tokens behind the first part."""
    first = setup.start(0, 9)
    setup.compute(first, 0, 8)
    second = setup.start(1, 14, setup.take_pages(1))
    setup.compute(second, 0, 4)
    second.pages.extend(first.pages[1:2] + setup.take_pages(2))
    setup.compute(second, 8, 13)
    assert setup.entries(second) == [*range(1, 8), *range(9, 13)]


def test_prompt_of_another_node_has_no_entries(setup: Setup) -> None:
    seq = setup.start(0, 14)
    setup.compute(seq, 9, 13)
    assert setup.entries(seq) == [10, 11, 12]


def test_page_that_was_handed_out_again_is_empty(setup: Setup) -> None:
    seq = setup.start(0, 13)
    setup.compute(seq, 0, 12)
    setup.allocator.free([seq.pages[1]])
    seq.pages[1] = setup.take_pages(1)[0]
    assert setup.entries(seq) == [1, 2, 3, 8, 9, 10, 11]


def test_rejected_drafts_leave_no_entry_where_a_sequence_is_taken_up_again(setup: Setup) -> None:
    """The row with drafts [6, 10) gave one token; the sequence lost its slot, not its pages."""
    seq = setup.start(0, 10)
    setup.compute(seq, 0, 6)
    setup.compute(seq, 6, 10)
    del seq.tokens[7:]
    assert setup.entries(seq) == [1, 2, 3, 4, 5]
    seq.pages_sent_to_runner = 0
    seq.tokens.append(1)
    setup.compute(seq, 6, 7)
    # The state in front of token 6 is gone, and with it what stands before it on its page.
    assert setup.entries(seq) == [1, 2, 3]


def test_drafts_end_in_front_of_one_without_a_token(setup: Setup) -> None:
    seqs = [setup.start(slot, 6) for slot in (0, 1)]
    for seq in seqs:
        setup.compute(seq, 0, 5)
    handles = [seq.handle for seq in seqs]
    assert setup.drafter.propose(handles, [1, 3]) == [array("i", [0]), array("i", [10, 11, 12])]
    assert setup.drafter.seconds == 0.75
    setup.failing_step = 1
    assert setup.drafter.propose(handles, [1, 3]) == [array("i", [0]), array("i", [10])]


def test_sequence_without_a_state_or_with_a_long_text_gets_none(setup: Setup) -> None:
    seq = setup.start(0, 9)
    assert not setup.drafter.has_room(seq, 1)
    setup.compute(seq, 0, 8)
    assert setup.drafter.has_room(seq, 31)
    assert not setup.drafter.has_room(seq, 32)
