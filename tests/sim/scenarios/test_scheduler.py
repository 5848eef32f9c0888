"""The production scheduler on a pretend device: outputs, memory and fairness under random load and tiny pools."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Iterator, Sequence

import pytest

from baton.config.classes import parse_classes
from baton.config.tenants import TenantRules
from baton.errors import PromptTooLong, QueueFull
from baton.sched.fairness.fair_queue import FairnessRules
from baton.sched.memory.kv_manager import KvManager
from baton.sched.planner.prompt_budget import PromptBudget
from baton.sched.queue.waiting_queue import WaitingQueue
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN, INVALID_TOKEN, StepPlan, StepResult
from baton.sched.types.request import FinishReason
from baton.sched.types.sequence import Seq, partial_of
from tests.support.effort import seeds
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request


def limits(rng: random.Random, **over: object) -> Limits:
    page = rng.choice([1, 2, 4])
    values: dict[str, object] = {
        "num_pages": rng.randint(12, 60) * (4 // page),
        "page_size": page,
        "max_running_requests": rng.choice([1, 2, 4, 8]),
        "max_queued_requests": 10_000,
        "step_tokens": page * rng.randint(1, 8),
        "policy": rng.choice(["fcfs", "lpm"]),
        "radix_cache": rng.random() < 0.8,
        "schedule_conservativeness": rng.choice([0.1, 1.0]),
        "prefill_first": rng.random() < 0.2,
    }
    return Limits(**(values | over))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", seeds(120))
def test_random_load_gives_reference_tokens_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    node = Node(limits(rng), depth=rng.choice([1, 2]))
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    capacity = node.limits.capacity_tokens
    want: dict[int, list[int]] = {}
    aborted: set[int] = set()
    for handle in range(40):
        prompt = random_prompt(rng, shared, min(24, capacity - 1))
        max_new = rng.randint(1, 30)
        req = request(handle, prompt, max_new, ignore_eos=rng.random() < 0.7)
        node.sched.add(req)
        want[handle] = reference(
            req.prompt, min(max_new, capacity - len(prompt)), req.params.ignore_eos
        )
        for _ in range(rng.randint(0, 6)):
            node.step()
        if rng.random() < 0.15:
            victim = rng.randrange(handle + 1)
            if victim not in node.finished:
                aborted.add(victim)
                node.sched.abort(victim)
                node.sched.ledger()
    node.run()
    for handle, tokens in want.items():
        got = node.outputs.get(handle, [])
        if handle in aborted:
            assert got == tokens[: len(got)]
            assert handle not in node.finished
        else:
            assert got == tokens, f"seed {seed} request {handle}"
            assert node.finished[handle] in (FinishReason.STOP, FinishReason.LENGTH)
    assert node.sched.is_idle
    node.sched.ledger().check_idle(node.limits.num_pages)
    node.sched.flush_cache()
    assert node.sched.ledger().free == node.limits.num_pages


@pytest.mark.parametrize("depth", [1, 2])
def test_row_without_a_token_ends_its_request_alone(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(Limits(64, 1, 4, 100, 32), depth=depth)
    for handle in range(3):
        node.sched.add(request(handle, [handle] * 4, 8, ignore_eos=True))
    plain = node.device.execute

    def broken(plan: StepPlan) -> StepResult:
        sampling = [row for row in plan.rows if row.sample]
        tokens = plain(plan).tokens
        bad = [row.handle == 1 and row.start >= 6 for row in sampling]
        return StepResult([INVALID_TOKEN if b else t for b, t in zip(bad, tokens, strict=True)])

    monkeypatch.setattr(node.device, "execute", broken)
    node.run()
    assert node.finished[1] is FinishReason.ERROR
    assert len(node.outputs[1]) == 3
    for handle in (0, 2):
        assert node.outputs[handle] == reference(array("i", [handle] * 4), 8, True)
    node.sched.ledger().check_idle(64)


@pytest.mark.parametrize("depth", [1, 2])
def test_token_that_completes_its_grammar_ends_its_request(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request 1 is complete with its third token, request 2's grammar fails there."""
    node = Node(Limits(64, 1, 4, 100, 32), depth=depth)
    for handle in range(3):
        node.sched.add(request(handle, [handle] * 4, 8, ignore_eos=True))
    plain = node.device.execute

    def constrained(plan: StepPlan) -> StepResult:
        sampling = [row for row in plan.rows if row.sample]
        tokens = list(plain(plan).tokens)
        late = [row.start >= 5 for row in sampling]
        failed = [row.handle == 2 and is_late for row, is_late in zip(sampling, late, strict=True)]
        completed = [i for i, row in enumerate(sampling) if row.handle == 1 and late[i]]
        return StepResult(
            [GRAMMAR_FAILED_TOKEN if f else t for f, t in zip(failed, tokens, strict=True)],
            completed=frozenset(completed),
        )

    monkeypatch.setattr(node.device, "execute", constrained)
    node.run()
    assert node.finished[1] is FinishReason.STOP
    assert node.outputs[1] == reference(array("i", [1] * 4), 8, True)[:3]
    assert node.finished[2] is FinishReason.ERROR
    assert node.errors[2][0] == "grammar_failed"
    assert len(node.outputs[2]) == 2
    assert node.outputs[0] == reference(array("i", [0] * 4), 8, True)
    node.sched.ledger().check_idle(64)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("born", ["in the prompt", "in the answer", "in the cache"])
