"""Two production schedulers, a prefill and a decode node; a pretend transfer copies pages at random moments."""

from __future__ import annotations

import dataclasses
import random

import pytest

from baton.sched.policies import PolicyParams
from baton.sched.setup.limits import Limits
from tests.support.effort import seeds
from tests.support.sched.fake_transfer import FakeTransfer
from tests.support.sched.scenarios import Scenario, ScenarioRun, scenarios
from tests.support.sched.sched_sim import VOCAB, Node, random_prompt, reference, request


@pytest.mark.parametrize("seed", seeds(60))
def test_prefill_here_decode_there_equals_one_node(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])

    def node(role: str) -> Node:
        pages = rng.randint(14, 50) * (4 // page)
        lim = Limits(
            pages,
            page,
            rng.choice([1, 2, 6]),
            1000,
            page * rng.randint(1, 6),
            role=role,
            num_reserved_decode_tokens=rng.choice([0, 8]),
            schedule_conservativeness=rng.choice([0.1, 1.0]),
            radix_cache=rng.random() < 0.8,
        )
        return Node(lim, depth=rng.choice([1, 2]))

    p, d = node("prefill"), node("decode")
    transfer = FakeTransfer(p, d, rng, break_rate=rng.choice([0.0, 0.0, 0.05]))
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 16))] for _ in range(3)]
    want: dict[int, list[int]] = {}
    aborted: set[int] = set()
    longest = min(20, p.limits.capacity_tokens - 1, d.limits.capacity_tokens - 1)

    def turn() -> None:
        p.step()
        d.step()
        transfer.tick()

    for handle in range(30):
        prompt = random_prompt(rng, shared, longest)
        req = request(
            handle, prompt, rng.randint(1, 20), ignore_eos=rng.random() < 0.7, room=1000 + handle
        )
        for each in rng.sample([p, d], 2):
            each.sched.add(req)
            for _ in range(rng.randint(0, 3)):
                turn()
        room_left = d.limits.capacity_tokens - len(prompt)
        want[handle] = reference(
            req.prompt, min(req.params.max_new_tokens, room_left), req.params.ignore_eos
        )
        if rng.random() < 0.15:
            victim = rng.randrange(handle + 1)
            if victim not in d.finished:
                aborted.add(victim)
                d.sched.abort(victim)
                p.sched.abort(victim)
        p.sched.ledger()
        d.sched.ledger()
    for _ in range(5000):
        turn()
        counts = p.sched.report.counts()
        if d.sched.is_idle and sum(counts.values()) == counts["leased"]:
            break
    d.absorb()
    for handle, tokens in want.items():
        got = d.outputs.get(handle, [])
        if handle in aborted or 1000 + handle in transfer.broken:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens, f"seed {seed} request {handle}"
    for room in list(p.done):
        p.sched.release(room)
    for each in (p, d):
        each.absorb()
        assert each.sched.is_idle, each.sched.report.counts()
        each.sched.ledger().check_idle(each.limits.num_pages)


def test_full_decode_node_delays_no_prefill() -> None:
    p = Node(Limits(64, 4, 8, 100, 64, role="prefill"), depth=1)
    d = Node(Limits(8, 4, 8, 100, 64, role="decode"), depth=1)
    for handle in range(4):
        req = request(handle, [handle % VOCAB] * 20, 8, room=handle + 1)
        p.sched.add(req)
        d.sched.add(req)
    p.run()
    d.step()
    assert set(p.done) == {1, 2, 3, 4}
    assert set(d.opened) == {1, 2, 3, 4}
    assert set(d.grants) == {1}, "the decode node has room for one prompt only"


