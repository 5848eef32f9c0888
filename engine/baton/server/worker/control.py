"""Control operations that the front asks a rank to carry out, one struct each.

The fields of the answer (messages.ReplyMessage.result) are named in the docstrings.
"""

from __future__ import annotations

import msgspec


class FlushCache(msgspec.Struct, frozen=True, tag="flush_cache"):
    """Drop the cached pages that no request uses. Answer: `pages`."""


class ReadKvSnapshot(msgspec.Struct, frozen=True, tag="kv_snapshot"):
    """The radix cache as one batch of KV events. Answer: `epoch`, `seq`, `payload`."""


class ReadLedger(msgspec.Struct, frozen=True, tag="ledger"):
    """Answer: `pages` and `requests`; with a transfer runtime also `rooms` and `transfer`."""

    room: int | None = None
    """List this KV transfer alone; None: all."""


class CountRemaining(msgspec.Struct, frozen=True, tag="left"):
    """Work that must end before the rank can stop without a loss. Answer: `requests`, `rooms`,
    `oldest_secs`.
    """


class ReadSteps(msgspec.Struct, frozen=True, tag="steps"):
    """The scheduler's last decisions. Answer: `steps`."""

    limit: int


class AbortByRoom(msgspec.Struct, frozen=True, tag="abort"):
    """End the requests of these rooms, and prompts that are leased to D. Answer: `aborted`."""

    rooms: list[int]
    rid: str | None
    """Leased prompts of the request with this id."""
    all_leases: bool
    """All leased prompts."""


class EndTransfers(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse the KV transfers that begin from now on. Answer: requests by state."""


class SuspendItems(msgspec.Struct, frozen=True, tag="suspend"):
    """Stop computing these items until they are resumed. Answer: `found`; `message` when it cannot
    be done.
    """

    handles: list[int]


class ResumeItems(msgspec.Struct, frozen=True, tag="resume"):
    """Answer: `found`."""

    handles: list[int]


ControlOperation = (
    FlushCache
    | ReadKvSnapshot
    | ReadLedger
    | CountRemaining
    | ReadSteps
    | AbortByRoom
    | EndTransfers
    | SuspendItems
    | ResumeItems
)


def operation_name(operation: ControlOperation) -> str:
    """The operation's tag, for messages to people."""
    return str(operation.__struct_config__.tag)
