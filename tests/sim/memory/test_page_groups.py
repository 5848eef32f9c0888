"""Random scenarios of tests.support.sched.scenarios with several page groups: windows, chunks, blocks of several pages.

The pretend device checks what every row reads of each group, the watched scheduler who holds which block.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Iterable, Iterator

import pytest

from baton.cache.group_pages import GroupRule
from baton.sched.setup.limits import Limits
from baton.sched.types.sequence import Seq
from tests.support.probes import GroupPagesProbe
from tests.support.sched.scenarios import Scenario, run_scenario, scenarios
from tests.support.sched.sched_sim import VOCAB, Node, reference, request

GROUPS = {
    "window": (GroupRule("window", 5, 1),),
    "wide": (GroupRule("window", 8, 3),),
    "chunk": (GroupRule("chunk", 8, 2),),
    "both": (GroupRule("window", 1, 1), GroupRule("chunk", 12, 2)),
}


def with_groups(first_seed: int, *, is_tight: bool = False) -> list[Scenario]:
    names = list(GROUPS)
    return [
        dataclasses.replace(scenario, groups=GROUPS[names[place % len(names)]])
        for place, scenario in enumerate(scenarios(first_seed, is_tight))
    ]


@pytest.mark.parametrize("scenario", with_groups(500)[::5], ids=str)
def test_every_invariant_holds_with_several_groups(scenario: Scenario) -> None:
    assert run_scenario(scenario, 120).steps >= 0


@pytest.mark.parametrize("scenario", with_groups(800, is_tight=True)[::7], ids=str)
def test_every_invariant_holds_in_short_queues(scenario: Scenario) -> None:
    assert run_scenario(scenario, 120).steps >= 0


STATES = {
    "wide": (GroupRule("state", 8, 3),),
    "narrow": (GroupRule("state", 1, 1),),
    "large": (GroupRule("state", 64, 40),),
    "behind a window": (GroupRule("window", 5, 2), GroupRule("state", 8, 3)),
    "none spared": (GroupRule("state", 10_000, 2),),
    "rolling": (GroupRule("state", 10_000, 3, 1),),
    "rolling behind others": (GroupRule("window", 5, 1), GroupRule("state", 24, 2, 7)),
}


def with_snapshots(first_seed: int, *, is_tight: bool = False) -> list[Scenario]:
    names = list(STATES)
    return [
        dataclasses.replace(scenario, groups=STATES[names[place % len(names)]])
        for place, scenario in enumerate(scenarios(first_seed, is_tight))
    ]


@pytest.mark.parametrize(
    "scenario", [*with_snapshots(900)[::4], *with_snapshots(950, is_tight=True)[::4]], ids=str
)
def test_every_invariant_holds_with_snapshots_of_states(scenario: Scenario) -> None:
    assert run_scenario(scenario, 120).steps >= 0


def test_prefix_is_found_up_to_a_snapshot() -> None:
    node = Node(limits_of(400, (GroupRule("state", 32, 5),)), depth=2)
    system = [n % 5 for n in range(100)]
    answer_all(node, [system + [1] * 27, system + [2] * 9, system + [1] * 27])
    # Of the first prompt at 32, 64, 96 and, in front of its last token, 124.
    assert node.cached == {0: 0, 1: 96, 2: 124}
    assert node.device.snapshots_read == 2


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 40])
@pytest.mark.parametrize("depth", [1, 2])
def test_next_turn_is_found_up_to_the_last_border_of_the_answer(length: int, depth: int) -> None:
    node = Node(limits_of(400, (GroupRule("state", 10_000, 5, 4),)), depth=depth)
    prompt = [n % 5 for n in range(22)]
    answer = reference(array("i", prompt), length, True)
    node.sched.add(request(0, prompt, length, ignore_eos=True))
    node.run()
    answer_all(node, [[*prompt, *answer, 1, 2, 3]])
    # No row has computed the answer's last token, and none of more than the prompt's last page.
    assert node.cached[1] == (22 + length - 1) // 4 * 4
    assert node.device.snapshots_read == 1


def test_rolling_snapshot_goes_before_a_request_is_retracted() -> None:
    """Two answers that fill the pool, but for what their snapshots take."""
    node = Node(limits_of(40, (GroupRule("state", 10_000, 8, 4),), watermark=0.0), depth=1)
    for handle in range(2):
        node.sched.add(request(handle, [handle] * 5, 70, ignore_eos=True))
    most = 0
    while node.step():
        most = max(most, *(len(h.rolling) for s in node.probe.seqs.values() for h in s.further), 0)
        node.sched.ledger()
    assert most == 8
    assert node.sched.report.counters()["retractions_total"] == 0


def test_rolling_snapshots_of_answers_leave_room_for_those_of_prompts() -> None:
    """Two answers whose snapshots would fill the share, and prompts that come beside them."""
    rule = GroupRule("state", 10_000, 5, 4)
    node = Node(limits_of(200, (rule,), state_snapshot_share=0.05), depth=1)
    for handle in range(2):
        node.sched.add(request(handle, [handle] * 5, 120, ignore_eos=True))
    for _ in range(20):
        node.step()
    prompt = [n % 5 for n in range(22)]
    for handle in (2, 3):
        node.sched.add(request(handle, prompt, 1, ignore_eos=True))
        for _ in range(8):
            node.step()
    assert node.cached == {0: 0, 1: 0, 2: 0, 3: 20}


def test_prompt_beside_one_that_begins_alike_leaves_its_end() -> None:
    """The tree has the tokens of either without a snapshot in front of the other."""
    node = Node(limits_of(400, (GroupRule("state", 10_000, 5, 64),)), depth=2)
    prompts = [[n % 5 for n in range(22)] + [end] * 19 for end in (1, 2)]
    for handle, prompt in enumerate(prompts):
        node.sched.add(request(handle, prompt, 6, ignore_eos=True))
    node.run()
    answer_all(node, prompts)
    assert node.cached == {0: 0, 1: 0, 2: 40, 3: 40}


def test_snapshots_keep_to_their_share_of_the_pool() -> None:
    rule = GroupRule("state", 4, 5)
    node = Node(limits_of(200, (rule,), state_snapshot_share=0.25), depth=1)
    memory = node.probe.memory
    (group,) = memory.cache.groups
    for handle in range(6):
        node.sched.add(request(handle, [handle % 5, handle] * 30, 20, ignore_eos=True))
    most = 0
    while node.step():
        held = sum(len(h.private) for seq in node.probe.seqs.values() for h in seq.further)
        most = max(most, held + group.evictable_pages + group.locked_pages)
        node.sched.ledger()
    assert 0 < most <= 50
    assert most % rule.width == 0


def test_without_a_share_no_snapshot_is_taken_and_nothing_is_found() -> None:
    node = Node(limits_of(200, (GroupRule("state", 4, 2),), state_snapshot_share=0.0), depth=1)
    answer_all(node, [[1, 2, 3] * 20] * 2)
    assert node.cached == {0: 0, 1: 0}


def test_reports_state_the_pages_of_each_kind() -> None:
    """That those held are the ones of the sequences' tables is checked by every scenario above."""
    groups = (GroupRule("window", 16, 2), GroupRule("state", 16, 3), GroupRule("window", 6, 1))
    node = Node(limits_of(300, groups), depth=2)
    answer_all(node, [[handle % 3] * 30 + [handle] * 20 for handle in range(12)])
    usage = node.sched.report.load().further_pages
    cached = node.sched.ledger().cached
    assert 0 < usage["window"].cached + usage["state"].cached < cached
    gauges = node.sched.report.gauges()
    assert gauges['kv_further_pages{kind="window",state="held"}'] == 0
    assert gauges['kv_further_pages{kind="state",state="cached"}'] == usage["state"].cached > 0