def test_pages_that_gave_nan_serve_no_later_request(depth: int, born: str) -> None:
    node = Node(Limits(64, 4, 4, 100, 8), depth=depth)
    prompt = [1, 2, 3, 4] * 5
    if born == "in the cache":
        node.sched.add(request(0, prompt, 6, ignore_eos=True))
        node.run()
        node.device.spoil_all()
    node.sched.add(request(1, prompt, 6, ignore_eos=True))
    steps_until_nan = {"in the prompt": depth, "in the answer": depth + 3, "in the cache": 0}[born]
    for _ in range(steps_until_nan):  # a prompt of three chunks
        node.step()
    node.device.spoil_all()
    node.run()
    assert node.errors[1][0] == "nonfinite_logits"
    for handle in (2, 3):
        node.sched.add(request(handle, prompt, 6, ignore_eos=True))
        node.run()
        assert node.outputs[handle] == reference(array("i", prompt), 6, True)
    assert (node.cached[2], node.cached[3]) == (0, 16), "computed once more, then shared"
    assert node.sched.report.counters()["kv_quarantined_pages_total"] > 0
    node.sched.ledger().check_idle(64)


def test_memory_pressure_retracts_and_still_answers_exactly() -> None:
    node = Node(Limits(24, 1, 4, 100, 8, schedule_conservativeness=0.05), depth=2)
    want = {}
    for handle in range(6):
        req = request(handle, [handle % VOCAB] * 4, 18, ignore_eos=True, is_length_known=False)
        node.sched.add(req)
        want[handle] = reference(req.prompt, 18, True)
    node.run()
    assert node.outputs == want
    assert node.sched.report.counters()["retractions_total"] > 0, (
        "the pool was meant to be too small for all"
    )


def test_at_most_one_step_between_two_tokens_of_a_running_request() -> None:
    for prefill_first in (False, True):
        node = Node(Limits(400, 4, 8, 100, 8, prefill_first=prefill_first), depth=1)
        node.sched.add(request(0, [1, 2, 3], 40, ignore_eos=True))
        for _ in range(3):
            node.step()
        for handle in range(1, 6):
            node.sched.add(request(handle, [handle % VOCAB] * 60, 2, ignore_eos=True))
        gap = 0
        while 0 not in node.finished:
            before = len(node.outputs[0])
            node.step()
            gap = 0 if len(node.outputs[0]) > before else gap + 1
            assert gap <= 1


def test_requests_of_one_step_share_their_prefix() -> None:
    node = Node(Limits(64, 4, 8, 100, 64), depth=1)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    for handle in range(4):
        node.sched.add(request(handle, [*prompt, handle], 3, ignore_eos=True))
    plan = node.sched.plan()
    assert plan is not None
    assert [row.n for row in plan.rows] == [9, 1, 1, 1], (
        "later requests compute only what the first one does not"
    )
    node.flight.append(plan)
    node.run()
    assert all(
        node.outputs[h] == reference(request(h, [*prompt, h], 3).prompt, 3, True) for h in range(4)
    )