@pytest.mark.parametrize(
    ("policy", "granted"),
    [("fcfs", [1, 2, 3]), ("short-first", [3, 1, 2]), ("edf", [2, 3, 1]), ("lof", [2, 1, 3])],
)
@pytest.mark.parametrize("announced", [False, True])
def test_policy_orders_prompts_on_their_way_to_a_decode_node(
    policy: str, granted: list[int], announced: bool
) -> None:
    limits = Limits(100, 4, 1, 100, 64, role="decode", policy=policy, num_reserved_decode_tokens=0)
    d = Node(limits, depth=1)
    for handle, length, answer, due in (
        (0, 4, 1, 9.0),
        (1, 20, 9, 900.0),
        (2, 40, 20, 300.0),
        (3, 8, 4, 600.0),
    ):
        req = request(handle, [handle] * length, answer, ignore_eos=True, room=handle)
        d.sched.add(dataclasses.replace(req, arrival=0.0, ttft_deadline=due))
        if handle == 0:
            d.step()
        elif announced:
            d.sched.transfer_announced(handle)
    order = []
    for _ in range(100):
        for room in [room for room in d.grants if room not in order]:
            order.append(room)
            d.sched.transfer_committed(room, 1, 0, None)
        d.step()
    assert order == [0, *granted]


@pytest.mark.parametrize("announced", [False, True])
def test_prompts_pass_one_without_room_on_a_decode_node_but_not_for_ever(announced: bool) -> None:
    """A large prompt arrives while an answer runs that leaves no room for it; small prompts keep coming."""
    limits = Limits(
        100, 4, 32, 1000, 64, role="decode", radix_cache=False, num_reserved_decode_tokens=0
    )
    d = Node(limits, depth=1)

    def arrive(handle: int, length: int, answer: int) -> None:
        d.sched.add(request(handle, [1] * length, answer, ignore_eos=True, room=handle))
        if announced:
            d.sched.transfer_announced(handle)

    arrive(0, 60, 120)
    d.step()
    d.sched.transfer_committed(0, 1, 0, None)
    arrive(1, 340, 4)
    handle, order = 1, [0]
    while 1 not in order:
        handle += 1
        arrive(handle, 8, 40)
        d.step()
        for room in [room for room in d.grants if room not in order]:
            order.append(room)
            d.sched.transfer_committed(room, 1, 0, None)
        assert d.steps < 300, "the large prompt starves"
        d.sched.ledger()
    assert len(order) > 5, "the small prompts wait for the large one"
    assert 0 in d.finished


@pytest.mark.parametrize("skip", [0, 2])
def test_skip_ahead_bounds_the_prompts_that_a_decode_node_passes_over(skip: int) -> None:
    limits = Limits(
        100, 4, 32, 100, 64, role="decode", radix_cache=False, admission_skip_ahead=skip
    )
    d = Node(limits, depth=1)
    d.sched.add(request(0, [1] * 60, 240, ignore_eos=True))
    d.step()
    for handle in (1, 2, 3, 4, 5):
        d.sched.add(
            request(handle, [2] * (300 if handle < 4 else 4), 4, ignore_eos=True, room=handle)
        )
    d.step()
    assert not d.grants
    d.sched.abort(3)
    d.step()
    assert set(d.grants) == ({4, 5} if skip else set())


def test_decode_node_reports_the_order_of_arriving_prompts() -> None:
    params = PolicyParams(lpm_degrade_threshold=2)
    d = Node(Limits(4, 4, 1, 100, 64, role="decode", policy="lpm", policy_params=params), depth=1)
    for handle in range(4):
        d.sched.add(request(handle, [1] * 12, 1, room=handle))
    d.step()
    active = [
        name
        for name, is_it in d.sched.report.gauges().items()
        if is_it and name.startswith("schedule_policy")
    ]
    assert active == ['schedule_policy_active{policy="fcfs"}']
    assert d.sched.report.counters()["schedule_policy_degraded_total"] == 1


def test_two_full_nodes_do_not_wait_for_each_other() -> None:
    """D set pages aside for the prompt that P has no room for, while P holds the one that D has no room for."""
    p = Node(Limits(8, 4, 8, 100, 64, role="prefill"), depth=1)
    d = Node(Limits(8, 4, 8, 100, 64, role="decode", num_reserved_decode_tokens=0), depth=1)
    transfer = FakeTransfer(p, d, random.Random(0), 0.0)
    late, early = (
        request(handle, [handle] * 20, 3, ignore_eos=True, room=handle) for handle in (1, 2)
    )
    for req in (late, early):
        d.sched.add(req)
        d.step()
    assert set(d.grants) == {1}
    p.sched.add(early)
    p.run()
    p.sched.add(late)
    for _ in range(60):
        p.step()
        d.step()
        transfer.tick()
    d.absorb()
    assert d.finished.keys() == {1, 2}
    assert transfer.revoked == 1
    assert d.outputs == {req.handle: reference(req.prompt, 3, True) for req in (late, early)}
    for node in (p, d):
        node.sched.ledger().check_idle(8)


