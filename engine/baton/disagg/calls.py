"""Calls of a transfer node about its rooms, one struct each: the argument of `TransferNode.call`.

A tag is the name of the method of baton._native.TransferNode, and the fields are its arguments in
their order. No call waits for the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec


class GroupPages(NamedTuple):
    """Pages of one page group that a prompt has: those with the numbers [first_page, total_pages).

    Each group numbers its pages of a prompt from 0. The first ones do not exist in a group that
    keeps the last tokens only.
    """

    group: int
    """Id of the group's descriptor in the layout of the node."""
    first_page: int
    total_pages: int
    last_page_tokens: int
    tokens_at: int | None = None
    """How many tokens of the prompt a state has seen; None: the group has no states."""


class GroupGrant(NamedTuple):
    """Where the pages of one page group go."""

    group: int
    start_page: int
    """Pages with lower numbers are here or not needed."""
    dst_pages: bytes
    """For all other pages, in their order: pages of the pool, int32, little endian."""
    tokens_at: int | None = None
    """How many tokens a state must have seen; None: the group has no states."""


class GroupIds(NamedTuple):
    """Ids of the page groups of a layout."""

    in_order: tuple[int, ...]
    """As the layout has them. The scheduler numbers them in this order, from 0."""
    states: int | None = None
    """The one whose pages hold states of sequences."""

    @staticmethod
    def of(layout: Mapping[str, Any]) -> GroupIds:
        """Args: `layout`: that of the transfer node."""
        groups = layout["groups"]
        states = next((group["id"] for group in groups if group["kind"] == "state"), None)
        return GroupIds(tuple(group["id"] for group in groups), states)

    def tokens_at(self, group: int, prompt_tokens: int) -> int | None:
        """How many tokens the state of a group has seen at the end of a prompt: all of them, so
        that D computes the first token behind it; None: the group has no states.
        """
        return prompt_tokens if group == self.states else None


class RoomCall(msgspec.Struct, frozen=True):
    """A call about one room."""

    room: int


class OfferCall(RoomCall, frozen=True, tag="offer"):
    """P: a request was accepted; `deadline_ms` from now it is given up unless it is finished."""

    attempt: int
    prompt_hash: bytes
    deadline_ms: int


class OpenCall(RoomCall, frozen=True, tag="open"):
    """D: fetch a prompt's pages from the prefill rank behind a bootstrap server."""

    attempt: int
    bootstrap_host: str
    bootstrap_port: int
    prefill_dp_rank: int
    """As the driver names it; below 0: room modulo P's DP size. With tensor parallelism, each
    process reads from the one of P with its heads.
    """
    prompt_hash: bytes
    deadline_ms: int
    """From now."""


class PublishCall(RoomCall, frozen=True, tag="publish"):
    """P: a group's prompt pages from `first_page` on are final. Seals them.

    A group's first call may begin at any page, each later one continues it without a gap.
    """

    group: int
    first_page: int
    pages: bytes
    """Their pages of the pool: int32, little endian."""


class FinishCall(RoomCall, frozen=True, tag="finish"):
    """P: prefill has ended, and all pages are published. The lease begins."""

    groups: tuple[GroupPages, ...]
    """One for each group of the layout."""
    payload: bytes
    """At most 2 MiB, which D gets unread."""


class GrantCall(RoomCall, frozen=True, tag="grant"):
    """D: where the prompt's pages go. They are written until the room ends, and not after."""

    groups: tuple[GroupGrant, ...]
    """One for each group of the layout."""


class RevokeCall(RoomCall, frozen=True, tag="revoke"):
    """D: take the grant back.

    `poll` answers GrantRevoked, or RoomAnnounced: P came first, the pages stay granted.
    """


class AbortCall(RoomCall, frozen=True, tag="abort"):
    """Either side; idempotent.

    On P also for a room that was never offered: a D that waits for it is refused.
    """

    code: str
    """Reason code of kv_transfer."""


class DrainCall(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse the transfers that begin from now on; live rooms continue."""


TransferCall = (
    OfferCall | OpenCall | PublishCall | FinishCall | GrantCall | RevokeCall | AbortCall | DrainCall
)
