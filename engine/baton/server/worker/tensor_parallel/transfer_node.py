"""The transfer runtimes of all tensor-parallel ranks as one: what the first rank's driver (baton.disagg) drives.

A call is made on the first rank's runtime and sent to the followers, which make it on theirs, in one order with the
steps: a follower publishes pages after the step that computed them, whenever that ends. Events are merged:

    end of a room   sent when every rank's is over. All committed: committed; else the first failure. When one rank's
                    room fails, the others' are aborted: either all heads of a page are there, or none is used.
    announced       when P holds pages for all ranks
    revoked         when all ranks gave their pages back. Where some could not (P came first, or the rank has all its
                    pages already), the others get their grant again and the room is announced.

Every runtime ends its rooms by deadlines of its own. A room that is over on one rank and not on another for longer than
all of them together means that a process hangs: the group ends.

Invariant: the pages of a room are the scheduler's again only when no rank's runtime writes them any more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.server.worker.tensor_parallel.calls import (
    AbortCall,
    DrainCall,
    FinishCall,
    GrantAgainCall,
    GrantCall,
    OfferCall,
    OpenCall,
    PublishCall,
    RevokeCall,
    RoomCall,
    TransferCall,
)
from baton.server.worker.tensor_parallel.channel import FollowerStuck, TpGroup, TpWorkers

log = logging.getLogger("baton.team_node")


Event = tuple[Any, ...]
ENDS = ("committed", "failed", "aborted", "released")


@dataclass(slots=True)
class Room:
    """Reports of the ranks about one room so far, by TP rank."""

    ends: dict[int, Event] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)
    answers: dict[int, str] | None = None
    """To a revocation that not all have answered."""
    grant: tuple[int, bytes] | None = None
    is_aborted: bool = False


class EventMerger:
    """Turns the ranks' events into those of one runtime. `broadcast` makes all ranks do something about a room."""

    def __init__(self, size: int, broadcast: Callable[[TransferCall], None]) -> None:
        self._size = size
        self._broadcast = broadcast
        self._rooms: dict[int, Room] = {}
        self._ending: dict[int, float] = {}
        """When rooms ended on the first of the ranks, those that have not on the last; oldest first."""

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, room: int) -> bool:
        return room in self._rooms

    def begin(self, room: int) -> None:
        self._rooms[room] = Room()

    def granted(self, room: int, start_page: int, pages: bytes) -> None:
        if (known := self._rooms.get(room)) is not None:
            known.grant = (start_page, pages)

    def revoking(self, room: int) -> None:
        if (known := self._rooms.get(room)) is not None:
            known.answers = dict.fromkeys(known.ends, "announced")

    def aborted(self, room: int) -> None:
        if (known := self._rooms.get(room)) is not None:
            known.is_aborted = True

    def check_none_is_late(self, now: float, limit_secs: float) -> None:
        """Raises FollowerStuck when a room's first end was longer ago than this, and its last has not come."""
        if not self._ending or now - self._ending[number := next(iter(self._ending))] <= limit_secs:
            return
        over = self._rooms[number].ends
        raise FollowerStuck(
            f"room {number} is over on tensor-parallel ranks {sorted(over)}, and for {limit_secs:g} s "
            f"nothing was heard of it from {[rank for rank in range(self._size) if rank not in over]}"
        )

    def take(self, tp_rank: int, events: Iterable[Event], now: float) -> list[Event]:
        """Add what a rank reported; returns what is now true of all."""
        merged = []
        for event in events:
            room = self._rooms.get(event[1])
            if room is None:
                log.error(
                    "tensor-parallel rank %d reports %r of a room that is over", tp_rank, event[:3]
                )
            elif event[0] in ENDS:
                self._ending.setdefault(event[1], now)
                merged += self._end(event[1], room, tp_rank, event)
            else:
                merged += self._go_on(event[1], room, tp_rank, event[0])
        return merged

    def _end(self, number: int, room: Room, tp_rank: int, event: Event) -> list[Event]:
        room.ends[tp_rank] = event
        done = event[0] == "committed" or event[2:3] == ("DONE",)
        if len(room.ends) < self._size:
            if not done and not room.is_aborted:
                room.is_aborted = True
                code = event[2] if len(event) > 2 else "CLIENT_GONE"
                self._broadcast(AbortCall(number, code))
            return [] if room.answers is None else self._go_on(number, room, tp_rank, "announced")
        del self._rooms[number], self._ending[number]
        ends = [room.ends[rank] for rank in sorted(room.ends)]
        for kind in ("failed", "aborted"):
            if found := [end for end in ends if end[0] == kind]:
                return [found[0]]
        if ends[0][0] == "released":
            return [next((end for end in ends if end[2] != "DONE"), ends[0])]
        return [ends[0]]  # the first rank's, which has P's message

    def _go_on(self, number: int, room: Room, tp_rank: int, kind: str) -> list[Event]:
        if room.answers is not None:
            if (
                room.answers.get(tp_rank) != "revoked"
            ):  # which stays true when P's pages come meanwhile
                room.answers[tp_rank] = kind
            if len(room.answers) < self._size:
                return []
            answers = room.answers
            room.answers = None
            if "announced" not in answers.values():
                room.grant, room.announced = None, set()
                return [("revoked", number)]
            if "revoked" in answers.values() and room.grant is not None:
                start_page, pages = room.grant
                tp_ranks = [rank for rank, answer in answers.items() if answer == "revoked"]
                self._broadcast(GrantAgainCall(number, start_page, pages, tp_ranks))
            return [("announced", number)]
        if kind == "announced" and len(room.announced) < self._size:
            room.announced.add(tp_rank)
            if len(room.announced) == self._size:
                return [("announced", number)]
        return []


