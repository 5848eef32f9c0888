"""Calls that the first tensor-parallel rank makes on the transfer nodes of all ranks."""

from __future__ import annotations

import msgspec

from baton.disagg.calls import GrantCall, TransferCall


class GrantAgainCall(msgspec.Struct, frozen=True, tag="grant_again"):
    """A grant for the ranks that gave their pages back while another rank could not."""

    grant: GrantCall
    tp_ranks: list[int]


TpCall = TransferCall | GrantAgainCall

encode_call = msgspec.msgpack.Encoder().encode
call_decoder: msgspec.msgpack.Decoder[TpCall] = msgspec.msgpack.Decoder(TpCall)
