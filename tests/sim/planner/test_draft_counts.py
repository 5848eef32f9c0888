"""Counts of drafts in the outputs of a request: the last ones state all of its drafts."""

from __future__ import annotations

from dataclasses import replace

from baton.sched.types.events import EmittedTokens
from tests.sim.planner.test_drafts import plan_with, single
from tests.support.sched.sched_sim import VOCAB, Node, request


def counts_of_step(node: Node, drafts: list[int]) -> list[tuple[int, int] | None]:
    """Counts in the outputs of a step with these drafts."""
    plan = plan_with(node, drafts)
    node.sched.commit(plan, node.device.execute(plan))
    events = [event for event in node.sched.drain_events() if isinstance(event, EmittedTokens)]
    for event in events:
        node.outputs[event.handle] += event.tokens
    return [event.drafts for event in events]


def test_last_output_of_each_step_has_counts_of_all_drafts_so_far() -> None:
    node, answer = single()
    wrong = (answer[3] + 1) % VOCAB
    assert counts_of_step(node, [*answer[1:3], wrong]) == [None, None, (2, 1)]
    assert node.outputs[0] == answer[:4]
    wrong = (answer[4] + 1) % VOCAB
    assert counts_of_step(node, [wrong, wrong]) == [(2, 3)]
    assert counts_of_step(node, answer[5:7]) == [None, None, (4, 3)]


def test_output_of_step_without_drafts_has_no_counts() -> None:
    node, _ = single()
    plan = node.sched.plan(0.0)
    assert plan is not None
    node.sched.commit(plan, node.device.execute(plan))
    outputs = [event for event in node.sched.drain_events() if isinstance(event, EmittedTokens)]
    assert [output.drafts for output in outputs] == [None]


def test_drafts_behind_the_end_of_an_answer_count_as_rejected() -> None:
    node, answer = single()
    end = next(i for i in range(3, len(answer)) if answer[i] not in answer[:i])
    node = Node(node.limits, depth=1)
    req = request(0, [1, 2, 3], 30)
    params = replace(req.params, stop_token_ids=(answer[end],))
    node.sched.add(replace(req, params=params))
    while len(node.outputs.get(0, [])) < end - 1:
        node.step()
    drafted = answer[end - 1 : end + 3]
    assert counts_of_step(node, drafted) == [None, (2, 2)]
    assert node.outputs[0] == answer[: end + 1]
