"""Rows with drafts: the tokens of every answer, the pages and the budgets are those without any."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from baton.cache.group_pages import GroupRule
from baton.sched.metrics.step_time import StepTime
from baton.sched.planner.draft_lengths import (
    PROBE_INTERVAL,
    DraftCandidate,
    DraftingCosts,
    StepCosts,
    choose_draft_lengths,
)
from baton.sched.policies import POLICIES
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.plan import Row, StepPlan, StepResult, StopReason
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import FinishReason
from baton.sched.types.sequence import Seq
from tests.sim.planner.test_suspend import settle, storm
from tests.support.sched.fake_transfer import FakeTransfer
from tests.support.sched.sched_sim import (
    EOS,
    VOCAB,
    Node,
    add_random_request,
    chain,
    next_token,
    random_prompt,
    reference,
    request,
)


def future(seq: Seq, length: int) -> list[int]:
    """The tokens that a sequence is going to draw."""
    state = 1
    for token in seq.tokens:
        state = chain(state, token)
    tokens = []
    for _ in range(length):
        tokens.append(next_token(state))
        state = chain(state, tokens[-1])
    return tokens


def drafter(rng: random.Random, right: float, most: int) -> Callable[[Scheduler], list[DraftOffer]]:
    """Drafts each token right with this probability, for some of the sequences and steps."""

    def make_offers(sched: Scheduler) -> list[DraftOffer]:
        if rng.random() < 0.2:
            return []
        offers = []
        for seq in sched.report.answering():
            if rng.random() < 0.2:
                continue
            tokens = [
                token if rng.random() < right else rng.randrange(VOCAB)
                for token in future(seq, rng.randint(1, most))
            ]
            known = len(seq.tokens) - (rng.random() < 0.05)  # some are stale
            offers.append(DraftOffer(seq.handle, known, array("i", tokens), rng.random()))
        return offers

    return make_offers


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_drafts_change_no_token_through_storms(right: float) -> None:
    counts = [storm_with_drafts(seed, right) for seed in range(25)]
    drafted, drawn = map(sum, zip(*counts, strict=True))
    assert drafted > 500
    assert right in (0.0, 0.6) or drawn > 500


def storm_with_drafts(seed: int, right: float) -> tuple[float, float]:
    """Returns how many tokens were drafted, and how many of them were drawn."""
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    node = Node(
        Limits(
            rng.randint(16, 60) * (4 // page), page, rng.choice([1, 2, 6]), 1000,
            page * rng.randint(1, 6),
            policy=rng.choice(sorted(POLICIES)),
            priority=PriorityRule(enabled=rng.random() < 0.5, preemption_threshold=rng.choice([0, 3])),
            preemption_mode=rng.choice(["recompute", "cache", "offload", "auto"]),
            host_pages=rng.choice([0, 0, 20, 100]),
            schedule_conservativeness=rng.choice([0.1, 1.0]),
            radix_cache=rng.random() < 0.8,
        ),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    node.make_offers = drafter(rng, right, 6)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want = {}
    for handle in range(30):
        want[handle] = add_random_request(node, rng, handle, shared)
        for _ in range(rng.randint(0, 5)):
            if rng.random() < 0.2:
                storm(node, rng, list(want))
            node.step()
    settle(node)
    assert {handle: node.outputs.get(handle, []) for handle in want} == want
    assert node.sched.is_idle
    node.sched.ledger().check_idle(node.limits.num_pages)
    counters = node.sched.stats.counters()
    return (
        counters["spec_decode_num_draft_tokens_total"],
        counters["spec_decode_num_accepted_tokens_total"],
    )


@pytest.mark.parametrize("kind", ["window", "state"])
@pytest.mark.parametrize("seed", range(20))
def test_drafts_change_no_token_with_several_groups(seed: int, kind: str) -> None:
    """Blocks behind a window are left behind by the tokens drawn, not by the drafts, and states have
    seen those alone."""
    rng = random.Random(500 + seed)
    page = rng.choice([1, 2, 4])
    rule = GroupRule("window", rng.choice([3, 8]), rng.choice([1, 2]))
    if kind == "state":
        rule = GroupRule(
            "state", rng.choice([4, 8, 10_000]), rng.choice([1, 2]), rng.choice([0, 1, 6])
        )
    node = Node(
        Limits(
            rng.randint(60, 120) * (4 // page), page, rng.choice([1, 2, 6]), 1000,
            page * rng.randint(1, 6),
            page_groups=(rule,),
            radix_cache=rng.random() < 0.8,
            schedule_conservativeness=rng.choice([0.1, 1.0]),
            preemption_mode=rng.choice(["recompute", "cache"]),
        ),
        depth=rng.choice([1, 2]),
    )  # fmt: skip
    node.make_offers = drafter(rng, rng.random(), 6)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want = {}
    for handle in range(30):
        want[handle] = add_random_request(node, rng, handle, shared)
        for _ in range(rng.randint(0, 5)):
            if rng.random() < 0.2:
                storm(node, rng, list(want))
            node.step()
    settle(node)
    assert {handle: node.outputs.get(handle, []) for handle in want} == want
    node.sched.ledger().check_idle(node.limits.num_pages)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_of_a_decode_node_change_no_token(seed: int) -> None:
    rng = random.Random(900 + seed)
    page = rng.choice([1, 2, 4])
    groups = rng.choice([(), (GroupRule("state", rng.choice([4, 10_000]), 2, rng.choice([0, 6])),)])

    def half(role: str) -> Node:
        lim = Limits(
            1000 // page, page, rng.choice([1, 2, 6]), 1000, page * rng.randint(1, 6), role=role,
            radix_cache=rng.random() < 0.8, page_groups=groups,
        )  # fmt: skip
        return Node(lim, depth=rng.choice([1, 2]))

    p, d = half("prefill"), half("decode")
    d.make_offers = drafter(rng, rng.random(), 6)
    transfer = FakeTransfer(p, d, rng, break_rate=0.0)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want: dict[int, list[int]] = {}
    for handle in range(20):
        req = request(
            handle, random_prompt(rng, shared, 40), rng.randint(1, 20), ignore_eos=True,
            room=1000 + handle,
        )  # fmt: skip
        for each in rng.sample([p, d], 2):
            each.sched.add(req)
        want[handle] = reference(req.prompt, req.params.max_new_tokens, True)
        for _ in range(rng.randint(0, 4)):
            p.step(), d.step(), transfer.tick()
    for _ in range(20_000):
        busy = [p.step(), d.step(), transfer.tick()]
        if p.sched.is_idle and d.sched.is_idle:
            break
        assert busy
    d.step()  # tells of what the last tick ended
    assert {handle: d.outputs[handle] for handle in want} == want
    d.sched.ledger().check_idle(d.limits.num_pages)


def single(**over: object) -> tuple[Node, list[int]]:
    """A node whose only answer has begun, and the answer."""
    values: dict[str, object] = {
        "num_pages": 60, "page_size": 4, "max_running_requests": 4, "max_queued_requests": 100, "step_tokens": 16
    }  # fmt: skip
    node = Node(Limits(**(values | over)), depth=1)  # type: ignore[arg-type]
    req = request(0, [1, 2, 3], 30, ignore_eos=True, is_length_known=False)
    node.sched.add(req)
    node.step()
    return node, reference(req.prompt, 30, True)


def plan_with(node: Node, tokens: list[int], acceptance: float = 0.9) -> StepPlan:
    (seq,) = node.sched.report.answering()
    offer = DraftOffer(seq.handle, len(seq.tokens), array("i", tokens), acceptance)
    node.sched.offer_drafts([offer])
    plan = node.sched.plan(0.0)
    assert plan is not None
    return plan


def test_a_row_with_drafts_stands_behind_decode_rows_and_has_its_known_token_first() -> None:
    node, answer = single()
    node.sched.add(request(1, [4, 4], 30, ignore_eos=True))
    node.step()
    seqs = {seq.handle: seq for seq in node.sched.report.answering()}
    known = len(seqs[0].tokens)
    node.sched.offer_drafts([DraftOffer(0, known, array("i", [1, 2, 3]), 0.9)])
    plan = node.sched.plan(0.0)
    assert plan is not None
    assert (plan.num_decode, plan.drafted, plan.num_answering, plan.prompt_rows) == (1, (3,), 2, ())
    assert [row.handle for row in plan.rows] == [1, 0]
    assert list(plan.rows[1].tokens) == [answer[1], 1, 2, 3]
    assert plan.rows[1].n == 4


def test_accepted_drafts_advance_an_answer_by_their_number_and_one() -> None:
    node, answer = single()
    plan = plan_with(node, answer[1:4])
    node.sched.commit(plan, node.device.execute(plan))
    node.absorb()
    assert node.outputs[0] == answer[:5]
    node.run()
    assert node.outputs[0] == answer


def test_an_answer_ends_inside_a_run() -> None:
    """Tokens behind the end are neither sent nor counted as drawn."""
    limits = Limits(
        num_pages=60, page_size=4, max_running_requests=4, max_queued_requests=100, step_tokens=16
    )
    for seed in range(10_000):
        prompt = random.Random(seed).choices(range(1, VOCAB), k=4)
        answer = reference(request(0, prompt, 50).prompt, 50, True)
        if answer.index(EOS) == 3:
            break
    node = Node(limits, depth=1)
    node.sched.add(request(0, prompt, 50))
    node.step()
    plan = plan_with(node, answer[1:7])
    node.sched.commit(plan, node.device.execute(plan))
    node.absorb()
    assert node.outputs[0] == answer[:4]
    assert node.finished[0] is FinishReason.STOP
    assert node.sched.stats.counters()["spec_decode_num_accepted_tokens_total"] == 3
    node.sched.ledger().check_idle(60)


def test_drafts_end_in_front_of_the_last_token_of_an_answer() -> None:
    node, answer = single()
    while len(node.outputs[0]) < 27:
        node.step()
    plan = plan_with(node, [0] * 6)
    assert plan.drafted == (2,)
    node.sched.commit(plan, node.device.execute(plan))
    node.run()
    assert node.outputs[0] == answer


def test_drafts_find_no_room_rather_than_take_the_page_of_another() -> None:
    """Two answers that fill the pool: drafts stay within the pages held, so that each still finds its next page."""
    node, _ = single(num_pages=11, step_tokens=64, schedule_conservativeness=0.01)
    node.sched.add(request(1, [1] * 26, 10, ignore_eos=True, is_length_known=False))
    for _ in range(2):
        node.step()
    first, second = node.sched.report.answering()
    node.sched.offer_drafts(
        [DraftOffer(s.handle, len(s.tokens), array("i", [0] * 12), 0.9) for s in (first, second)]
    )
    assert node.probe.state.memory.available == 2
    held = [len(s.pages) for s in (first, second)]
    plan = node.sched.plan(0.0)
    assert plan is not None
    assert [len(s.pages) for s in (first, second)] == held
    assert plan.drafted == (2,), "as many as the last page of each has room for"
    assert node.sched.report.counters()["retractions_total"] == 0


def test_prompts_keep_drafts_away() -> None:
    node, _ = single()
    node.sched.add(request(1, [4, 4], 30, ignore_eos=True))
    assert plan_with(node, [1, 2, 3]).drafted == ()


def test_an_offer_for_another_length_is_stale() -> None:
    node, _ = single()
    (seq,) = node.sched.report.answering()
    node.sched.offer_drafts([DraftOffer(0, len(seq.tokens) - 1, array("i", [1]), 0.9)])
    plan = node.sched.plan(0.0)
    assert plan is not None
    assert plan.drafted == ()


def test_a_failure_in_a_rejected_position_is_none() -> None:
    node, answer = single()
    wrong = (answer[1] + 1) % VOCAB
    plan = plan_with(node, [wrong, 0, 0])
    node.device.spoil_all()  # what the device would read behind the wrong draft
    node.sched.commit(plan, StepResult([answer[1]], runs=(1,)))
    node.absorb()
    assert node.errors == {}
    assert node.outputs[0] == answer[:2]


def test_drafts_that_never_pay_are_probed() -> None:
    """Their time is measured only in steps that have some."""
    node = Node(
        Limits(
            num_pages=400, page_size=4, max_running_requests=4, max_queued_requests=9, step_tokens=16
        ),
        depth=1,
    )  # fmt: skip
    req = request(0, [1, 2, 3], 2 * PROBE_INTERVAL, ignore_eos=True)
    node.sched.add(req)
    node.step()
    drafted = []
    for _ in range(PROBE_INTERVAL + 50):
        (seq,) = node.sched.report.answering()
        offer = DraftOffer(0, len(seq.tokens), array("i", (0, 0, 0)), 0.01)
        would_draft = bool(node.sched.draft_lengths([offer], 0.0))
        plan = plan_with(node, [0, 0, 0], acceptance=0.01)
        drafted.append(plan.drafted)
        assert would_draft == bool(plan.drafted), "nothing is offered where no step would draft"
        node.sched.commit(plan, node.device.execute(plan))
        node.sched.observe(plan, 0.1)
        node.absorb()
    # Before the first step is measured, drafts cost nothing.
    probes = [i for i, counts in enumerate(drafted[1:], 1) if counts]
    assert probes == [PROBE_INTERVAL]
    assert drafted[PROBE_INTERVAL] == (1,)
    answer = reference(req.prompt, 2 * PROBE_INTERVAL, True)
    assert node.outputs[0] == answer[: len(node.outputs[0])]


def test_steps_with_drafts_teach_nothing_about_others() -> None:
    times = StepTime(64)
    row = Row(0, 0, 5, 1, True, array("i", [1]), 0, array("i"))
    plain = StepPlan(1, (row,), 1, (), array("i"), StopReason.QUEUE_EMPTY)
    wide = row._replace(n=5, tokens=array("i", [1, 2, 3, 4, 5]))
    with_drafts = StepPlan(2, (wide,), 0, (), array("i"), StopReason.QUEUE_EMPTY, drafted=(4,))
    for _ in range(20):
        times.observe(plain, 0.010)
        times.observe(with_drafts, 0.014)
    assert times.decode_seconds(1) == pytest.approx(0.010)
    assert times.draft_seconds(4) == pytest.approx(0.004)
    assert times.prefill_rate == StepTime(64).prefill_rate


def test_the_time_of_making_drafts_is_spent_too() -> None:
    node, answer = single()
    (seq,) = node.sched.report.answering()
    offer = DraftOffer(seq.handle, len(seq.tokens), array("i", answer[1:3]), 0.9)
    for made_in in (0.25, 0.5):
        node.sched.offer_drafts([offer], 0.0, made_in)
    assert node.sched.stats.counters()["spec_decode_spent_seconds_total"] == 0.75


def test_drafts_are_not_made_where_making_them_takes_too_long() -> None:
    node, _ = single()
    plan = node.sched.plan(0.0)
    assert plan is not None
    node.sched.commit(plan, node.device.execute(plan))
    for _ in range(5):
        node.sched.observe(plan, 0.010)
    (seq,) = node.sched.report.answering()
    offer = DraftOffer(seq.handle, len(seq.tokens), array("i", bytes(4 * 8)), 0.8)

    def lengths(per_step: float) -> list[int]:
        costs = DraftingCosts(per_step, 0.0)
        return list(node.sched.draft_lengths([offer], 0.0, costs).values())

    assert lengths(0.0)[0] > lengths(0.001)[0] >= 1
    assert lengths(0.010) == []
    assert node.sched.stats.counters()["spec_decode_num_draft_tokens_total"] == 0


def test_drafts_stop_paying_in_larger_batches() -> None:
    costs = StepCosts(plain=0.010, per_draft=0.002, wait=0.0)
    for rows in (1, 2, 4, 8, 16, 64):
        candidates = [DraftCandidate(handle, 8, 0.8) for handle in range(rows)]
        chosen = choose_draft_lengths(candidates, rows, 10_000, costs)
        if rows == 1:
            assert chosen[0] >= 4
        if rows >= 16:
            assert chosen == {}


def test_the_choice_is_the_best_of_all() -> None:
    """Against every combination of lengths."""
    rng = random.Random(0)
    for _ in range(200):
        acceptances = [rng.random() for _ in range(rng.randint(1, 3))]
        candidates = [DraftCandidate(i, rng.randint(0, 4), a) for i, a in enumerate(acceptances)]
        rows = len(candidates) + rng.randint(0, 4)
        costs = StepCosts(
            rng.uniform(0.5, 2),
            rng.uniform(0.01, 0.5),
            rng.choice([0.0, 0.2]),
            rng.choice([0.0, 0.1, 0.4]),
        )

        def speed(
            lengths: dict[int, int],
            rows: int = rows,
            costs: StepCosts = costs,
            candidates: list[DraftCandidate] = candidates,
        ) -> float:
            gain = sum(
                candidates[i].acceptance ** (k + 1) for i, n in lengths.items() for k in range(n)
            )
            drafts = sum(lengths.values())
            seconds = costs.plain + costs.per_draft * drafts + costs.wait * bool(drafts)
            seconds += costs.per_drafting_step * max(lengths.values(), default=0)
            return (rows + gain) / seconds

        options: list[dict[int, int]] = [{}]
        for candidate in candidates:
            options = [
                {**option, candidate.handle: n} if n else option
                for option in options
                for n in range(candidate.most + 1)
            ]
        chosen = choose_draft_lengths(candidates, rows, 100, costs)
        assert speed(chosen) == pytest.approx(max(map(speed, options)))