def test_lpm_prefers_the_cached_prompt_and_fcfs_the_older() -> None:
    for policy, first in (("fcfs", 1), ("lpm", 2)):
        node = Node(Limits(64, 4, 1, 100, 64, policy=policy), depth=1)
        node.sched.add(request(0, [1, 2, 3, 4, 1, 2, 3, 4, 2], 1, ignore_eos=True))
        node.run()
        node.sched.add(request(1, [4, 4, 4, 4, 4], 1, ignore_eos=True))
        node.sched.add(request(2, [1, 2, 3, 4, 1, 2, 3, 4, 3], 1, ignore_eos=True))
        plan = node.sched.plan()
        assert plan is not None
        assert plan.rows[0].handle == first


def test_impossible_and_surplus_requests_are_refused_with_numbers() -> None:
    sched = Scheduler(Limits(4, 4, 2, 2, 16))
    with pytest.raises(PromptTooLong, match="16 tokens, the KV pool of this engine holds 16"):
        sched.add(request(0, [1] * 16, 4))
    sched.add(request(1, [1], 1))
    sched.add(request(2, [1], 1))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        sched.add(request(3, [1], 1))


def test_answers_are_cut_to_what_the_pool_can_hold() -> None:
    node = Node(Limits(4, 4, 2, 10, 16), depth=2)
    node.sched.add(request(0, [1] * 10, 1000, ignore_eos=True))
    node.run()
    assert len(node.outputs[0]) == 6
    assert node.finished[0] is FinishReason.LENGTH


def test_deadline_ends_waiting_and_running_requests_with_timeout() -> None:

    node = Node(Limits(64, 4, 1, 10, 16), depth=2)
    node.sched.add(dataclasses.replace(request(0, [1, 2], 50, ignore_eos=True), deadline=5.0))
    node.sched.add(dataclasses.replace(request(1, [1, 2], 50, ignore_eos=True), deadline=5.0))
    for _ in range(4):
        node.step()
    node.sched.expire(4.9)
    assert not node.errors
    node.sched.expire(5.0)
    node.run()
    assert {h: error.code for h, error in node.errors.items()} == {0: "timeout", 1: "timeout"}
    node.sched.ledger().check_idle(64)


def test_same_inputs_same_plans() -> None:
    def trace() -> list[object]:
        rng = random.Random(5)
        node = Node(Limits(40, 2, 4, 100, 12), depth=2)
        plans: list[object] = []
        for handle in range(20):
            node.sched.add(request(handle, random_prompt(rng, [[1, 2, 3, 4]], 20), 8))
            node.step()
            plans.extend(node.flight)
        return plans

    assert trace() == trace()


@pytest.mark.parametrize("policy", ["fcfs", "srpt-aging", "edf"])
def test_short_prompts_fill_the_budget_however_few_may_stay_unfinished(policy: str) -> None:
    node = Node(
        Limits(400, 4, 32, 100, 64, policy=policy, max_partial_prefills=2, role="prefill"), depth=1
    )
    for handle in range(24):
        node.sched.add(request(handle, [handle % VOCAB] * (handle % 3) + [4] * 8, 1, room=handle))
    plan = node.sched.plan()
    assert plan is not None
    assert plan.num_tokens > 60
    node.flight.append(plan)
    node.run()
    assert node.steps < 4


def test_prompt_that_precedes_the_unfinished_one_starts_before_it() -> None:
    """One unfinished prompt is allowed, and that is 0; 1 is due before it and 2 after it."""
    node = Node(
        Limits(400, 4, 32, 100, 16, policy="edf", max_partial_prefills=1, role="prefill"), depth=1
    )

    def due(handle: int, length: int, at: float) -> None:
        req = request(handle, [handle] * length, 1, room=handle)
        node.sched.add(dataclasses.replace(req, arrival=0.0, ttft_deadline=at))

    due(0, 20, 500.0)
    node.step()
    due(1, 8, 100.0)
    due(2, 8, 900.0)
    plan = node.sched.plan()
    assert plan is not None
    assert [row.handle for row in plan.rows] == [1, 0, 2]
    assert plan.num_tokens == 16