@pytest.mark.parametrize("scenario", [w for w in scenarios(0) if w.role == "pair"][5::6], ids=str)
def test_no_lease_ends_before_its_time_while_both_nodes_live(scenario: Scenario) -> None:
    run = ScenarioRun(scenario)
    run.abort_rate = run.suspend_rate = 0.0
    run.run(60)
    assert run.transfer is not None
    assert run.transfer.expired == 0, scenario


@pytest.mark.parametrize("depth", [1, 2])
def test_answers_that_outgrow_p_take_no_page_that_d_may_be_reading(depth: int) -> None:
    """P also answers a request of its own, the oldest, whose answer is longer than expected."""
    p = Node(Limits(12, 4, 8, 100, 8, role="prefill", schedule_conservativeness=0.01), depth=depth)
    own = request(0, [3] * 5, 40, ignore_eos=True, is_length_known=False)
    p.sched.add(own)
    for handle in (1, 2):
        p.sched.add(request(handle, [handle] * 29, 1, room=handle))
    for _ in range(80):
        p.step()
        for book in p.final_pages.values():
            for page, content in book.values():
                assert p.device.memory[page][: len(content)] == content, (
                    "an announced page was given away"
                )
        for room in list(p.done):
            del p.done[room], p.final_pages[room]
            p.sched.release(room)
    assert p.sched.report.counters()["retractions_total"] > 0
    assert p.sched.is_idle
    assert p.outputs[0] == reference(own.prompt, 40, True)
    p.sched.ledger().check_idle(12)


def test_abort_ends_a_lease_that_no_decode_node_opened() -> None:
    p = Node(Limits(8, 4, 8, 100, 64, role="prefill"), depth=1)
    for handle in (1, 2):
        p.sched.add(request(handle, [handle] * 12, 3, room=handle + 100))
    p.run()
    assert p.sched.leased("r2") == [2]
    assert p.sched.in_rooms([102, 7, 101]) == [2, 1]
    p.sched.abort(1)
    p.absorb()
    (aborted,) = p.aborts
    assert aborted.req.handle == 1
    assert p.sched.ledger().held + p.sched.ledger().in_transfer == 6, (
        "D may be reading until the runtime says it is not"
    )
    p.sched.release(101)
    assert p.sched.leased(None) == [2]
    assert 1 in p.finished, "it had been answered before: nothing more is said"
    p.sched.release(102)
    p.sched.ledger().check_idle(8)


@pytest.mark.parametrize("depth", [1, 2])
def test_room_that_ends_before_its_prompt_is_computed_leaves_no_page_leased(depth: int) -> None:
    for turns in range(6):
        p = Node(Limits(16, 4, 8, 100, 8, role="prefill"), depth=depth)
        p.sched.add(request(1, [1] * 20, 3, room=101))
        p.sched.add(request(2, [1] * 20, 3, room=102))
        for _ in range(turns):
            p.step()
        p.sched.release(101, "CLIENT_GONE")
        p.run()
        assert p.sched.leased(None) == [2], f"released after {turns} turns"
        p.sched.release(102)
        assert p.sched.is_idle
        p.sched.ledger().check_idle(16)


