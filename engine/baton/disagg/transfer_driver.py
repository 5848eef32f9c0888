"""The life of a disaggregated request on its two nodes: scheduler events in, native transfer calls
out, and back.

    P   offer ──▶ publish* (final pages, per chunk) ──▶ finish (first token, lease)
        ──▶ released ─▶ Scheduler.release
    D   open ──▶ grant (pages reserved) ──▶ committed (all verified) ─▶ Scheduler.transfer_committed
        announced (P holds pages, no grant yet) ─▶ Scheduler.transfer_announced
        revoke ──▶ revoked ─▶ Scheduler.grant_revoked, or announced: P came first
                                        └─▶ failed ─▶ Scheduler.transfer_failed
        abort ──▶ aborted ─▶ Scheduler.transfer_failed, which frees the pages of ended requests

A failure of one room (a full table of the runtime, a refused call, a payload of P that cannot be
used) ends that room alone.

Native calls never block: sockets and copies live in the transfer runtime's threads (crate
kv_transfer), which wakes the scheduler process through `event_fd`. Nothing here knows torch or a
socket.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Protocol

import msgspec

from baton import errors
from baton.disagg.calls import (
    AbortCall,
    FinishCall,
    GrantCall,
    GroupGrant,
    GroupIds,
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
    RoomFailed,
    RoomReleased,
)
from baton.sched.scheduler import Scheduler
from baton.sched.types import events
from baton.sched.types.plan import TokenLogprobs
from baton.sched.types.request import Rendezvous, ValidatedRequest

log = logging.getLogger("baton.transfer")

POLL_BATCH = 256
"""Transfer events taken per scheduler turn."""
RETRY_AFTER_SECS = 2
"""Retry-After of a request whose room the transfer runtime does not take: leases and transfers end
within seconds.
"""


class RoomErrorKind(Enum):
    """Values of the label `kind` of `kv_room_errors_total`."""

    REFUSED = "refused"
    """The runtime did not take the room."""
    CALL = "call"
    """A call about a live room failed."""
    PAYLOAD = "payload"
    """P's first token could not be used."""

    @property
    def counter(self) -> str:
        return f'kv_room_errors_total{{kind="{self.value}"}}'


_ERROR_OF_REASON: dict[str, type[errors.EngineError]] = {
    "DEADLINE": errors.KvTransferTimeout,
    "LAYOUT_MISMATCH": errors.PairIncompatible,
    "PROMPT_MISMATCH": errors.PromptMismatch,
    "UNREACHABLE": errors.BootstrapUnreachable,
    "RANK_UNKNOWN": errors.BadRequest,
    "AUTH": errors.PairIncompatible,
    "QUARANTINED": errors.PairIncompatible,
    "DUP_ROOM": errors.DuplicateRoom,
    "CLIENT_GONE": errors.PrefillFailed,
    "PROMPT_TOO_LONG": errors.PromptTooLong,
}


_REASON_OF_REFUSAL: dict[type[errors.EngineError], str] = {
    errors.PromptTooLong: "PROMPT_TOO_LONG",
    errors.Aborted: "CLIENT_GONE",
    errors.RequestTimeout: "DEADLINE",
    errors.DeadlineMissed: "DEADLINE",
}
"""Reason code for the peer of a request that was not queued; others: NO_CAPACITY."""


class TransferDriver(Protocol):
    """Part of an engine that takes requests' KV pages to another node or gets them from there."""

    @property
    def counters(self) -> Mapping[str, float]: ...
    def accept(self, req: ValidatedRequest) -> None:
        """A request is about to be queued. Raises EngineError when it cannot be."""

    def refuse(self, req: ValidatedRequest, error: errors.EngineError) -> None:
        """Undo `accept`: the request was not queued."""

    def apply_event(self, event: events.Event, sched: Scheduler) -> None: ...
    def poll(self, sched: Scheduler) -> None:
        """Tell the scheduler what has happened to the pages."""