@pytest.mark.parametrize("share", ["none", "classes", "tenants"])
def test_others_pass_a_request_that_waits_for_pages_and_do_not_delay_it(share: str) -> None:
    """Request 0 holds a quarter of the pool for long; request 1 needs most of it and waits for 0, the others do not."""
    rules = FairnessRules(
        classes=parse_classes("small:8,large:1")[0]
        if share == "classes"
        else FairnessRules().classes,
        tenants=TenantRules() if share == "tenants" else None,
    )
    node = Node(Limits(100, 4, 32, 100, 64, fairness=rules, radix_cache=False), depth=1)

    def add(handle: int, length: int, answer: int, who: str) -> None:
        req = request(handle, [handle % VOCAB] * length, answer, ignore_eos=True)
        node.sched.add(
            dataclasses.replace(req, arrival=float(handle), priority_class=who, tenant=who)
        )

    add(0, 20, 80, "small")
    node.step()
    add(1, 340, 4, "large")
    started = {}
    handle = 1
    while 1 not in node.finished:
        if handle < 200:
            handle += 1
            add(handle, 8, 4, "small")
        node.step()
        for done in node.outputs:
            started.setdefault(done, node.steps)
        assert node.steps < 400, "the large request starves"
    before_it = [h for h in started if h > 1 and started[h] < started[1]]
    assert len(before_it) >= 50, "the small requests wait for the large one"
    assert max(started[h] - h for h in before_it) < 20
    assert started[1] - 80 < 20, "the large request waits for those that passed it"


def test_request_that_waits_for_all_pages_is_not_passed_for_ever() -> None:
    """Requests that pass it add to its reservation; with a full one, nothing passes until it has started."""
    node = Node(Limits(100, 4, 32, 1000, 64, radix_cache=False), depth=1)
    node.sched.add(request(0, [1] * 60, 240, ignore_eos=True))
    node.step()
    node.sched.add(request(1, [2] * 396, 4, ignore_eos=True))
    handle = 1
    while not node.outputs.get(1):
        handle += 1
        node.sched.add(request(handle, [3] * 8, 40, ignore_eos=True))
        node.step()
        assert node.steps < 400, "the large request starves"
    assert len(node.outputs) >= 5, "others passed it at first"


def test_request_whose_own_prefix_is_the_evictable_part_is_not_passed_for_ever() -> None:
    """A request reserves pages even where evicting its own cached prefix would free enough."""
    node = Node(Limits(100, 4, 32, 1000, 64), depth=1)
    node.sched.add(request(0, [2] * 200, 1))
    node.run()
    node.sched.add(request(1, [1] * 8, 40, ignore_eos=True))
    node.step()
    node.sched.add(request(2, [2] * 396, 4, ignore_eos=True))
    handle = 2
    while not node.outputs.get(2):
        if node.steps % 25 == 0:
            handle += 1
            node.sched.add(request(handle, [1] * 8, 40, ignore_eos=True))
        node.step()
        assert node.steps < 400, "the large request starves"


@pytest.mark.parametrize("share", ["none", "tenants"])
def test_reserved_request_does_not_start_behind_max_partial_prefills_either(share: str) -> None:
    """Pages become free while request 2, which precedes it, is computed in part."""
    rules = FairnessRules(tenants=TenantRules() if share == "tenants" else None)
    node = Node(
        Limits(100, 4, 8, 100, 64, policy="srpt-aging", max_partial_prefills=1, long_prefill_token_threshold=16,
               radix_cache=False, fairness=rules),
        depth=1,
    )  # fmt: skip
    node.sched.add(request(0, [1] * 16, 144, ignore_eos=True))
    node.step()
    node.sched.add(request(1, [2] * 280, 1))
    node.step()
    held = node.probe.reservation
    assert held is not None
    assert held.seq.handle == 1
    node.sched.add(request(2, [3] * 96, 1))
    node.step()
    node.sched.abort(0)
    while 2 not in node.finished:
        node.step()
        assert len(partial_of(node.probe.running.values())) <= 1
        assert node.steps < 20
    while 1 not in node.finished:
        node.step()
        assert node.steps < 60


