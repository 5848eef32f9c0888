"""The transfer runtimes of all tensor-parallel ranks as one: what the first rank's driver
(baton.disagg) drives.

A call is made on the first rank's runtime and sent to the executors, which make it on theirs, in
one order with the steps: an executor publishes pages after the step that computed them, whenever
that ends. Events are merged:

    end of a room sent when every rank's is over. All committed: committed; else the first failure.
                    When one rank's room fails, the others' are aborted: either all heads of a page
                    are there, or none is used.
    announced when P holds pages for all ranks revoked when all ranks gave their pages back. Where
    some could not (P came first, or the rank has all its
                    pages already), the others get their grant again and the room is announced.

Every runtime ends its rooms by deadlines of its own. A room that is over on one rank and not on
another for longer than all of them together means that a process hangs: the group ends.

Invariant: the pages of a room are the scheduler's again only when no rank's runtime writes them any
more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from baton.disagg.calls import (
    AbortCall,
    DrainCall,
    GrantCall,
    OfferCall,
    OpenCall,
    RevokeCall,
    RoomCall,
    TransferCall,
)
from baton.disagg.events import (
    RELEASED_AFTER_PULL,
    GrantRevoked,
    NodeEvent,
    RoomAborted,
    RoomAnnounced,
    RoomCommitted,
    RoomEnd,
    RoomFailed,
    RoomReleased,
)
from baton.disagg.native_node import TransferRuntime
from baton.server.worker.tensor_parallel.calls import GrantAgainCall, TpCall
from baton.server.worker.tensor_parallel.channel import ExecutorStuck, TpExecutors, TpGroup

log = logging.getLogger("baton.tp_transfer")


class RevocationAnswer(Enum):
    """A rank's answer to `revoke`."""

    REVOKED = auto()
    ANNOUNCED = auto()
    """P's pages came first, or the room is over on this rank."""


@dataclass(slots=True)
class Room:
    """Reports of the ranks about one room so far, by TP rank."""

    ends: dict[int, RoomEnd] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)
    answers: dict[int, RevocationAnswer] | None = None
    """To a revocation that not all have answered."""
    grant: GrantCall | None = None
    is_aborted: bool = False


