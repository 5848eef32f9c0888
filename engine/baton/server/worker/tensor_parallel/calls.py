"""Calls that the first tensor-parallel rank makes on the transfer runtimes of all ranks, one struct each.

Fields are the arguments of the method of the same name of disagg.transfer_driver.TransferNode.
"""

from __future__ import annotations

import msgspec


class RoomCall(msgspec.Struct, frozen=True):
    """A call about one room."""

    room: int


class OfferCall(RoomCall, frozen=True, tag="offer"):
    attempt: int
    prompt_hash: bytes
    deadline_ms: int


class OpenCall(RoomCall, frozen=True, tag="open"):
    attempt: int
    bootstrap_host: str
    bootstrap_port: int
    prefill_dp_rank: int
    """As the first rank's driver names it; each process reads from the one of P with its heads."""
    prompt_hash: bytes
    deadline_ms: int


class PublishCall(RoomCall, frozen=True, tag="publish"):
    first_page: int
    pages: bytes


class FinishCall(RoomCall, frozen=True, tag="finish"):
    total_pages: int
    last_page_tokens: int
    payload: bytes


class GrantCall(RoomCall, frozen=True, tag="grant"):
    start_page: int
    dst_pages: bytes


class GrantAgainCall(RoomCall, frozen=True, tag="grant_again"):
    """A grant for the ranks that gave their pages back while another rank could not."""

    start_page: int
    dst_pages: bytes
    tp_ranks: list[int]


class RevokeCall(RoomCall, frozen=True, tag="revoke"):
    pass


class AbortCall(RoomCall, frozen=True, tag="abort"):
    code: str


class DrainCall(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse the transfers that begin from now on."""


TransferCall = (
    OfferCall
    | OpenCall
    | PublishCall
    | FinishCall
    | GrantCall
    | GrantAgainCall
    | RevokeCall
    | AbortCall
    | DrainCall
)

encode_call = msgspec.msgpack.Encoder().encode
call_decoder: msgspec.msgpack.Decoder[TransferCall] = msgspec.msgpack.Decoder(TransferCall)