def test_damaged_pages_serve_no_later_prompt_and_are_free_when_their_users_end() -> None:
    p = Node(Limits(40, 4, 8, 100, 8, role="prefill"), depth=2)
    first = [1] * 20
    p.sched.add(request(1, first, 3, room=101))
    p.sched.add(request(2, first, 3, room=102))
    p.run()
    p.sched.add(
        request(3, first + [2] * 40, 3, room=103)
    )  # has the same pages, and computes for some steps more
    p.step()
    p.sched.release(101, "CHECKSUM")
    p.sched.ledger()
    p.sched.add(request(4, first, 3, room=104))
    p.sched.add(request(5, first, 3, room=105))
    p.run()
    assert (p.cached[3], p.cached[4], p.cached[5]) == (20, 0, 16), (
        "only what was computed again is shared"
    )
    assert p.sched.report.counters()["kv_quarantined_pages_total"] >= 5
    assert sorted(p.done) == [101, 102, 103, 104, 105]
    for room in (102, 103, 104, 105):
        p.sched.release(room)
    p.sched.ledger().check_idle(40)
    p.sched.flush_cache()
    assert p.sched.ledger().free == 40


def test_damaged_pages_do_not_come_back_from_the_host() -> None:
    p = Node(Limits(10, 4, 4, 100, 64, role="prefill", host_pages=40), depth=1)
    prompt = [1] * 30
    for handle, tokens in enumerate([prompt, [2] * 36, prompt]):
        p.sched.add(request(handle, tokens, 3, room=100 + handle))
        p.run()
        p.sched.release(100 + handle, "CHECKSUM" if handle == 2 else "DONE")
    assert p.cached[2] == 28, "by way of the host"
    p.sched.add(request(3, prompt, 3, room=103))
    p.run()
    assert p.cached[3] == 0
    p.sched.release(103)
    p.sched.ledger().check_idle(10)


def test_whole_prompt_in_ds_cache_needs_no_page() -> None:
    d = Node(Limits(32, 4, 4, 100, 64, role="decode"), depth=1)
    prompt = [1, 2, 3, 4, 1, 2, 3, 4]
    d.sched.add(request(0, prompt, 2, ignore_eos=True, room=1))
    d.step()
    grant = d.grants.pop(1)
    assert (grant.start_page, len(grant.pages)) == (0, 2)
    p = Node(Limits(32, 4, 4, 100, 64, role="prefill"), depth=1)
    p.sched.add(request(0, prompt, 2, ignore_eos=True, room=1))
    p.run()
    for at, page in enumerate(grant.pages):
        d.device.memory[page] = list(p.final_pages[1][at][1])
    d.sched.transfer_committed(1, p.done[1].token, 0, None)
    d.run()
    d.sched.add(request(2, prompt, 2, ignore_eos=True, room=2))
    d.step()
    assert (d.grants[2].start_page, len(d.grants[2].pages)) == (2, 0)


def test_transfer_that_had_ended_before_its_abort_holds_no_page() -> None:
    """The runtime's "committed" was on its way when the engine said abort: there will be no other event."""
    d = Node(Limits(32, 4, 4, 100, 64, role="decode"), depth=1)
    d.sched.add(request(0, [1, 2, 3, 4, 5], 2, room=1))
    d.step()
    assert 1 in d.grants
    d.sched.abort(0)
    assert d.sched.report.counts()["aborting"] == 1
    d.sched.transfer_committed(1, 3, 0, None)
    assert d.sched.is_idle
    d.sched.ledger().check_idle(32)


def test_pages_are_granted_only_when_no_earlier_step_can_write_to_them() -> None:
    d = Node(
        Limits(6, 2, 4, 100, 64, role="decode", radix_cache=False, num_reserved_decode_tokens=0),
        depth=2,
    )
    prompt = next(
        p for p in ([a, b] for a in range(VOCAB) for b in range(VOCAB)) if 3 <= len(_answer(p)) <= 5
    )
    d.sched.add(request(0, prompt, 8))
    d.step()
    d.sched.add(request(1, [1] * 11, 1, room=7))
    while 0 not in d.finished:
        d.step()
        assert not d.grants
    assert d.flight, "the end of the answer was noticed one step late"
    assert 0 in [row.handle for row in d.flight[0].rows]
    plan = d.sched.plan()
    d.absorb()
    assert plan is None
    assert not d.grants, "the step in flight still writes to a page of the finished request"
    d.step()
    assert len(d.grants[7].pages) == 6


def _answer(prompt: list[int]) -> list[int]:
    return reference(request(0, prompt, 8).prompt, 8, False)