class EventMerger:
    """Turns the ranks' events into those of one runtime. `broadcast` makes all ranks do something
    about a room.
    """

    def __init__(self, size: int, broadcast: Callable[[TpCall], None]) -> None:
        self._size = size
        self._broadcast = broadcast
        self._rooms: dict[int, Room] = {}
        self._ending: dict[int, float] = {}
        """When rooms ended on the first of the ranks, those that have not on the last; oldest
        first.
        """

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def begin(self, room: int) -> None:
        self._rooms[room] = Room()

    def granted(self, call: GrantCall) -> None:
        if (known := self._rooms.get(call.room)) is not None:
            known.grant = call

    def revoking(self, room: int) -> None:
        if (known := self._rooms.get(room)) is not None:
            known.answers = dict.fromkeys(known.ends, RevocationAnswer.ANNOUNCED)

    def aborted(self, room: int) -> None:
        if (known := self._rooms.get(room)) is not None:
            known.is_aborted = True

    def check_none_is_late(self, now: float, limit_secs: float) -> None:
        """Raises ExecutorStuck when a room's first end was longer ago than this, and its last has
        not come.
        """
        if not self._ending or now - self._ending[number := next(iter(self._ending))] <= limit_secs:
            return
        over = self._rooms[number].ends
        raise ExecutorStuck(
            f"room {number} is over on tensor-parallel ranks {sorted(over)}, and for "
            f"{limit_secs:g} s "
            f"no report of it came from {[rank for rank in range(self._size) if rank not in over]}"
        )

    def take(self, tp_rank: int, events: Iterable[NodeEvent], now: float) -> list[NodeEvent]:
        """Add what a rank reported; returns what is now true of all."""
        merged: list[NodeEvent] = []
        for event in events:
            room = self._rooms.get(event.room)
            if room is None:
                log.error(
                    "tensor-parallel rank %d reports %s of room %d, which is over",
                    tp_rank,
                    type(event).__name__,
                    event.room,
                )
                continue
            match event:
                case RoomAnnounced():
                    merged += self._add_announcement(event.room, room, tp_rank)
                case GrantRevoked():
                    merged += self._add_revocation(event.room, room, tp_rank)
                case _:
                    self._ending.setdefault(event.room, now)
                    merged += self._add_end(room, tp_rank, event)
        return merged

    def _add_end(self, room: Room, tp_rank: int, end: RoomEnd) -> list[NodeEvent]:
        number = end.room
        room.ends[tp_rank] = end
        if len(room.ends) < self._size:
            code = _reason_to_abort(end)
            if code is not None and not room.is_aborted:
                room.is_aborted = True
                self._broadcast(AbortCall(number, code))
            if room.answers is None:
                return []
            return self._add_answer(number, room, room.answers, tp_rank, RevocationAnswer.ANNOUNCED)
        del self._rooms[number]
        del self._ending[number]
        return [_end_of_all([room.ends[rank] for rank in sorted(room.ends)])]

    def _add_announcement(self, number: int, room: Room, tp_rank: int) -> list[NodeEvent]:
        if room.answers is not None:
            return self._add_answer(number, room, room.answers, tp_rank, RevocationAnswer.ANNOUNCED)
        if len(room.announced) == self._size:
            return []
        room.announced.add(tp_rank)
        return [RoomAnnounced(number)] if len(room.announced) == self._size else []

    def _add_revocation(self, number: int, room: Room, tp_rank: int) -> list[NodeEvent]:
        if room.answers is None:
            return []
        return self._add_answer(number, room, room.answers, tp_rank, RevocationAnswer.REVOKED)

    def _add_answer(
        self,
        number: int,
        room: Room,
        answers: dict[int, RevocationAnswer],
        tp_rank: int,
        answer: RevocationAnswer,
    ) -> list[NodeEvent]:
        # A rank that gave its pages back has none, also when P's pages come meanwhile.
        if answers.get(tp_rank) is not RevocationAnswer.REVOKED:
            answers[tp_rank] = answer
        if len(answers) < self._size:
            return []
        room.answers = None
        if RevocationAnswer.ANNOUNCED not in answers.values():
            room.grant = None
            room.announced = set()
            return [GrantRevoked(number)]
        tp_ranks = [rank for rank, given in answers.items() if given is RevocationAnswer.REVOKED]
        if tp_ranks and room.grant is not None:
            self._broadcast(GrantAgainCall(room.grant, tp_ranks))
        return [RoomAnnounced(number)]


def _reason_to_abort(end: RoomEnd) -> str | None:
    """Code with which the room is aborted on the other ranks; None after an end in order."""
    match end:
        case RoomCommitted():
            return None
        case RoomReleased():
            return None if end.code == RELEASED_AFTER_PULL else end.code
        case RoomFailed():
            return end.code
        case RoomAborted():
            return "CLIENT_GONE"


def _end_of_all(ends: Sequence[RoomEnd]) -> RoomEnd:
    """The end of a room for the scheduler, from those of the ranks in their order."""
    for kind in (RoomFailed, RoomAborted):
        for end in ends:
            if isinstance(end, kind):
                return end
    for end in ends:
        if isinstance(end, RoomReleased) and end.code != RELEASED_AFTER_PULL:
            return end
    return ends[0]  # the first rank's, which has P's message