# ---- hits, memory in use, and long runs ----


def limits_of(pages: int, groups: tuple[GroupRule, ...], **values: object) -> Limits:
    return Limits(
        pages,
        page_size=4,
        max_running_requests=8,
        max_queued_requests=100_000,
        step_tokens=32,
        page_groups=groups,
        **values,  # type: ignore[arg-type]
    )


def answer_all(node: Node, prompts: Iterable[list[int]], most_waiting: int = 6) -> None:
    """Answer prompts of 6 tokens each, a few at a time."""
    for handle, prompt in enumerate(prompts, start=len(node.finished)):
        req = request(handle, prompt, 6, ignore_eos=True)
        node.sched.add(req)
        while len(node.probe.seqs) > most_waiting:
            assert node.step()
        assert handle in node.probe.seqs or node.outputs[handle] == reference(req.prompt, 6, True)
    node.run()


WINDOW = GroupRule("window", 16, 2)


def test_prefix_is_found_whose_window_its_own_prompt_has_left_behind() -> None:
    node = Node(limits_of(400, (WINDOW,)), depth=2)
    system = [n % 5 for n in range(200)]
    answer_all(node, [system + [1] * 60])
    cached = node.sched.ledger().cached
    # What every layer keeps: 66 full pages of prompt and answer, in both groups but for the last one.
    assert cached >= 66 + 2 * 60
    answer_all(node, [system + [2] * 60, system[:101] + [3] * 9])
    assert node.cached == {0: 0, 1: 200, 2: 100}