class TransferNode(Protocol):
    """The part of a transfer runtime used here (see the docstrings of
    baton._native.TransferNode).
    """

    def call(self, call: TransferCall) -> None:
        """Raises ValueError (a room's number is in use, or an argument is wrong) or
        RuntimeError.
        """

    def poll(self, max: int) -> Sequence[NodeEvent]: ...


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class FirstToken(msgspec.Struct, array_like=True):
    """Data sent from P to D beside the pages: the payload of FINAL."""

    token: TokenId
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    logprob: float | None = None
    top_ids: tuple[TokenId, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    completes_grammar: bool = False
    """The answer ends with this token."""
    id_logprobs: tuple[float, ...] = ()

    def logprobs(self) -> TokenLogprobs | None:
        return (
            None
            if self.logprob is None
            else TokenLogprobs(self.logprob, self.top_ids, self.top_logprobs, self.id_logprobs)
        )


_payload_encoder = msgspec.msgpack.Encoder()
_payload_decoder = msgspec.msgpack.Decoder(FirstToken)


def prompt_hash(req: ValidatedRequest) -> bytes:
    """16 bytes by which P and D recognize that they tokenized the same prompt."""
    return hashlib.blake2b(req.prompt.tobytes(), digest_size=16, key=req.namespace[:64]).digest()


def _rendezvous(req: ValidatedRequest) -> Rendezvous:
    assert req.rendezvous is not None, f"request {req.rid} has no rendezvous"
    return req.rendezvous


_CLIENT_MESSAGES = {
    "AUTH": "the cluster keys of the prefill and the decode node differ; give all engines the same "
    "--cluster-key (the decode node's log names both nodes)",
    "UNREACHABLE": "the decode node does not reach the prefill node; the decode node's "
    "log says why",
}
"""Messages for clients in the place of those that name addresses of the fleet and what a peer
answered.
"""


_FIELDS_AT_FAULT = {"RANK_UNKNOWN": "disagg_prefill_dp_rank"}
"""Fields of a request that is refused for the reason.

The older name of this one is data_parallel_rank.
"""


def error_of(reason: str, message: str, retryable: bool) -> errors.EngineError:
    """The HTTP-side error of a transfer reason code."""
    hint = "; retry" if retryable else ""
    message = _CLIENT_MESSAGES.get(reason, message)
    cls = _ERROR_OF_REASON.get(reason, errors.KvTransferFailed)
    return cls(f"{reason}: {message}{hint}", param=_FIELDS_AT_FAULT.get(reason))


def read_first_token(payload: bytes, vocab_size: int) -> FirstToken:
    """Decode and check the payload of FINAL, which another process wrote. Raises ValueError."""
    try:
        first = _payload_decoder.decode(payload)
    except msgspec.DecodeError as err:
        raise ValueError(f"the payload of FINAL is not a first token ({err})") from err
    if (highest := max(first.token, *first.top_ids, 0)) >= vocab_size:
        raise ValueError(f"token id {highest} is outside the vocabulary of {vocab_size}")
    if len(first.top_ids) != len(first.top_logprobs):
        raise ValueError(f"{len(first.top_ids)} top tokens have {len(first.top_logprobs)} logprobs")
    return first


class RoomCalls:
    """Calls to the transfer runtime, one room each.

    A call that fails ends its own room; the rank continues.
    """

    def __init__(self, node: TransferNode, timeout_secs: float, groups: GroupIds) -> None:
        self._node = node
        self._groups = groups
        self._timeout_ms = int(timeout_secs * 1000)
        self.counters = {kind.counter: 0.0 for kind in RoomErrorKind}

    def _begin(self, call: OfferCall | OpenCall) -> None:
        """Make the call that starts a room.

        Raises DuplicateRoom or QueueFull; the runtime knows no such room then.
        """
        try:
            self._node.call(call)
        except ValueError as err:
            raise errors.DuplicateRoom(
                f"bootstrap room {call.room} is in use: {err}", param="bootstrap_room"
            ) from err
        except RuntimeError as err:
            self._count(RoomErrorKind.REFUSED)
            raise errors.QueueFull(
                f"NO_CAPACITY: {err}; retry after {RETRY_AFTER_SECS} s",
                retry_after_secs=RETRY_AFTER_SECS,
            ) from err

    def _continue(
        self,
        sched: Scheduler,
        req: ValidatedRequest,
        call: PublishCall | FinishCall | GrantCall | RevokeCall,
    ) -> None:
        """Make a call about a live room; when it fails, the request ends with TRANSPORT_BROKEN."""
        try:
            self._node.call(call)
        except (ValueError, RuntimeError) as err:
            self._count(RoomErrorKind.CALL)
            log.error("room %d ends: %s", call.room, err)
            sched.fail(
                req.handle,
                error_of("TRANSPORT_BROKEN", str(err), retryable=True),
                "TRANSPORT_BROKEN",
            )

    def _abort(self, req: ValidatedRequest, code: str) -> None:
        """Give the room up.

        A runtime that cannot take the call ends the room at its deadline, or has ended it.
        """
        room = _rendezvous(req).room
        try:
            self._node.call(AbortCall(room, code))
        except (ValueError, RuntimeError) as err:
            self._count(RoomErrorKind.CALL)
            log.error("room %d was not aborted: %s", room, err)

    def _count(self, kind: RoomErrorKind) -> None:
        self.counters[kind.counter] += 1


class PrefillTransferDriver(RoomCalls):
    """P's half.

    Raises DuplicateRoom or QueueFull from `accept` when the transfer runtime does not take the
    room.
    """

    def __init__(self, node: TransferNode, timeout_secs: float, groups: GroupIds) -> None:
        super().__init__(node, timeout_secs, groups)
        self._offered = Counter[int]()
        """Offers of each room whose end was not polled yet.

        A number may be offered again before its first end is.
        """

    def accept(self, req: ValidatedRequest) -> None:
        """Called before the scheduler queues a request with a room."""
        rendezvous = _rendezvous(req)
        room = rendezvous.room
        self._begin(OfferCall(room, rendezvous.attempt, prompt_hash(req), self._timeout_ms))
        self._offered[room] += 1

    def refuse(self, req: ValidatedRequest, error: errors.EngineError) -> None:
        """The scheduler did not take a request that `accept` had offered."""
        code = _REASON_OF_REFUSAL.get(type(error), "NO_CAPACITY")
        self._abort(req, code)

    def apply_event(self, event: events.Event, sched: Scheduler) -> None:
        if isinstance(event, events.PagesFinal):
            room = _rendezvous(event.req).room
            group = self._groups.in_order[event.group]
            publish = PublishCall(room, group, event.first_page, event.pages.tobytes())
            self._continue(sched, event.req, publish)
        elif isinstance(event, events.PrefillDone):
            room = _rendezvous(event.req).room
            finish = FinishCall(room, self._pages_of(event), _payload_of(event))
            self._continue(sched, event.req, finish)
        elif isinstance(event, events.AbortTransfer):
            self._abort(event.req, event.code)

    def _pages_of(self, event: events.PrefillDone) -> tuple[GroupPages, ...]:
        ranges = ((0, event.total_pages), *event.further)
        return tuple(
            GroupPages(
                group,
                first_page,
                total_pages,
                0 if group == self._groups.states else event.last_page_tokens,
                self._groups.tokens_at(group, len(event.req.prompt)),
            )
            for group, (first_page, total_pages) in zip(self._groups.in_order, ranges, strict=True)
        )

    def poll(self, sched: Scheduler) -> None:
        """Take over what the transfer runtime reports."""
        for event in self._node.poll(POLL_BATCH):
            if isinstance(event, RoomReleased):
                later = self._offered.pop(event.room, 1) - 1
                if later:
                    self._offered[event.room] = later  # the scheduler's request is of a later offer
                else:
                    sched.release(event.room, event.code)


def _payload_of(event: events.PrefillDone) -> bytes:
    first = FirstToken(event.token, event.cached_tokens)
    first.completes_grammar = event.completes_grammar
    if (lp := event.logprobs) is not None:
        first.logprob = lp.chosen
        first.top_ids = tuple(lp.top_ids)
        first.top_logprobs = tuple(lp.top_logprobs)
        first.id_logprobs = tuple(lp.id_logprobs)
    return _payload_encoder.encode(first)


class DecodeTransferDriver(RoomCalls):
    """D's half."""

    def __init__(
        self, node: TransferNode, timeout_secs: float, groups: GroupIds, vocab_size: int
    ) -> None:
        super().__init__(node, timeout_secs, groups)
        self._vocab_size = vocab_size

    def accept(self, req: ValidatedRequest) -> None:
        """Nothing to do before the scheduler has queued the request."""

    def refuse(self, req: ValidatedRequest, error: errors.EngineError) -> None:
        """Nothing was promised to the peer."""

    def apply_event(self, event: events.Event, sched: Scheduler) -> None:
        if isinstance(event, events.OpenTransfer):
            rendezvous = _rendezvous(event.req)
            open_call = OpenCall(
                room=rendezvous.room,
                attempt=rendezvous.attempt,
                bootstrap_host=rendezvous.host,
                bootstrap_port=rendezvous.port,
                prefill_dp_rank=rendezvous.prefill_dp_rank,
                prompt_hash=prompt_hash(event.req),
                deadline_ms=self._timeout_ms,
            )
            try:
                self._begin(open_call)
            except errors.EngineError as err:
                sched.transfer_failed(rendezvous.room, err)
        elif isinstance(event, events.GrantPages):
            room = _rendezvous(event.req).room
            self._continue(sched, event.req, GrantCall(room, self._grants_of(event)))
        elif isinstance(event, events.RevokeGrant):
            self._continue(sched, event.req, RevokeCall(_rendezvous(event.req).room))
        elif isinstance(event, events.AbortTransfer):
            self._abort(event.req, event.code)

    def _grants_of(self, event: events.GrantPages) -> tuple[GroupGrant, ...]:
        granted = ((event.start_page, event.pages), *event.further)
        return tuple(
            GroupGrant(
                group,
                start_page,
                pages.tobytes(),
                self._groups.tokens_at(group, len(event.req.prompt)),
            )
            for group, (start_page, pages) in zip(self._groups.in_order, granted, strict=True)
        )

    def poll(self, sched: Scheduler) -> None:
        for event in self._node.poll(POLL_BATCH):
            room = event.room
            match event:
                case RoomAnnounced():
                    sched.transfer_announced(room)
                case GrantRevoked():
                    sched.grant_revoked(room)
                case RoomCommitted():
                    self._commit(sched, event)
                case RoomFailed():
                    error = error_of(event.code, event.message, event.is_retryable)
                    sched.transfer_failed(room, error)
                case RoomAborted():  # by this node, or by the runtime of a tensor-parallel rank
                    error = error_of("TRANSPORT_BROKEN", "a rank gave the room up", retryable=True)
                    sched.transfer_failed(room, error)

    def _commit(self, sched: Scheduler, event: RoomCommitted) -> None:
        room = event.room
        try:
            first = read_first_token(event.payload, self._vocab_size)
        except ValueError as err:
            self._count(RoomErrorKind.PAYLOAD)
            log.error("room %d ends: %s", room, err)
            sched.transfer_failed(room, error_of("TRANSPORT_BROKEN", str(err), retryable=True))
            return
        sched.transfer_committed(
            room,
            first.token,
            first.cached_tokens,
            first.logprobs(),
            event.pulled,
            first.completes_grammar,
        )
