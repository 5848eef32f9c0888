"""Messages between the front process and a scheduler process (one per DP rank), over ZMQ.

Encoded with msgspec's msgpack; prompts travel as little-endian int32 bytes, all tokens of a step in
one message. No pickle. Front → rank: `ToRank`; rank → front: `ToFront`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton.cache.int_array import pack, unpack
from baton.sched.metrics.histogram import Histogram
from baton.sched.state.load_report import LoadReport
from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.request_timeline import RequestTimeline
from baton.server.worker.control import ControlOperation


class SubmitMessage(msgspec.Struct, tag="submit"):
    """Front and ranks are processes of one machine, so they share the monotonic clock that a
    request's times are of.
    """

    request: ValidatedRequest


class AbortMessage(msgspec.Struct, tag="abort"):
    """Stop these requests and free what they hold. No TokenBatch row follows for them; unknown
    handles are ignored.
    """

    handles: list[int]


class ControlMessage(msgspec.Struct, tag="control"):
    """The rank answers with one ReplyMessage carrying the same `id`."""

    id: int
    operation: ControlOperation


ToRank = SubmitMessage | AbortMessage | ControlMessage


class ReplyMessage(msgspec.Struct, tag="reply"):
    id: int
    ok: bool
    result: dict[str, Any] = {}


class FromRank(msgspec.Struct):
    """A message in the name of a whole rank."""

    dp_rank: int


class TokenBatch(FromRank, tag="tokens"):
    """Output of one step. A handle may have several rows, in order.

    The front does not decode it: engine/text/src/answers/token_batch.rs does, which knows the
    fields in this order.
    """

    rows: list[EmittedTokens]


class LoadingMessage(FromRank, tag="loading"):
    """Parameters of the model that one process of a rank has in memory, at the start of loading and
    while it lasts.
    """

    tp_rank: int
    done: int
    total: int


class ReadyMessage(FromRank, tag="ready"):
    """The rank has loaded its model and accepts requests. `info`: what /get_server_info adds (pool
    size, dtype …).
    """

    info: dict[str, Any]


class StatsMessage(FromRank, tag="stats"):
    """Gauges, counters and histograms of one rank, every second and whenever it turns idle.

    `gauges` / `counters` are keyed by the metric's name with labels already rendered, e.g.
    'kv_pages{state="free"}'; the front adds the prefix `baton_` and the dp_rank label.
    """

    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    """Keyed like the others."""
    load: LoadReport | None = None
    not_accepting_reason: str | None = None
    """Why the rank should get no new requests although it lives."""


class FatalMessage(FromRank, tag="fatal"):
    """The rank is about to exit (or could not start); the front fails its requests and turns
    unready.
    """

    message: str


class KvEvents(FromRank, tag="kv_events"):
    """Batch of KV events, in order of `seq`; only with --kv-events-config.

    `payload`: kv_events.codec.WireEventBatch.
    """

    seq: int
    payload: bytes


class TimelinesMessage(FromRank, tag="timelines"):
    """Timelines of traced requests, after their end: on P that is when D has pulled."""

    timelines: list[RequestTimeline]


ToFront = (
    TokenBatch
    | ReplyMessage
    | LoadingMessage
    | ReadyMessage
    | StatsMessage
    | FatalMessage
    | KvEvents
    | TimelinesMessage
)

encoder = msgspec.msgpack.Encoder(enc_hook=pack)
to_rank_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=unpack)
to_front_decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
