"""Transfer runtimes of several ranks as one: against ranks that answer late, fail alone and are revoked half-way."""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.disagg.calls import (
    AbortCall,
    DrainCall,
    FinishCall,
    GrantCall,
    GroupGrant,
    GroupPages,
    OfferCall,
    OpenCall,
    PublishCall,
    RevokeCall,
    TransferCall,
)
from baton.disagg.events import (
    GrantRevoked,
    NodeEvent,
    RoomAborted,
    RoomAnnounced,
    RoomCommitted,
    RoomEnd,
    RoomFailed,
    RoomReleased,
)
from baton.sched.types.request_timeline import PulledPages
from baton.server.worker.tensor_parallel import channel
from baton.server.worker.tensor_parallel.calls import (
    GrantAgainCall,
    TpCall,
    call_decoder,
    encode_call,
)
from baton.server.worker.tensor_parallel.channel import ExecutorStuck
from baton.server.worker.tensor_parallel.transfer_node import (
    EventMerger,
    TpTransferNode,
    execute_call,
)
from tests.support.effort import examples

ROOM = 7
GRANTS = (GroupGrant(5, 0, b"pages"), GroupGrant(6, 4, b"more"))
PULLED = PulledPages("shm", 3, 12288, 0.002, 0.01)


def committed(payload: bytes = b"") -> RoomCommitted:
    return RoomCommitted(ROOM, payload, (GroupPages(0, 0, 3, 9),), PULLED)


class Rank:
    """Stand-in for the runtime of one decode rank, with the calls of baton._native.TransferNode; calls and events are
    delivered later."""

    def __init__(self) -> None:
        self.calls: deque[TpCall] = deque()
        self.events: deque[NodeEvent] = deque()
        self.has_grant = False
        self.p_holds = False
        self.is_over = False

    def execute_call(self) -> None:
        call = self.calls.popleft()
        if self.is_over:
            return
        if isinstance(call, GrantCall | GrantAgainCall):
            self.has_grant = True
        elif isinstance(call, RevokeCall):
            if not self.p_holds:
                self.has_grant = False
            self.events.append(RoomAnnounced(ROOM) if self.p_holds else GrantRevoked(ROOM))
        else:
            self._end(RoomAborted(ROOM))

    def announce(self) -> None:
        """P's first pages are ready."""
        if not self.is_over and not self.p_holds:
            self.p_holds = True
            if not self.has_grant:
                self.events.append(RoomAnnounced(ROOM))

    def commit(self) -> None:
        if not self.is_over and self.p_holds and self.has_grant:
            self._end(committed(b"payload"))

    def fail(self, code: str) -> None:
        if not self.is_over:
            self._end(RoomFailed(ROOM, code, "why", True))

    def _end(self, end: RoomEnd) -> None:
        self.is_over = True
        self.has_grant = False
        self.events.append(end)