def test_pages_left_behind_are_the_first_to_be_evicted_unless_a_second_prompt_used_them() -> None:
    node = Node(limits_of(400, (WINDOW,)), depth=1)
    system = [n % 5 for n in range(80)]
    answer_all(node, [system + [1] * 60, system + [2] * 60])
    cache = node.probe.memory.cache
    (group,) = cache.groups
    before = node.sched.ledger().cached
    free = node.sched.ledger().free
    num_passed = group.width * len(GroupPagesProbe(group).passed)
    assert cache.evict(num_passed) == num_passed
    assert node.sched.ledger().free == free + num_passed
    assert node.sched.ledger().cached == before - num_passed
    answer_all(node, [system + [3] * 60])
    assert node.cached[2] == 80, "the window in front of the branch was kept"


def test_pool_is_full_when_the_first_request_waits_for_pages() -> None:
    """A few long prompts: the windows take what they need, and the rest is group 0's."""
    node = Node(limits_of(300, (WINDOW,), schedule_conservativeness=0.1), depth=1)
    for handle in range(8):
        node.sched.add(request(handle, [handle % 5, handle] * 60, 40, ignore_eos=True))
    used = []
    while node.step():
        ledger = node.sched.ledger()
        if node.sched.report.counts()["waiting"]:
            used.append((ledger.held + ledger.cached) / 300)
    assert max(used) >= 0.9


def prompts_with_shared_beginnings(rng: random.Random, count: int) -> Iterator[list[int]]:
    """System prompts by popularity, and conversations that go on."""
    systems = [[rng.randrange(VOCAB) for _ in range(rng.randint(16, 120))] for _ in range(12)]
    turns: list[list[int]] = []
    for _ in range(count):
        if turns and rng.random() < 0.5:
            prompt = turns.pop(rng.randrange(len(turns)))
        else:
            prompt = list(systems[min(int(rng.expovariate(0.4)), 11)])
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        yield prompt
        answer = reference(array("i", prompt), 6, True)
        if len(prompt) < 200:
            turns = [*turns[-20:], prompt + answer]


@pytest.mark.parametrize("count", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_as_many_tokens_are_found_as_with_all_pages_kept(count: int) -> None:
    """Pools of equal bytes: with one group a page holds all layers, and is as large as three pages."""
    hits = []
    for groups, pages in [((WINDOW,), 900), ((), 300)]:
        node = Node(limits_of(pages, groups), depth=2)
        answer_all(node, prompts_with_shared_beginnings(random.Random(5), count))
        hits.append(node.sched.hit_tokens["device"] + node.sched.hit_tokens["in_flight"])
        node.sched.ledger().check_idle(pages)
    assert hits[0] >= 0.95 * hits[1]


def test_prefix_that_is_matched_takes_its_window_from_what_is_evictable() -> None:
    """A request that waits is told the same pages as one that is admitted, or it would not preempt."""
    node = Node(limits_of(400, (WINDOW,)), depth=1)
    answer_all(node, [[n % 5 for n in range(80)] + [1] * 60])
    memory = node.probe.memory
    for shared in (0, 3, 40, 80):
        prompt = [n % 5 for n in range(shared)] + [4] * 20
        seq = Seq(request(9, prompt, 6), array("i", prompt), 6)
        told = memory.available_to(seq)
        match = memory.match_prefix(seq, seq.reusable_tokens)
        assert match.num_tokens == shared // 4 * 4
        assert memory.available == told
        memory.drop_match(match)
        assert memory.available == 400
