"""When a draft model drafts, for whom, and what it spends where that does not pay."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest

from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.model_drafter import DraftLimits, ModelDrafter, TimedResult
from baton.runtime.speculation.model_speculator import (
    CATCH_UP_TOKENS_PER_TOKEN,
    PROBE_SHARE,
    ModelSpeculator,
)
from baton.sched.planner.draft_lengths import NO_DRAFTING_COSTS, DraftingCosts
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.plan import StepPlan, StepResult, StopReason
from baton.sched.types.request import SamplingParams, ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState
from tests.unit.runtime.speculation.test_speculator import Grammars

DRAFT_TOKEN = 7
DRAFT_SECS = 0.01
PAGE = 4


class Setup:
    def __init__(self, constraints: Grammars | None = None) -> None:
        self.now = 0.0
        self.plans = 0
        pages = DraftPages(PAGE, array("q", [0] * 400))
        drafter = ModelDrafter(self._run, pages, DraftLimits(PAGE, 400, 1, max_context=1000))
        self.speculator = ModelSpeculator(
            drafter, 4, constraints or Grammars(), clock=lambda: self.now
        )
        self.asked: list[DraftingCosts] = []
        self.pays = True

    def _run(self, plans: Sequence[StepPlan]) -> list[TimedResult]:
        self.plans += len(plans)
        return [
            (StepResult([DRAFT_TOKEN] * sum(row.sample for row in plan.rows)), DRAFT_SECS)
            for plan in plans
        ]

    def choose(
        self, offers: Sequence[DraftOffer], drafting: DraftingCosts = NO_DRAFTING_COSTS
    ) -> dict[int, int]:
        self.asked.append(drafting)
        return {offer.handle: 2 for offer in offers} if self.pays else {}

    def turn(self, *seqs: Seq) -> tuple[list[list[int]], float]:
        """Drafts that are offered, and how long they took."""
        seconds = self.speculator.draft(seqs, self.choose)
        return [list(offer.tokens) for offer in self.speculator.make_offers(seqs)], seconds


def sequence(tokens: int = 6, *, handle: int = 0, grammar: str = "", most: int = 100) -> Seq:
    """A decoding sequence, whose last token is to be computed."""
    params = SamplingParams(grammar=grammar)
    req = ValidatedRequest(handle, "r", array("i", [1] * (tokens - 1)), params)
    seq = Seq(req, array("i", [1] * tokens), most)
    seq.state = SeqState.RUNNING
    seq.slot = handle
    seq.computed = tokens - 1
    seq.pages = array("i", range(100 * handle, 100 * handle + -(-tokens // PAGE)))
    seq.pages_sent_to_runner = len(seq.pages)
    return seq


@pytest.fixture
def setup() -> Setup:
    return Setup()


def draw(seq: Seq, *tokens: int) -> None:
    seq.tokens.extend(tokens)
    seq.computed = len(seq.tokens) - 1
    needed = -(-len(seq.tokens) // PAGE)
    seq.pages.extend(range(seq.pages[-1] + 1, seq.pages[0] + needed))


def plan(*drafted: int) -> StepPlan:
    return StepPlan(1, (), 0, (), array("i"), StopReason.QUEUE_EMPTY, drafted=drafted)


def test_as_many_drafts_are_made_as_the_scheduler_would_take(setup: Setup) -> None:
    seq = sequence()
    assert setup.speculator.would_draft([seq], setup.choose)
    assert setup.plans == 0, "nothing is computed while steps are in flight"
    assert setup.turn(seq) == ([[DRAFT_TOKEN] * 2], 2 * DRAFT_SECS)
    assert setup.plans == 2


def test_the_scheduler_is_told_the_measured_time_of_a_drafting_step(setup: Setup) -> None:
    seq = sequence()
    for _ in range(2):
        setup.turn(seq)
        draw(seq, 1)
    assert setup.asked[-1].per_step == pytest.approx(DRAFT_SECS)


def test_acceptance_is_learned_from_what_was_drafted(setup: Setup) -> None:
    right = sequence(handle=0)
    wrong = sequence(handle=1)
    for _ in range(20):
        setup.turn(right, wrong)
        draw(right, DRAFT_TOKEN, DRAFT_TOKEN, 5)
        draw(wrong, 5)
    setup.turn(right, wrong)
    shares = [offer.acceptance for offer in setup.speculator.make_offers([right, wrong])]
    assert shares[0] > 0.9
    assert shares[1] < 0.1


def test_where_drafts_do_not_pay_probes_take_a_small_share_of_the_time(setup: Setup) -> None:
    seq = sequence()
    setup.pays = False
    spent = 0.0
    probes = 0
    steps = 2000
    for _ in range(steps):
        if setup.speculator.would_draft([seq], setup.choose):
            _, seconds = setup.turn(seq)
            spent += seconds
            probes += seconds > 0
        setup.now += 0.01
    assert 3 <= probes <= 8
    # The first one comes at once.
    assert spent <= 2 * PROBE_SHARE * setup.now


def test_a_probe_measures_acceptance(setup: Setup) -> None:
    seq = sequence()
    setup.pays = False
    setup.turn(seq)
    draw(seq, DRAFT_TOKEN, DRAFT_TOKEN, DRAFT_TOKEN)
    setup.turn(seq)
    setup.pays = True
    setup.turn(seq)
    (offer,) = setup.speculator.make_offers([seq])
    assert offer.acceptance > 0.5


def test_a_probe_of_an_answer_that_ends_is_over(setup: Setup) -> None:
    """Else the next one would go on with its time, or never begin."""
    late = sequence(300, handle=0)
    setup.pays = False
    setup.turn(late)
    assert setup.speculator._model.is_catching_up
    late.state = SeqState.FINISHED
    other = sequence(handle=1)
    assert setup.turn(other) == ([], 0.0)
    setup.now += 100
    assert setup.turn(other)[0] == [[DRAFT_TOKEN] * 3]


def test_forced_tokens_of_a_grammar_cost_no_drafting() -> None:
    setup = Setup(Grammars(forced=[5, 6]))
    seq = sequence(grammar="g")
    assert setup.speculator.would_draft([seq], setup.choose)
    assert setup.turn(seq) == ([[5, 6]], 0.0)
    assert setup.plans == 0


def test_drafts_end_where_the_grammar_refuses_them() -> None:
    setup = Setup(Grammars(admitted=1))
    assert setup.turn(sequence(grammar="g"))[0] == [[DRAFT_TOKEN]]


@pytest.mark.parametrize(
    ("change", "is_drafted"),
    [
        (lambda seq: None, True),
        (lambda seq: setattr(seq, "computed", 3), False),
        (lambda seq: setattr(seq, "state", SeqState.FINISHED), True),
        (lambda seq: setattr(seq, "max_total_tokens", len(seq.tokens)), False),
    ],
    ids=["decoding", "sent back", "ended meanwhile", "at its end"],
)
def test_sequences_that_are_ready_to_decode_are_drafted_for(
    setup: Setup, change: Callable[[Seq], None], is_drafted: bool
) -> None:
    seq = sequence()
    change(seq)
    setup.turn(seq)
    assert (setup.plans > 0) is is_drafted


def test_the_end_of_an_answer_is_not_worth_catching_up_with_its_prompt(setup: Setup) -> None:
    behind = 400
    few = behind // CATCH_UP_TOKENS_PER_TOKEN - 2
    setup.turn(sequence(behind, most=few))
    assert setup.plans == 0
    setup.turn(sequence(behind, handle=1, most=few + 5))
    assert setup.plans == 1


def test_drafting_goes_on_while_a_prompt_is_caught_up_with(setup: Setup) -> None:
    """Its parts follow each other step by step."""
    seq = sequence(300)
    turns = 0
    while setup.turn(seq)[0] == []:
        turns += 1
        setup.speculator.on_planned(plan())
        assert setup.speculator.is_drafting
    assert turns > 1


def test_the_wait_for_a_plan_is_without_the_drafting(setup: Setup) -> None:
    setup.turn(sequence())
    setup.speculator.on_waited(2 * DRAFT_SECS + 0.01)
    assert setup.speculator.wait_secs == pytest.approx(0.001)
