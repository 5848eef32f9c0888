"""Events of a rank's transfer runtime, one struct each: the results of `poll`.

Exactly one event ends each room: RoomCommitted, RoomFailed or RoomAborted on D, RoomReleased on P.
Before it come, on D only, RoomAnnounced and the answers to `revoke`: RoomAnnounced or GrantRevoked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.disagg.calls import GroupPages
from baton.sched.types.request_timeline import PulledPages

RELEASED_AFTER_PULL = "DONE"
"""RoomReleased.code when D has pulled everything; otherwise a reason code of kv_transfer."""


class RoomEvent(msgspec.Struct, frozen=True):
    """An event of one room."""

    room: int


class RoomAnnounced(RoomEvent, frozen=True, tag="announced"):
    """D: P holds pages for a room without a grant."""


class GrantRevoked(RoomEvent, frozen=True, tag="revoked"):
    """D: the pages of the grant are not written any more."""


class RoomCommitted(RoomEvent, frozen=True, tag="committed"):
    """D: all pages are here and verified."""

    payload: bytes
    """Data that P sent beside the pages: transfer_driver.FirstToken."""
    groups: tuple[GroupPages, ...]
    pulled: PulledPages


class RoomFailed(RoomEvent, frozen=True, tag="failed"):
    """D: the pages cannot come."""

    code: str
    """Reason code of kv_transfer."""
    message: str
    is_retryable: bool


class RoomAborted(RoomEvent, frozen=True, tag="aborted"):
    """D: the room was given up here."""


class RoomReleased(RoomEvent, frozen=True, tag="released"):
    """P: the pages are not read any more."""

    code: str
    """`RELEASED_AFTER_PULL`, or the reason code of kv_transfer."""


RoomEnd = RoomCommitted | RoomFailed | RoomAborted | RoomReleased
NodeEvent = RoomAnnounced | GrantRevoked | RoomEnd

_pulled_decoder = msgspec.json.Decoder(PulledPages)


def read_event(native: tuple[Any, ...]) -> NodeEvent:
    """The struct of a tuple from `poll` of baton._native.TransferNode.

    Raises ValueError for a tuple that this version does not know.
    """
    match native:
        case ("announced", room):
            return RoomAnnounced(room)
        case ("revoked", room):
            return GrantRevoked(room)
        case ("committed", room, payload, groups, pulled):
            pages = tuple(GroupPages(*group) for group in groups)
            return RoomCommitted(room, payload, pages, _pulled_decoder.decode(pulled))
        case ("failed", room, code, message, is_retryable):
            return RoomFailed(room, code, message, is_retryable)
        case ("aborted", room):
            return RoomAborted(room)
        case ("released", room, code):
            return RoomReleased(room, code)
    raise ValueError(
        f"the transfer runtime reports {native[0]!r} with {len(native) - 1} values, which this "
        "version does not know; build the native extension again"
    )
