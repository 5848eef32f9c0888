"""The life of a disaggregated request on its two nodes: scheduler events in, native transfer calls out, and back.

    P   offer ──▶ publish* (final pages, per chunk) ──▶ finish (first token, lease) ──▶ released ─▶ sched.release
    D   open ──▶ grant (pages reserved) ──▶ committed (all verified) ─▶ sched.transfer_committed
        announced (P holds pages, no grant yet) ─▶ sched.transfer_announced
        revoke ──▶ revoked ─▶ sched.grant_revoked, or announced: P came first
                                        └─▶ failed ─▶ sched.transfer_failed
        abort ──▶ aborted ─▶ sched.transfer_closed

Native calls never block: sockets and copies live in the transfer runtime's threads (crate kv_transfer), which wakes the
scheduler process through `event_fd`. Nothing here knows torch or a socket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from baton.errors import (
    BootstrapUnreachable,
    DuplicateRoom,
    EngineError,
    KvTransferFailed,
    KvTransferTimeout,
    PairIncompatible,
    PrefillFailed,
    PromptTooLong,
)
from baton.request import Rendezvous, Validated
from baton.sched.events import AbortTransfer, Event, GrantPages, OpenTransfer, PagesFinal, PrefillDone, RevokeGrant
from baton.sched.plan import TokenLogprobs
from baton.sched.scheduler import Scheduler
from baton.sched.story import Pulled

POLL_BATCH = 256
"""Transfer events taken per scheduler turn."""

_ERROR_OF_REASON: dict[str, type[EngineError]] = {
    "DEADLINE": KvTransferTimeout,
    "LAYOUT_MISMATCH": PairIncompatible,
    "PROMPT_MISMATCH": PairIncompatible,
    "UNREACHABLE": BootstrapUnreachable,
    "AUTH": PairIncompatible,
    "DUP_ROOM": DuplicateRoom,
    "CLIENT_GONE": PrefillFailed,
    "PROMPT_TOO_LONG": PromptTooLong,
}


class TransferNode(Protocol):
    """The part of baton._native.TransferNode used here (see its docstrings)."""

    def offer(self, room: int, attempt: int, prompt_hash: bytes, deadline_ms: int) -> None: ...
    def publish(self, room: int, first_page: int, pages: bytes) -> None: ...
    def finish(self, room: int, total_pages: int, last_page_tokens: int, payload: bytes) -> None: ...
    def open(
        self, room: int, attempt: int, bootstrap_host: str, bootstrap_port: int, prefill_dp_rank: int,
        prompt_hash: bytes, deadline_ms: int,
    ) -> None: ...  # fmt: skip
    def grant(self, room: int, start_page: int, dst_pages: bytes) -> None: ...
    def revoke(self, room: int) -> None: ...
    def abort(self, room: int, code: str) -> None: ...
    def poll(self, max: int) -> Sequence[tuple[object, ...]]: ...


class FirstToken(msgspec.Struct, array_like=True):
    """What P tells D beside the pages: the payload of FINAL."""

    token: int
    cached_tokens: int
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def logprobs(self) -> TokenLogprobs | None:
        return None if self.logprob is None else TokenLogprobs(self.logprob, self.top_ids, self.top_logprobs)


_payload_encoder = msgspec.msgpack.Encoder()
_payload_decoder = msgspec.msgpack.Decoder(FirstToken)
_pulled_decoder = msgspec.json.Decoder(Pulled)


def prompt_hash(req: Validated) -> bytes:
    """16 bytes by which P and D recognise that they tokenised the same prompt."""
    return hashlib.blake2b(req.prompt.tobytes(), digest_size=16, key=req.namespace[:64]).digest()


def _meeting(req: Validated) -> Rendezvous:
    assert req.rendezvous is not None, f"request {req.rid} has no rendezvous"
    return req.rendezvous


def error_of(reason: str, message: str, retryable: bool) -> EngineError:
    """The HTTP-side error of a transfer reason code."""
    hint = "; retry" if retryable else ""
    return _ERROR_OF_REASON.get(reason, KvTransferFailed)(f"{reason}: {message}{hint}")


class PrefillRelay:
    """P's half. Raises DuplicateRoom from `accept` when the room is still known to the transfer runtime."""

    def __init__(self, node: TransferNode, timeout_secs: float) -> None:
        self._node = node
        self._timeout_ms = int(timeout_secs * 1000)

    def accept(self, req: Validated) -> None:
        """Called before the scheduler queues a request with a room."""
        meet = _meeting(req)
        try:
            self._node.offer(meet.room, meet.attempt, prompt_hash(req), self._timeout_ms)
        except ValueError as err:
            raise DuplicateRoom(f"bootstrap room {meet.room} is in use: {err}", param="bootstrap_room") from err

    def refuse(self, req: Validated) -> None:
        """The scheduler did not take a request that `accept` had offered."""
        self._node.abort(_meeting(req).room, "NO_CAPACITY")

    def carry_out(self, event: Event) -> None:
        if isinstance(event, PagesFinal):
            self._node.publish(_meeting(event.req).room, event.first_page, event.pages.tobytes())
        elif isinstance(event, PrefillDone):
            lp = event.logprobs
            payload = FirstToken(event.token, event.cached_tokens)
            if lp is not None:
                payload = FirstToken(
                    event.token, event.cached_tokens, lp.chosen, tuple(lp.top_ids), tuple(lp.top_logprobs)
                )
            self._node.finish(
                _meeting(event.req).room, event.total_pages, event.last_page_tokens, _payload_encoder.encode(payload)
            )
        elif isinstance(event, AbortTransfer):
            self._node.abort(_meeting(event.req).room, event.code)

    def pump(self, sched: Scheduler) -> None:
        """Take over what the transfer runtime reports."""
        for kind, room, *rest in self._node.poll(POLL_BATCH):
            assert isinstance(room, int)
            if kind == "released":
                sched.release(room, str(rest[0]))