@pytest.mark.parametrize("skip", [0, 2])
def test_skip_ahead_bounds_how_many_requests_are_passed_over(skip: int) -> None:
    node = Node(Limits(100, 4, 32, 100, 64, radix_cache=False, admission_skip_ahead=skip), depth=1)
    node.sched.add(request(0, [1] * 60, 240, ignore_eos=True))
    node.step()
    for handle in (1, 2, 3):
        node.sched.add(request(handle, [2] * 300, 4, ignore_eos=True))
    for handle in (4, 5):
        node.sched.add(request(handle, [3] * 4, 4, ignore_eos=True))
    plan = node.sched.plan()
    assert plan is not None
    assert {row.handle for row in plan.rows} == {0}
    node.flight.append(plan)
    node.sched.abort(3)
    plan = node.sched.plan()
    assert plan is not None
    assert {row.handle for row in plan.rows} >= ({4, 5} if skip else set())


@pytest.mark.parametrize("policy", ["fcfs", "srpt-aging", "hrrn"])
def test_plan_looks_at_few_of_a_long_queue(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No slot or no pages, with prompts under way that the queue's order puts last."""
    taken: list[Seq] = []
    in_order = WaitingQueue.in_order

    def counted(queue: WaitingQueue, under_way: Sequence[Seq] = ()) -> Iterator[Seq]:
        for seq in in_order(queue, under_way):
            taken.append(seq)
            yield seq

    monkeypatch.setattr(WaitingQueue, "in_order", counted)
    for limits in (
        Limits(4000, 4, 2, 5000, 8, policy=policy),
        Limits(80, 4, 50, 5000, 8, policy=policy),
    ):
        node = Node(limits, depth=1)
        for handle in (0, 1):
            node.sched.add(request(handle, [1] * 120, 8))
            node.step()
        for handle in range(2, 1000):
            node.sched.add(request(handle, [2] * 40, 300))
        for _ in range(8):
            taken.clear()
            plan = node.sched.plan()
            assert plan is not None
            node.flight.append(plan)
            node.absorb()
            node.sched.commit(node.flight.pop(), node.device.execute(plan))
            assert len(taken) <= limits.admission_skip_ahead + 4


def test_admission_taken_back_leaves_cached_tokens_to_charge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = FairnessRules(tenants=TenantRules())
    node = Node(Limits(100, 4, 4, 100, 64, fairness=rules), depth=1)
    for handle, tenant in ((0, "a"), (1, "b")):
        req = dataclasses.replace(request(handle, [1] * 20, 1), tenant=tenant)
        if handle:
            with monkeypatch.context() as patch:
                patch.setattr(PromptBudget, "chunk_tokens", lambda *args, **kwargs: 0)
                node.sched.add(req)
                assert node.sched.plan() is None
        else:
            node.sched.add(req)
        node.run()
    assert node.sched.sharing.counters()['tenant_tokens_total{tenant="b",kind="cached"}'] == 16


def test_disabled_cache_takes_and_finds_nothing() -> None:
    memory = KvManager(Limits(4, 1, 1, 10, 4, radix_cache=False))
    req = request(0, [1, 2], 1)
    seq, later = Seq(req, array("i", req.prompt), 1), Seq(req, array("i", req.prompt), 1)
    assert memory.extend(seq, 2)
    seq.computed = 2
    memory.publish(seq)
    assert (seq.node, seq.published, len(seq.private)) == (None, 0, 2), (
        "the sequence still owns its pages"
    )
    match = memory.match_prefix(later, 2)
    assert match.num_tokens == 0
    memory.cache.unlock(match.node)
    cache = memory.cache
    assert (cache.flush(), cache.evictable_pages, cache.locked_pages) == (0, 0, 0)
    memory.release_pages(seq)
    assert memory.allocator.free_count == 4
