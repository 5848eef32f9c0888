"""Classes and tenants inside the scheduler: shares, waits, limits; and with one class nothing changes."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction
from typing import Any

import pytest

from baton.config.classes import parse_classes
from baton.config.tenants import TenantRule, TenantRules
from baton.errors import PromptTooLong, TenantQueueFull
from baton.sched.fairness.fair_queue import MAX_LABELS, FairnessRules, FairQueue
from baton.sched.policies import POLICIES
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StepPlan, StepResult
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import ValidatedRequest
from tests.support.effort import seeds
from tests.support.probes import SchedulerProbe
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request

STEP = 16


def fair(
    classes: str = "", tenants: dict[str, TenantRule] | None = None, **more: Any
) -> FairnessRules:
    rules = parse_classes(classes)[0] if classes else FairnessRules().classes
    return FairnessRules(
        classes=rules, tenants=None if tenants is None else TenantRules(named=tenants), **more
    )


def limits(rules: FairnessRules, **more: Any) -> Limits:
    values: dict[str, Any] = {
        "num_pages": 4000, "page_size": 2, "max_running_requests": 64, "max_queued_requests": 10_000,
        "step_tokens": STEP,
    }  # fmt: skip
    return Limits(**values | more, fairness=rules)


def ask(
    handle: int, size: int, *, of: str = "", by: str = "", max_new: int = 1, priority: int | None = None,
    first: int | None = None,
) -> ValidatedRequest:  # fmt: skip
    """A request whose prompt shares no page with others."""
    prompt = [1000 + handle if first is None else first] * size
    plain = request(handle, prompt, max_new, ignore_eos=True)
    return dataclasses.replace(plain, priority_class=of, tenant=by, priority=priority)


class Books:
    """Runs a scheduler without a device and writes down who got which tokens in which step."""

    def __init__(self, what: Limits) -> None:
        self.sched = Scheduler(what)
        self.owner: dict[int, str] = {}
        self.steps: list[StepPlan] = []
        self.ended: list[int] = []

    def add(self, req: ValidatedRequest, owner: str) -> None:
        self.owner[req.handle] = owner
        self.sched.add(req)

    def step(self) -> StepPlan | None:
        plan = self.sched.plan()
        if plan is not None:
            self.sched.commit(plan, StepResult([7] * sum(row.sample for row in plan.rows)))
            self.steps.append(plan)
        for event in self.sched.drain_events():
            if getattr(event, "finish", None) is not None:
                self.ended.append(event.handle)  # type: ignore[union-attr]
        return plan

    def prompt_tokens(self, plan: StepPlan) -> dict[str, int]:
        """Prompt tokens per owner in a step."""
        got: dict[str, int] = {}
        for row in plan.rows[plan.num_decode :]:
            got[self.owner[row.handle]] = got.get(self.owner[row.handle], 0) + row.n
        return got


def spread(series: list[Fraction]) -> Fraction:
    """The largest difference over any window of a running sum."""
    return max(series) - min(series)


# ---- classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("sizes", [("small", "large"), ("large", "small"), ("mixed", "mixed")])
def test_backlogged_classes_share_prompt_tokens_by_weight(
    policy: str, sizes: tuple[str, str]
) -> None:
    """|served_i / w_i - served_j / w_j| ≤ (largest chunk + quantum) (1/w_i + 1/w_j) over every window."""
    rng = random.Random(policy + sizes[0])
    weights = {"gold": 5, "coal": 2}
    books = Books(
        limits(fair("gold:5,coal:2", charge_decode=False), policy=policy, max_partial_prefills=64)
    )
    waiting = dict.fromkeys(weights, 0)
    handle = 0
    series = [Fraction(0)]
    for _ in range(300):
        for name, style in zip(weights, sizes, strict=True):
            while sum(books.owner[s] == name for s in books.owner) - waiting[name] < 40:
                size = {
                    "small": rng.randint(1, 3),
                    "large": rng.randint(60, 100),
                    "mixed": rng.choice((1, 90)),
                }[style]
                handle += 1
                books.add(ask(handle, size, of=name), name)
        plan = books.step()
        assert plan is not None
        assert plan.num_tokens >= STEP - 1, "work conserving: only the rest of a page stays empty"
        got = books.prompt_tokens(plan)
        series.append(
            series[-1] + Fraction(got.get("gold", 0), 5) - Fraction(got.get("coal", 0), 2)
        )
        for name in weights:
            waiting[name] = sum(books.owner[h] == name for h in books.ended)
    assert spread(series) <= (STEP + STEP) * (Fraction(1, 5) + Fraction(1, 2))


def test_class_alone_gets_everything_and_owes_nothing_for_it() -> None:
    books = Books(limits(fair("gold:9,coal:1")))
    for handle in range(50):
        books.add(ask(handle, 20, of="coal"), "coal")
    for _ in range(40):
        plan = books.step()
        assert plan is not None
        assert plan.num_tokens >= STEP - 1
    books.add(ask(100, STEP * 3, of="gold"), "gold")
    waited = 0
    while books.prompt_tokens(books.step() or books.steps[0]).get("gold", 0) == 0:
        waited += 1
    assert waited <= 2
    first, last = (
        f'class_tokens_total{{class="{name}",kind="prompt"}}' for name in ("gold", "coal")
    )
    counters = books.sched.sharing.counters()
    assert counters[first] == sum(books.prompt_tokens(p).get("gold", 0) for p in books.steps)
    assert counters[last] == sum(books.prompt_tokens(p).get("coal", 0) for p in books.steps)
    assert (
        books.sched.sharing.gauges()['class_waiting{class="coal"}']
        == books.sched.report.counts()["waiting"]
    )


@pytest.mark.parametrize("policy", ["fcfs", "srpt-aging"])
def test_class_that_comes_back_waits_for_one_turn_of_each_other_at_most(policy: str) -> None:
    """Tokens computed for others before its first: at most the sum of their shares, and a chunk each."""
    weights = {"a": 4, "b": 2, "c": 1}
    books = Books(limits(fair("a:4,b:2,c:1"), policy=policy))
    handle = 0
    for name in ("a", "b"):
        for _ in range(60):
            handle += 1
            books.add(ask(handle, 61, of=name), name)
    for round_ in range(8):
        for _ in range(round_):
            books.step()
        handle += 1
        books.add(ask(handle, 5, of="c"), "c")
        others = 0
        while (got := books.prompt_tokens(books.step() or books.steps[0])).get("c", 0) == 0:
            others += sum(got.values())
        bound = sum(STEP * weights[n] / max(weights.values()) + STEP for n in ("a", "b")) + STEP
        assert others <= bound


def test_answers_are_charged_to_their_class_unless_switched_off() -> None:
    shares = {}
    for charged in (True, False):
        books = Books(limits(fair("a:1,b:1", charge_decode=charged)))
        for handle in range(8):
            books.add(ask(handle, 2, of="a", max_new=400), "a")
        while len(books.steps) < 4:
            books.step()
        for handle in range(100, 200):
            books.add(ask(handle, 30, of="ab"[handle % 2]), "ab"[handle % 2])
        del books.steps[:]
        for _ in range(120):
            books.step()
        got = [books.prompt_tokens(plan) for plan in books.steps]
        shares[charged] = sum(g.get("a", 0) for g in got) / sum(sum(g.values()) for g in got)
    assert shares[False] == pytest.approx(0.5, abs=0.05)
    assert shares[True] < 0.1, (
        "8 tokens of answers per step against 8 of prompts: b is owed all prompts"
    )


def test_large_request_of_one_class_is_not_kept_out_by_small_ones_of_another() -> None:
    """In both directions: for each order of classes, pages are short and the other class never stops asking."""
    for large, small in (("a", "b"), ("b", "a")):
        books = Books(limits(fair("a:5,b:1"), num_pages=60, schedule_conservativeness=0.3))
        handle = steps = 0
        while 0 not in books.ended:
            while sum(h not in books.ended for h in books.owner) < 12:
                handle += 1
                books.add(ask(handle, 6, of=small, max_new=12), small)
            if steps == 10:
                books.add(ask(0, 80, of=large, max_new=4), large)
            books.step()
            steps += 1
            assert steps < 200, "the large request starves"
        assert len(books.ended) > 5, "and the others go on"
        while len(books.ended) < len(books.owner):
            assert books.step() is not None, "the small ones starve"


def test_redeciding_policies_leave_every_class_one_prompt_under_way() -> None:
    books = Books(limits(fair("a:1,b:1"), policy="srpt-aging", max_partial_prefills=1))
    books.add(ask(0, 400, of="b"), "b")
    books.step()
    books.add(ask(1, 30, of="a"), "a")
    while 1 not in books.ended:
        books.step()
    assert 0 not in books.ended
    books.add(ask(2, 2, of="b"), "b")
    books.step()
    assert 2 in books.ended, "one step completes it"


def test_requests_without_a_known_class_are_in_the_middle() -> None:
    sched = Scheduler(limits(fair("a:1,b:1,c:1")))
    for handle, name in enumerate(("", "gold", "b")):
        sched.add(ask(handle, 2, of=name))
    assert sched.sharing.gauges() == {
        f'class_waiting{{class="{n}"}}': float(c) for n, c in (("a", 0), ("b", 3), ("c", 0))
    }


# ---- tenants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "srpt-aging", "short-first"])
def test_backlogged_tenants_share_by_weight_within_a_request_and_a_chunk(policy: str) -> None:
    rng = random.Random(policy)
    weights = {"x": 3.0, "y": 1.0}
    most = 70
    rules = fair(tenants={name: TenantRule(weight=w) for name, w in weights.items()})
    books = Books(limits(rules, policy=policy))
    handle = 0
    for _ in range(400):
        for name in weights:
            handle += 1
            size = rng.choice((1, most)) if name == "x" else rng.randint(1, most)
            books.add(ask(handle, size, by=name), name)
    series = [Fraction(0)]
    for _ in range(500):
        plan = books.step()
        assert plan is not None
        got = books.prompt_tokens(plan)
        series.append(series[-1] + Fraction(got.get("x", 0), 3) - Fraction(got.get("y", 0)))
    # One request and one chunk of each, and the answers' token (weight 2) of the requests that one chunk holds.
    assert spread(series) <= (most + STEP + 2 * STEP) * (Fraction(1, 3) + 1)


def test_pausing_tenant_earns_nothing() -> None:
    books = Books(limits(fair(tenants={})))
    for handle in range(100):
        books.add(ask(handle, 30, by="busy"), "busy")
    for _ in range(100):
        books.step()
    for handle in range(100, 200):
        books.add(ask(handle, 30, by="late"), "late")
    del books.steps[:]
    for _ in range(60):
        books.step()
    got = [books.prompt_tokens(plan) for plan in books.steps]
    late = sum(g.get("late", 0) for g in got)
    assert abs(late - sum(g.get("busy", 0) for g in got)) <= 2 * (30 + STEP)


def test_tenant_at_its_limit_is_skipped_and_blocks_no_other() -> None:
    rules = fair(
        tenants={"capped": TenantRule(max_running=1), "small": TenantRule(max_kv_tokens=100)}
    )
    books = Books(limits(rules, schedule_conservativeness=1 / 0.7))
    for handle in range(12):
        name = ("capped", "small", "free")[handle % 3]
        books.add(ask(handle, 10, by=name, max_new=30), name)
    most = {"capped": 0, "small": 0, "free": 0}
    while len(books.ended) < 12:
        plan = books.step()
        assert plan is not None
        now = dict.fromkeys(most, 0)
        for row in plan.rows:
            now[books.owner[row.handle]] += 1
        most = {name: max(most[name], now[name]) for name in most}
    assert most["capped"] == 1
    assert most["free"] == 4, "all of them run at once beside the others' queues"
    assert 2 <= most["small"] <= 3, (
        "100 tokens for requests of 40, which estimates let grow a little"
    )
    free = [h for h in range(12) if books.owner[h] == "free"]
    assert set(books.ended[:4]) & set(free), "no tenant waits for the capped one"
    counters = books.sched.sharing.counters()
    assert counters['tenant_throttled_total{reason="running"}'] == 3, (
        "once per request that had to wait"
    )
    assert counters['tenant_throttled_total{reason="kv"}'] >= 1


def test_request_larger_than_expected_still_runs_alone() -> None:
    books = Books(limits(fair(tenants={"t": TenantRule(max_kv_tokens=20)})))
    books.add(ask(0, 10, by="t", max_new=500), "t")
    while not books.ended:
        assert books.step() is not None


def test_full_queue_and_a_prompt_above_the_limit_are_refused() -> None:
    sched = Scheduler(limits(fair(tenants={"t": TenantRule(max_queued=2, max_kv_tokens=50)})))
    for handle in (0, 1):
        sched.add(ask(handle, 4, by="t"))
    with pytest.raises(
        TenantQueueFull, match=r"2 requests of tenant 't' are waiting, its limit is 2"
    ) as full:
        sched.add(ask(2, 4, by="t"))
    assert (full.value.param, full.value.retry_after_secs) == ("tenant", 1)
    sched.add(ask(3, 4, by="other"))
    with pytest.raises(PromptTooLong, match="may hold 50"):
        sched.add(ask(4, 50, by="t"))
    sched.abort(0)
    sched.add(ask(5, 4, by="t"))
    assert sched.sharing.counters()['tenant_throttled_total{reason="queue"}'] == 1


def test_nodes_own_requests_have_no_limits() -> None:
    """A health probe works where tenants that are not named are refused."""
    refusing = TenantRules(
        default=TenantRule(max_queued=0, max_kv_tokens=1), named={"t": TenantRule()}
    )
    books = Books(limits(FairnessRules(tenants=refusing)))
    with pytest.raises(PromptTooLong):
        books.sched.add(ask(0, 4, by="stranger"))
    books.add(ask(1, 4), "")
    while not books.ended:
        books.step()
    assert (
        books.sched.sharing.counters()['tenant_tokens_total{tenant="internal",kind="prompt"}'] == 4
    )


def test_tokens_are_counted_per_tenant_with_bounded_labels() -> None:
    rules = fair(tenants={"named": TenantRule()}, cached_token_weight=0.25, output_token_weight=3.0)
    books = Books(limits(rules))
    books.add(ask(0, 9, by="named", max_new=5), "named")
    while not books.ended:
        books.step()
    books.add(ask(1, 9, by="named", max_new=5, first=1000), "named")
    while len(books.ended) < 2:
        books.step()
    counters = books.sched.sharing.counters()
    got = [
        counters[f'tenant_tokens_total{{tenant="named",kind="{k}"}}']
        for k in ("prompt", "cached", "generated")
    ]
    assert got == [9 + 1, 8, 10]
    assert books.sched.sharing._counters[0]["named"] == 10 + 0.25 * 8 + 3.0 * 10
    for handle in range(2, 2 * MAX_LABELS):
        books.add(ask(handle, 1, by=f"t{handle}"), "x")
    while len(books.ended) < 2 * MAX_LABELS:
        books.step()
    labels = {
        key.split('"')[1]
        for key in books.sched.sharing.counters()
        if key.startswith("tenant_tokens")
    }
    assert len(labels) == MAX_LABELS + 2
    assert "other" in labels


def test_priority_orders_inside_a_tenant_and_not_between_tenants() -> None:
    rules = fair(tenants={})
    books = Books(limits(rules, priority=PriorityRule(enabled=True), step_tokens=4, page_size=1))
    for handle, (by, priority) in enumerate([("x", 0), ("x", 5), ("y", 0), ("x", 9)]):
        books.add(ask(handle, 4, by=by, priority=priority), by)
    while len(books.ended) < 4:
        books.step()
    assert books.ended[0] == 3
    assert books.ended[1] == 2, "x's second request waits for y's first, whatever its priority"
    assert books.ended[2:] == [1, 0]


# ---- together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(6))
def test_with_one_class_and_one_tenant_every_plan_is_the_same_as_without(
    policy: str, seed: int
) -> None:
    """Over random loads with priorities, preemption, retraction and overlap."""

    def plans(rules: FairnessRules) -> list[StepPlan]:
        rng = random.Random(seed)
        node = Node(
            limits(
                rules, policy=policy, num_pages=rng.randint(20, 60), max_running_requests=rng.choice((2, 4)),
                priority=PriorityRule(enabled=seed % 2 == 0, preemption_threshold=3), max_partial_prefills=2,
                schedule_conservativeness=0.2,
            ),
            depth=1 + seed % 2,
        )  # fmt: skip
        made: list[StepPlan] = []
        for handle in range(30):
            prompt = random_prompt(rng, [[1, 2, 3, 4, 1, 2]], 30)
            req = request(handle, prompt, rng.randint(1, 20), ignore_eos=True)
            node.sched.add(dataclasses.replace(req, priority=rng.choice((None, 0, 5, 9))))
            for _ in range(rng.randint(0, 3)):
                node.step()
                made.extend(node.flight)
        while node.step():
            made.extend(node.flight)
        assert len(node.finished) == 30
        return made

    assert plans(fair("only:1")) == plans(FairnessRules())


@pytest.mark.parametrize("seed", seeds(60))
def test_random_load_with_classes_and_tenants_gives_reference_tokens(seed: int) -> None:
    rng = random.Random(4000 + seed)
    page = rng.choice([1, 2, 4])
    caps = {
        "x": TenantRule(weight=3, max_running=2),
        "y": TenantRule(max_kv_tokens=60, max_queued=50),
    }
    rules = fair(rng.choice(("", "a:8,b:4,c:1", "a:1,b:1")), rng.choice((None, {}, caps)))
    node = Node(
        limits(
            rules, num_pages=rng.randint(16, 60) * (4 // page), page_size=page,
            max_running_requests=rng.choice((1, 2, 4)), step_tokens=page * rng.randint(1, 6),
            policy=rng.choice(sorted(POLICIES)), max_partial_prefills=rng.choice((1, 4)),
            priority=PriorityRule(enabled=rng.random() < 0.5, preemption_threshold=rng.choice((0, 3))),
            schedule_conservativeness=rng.choice((0.1, 1.0)), prefill_first=rng.random() < 0.2,
        ),
        depth=rng.choice((1, 2)),
    )  # fmt: skip
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want, gone = {}, set()
    for handle in range(40):
        prompt = random_prompt(rng, shared, min(24, node.sched.limits.capacity_tokens - 1))
        req = request(handle, prompt, rng.randint(1, 30), ignore_eos=rng.random() < 0.7)
        node.sched.add(
            dataclasses.replace(
                req,
                priority=rng.choice((None, 0, 5, 9)),
                priority_class=rng.choice("abc"),
                tenant=rng.choice("xyz"),
            )
        )
        room = node.sched.limits.capacity_tokens - len(prompt)
        want[handle] = reference(
            req.prompt, min(req.params.max_new_tokens, room), req.params.ignore_eos
        )
        for _ in range(rng.randint(0, 5)):
            node.step()
        if rng.random() < 0.1:
            victim = rng.randrange(handle + 1)
            if victim not in node.finished:
                gone.add(victim)
                node.sched.abort(victim)
    node.run()
    assert {h: out for h, out in node.outputs.items() if h not in gone} == {
        h: out for h, out in want.items() if h not in gone
    }
    node.sched.ledger().check_idle(node.limits.num_pages)
    if isinstance(node.sched.sharing, FairQueue):
        assert node.sched.sharing._waiting == [{} for _ in node.sched.sharing._waiting]
        assert not node.sched.sharing._limits._held_back


def test_decode_node_admits_prompts_on_their_way_by_class_and_tenant() -> None:
    rules = fair("a:3,b:1", {"rich": TenantRule(weight=1), "poor": TenantRule(max_running=1)})
    sched = Scheduler(limits(rules, role="decode", max_running_requests=10))
    for handle in range(40):
        plain = request(handle, [1000 + handle] * 16, 50, ignore_eos=True, room=handle)
        tenant = "poor" if handle in (20, 21, 22) else "rich"
        sched.add(
            dataclasses.replace(plain, priority_class="b" if handle < 20 else "a", tenant=tenant)
        )
    sched.plan()
    assert sched.report.counts()["transfer"] == 10
    got = sorted(SchedulerProbe(sched).state.transfer)
    assert sum(h < 20 for h in got) in (2, 3), "b came first, and has a quarter"
    assert sum(h in (20, 21, 22) for h in got) <= 1, (
        "a tenant's limit holds for pages on their way too"
    )


def test_preemption_makes_room_for_the_request_whose_turn_it_is() -> None:
    rules = fair("a:1,b:1", {"capped": TenantRule(max_running=1)})
    priority = PriorityRule(enabled=True, preemption_threshold=5)
    books = Books(limits(rules, max_running_requests=2, priority=priority))
    books.add(ask(0, 4, of="a", by="capped", max_new=60, priority=8), "capped")
    books.add(ask(1, 4, of="a", by="low", max_new=60, priority=0), "low")
    books.step()
    books.add(ask(2, 4, of="a", by="capped", max_new=2, priority=9), "capped")
    books.step()
    assert books.sched.report.counters()["preemptions_total"] == 0, (
        "its tenant is at its limit: no request gives way for it"
    )
    books.add(ask(3, 4, of="b", by="other", max_new=2, priority=9), "other")
    while 3 not in books.ended:
        books.step()
    assert books.sched.report.counters()["preemptions_total"] == 1
    while len(books.ended) < 4:
        assert books.step() is not None
