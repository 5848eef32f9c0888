"""The driver between scheduler and transfer runtime: what goes wrong with one room ends that room and nothing else."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from baton.disagg.calls import GroupGrant, GroupIds, GroupPages, TransferCall
from baton.disagg.events import (
    GrantRevoked,
    NodeEvent,
    RoomAborted,
    RoomAnnounced,
    RoomCommitted,
    RoomFailed,
    RoomReleased,
    read_event,
)
from baton.disagg.transfer_driver import (
    DecodeTransferDriver,
    PrefillTransferDriver,
    _payload_of,
    error_of,
    read_first_token,
)
from baton.errors import PromptTooLong, QueueFull
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.events import EmittedTokens, GrantPages, PagesFinal, PrefillDone
from baton.sched.types.request import FinishReason
from baton.sched.types.request_timeline import PulledPages
from tests.support.sched.sched_sim import Node, request

VOCAB = 100
GROUPS = GroupIds((5,))
PAGES = (GroupPages(5, 0, 3, 4),)
PULLED = PulledPages("shm", 3, 1, 0.1, 0.1)
GOOD = msgspec.msgpack.encode([42, 0])


class Runtime:
    """A TransferNode whose calls are recorded; those named in `broken` raise."""

    def __init__(self, **broken: Exception) -> None:
        self.broken = broken
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[NodeEvent] = []

    def call(self, call: TransferCall) -> None:
        name = call.__struct_config__.tag
        self.calls.append((name, *msgspec.structs.astuple(call)))
        if name in self.broken:
            raise self.broken[name]

    def poll(self, _max: int) -> list[NodeEvent]:
        events = self.events
        self.events = []
        return events


FULL = RuntimeError("8320 rooms are live or not yet polled, which is this node's limit (max_rooms)")


def decode(node: Runtime) -> tuple[Scheduler, DecodeTransferDriver]:
    return Scheduler(Limits(32, 4, 4, 100, 64, role="decode")), DecodeTransferDriver(
        node, 60.0, GROUPS, VOCAB
    )


def carry_out(
    sched: Scheduler, driver: DecodeTransferDriver | PrefillTransferDriver
) -> list[EmittedTokens]:
    said = []
    while events := sched.drain_events():
        for event in events:
            if isinstance(event, EmittedTokens):
                said.append(event)
            driver.apply_event(event, sched)
    return said


def granted(node: Runtime, rooms: int = 1) -> tuple[Scheduler, DecodeTransferDriver]:
    """A decode node whose rooms 101.. have pages."""
    sched, driver = decode(node)
    for handle in range(1, rooms + 1):
        sched.add(request(handle, [handle] * 12, 3, room=100 + handle))
    carry_out(sched, driver)
    sched.plan()
    carry_out(sched, driver)
    return sched, driver


def errors(driver: DecodeTransferDriver | PrefillTransferDriver, kind: str) -> float:
    return driver.counters[f'kv_room_errors_total{{kind="{kind}"}}']


def test_full_runtime_refuses_the_request_on_p() -> None:
    node = Runtime(offer=FULL)
    driver = PrefillTransferDriver(node, 60.0, GROUPS)
    with pytest.raises(QueueFull, match="NO_CAPACITY: 8320 rooms") as refused:
        driver.accept(request(1, [1, 2, 3], 3, room=101))
    assert refused.value.retry_after_secs == 2
    assert errors(driver, "refused") == 1


def test_full_runtime_ends_the_request_on_d() -> None:
    sched, driver = decode(Runtime(open=FULL))
    sched.add(request(1, [1, 2, 3], 3, room=101))
    (said,) = carry_out(sched, driver)
    assert said.error is not None
    assert (said.error[0], said.retry_after_secs) == ("queue_full", 2)
    assert errors(driver, "refused") == 1
    assert sched.is_idle
    sched.ledger().check_idle(32)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "not a first token"),
        (b"\xc1garbage", "not a first token"),
        (msgspec.msgpack.encode({"token": 1}), "not a first token"),
        (msgspec.msgpack.encode([-7, 0]), "not a first token"),
        (msgspec.msgpack.encode([2**40, 0]), "not a first token"),
        (msgspec.msgpack.encode([1, 2**40]), "not a first token"),
        (msgspec.msgpack.encode([VOCAB, 0]), "token id 100 is outside the vocabulary of 100"),
        (msgspec.msgpack.encode([1, 0, -0.5, [VOCAB + 1], [-0.5]]), "token id 101 is outside"),
        (msgspec.msgpack.encode([1, 0, -0.5, [1, 2], [-0.5]]), "2 top tokens have 1 logprobs"),
    ],
)
def test_first_token_that_cannot_be_used_fails_its_room_only(payload: bytes, why: str) -> None:
    node = Runtime()
    sched, driver = granted(node, rooms=2)
    node.events = [
        RoomCommitted(101, payload, PAGES, PULLED),
        RoomCommitted(102, GOOD, PAGES, PULLED),
    ]
    driver.poll(sched)
    failed, other = carry_out(sched, driver)
    assert failed.error is not None
    assert failed.error[0] == "kv_transfer_failed"
    assert why in failed.error[1]
    assert (other.handle, list(other.tokens)) == (2, [42])
    assert errors(driver, "payload") == 1
    sched.abort(2)
    sched.ledger().check_idle(32)


@pytest.mark.parametrize("completes", [True, False, None])
def test_first_token_that_completes_its_grammar_ends_the_answer(completes: bool | None) -> None:
    """None: a node of an earlier version, which does not say it."""
    node = Runtime()
    sched, driver = granted(node)
    fields = [42, 0, None, [], []]
    payload = msgspec.msgpack.encode(fields if completes is None else [*fields, completes])
    node.events = [RoomCommitted(101, payload, PAGES, PULLED)]
    driver.poll(sched)
    (first,) = carry_out(sched, driver)
    assert list(first.tokens) == [42]
    assert first.finish is (FinishReason.STOP if completes else None)
    if not completes:
        sched.abort(1)
    assert sched.is_idle
    sched.ledger().check_idle(32)


TWO_GROUPS = GroupIds((5, 8))
"""Ids of the page groups whose numbers are 0 and 1 to the scheduler."""


def test_pages_of_each_group_are_published_and_finished_under_its_id() -> None:
    node = Runtime()
    driver = PrefillTransferDriver(node, 60.0, TWO_GROUPS)
    sched = Scheduler(Limits(32, 4, 4, 100, 64, role="prefill"))
    req = request(1, [1] * 12, 3, room=101)
    driver.apply_event(PagesFinal(req, 0, array("i", [7, 9])), sched)
    driver.apply_event(PagesFinal(req, 4, array("i", [3]), group=1), sched)
    done = PrefillDone(
        req=req,
        total_pages=2,
        last_page_tokens=6,
        token=42,
        cached_tokens=0,
        logprobs=None,
        further=((4, 5),),
    )
    driver.apply_event(done, sched)
    assert node.calls == [
        ("publish", 101, 5, 0, array("i", [7, 9]).tobytes()),
        ("publish", 101, 8, 4, array("i", [3]).tobytes()),
        ("finish", 101, (GroupPages(5, 0, 2, 6), GroupPages(8, 4, 5, 6)), _payload_of(done)),
    ]


def test_pages_of_all_groups_are_granted_by_one_call() -> None:
    node = Runtime()
    driver = DecodeTransferDriver(node, 60.0, TWO_GROUPS, VOCAB)
    further = ((4, array("i", [3])),)
    event = GrantPages(request(1, [1] * 12, 3, room=101), 1, array("i", [9, 2]), further)
    driver.apply_event(event, Scheduler(Limits(32, 4, 4, 100, 64, role="decode")))
    full = GroupGrant(5, 1, array("i", [9, 2]).tobytes())
    assert node.calls == [("grant", 101, (full, GroupGrant(8, 4, array("i", [3]).tobytes())))]


WITH_STATE = GroupIds.of({"groups": [{"id": 5, "kind": "full"}, {"id": 8, "kind": "state"}]})


def test_both_nodes_state_how_many_tokens_a_state_has_seen() -> None:
    p = Runtime()
    d = Runtime()
    req = request(1, [1] * 14, 3, room=101)
    done = PrefillDone(
        req=req,
        total_pages=4,
        last_page_tokens=2,
        token=42,
        cached_tokens=0,
        logprobs=None,
        further=((0, 3),),
    )
    driver = PrefillTransferDriver(p, 60.0, WITH_STATE)
    driver.apply_event(done, Scheduler(Limits(32, 4, 4, 100, 64, role="prefill")))
    pages = (GroupPages(5, 0, 4, 2), GroupPages(8, 0, 3, 0, tokens_at=14))
    assert p.calls == [("finish", 101, pages, _payload_of(done))]
    granted = GrantPages(req, 4, array("i"), ((0, array("i", [9, 7, 2])),))
    decode_driver = DecodeTransferDriver(d, 60.0, WITH_STATE, VOCAB)
    decode_driver.apply_event(granted, Scheduler(Limits(32, 4, 4, 100, 64, role="decode")))
    state = GroupGrant(8, 0, array("i", [9, 7, 2]).tobytes(), tokens_at=14)
    assert d.calls == [("grant", 101, (GroupGrant(5, 4, b""), state))]


def test_event_that_leaves_a_group_out_is_an_error_of_the_scheduler() -> None:
    driver = DecodeTransferDriver(Runtime(), 60.0, TWO_GROUPS, VOCAB)
    event = GrantPages(request(1, [1] * 12, 3, room=101), 0, array("i", [9]))
    with pytest.raises(ValueError, match="shorter"):
        driver.apply_event(event, Scheduler(Limits(32, 4, 4, 100, 64, role="decode")))


def test_prefill_node_says_that_its_token_completes_the_grammar() -> None:
    for completes in (True, False):
        done = PrefillDone(
            req=request(1, [1, 2, 3], 3, room=101),
            total_pages=1,
            last_page_tokens=3,
            token=7,
            cached_tokens=0,
            logprobs=None,
            completes_grammar=completes,
        )
        first = read_first_token(_payload_of(done), VOCAB)
        assert (first.token, first.completes_grammar) == (7, completes)


@pytest.mark.parametrize(
    "error", [ValueError("page 99 is outside the pool"), RuntimeError("the runtime is closed")]
)
def test_call_that_fails_on_d_ends_its_request(error: Exception) -> None:
    node = Runtime(grant=error)
    sched, driver = decode(node)
    sched.add(request(1, [1] * 12, 3, room=101))
    carry_out(sched, driver)
    sched.plan()
    (said,) = carry_out(sched, driver)
    assert said.error is not None
    assert said.error[0] == "kv_transfer_failed"
    assert node.calls[-1] == ("abort", 101, "TRANSPORT_BROKEN")
    node.events = [RoomAborted(101)]
    driver.poll(sched)
    sched.ledger().check_idle(32)


@pytest.mark.parametrize("call", ["publish", "finish"])
def test_call_that_fails_on_p_ends_its_request(call: str) -> None:
    runtime = Runtime(**{call: RuntimeError("the runtime is 65536 commands behind")})
    p, driver = (
        Node(Limits(8, 4, 8, 100, 64, role="prefill"), depth=1),
        PrefillTransferDriver(runtime, 60.0, GROUPS),
    )
    req = request(1, [1] * 12, 3, room=101)
    driver.accept(req)
    p.sched.add(req)
    plan = p.sched.plan()
    assert plan is not None
    p.sched.commit(plan, p.device.execute(plan))
    carry_out(p.sched, driver)
    assert ("abort", 101, "TRANSPORT_BROKEN") in runtime.calls
    runtime.events = [RoomReleased(101, "TRANSPORT_BROKEN")]
    driver.poll(p.sched)
    p.sched.ledger().check_idle(8)


def test_room_given_up_by_one_rank_fails_its_request() -> None:
    node = Runtime()
    sched, driver = granted(node)
    node.events = [RoomAborted(101)]
    driver.poll(sched)
    (said,) = carry_out(sched, driver)
    assert said.error is not None
    sched.ledger().check_idle(32)


def test_end_of_a_former_offer_does_not_end_a_later_one() -> None:
    node = Runtime()
    p, driver = (
        Node(Limits(8, 4, 8, 100, 64, role="prefill"), depth=1),
        PrefillTransferDriver(node, 60.0, GROUPS),
    )
    first, second = (request(handle, [handle] * 12, 3, room=101) for handle in (1, 2))
    driver.accept(first)
    p.sched.add(first)
    p.sched.abort(1)
    driver.accept(second)  # the runtime has ended the first; its event was not polled yet
    p.sched.add(second)
    node.events = [RoomReleased(101, "CLIENT_GONE")]
    driver.poll(p.sched)
    p.run()
    assert p.sched.leased(None) == [2]
    node.events = [RoomReleased(101, "DONE")]
    driver.poll(p.sched)
    p.sched.ledger().check_idle(8)


def test_prompt_too_long_for_p_is_not_retried() -> None:
    node = Runtime()
    driver = PrefillTransferDriver(node, 60.0, GROUPS)
    for error in (PromptTooLong("prompt has 9000 tokens"), QueueFull("full")):
        driver.refuse(request(1, [1], 3, room=101), error)
    assert [code for _, _, code in node.calls] == ["PROMPT_TOO_LONG", "NO_CAPACITY"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [("AUTH", "pair_incompatible"), ("UNREACHABLE", "bootstrap_unreachable")],
)
def test_clients_read_no_address_and_no_answer_of_a_peer(reason: str, code: str) -> None:
    peer = "http://10.9.8.7:8998/route?engine_rank=-1 answered 401: the cluster keys differ"
    error = error_of(reason, peer, retryable=False)
    assert error.code == code
    for secret in ("10.9.8.7", "8998", "401", "/route"):
        assert secret not in str(error), error
    assert str(error).startswith(f"{reason}: ")


def test_rank_that_the_prefill_node_has_not_is_the_requests_own_mistake() -> None:
    """400 is retried by no router, and the sentence has the numbers."""
    why = "the prefill node has no rank 9: it has 1, from 0 on"
    error = error_of("RANK_UNKNOWN", why, retryable=False)
    assert (error.code, error.status) == ("invalid_value", 400)
    assert error.param == "disagg_prefill_dp_rank"
    assert why in error.message


def test_mismatch_of_a_prompt_is_not_one_of_the_pair() -> None:
    error = error_of("PROMPT_MISMATCH", "P and D tokenized different prompts", retryable=False)
    assert (error.code, error.status) == ("prompt_mismatch", 502)


def test_pair_that_damages_pages_is_reported_as_a_pair() -> None:
    """The router then excludes the two from each other, and neither of them from the others."""
    error = error_of("QUARANTINED", "several in a row brought damaged pages", retryable=True)
    assert (error.code, error.status) == ("pair_incompatible", 502)
    assert error_of("CHECKSUM", "one was damaged", retryable=True).code == "kv_transfer_failed"


PULLED_JSON = (
    '{"transport":"shm","pages":3,"bytes":1,"pull_seconds":0.1,"room_seconds":0.1,"retries":0}'
)


@pytest.mark.parametrize(
    ("native", "event"),
    [
        (("announced", 7), RoomAnnounced(7)),
        (("revoked", 7), GrantRevoked(7)),
        (
            ("committed", 7, b"token", [(5, 0, 3, 4)], PULLED_JSON),
            RoomCommitted(7, b"token", PAGES, PULLED),
        ),
        (("failed", 7, "AUTH", "why", False), RoomFailed(7, "AUTH", "why", False)),
        (("aborted", 7), RoomAborted(7)),
        (("released", 7, "DONE"), RoomReleased(7, "DONE")),
    ],
)
def test_native_tuple_becomes_the_struct_of_its_kind(
    native: tuple[Any, ...], event: NodeEvent
) -> None:
    assert read_event(native) == event


@pytest.mark.parametrize("native", [("moved", 7), ("failed", 7, "AUTH")])
def test_native_tuple_of_another_version_is_refused(native: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="build the native extension again"):
        read_event(native)