class TpTransferNode:
    """TransferNode for baton.disagg, and what the rank process asks of one beside that."""

    def __init__(self, node: TransferRuntime, executors: TpExecutors, late_secs: float) -> None:
        """`late_secs`: more than the ranks' ends of a room can be apart while all of them work."""
        self._node = node
        self._executors = executors
        self._late_secs = late_secs
        self._failure: str | None = None
        """Why an executor's runtime does not work any more."""
        self._merger = EventMerger(executors.group.tp_size, self._call_everywhere)

    def call(self, call: TransferCall) -> None:
        match call:
            case OfferCall() | OpenCall():
                self._begin(call)
                return
            case GrantCall():
                self._merger.granted(call)
            case RevokeCall():
                self._merger.revoking(call.room)
            case AbortCall():
                self._merger.aborted(call.room)
        self._call_everywhere(call)

    def _begin(self, call: OfferCall | OpenCall) -> None:
        """Raises what the first rank's runtime raises, ValueError while an executor's room of this
        number lives.
        """
        if call.room in self._merger:
            raise ValueError(f"room {call.room} is live on another tensor-parallel rank")
        make_call(self._node, self._executors.group, call)
        self._merger.begin(call.room)
        self._executors.send_call(call)

    def _call_everywhere(self, call: TpCall) -> None:
        make_call(self._node, self._executors.group, call)
        self._executors.send_call(call)

    def poll(self, max: int) -> Sequence[NodeEvent]:
        now = time.monotonic()
        merged = self._merger.take(0, self._node.poll(max), now)
        for report in self._executors.take_reports():
            merged += self._merger.take(report.tp_rank, report.events, now)
            if report.failure is not None:
                self._failure = f"tensor-parallel rank {report.tp_rank}: {report.failure}"
        self._merger.check_none_is_late(now, self._late_secs)
        return merged

    def close(self) -> None:
        """The executors close theirs when they stop."""
        self._node.close()

    @property
    def event_fd(self) -> int:
        """Event descriptor of this process; `TpExecutors.reports` is readable when the others have
        something.
        """
        return self._node.event_fd

    def rooms_json(self, room: int | None = None) -> str:
        """This process's."""
        return self._node.rooms_json(room)

    def stats_json(self) -> str:
        """This process's: of bytes, its share. The health is that of all."""
        text = self._node.stats_json()
        if self._failure is None:
            return text
        return json.dumps({**json.loads(text), "healthy": False, "unhealthy_reason": self._failure})


def make_call(node: TransferRuntime, group: TpGroup, call: TpCall) -> None:
    """Make a call of `TpTransferNode` on one rank's own runtime. Raises what the runtime raises."""
    match call:
        case OpenCall():
            # P's processes are registered like DP ranks (server.worker.transfer_setup), and a
            # divided P has one DP rank.
            peer = max(call.prefill_dp_rank, 0) * group.tp_size + group.tp_rank
            node.call(msgspec.structs.replace(call, prefill_dp_rank=peer))
        case GrantAgainCall():
            if group.tp_rank in call.tp_ranks:
                node.call(call.grant)
        case _:
            node.call(call)


def execute_call(node: TransferRuntime, group: TpGroup, call: TpCall) -> RoomEnd | None:
    """As `make_call`, on an executor, where a call that fails ends its room only.

    Returns the end of a room that its runtime does not take. A live room is aborted; its runtime
    reports its end.
    """
    try:
        make_call(node, group, call)
    except (ValueError, RuntimeError) as err:
        about = call.grant if isinstance(call, GrantAgainCall) else call
        room = about.room if isinstance(about, RoomCall) else None
        log.error("%s of room %s: %s", call.__struct_config__.tag, room, err)
        code = "DUP_ROOM" if isinstance(err, ValueError) else "NO_CAPACITY"
        match about:
            case OfferCall():
                return RoomReleased(about.room, code)
            case OpenCall():
                return RoomFailed(about.room, code, str(err), is_retryable=True)
            case AbortCall() | DrainCall():
                return None
            case _:
                with contextlib.suppress(RuntimeError):
                    node.call(AbortCall(about.room, "TRANSPORT_BROKEN"))
    return None