class TpTransferNode:
    """TransferNode for baton.disagg, and what the rank process asks of one beside that."""

    def __init__(self, node: Any, followers: TpWorkers, late_secs: float) -> None:
        """`late_secs`: more than the ranks' ends of a room can be apart while all of them work."""
        self._node = node
        self._followers = followers
        self._late_secs = late_secs
        self._failure: str | None = None
        """Why a follower's runtime does not work any more."""
        self._merger = EventMerger(followers.team.tp_size, self._call_everywhere)

    def offer(self, room: int, attempt: int, prompt_hash: bytes, deadline_ms: int) -> None:
        self._begin(OfferCall(room, attempt, prompt_hash, deadline_ms))

    def open(
        self, room: int, attempt: int, bootstrap_host: str, bootstrap_port: int, prefill_dp_rank: int,
        prompt_hash: bytes, deadline_ms: int,
    ) -> None:  # fmt: skip
        self._begin(
            OpenCall(
                room,
                attempt,
                bootstrap_host,
                bootstrap_port,
                prefill_dp_rank,
                prompt_hash,
                deadline_ms,
            )
        )

    def publish(self, room: int, first_page: int, pages: bytes) -> None:
        self._call_everywhere(PublishCall(room, first_page, pages))

    def finish(self, room: int, total_pages: int, last_page_tokens: int, payload: bytes) -> None:
        self._call_everywhere(FinishCall(room, total_pages, last_page_tokens, payload))

    def grant(self, room: int, start_page: int, dst_pages: bytes) -> None:
        self._merger.granted(room, start_page, dst_pages)
        self._call_everywhere(GrantCall(room, start_page, dst_pages))

    def revoke(self, room: int) -> None:
        self._merger.revoking(room)
        self._call_everywhere(RevokeCall(room))

    def abort(self, room: int, code: str) -> None:
        self._merger.aborted(room)
        self._call_everywhere(AbortCall(room, code))

    def drain(self) -> None:
        self._call_everywhere(DrainCall())

    def _begin(self, call: OfferCall | OpenCall) -> None:
        """Raises what the first rank's runtime raises, ValueError while a follower's room of this number lives."""
        if call.room in self._merger:
            raise ValueError(f"room {call.room} is live on another tensor-parallel rank")
        make_call(self._node, self._followers.team, call)
        self._merger.begin(call.room)
        self._followers.send_call(call)

    def _call_everywhere(self, call: TransferCall) -> None:
        make_call(self._node, self._followers.team, call)
        self._followers.send_call(call)

    def poll(self, max: int) -> Sequence[Event]:
        now = time.monotonic()
        merged = self._merger.take(0, self._node.poll(max), now)
        for heard in self._followers.heard():
            merged += self._merger.take(heard.tp_rank, heard.events, now)
            if heard.failure is not None:
                self._failure = f"tensor-parallel rank {heard.tp_rank}: {heard.failure}"
        self._merger.check_none_is_late(now, self._late_secs)
        return merged

    def close(self) -> None:
        """The followers close theirs when they stop."""
        self._node.close()

    @property
    def event_fd(self) -> int:
        """Event descriptor of this process; `TpWorkers.reports` is readable when the others have something."""
        return int(self._node.event_fd)

    def rooms_json(self, room: int | None) -> str:
        """This process's."""
        return str(self._node.rooms_json(room))

    def stats_json(self) -> str:
        """This process's: of bytes, its share. The health is that of all."""
        text = str(self._node.stats_json())
        if self._failure is None:
            return text
        return json.dumps({**json.loads(text), "healthy": False, "unhealthy_reason": self._failure})


def make_call(node: Any, team: TpGroup, call: TransferCall) -> None:
    """Make a call of `TpTransferNode` on one rank's own runtime. Raises what the runtime raises."""
    match call:
        case OfferCall():
            node.offer(call.room, call.attempt, call.prompt_hash, call.deadline_ms)
        case OpenCall():
            # P's processes are registered like DP ranks (server.worker.transfer_setup), and a divided P has one DP
            # rank.
            peer = max(call.prefill_dp_rank, 0) * team.tp_size + team.tp_rank
            node.open(
                call.room,
                call.attempt,
                call.bootstrap_host,
                call.bootstrap_port,
                peer,
                call.prompt_hash,
                call.deadline_ms,
            )
        case PublishCall():
            node.publish(call.room, call.first_page, call.pages)
        case FinishCall():
            node.finish(call.room, call.total_pages, call.last_page_tokens, call.payload)
        case GrantCall():
            node.grant(call.room, call.start_page, call.dst_pages)
        case GrantAgainCall():
            if team.tp_rank in call.tp_ranks:
                node.grant(call.room, call.start_page, call.dst_pages)
        case RevokeCall():
            node.revoke(call.room)
        case AbortCall():
            node.abort(call.room, call.code)
        case DrainCall():
            node.drain()


def execute_call(node: Any, team: TpGroup, call: TransferCall) -> Event | None:
    """As `make_call`, on a follower, where a call that fails ends its room only.

    Returns the end of a room that its runtime does not take. A live room is aborted; its runtime reports its end.
    """
    try:
        make_call(node, team, call)
    except (ValueError, RuntimeError) as err:
        room = call.room if isinstance(call, RoomCall) else None
        log.error("%s of room %s: %s", call.__struct_config__.tag, room, err)
        code = "DUP_ROOM" if isinstance(err, ValueError) else "NO_CAPACITY"
        match call:
            case OfferCall():
                return ("released", call.room, code)
            case OpenCall():
                return ("failed", call.room, code, str(err), True)
            case AbortCall() | DrainCall():
                return None
            case _:
                with contextlib.suppress(RuntimeError):
                    node.abort(call.room, "TRANSPORT_BROKEN")
    return None