class DecodeRelay:
    """D's half."""

    def __init__(self, node: TransferNode, timeout_secs: float) -> None:
        self._node = node
        self._timeout_ms = int(timeout_secs * 1000)

    def accept(self, req: Validated) -> None:
        """Nothing to do before the scheduler has queued the request."""

    def refuse(self, req: Validated) -> None:
        """Nothing was promised to the peer."""

    def carry_out(self, event: Event) -> None:
        if isinstance(event, OpenTransfer):
            meet = _meeting(event.req)
            self._node.open(
                meet.room, meet.attempt, meet.host, meet.port, meet.prefill_dp_rank, prompt_hash(event.req),
                self._timeout_ms,
            )  # fmt: skip
        elif isinstance(event, GrantPages):
            self._node.grant(_meeting(event.req).room, event.start_page, event.pages.tobytes())
        elif isinstance(event, RevokeGrant):
            self._node.revoke(_meeting(event.req).room)
        elif isinstance(event, AbortTransfer):
            self._node.abort(_meeting(event.req).room, event.code)

    def pump(self, sched: Scheduler) -> None:
        for kind, room, *rest in self._node.poll(POLL_BATCH):
            assert isinstance(room, int)
            if kind == "announced":
                sched.transfer_announced(room)
            elif kind == "revoked":
                sched.grant_revoked(room)
            elif kind == "committed":
                payload, _, _, pulled = rest
                assert isinstance(payload, bytes)
                assert isinstance(pulled, str)
                first = _payload_decoder.decode(payload)
                told = _pulled_decoder.decode(pulled)
                sched.transfer_committed(room, first.token, first.cached_tokens, first.logprobs(), told)
            elif kind == "failed":
                code, message, retryable = rest
                sched.transfer_failed(room, error_of(str(code), str(message), bool(retryable)))
            elif kind == "aborted":
                sched.transfer_closed(room)


Relay = PrefillRelay | DecodeRelay