class RoomOnRanks:
    """A room on all ranks, and what the scheduler would know of it."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.ranks = [Rank() for _ in range(size)]
        self.rng = rng
        self.merger = EventMerger(size, self.call_ranks)
        self.merger.begin(ROOM)
        self.heard: list[NodeEvent] = []
        self.granted = self.revoking = self.aborted = False

    def call_ranks(self, call: TpCall) -> None:
        for number, rank in enumerate(self.ranks):
            if not isinstance(call, GrantAgainCall) or number in call.tp_ranks:
                rank.calls.append(call)

    def grant(self) -> None:
        if not self.granted and not self.ended:
            self.granted = True
            grant = GrantCall(ROOM, GRANTS)
            self.merger.granted(grant)
            self.call_ranks(grant)

    def revoke(self) -> None:
        if self.granted and not self.revoking and not self.ended:
            self.revoking = True
            self.merger.revoking(ROOM)
            self.call_ranks(RevokeCall(ROOM))

    def abort(self) -> None:
        if not self.ended:
            self.aborted = True
            self.merger.aborted(ROOM)
            self.call_ranks(AbortCall(ROOM, "CLIENT_GONE"))

    @property
    def ended(self) -> bool:
        return any(isinstance(event, RoomEnd) for event in self.heard)

    def hear(self, number: int) -> None:
        rank = self.ranks[number]
        if not rank.events:
            return
        for event in self.merger.take(number, [rank.events.popleft()], 0.0):
            assert not self.ended, "nothing is heard after the end"
            self.heard.append(event)
            if isinstance(event, GrantRevoked):
                self.granted = self.revoking = False
                assert not any(r.has_grant for r in self.ranks), (
                    "the pages are the scheduler's again"
                )
            elif isinstance(event, RoomAnnounced):
                self.revoking = False
            else:
                assert all(r.is_over for r in self.ranks), "no rank writes the pages any more"

    def act(self, what: str) -> None:
        number = self.rng.randrange(len(self.ranks))
        rank = self.ranks[number]
        if what == "execute_call":
            if rank.calls:
                rank.execute_call()
        elif what == "hear":
            self.hear(number)
        elif what == "fail":
            rank.fail(self.rng.choice(["STALE_PAGE", "PEER_DEAD"]))
        elif what in ("announce", "commit"):
            getattr(rank, what)()
        else:
            getattr(self, what)()

    def settle(self) -> None:
        while any(rank.calls or rank.events for rank in self.ranks):
            for number, rank in enumerate(self.ranks):
                if rank.calls:
                    rank.execute_call()
                self.hear(number)


WEIGHTS = {
    "execute_call": 8,
    "hear": 8,
    "announce": 3,
    "commit": 3,
    "grant": 3,
    "revoke": 2,
    "fail": 0.3,
    "abort": 0.3,
}


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_all_heads_of_a_page_are_there_or_none_is_used(size: int, seed: int) -> None:
    rng = random.Random(seed)
    room = RoomOnRanks(size, rng)
    for what in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=120):
        room.act(what)
    room.settle()
    assert not room.revoking or room.ended, "a revocation is answered, or the room ends"
    if not room.ended and room.granted:
        assert all(rank.has_grant or rank.is_over for rank in room.ranks), (
            "announced: all may be written"
        )
    # From here everything goes well, if it still can.
    room.grant()
    room.settle()
    for rank in room.ranks:
        rank.announce()
        rank.commit()
    room.settle()
    assert room.ended
    assert len(room.merger) == 0, "nothing is remembered of a room that is over"


def test_failure_of_one_rank_ends_the_others_and_is_reported() -> None:
    calls: list[TpCall] = []
    merger = EventMerger(3, calls.append)
    stale = RoomFailed(ROOM, "STALE_PAGE", "page 3", True)
    merger.begin(ROOM)
    assert merger.take(1, [stale], 0.0) == []
    assert calls == [AbortCall(ROOM, "STALE_PAGE")]
    assert merger.take(0, [committed(b"token")], 0.0) == []
    assert merger.take(2, [RoomAborted(ROOM)], 0.0) == [stale]
    assert calls == [AbortCall(ROOM, "STALE_PAGE")], "once"


def test_committed_carries_the_first_ranks_data_once_all_have_committed() -> None:
    merger = EventMerger(2, lambda *_: pytest.fail("nothing to tell"))
    merger.begin(ROOM)
    assert merger.take(0, [committed(b"token")], 0.0) == []
    assert merger.take(1, [committed()], 0.0) == [committed(b"token")]


def test_prompt_is_released_when_no_rank_of_p_serves_it_any_more() -> None:
    calls: list[TpCall] = []
    merger = EventMerger(2, calls.append)
    merger.begin(ROOM)
    assert merger.take(1, [RoomReleased(ROOM, "DONE")], 0.0) == []
    assert merger.take(0, [RoomReleased(ROOM, "LEASE_EXPIRED")], 0.0) == [
        RoomReleased(ROOM, "LEASE_EXPIRED")
    ]
    merger.begin(ROOM)
    assert merger.take(0, [RoomReleased(ROOM, "LEASE_EXPIRED")], 0.0) == []
    assert calls == [AbortCall(ROOM, "LEASE_EXPIRED")], "the others end theirs"
    assert merger.take(1, [RoomReleased(ROOM, "DONE")], 0.0) == [
        RoomReleased(ROOM, "LEASE_EXPIRED")
    ]


class FakeNode:
    """Notes calls; refuses the rooms in `taken`."""

    def __init__(self, taken: set[int] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.taken = taken or set()
        self.events: list[NodeEvent] = []

    def call(self, call: TransferCall) -> None:
        if isinstance(call, OpenCall | OfferCall) and call.room in self.taken:
            raise ValueError("room is in use")
        self.calls.append((call.__struct_config__.tag, *msgspec.structs.astuple(call)))

    def poll(self, _max: int) -> list[NodeEvent]:
        events = self.events
        self.events = []
        return events


class InlineExecutors:
    """Executors (server.worker.tensor_parallel.channel) that execute_call at once."""

    def __init__(self, groups: list[channel.TpGroup], nodes: list[FakeNode]) -> None:
        self.group, *self.groups = groups
        self.nodes = nodes
        self.reports: list[channel.TransferEvents] = []

    def send_call(self, call: TpCall) -> None:
        for group, node in zip(self.groups, self.nodes, strict=True):
            if refused := execute_call(node, group, call_decoder.decode(encode_call(call))):
                report = channel.TransferEvents(group.tp_rank, [refused])
                decoded = channel.report_decoder.decode(channel.encode_report(report))
                assert isinstance(decoded, channel.TransferEvents)
                self.reports.append(decoded)

    def take_reports(self) -> list[channel.TransferEvents]:
        reports = self.reports
        self.reports = []
        return reports


def tp_node_of(nodes: list[FakeNode]) -> tuple[TpTransferNode, InlineExecutors]:
    groups = [channel.TpGroup(rank, len(nodes), Path("/nowhere"), 1) for rank in range(len(nodes))]
    executors = InlineExecutors(groups, nodes[1:])
    return TpTransferNode(nodes[0], executors, late_secs=60.0), executors


def test_each_process_of_d_reads_from_the_one_of_p_with_its_heads() -> None:
    nodes = [FakeNode() for _ in range(3)]
    tp_node, _ = tp_node_of(nodes)
    tp_node.call(OpenCall(ROOM, 0, "host", 8998, -1, b"hash", 1000))
    assert [node.calls[0][5] for node in nodes] == [0, 1, 2]
    tp_node.call(GrantCall(ROOM, GRANTS))
    assert all(node.calls[-1] == ("grant", ROOM, GRANTS) for node in nodes)


def test_each_call_reaches_all_ranks_with_its_arguments() -> None:
    nodes = [FakeNode(), FakeNode()]
    tp_node, _ = tp_node_of(nodes)
    tp_node.call(OfferCall(ROOM, 2, b"hash", 1000))
    tp_node.call(PublishCall(ROOM, 5, 3, b"pages"))
    tp_node.call(FinishCall(ROOM, (GroupPages(5, 2, 9, 7),), b"token"))
    tp_node.call(RevokeCall(ROOM))
    tp_node.call(AbortCall(ROOM, "CLIENT_GONE"))
    tp_node.call(DrainCall())
    expected = [
        ("offer", ROOM, 2, b"hash", 1000),
        ("publish", ROOM, 5, 3, b"pages"),
        ("finish", ROOM, (GroupPages(5, 2, 9, 7),), b"token"),
        ("revoke", ROOM),
        ("abort", ROOM, "CLIENT_GONE"),
        ("drain",),
    ]
    assert [node.calls for node in nodes] == [expected, expected]


def test_reports_of_executors_round_trip_with_every_kind_of_event() -> None:
    events: list[NodeEvent] = [
        RoomAnnounced(ROOM),
        GrantRevoked(ROOM),
        committed(),
        RoomFailed(ROOM, "AUTH", "why", False),
        RoomAborted(ROOM),
        RoomReleased(2**53 - 1, "DONE"),
    ]
    report = channel.TransferEvents(1, events, "data thread: gone")
    assert channel.report_decoder.decode(channel.encode_report(report)) == report


def test_room_that_the_first_rank_refuses_reaches_no_other() -> None:
    nodes = [FakeNode({ROOM}), FakeNode()]
    tp_node, _ = tp_node_of(nodes)
    with pytest.raises(ValueError, match="in use"):
        tp_node.call(OfferCall(ROOM, 0, b"hash", 1000))
    assert nodes[1].calls == []


def test_room_that_an_executor_refuses_fails_everywhere() -> None:
    nodes = [FakeNode(), FakeNode({ROOM})]
    tp_node, _ = tp_node_of(nodes)
    tp_node.call(OpenCall(ROOM, 0, "host", 8998, -1, b"hash", 1000))
    assert tp_node.poll(10) == []
    assert nodes[0].calls[-1] == ("abort", ROOM, "DUP_ROOM")
    nodes[0].events = [RoomAborted(ROOM)]
    assert tp_node.poll(10) == [RoomFailed(ROOM, "DUP_ROOM", "room is in use", True)]


def test_executor_without_capacity_fails_the_room_and_lives() -> None:
    class Full(FakeNode):
        def call(self, call: TransferCall) -> None:
            if isinstance(call, OpenCall):
                raise RuntimeError("4 rooms are live")
            super().call(call)

    nodes = [FakeNode(), Full()]
    tp_node, _ = tp_node_of(nodes)
    tp_node.call(OpenCall(ROOM, 0, "host", 8998, -1, b"hash", 1000))
    nodes[0].events = [RoomAborted(ROOM)]
    assert tp_node.poll(10) == [RoomFailed(ROOM, "NO_CAPACITY", "4 rooms are live", True)]


def test_call_that_an_executor_refuses_aborts_the_room() -> None:
    class Broken(FakeNode):
        def call(self, call: TransferCall) -> None:
            if isinstance(call, GrantCall):
                raise ValueError("5 pages are not int32")
            super().call(call)

    nodes = [FakeNode(), Broken()]
    tp_node, _ = tp_node_of(nodes)
    tp_node.call(OpenCall(ROOM, 0, "host", 8998, -1, b"hash", 1000))
    tp_node.call(GrantCall(ROOM, (GroupGrant(5, 0, b"odd"),)))
    assert nodes[1].calls[-1] == ("abort", ROOM, "TRANSPORT_BROKEN")


def test_runtime_that_failed_on_an_executor_shows_in_the_health_of_all() -> None:
    class Healthy(FakeNode):
        def stats_json(self) -> str:
            return '{"healthy": true, "unhealthy_reason": null}'

    tp_node, executors = tp_node_of([Healthy(), FakeNode()])
    assert json.loads(tp_node.stats_json())["healthy"]
    executors.reports.append(channel.TransferEvents(1, [], "data thread: gone"))
    assert tp_node.poll(10) == []
    health = {"healthy": False, "unhealthy_reason": "tensor-parallel rank 1: data thread: gone"}
    assert json.loads(tp_node.stats_json()) == health


def test_room_that_lives_on_an_executor_is_not_begun_again() -> None:
    nodes = [FakeNode(), FakeNode()]
    tp_node, _ = tp_node_of(nodes)
    tp_node.call(OfferCall(ROOM, 0, b"hash", 1000))
    nodes[0].events = [RoomReleased(ROOM, "CLIENT_GONE")]
    assert tp_node.poll(10) == []
    with pytest.raises(ValueError, match="room 7 is live on another tensor-parallel rank"):
        tp_node.call(OfferCall(ROOM, 1, b"hash", 1000))


def test_rank_that_never_ends_a_room_is_noticed() -> None:
    merger = EventMerger(3, lambda *_: None)
    merger.begin(ROOM)
    merger.begin(ROOM + 1)
    merger.take(0, [committed(b"token")], 10.0)
    merger.take(2, [committed()], 50.0)
    merger.check_none_is_late(70.0, 60.0)
    with pytest.raises(
        ExecutorStuck, match=r"room 7 is over on tensor-parallel ranks \[0, 2\].*60 s.*from \[1\]"
    ):
        merger.check_none_is_late(70.1, 60.0)
    assert merger.take(1, [committed()], 71.0)
    merger.check_none_is_late(1e9, 60.0)
