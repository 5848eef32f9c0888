"""The front's end of the ZMQ sockets: sends to the scheduler processes, hands their messages to the
waiting calls.

1. `submit` sends one item to one rank and stores its sink under the item's handle; `open_answer`
   registers the request's items with the text layer, with the rules of its answer;
2. every message with tokens goes to the text layer undecoded; the resulting bytes and events go to
   the sinks, in the event loop, in the order of the messages;
3. a row with a finish, an `abort`, or the rank's death removes the handle; exactly one of them
   happens.

Invariants: a handle is never reused; rows of unknown handles (just aborted) are dropped; what is in
flight is bounded by `limit` per rank, so the sockets' queues are too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from baton.errors import (
    EngineDead,
    EngineError,
    NonfiniteLogits,
    NotReady,
    QueueFull,
    RequestTimeout,
    by_code,
)
from baton.sched.types.request import ValidatedRequest
from baton.server.worker import messages
from baton.server.worker.control import ControlOperation, operation_name

if TYPE_CHECKING:  # launch reports a missing extension in a sentence
    from baton._native import AnswerCounts, AnswerTable, FailedAnswer, FedBatch, FirstToken

log = logging.getLogger("baton.front")

DRAIN_BURST = 64
"""Messages taken from the socket before other tasks get their turn."""
SEND_QUEUE = 100_000
"""Messages a rank may be behind by (its submits are bounded by `limit`); more means it hangs."""


class AnswerSink(Protocol):
    """Receives what becomes of one request."""

    def on_first_token(self, first: FirstToken, now: float) -> None: ...
    def on_metered(self, tokens: int) -> None: ...
    def on_chunk(self, chunk: bytes, now: float) -> None: ...
    def on_finish(self) -> None: ...
    def fail(self, error: EngineError) -> None: ...


@dataclass(slots=True)
class RankClient:
    """Scheduler process as the front sees it."""

    dp_rank: int
    socket: zmq.Socket[bytes]
    ready: bool = False
    dead: str | None = None
    """Why it is gone; None while it lives."""
    info: dict[str, Any] = field(default_factory=dict)
    loading: dict[int, float] = field(default_factory=dict)
    """Share of its weights that each process has read, by TP rank; empty before the first has
    begun.
    """
    tp_size: int = 1
    stats: messages.StatsMessage = field(init=False)
    """Last report, made at `reported_at` (monotonic seconds); empty before the first and after its
    death.
    """
    reported_at: float = 0.0
    items: dict[int, tuple[AnswerSink, int]] = field(default_factory=dict)
    """Sink and weight of each item in flight, by handle."""
    nonfinite: int = 0
    """Answers in a row that ended because the model computed NaN or infinity."""
    nonfinite_at: float = 0.0
    """When the last of them ended (monotonic seconds)."""
    tokens_in_flight: int = 0
    """Prompt tokens + answer limit of what it works on: the load that balancing compares."""

    def __post_init__(self) -> None:
        self.stats = messages.StatsMessage(self.dp_rank)

    @property
    def load_progress(self) -> float:
        """Share of its weights that are in memory, 0 to 1."""
        return 1.0 if self.ready else sum(self.loading.values()) / self.tp_size


class RankSet:
    """All ranks of this node."""

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        pushes: Sequence[zmq.Socket[bytes]],
        limit: int,
        answers: AnswerTable,
        tp_size: int = 1,
    ) -> None:
        self.answers = answers
        """The text layer's view of what runs."""
        self._sinks: dict[int, AnswerSink] = {}
        """By id of an open answer."""
        self._pull = pull
        self._limit = limit
        self.ranks = [RankClient(i, socket, tp_size=tp_size) for i, socket in enumerate(pushes)]
        self._of_handle: dict[int, RankClient] = {}
        self._handles = itertools.count(1)
        self._controls: dict[int, tuple[RankClient, asyncio.Future[messages.ReplyMessage]]] = {}
        self._control_ids = itertools.count(1)
        self._next = 0
        self.changed = asyncio.Event()
        """Set at every Ready and death. Look and clear it without an await between, then wait:
        nothing is missed.
        """
        self._loop = asyncio.get_running_loop()
        self.on_stats: Callable[[RankClient], None] = lambda rank: None
        """Called after a report, and with empty tables after a death."""
        self.on_kv_events: Callable[[messages.KvEvents], None] = lambda message: None
        self.on_timelines: Callable[[messages.TimelinesMessage], None] = lambda message: None
        self._loop.add_reader(self._pull.FD, self._readable)
        # ZMQ's descriptor is edge-triggered: look once for what came before the reader was there.
        self._loop.call_soon(self._readable)

    # ---- state -----------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        return all(r.ready and r.dead is None for r in self.ranks)

    @property
    def any_alive(self) -> bool:
        return any(r.dead is None for r in self.ranks)

    @property
    def all_alive(self) -> bool:
        return all(r.dead is None for r in self.ranks)

    @property
    def in_flight(self) -> int:
        return len(self._of_handle)

    # ---- to the ranks ----------------------------------------------------------------------------

    def choose(self, wanted: int | None) -> RankClient:
        """The rank asked for, else the least loaded one that lives; ties go round. Raises NotReady
        or EngineDead.
        """
        if wanted is not None:
            rank = self.ranks[wanted]
        else:
            alive = [r for r in self.ranks if r.dead is None]
            if not alive:
                raise EngineDead(
                    f"no rank of this engine is alive ({self.ranks[0].dead})", retry_after_secs=5
                )
            self._next += 1
            turn = self._next
            rank = min(
                alive, key=lambda r: (r.tokens_in_flight, (r.dp_rank - turn) % len(self.ranks))
            )
        if rank.dead is not None:
            raise EngineDead(
                f"rank {rank.dp_rank} of this engine is gone ({rank.dead})", retry_after_secs=5
            )
        if not rank.ready:
            raise NotReady(f"rank {rank.dp_rank} is still loading the model", retry_after_secs=2)
        return rank

    def draw_handle(self) -> int:
        """A handle that no item has or had."""
        return next(self._handles)

    def submit(self, rank: RankClient, request: ValidatedRequest, sink: AnswerSink) -> None:
        """Send one item, whose handle was drawn here. Raises QueueFull."""
        if len(rank.items) >= self._limit:
            raise QueueFull(
                f"rank {rank.dp_rank} has {len(rank.items)} requests in flight, its limit is "
                f"{self._limit}; "
                "try again later, or raise --max-queued-requests",
                retry_after_secs=1,
            )
        handle = request.handle
        weight = len(request.prompt) + request.params.max_new_tokens
        self._send(rank, messages.SubmitMessage(request))
        rank.items[handle] = (sink, weight)
        rank.tokens_in_flight += weight
        self._of_handle[handle] = rank

    def open_answer(self, spec: bytes, sink: AnswerSink) -> int:
        """Begin an answer (answer_spec.AnswerSpec) of items that were just submitted; returns its
        id.
        """
        answer: int = self.answers.open(spec)
        self._sinks[answer] = sink
        return answer

    def close_answer(self, answer: int) -> AnswerCounts | None:
        """Forget an answer; returns what it counted."""
        self._sinks.pop(answer, None)
        return self.answers.close(answer)

    def runs(self, handle: int) -> bool:
        """Tell whether a rank works on the item."""
        return handle in self._of_handle

    def abort(self, handles: Sequence[int]) -> None:
        """Forget these items and tell their ranks. Unknown handles (already finished) are
        ignored.
        """
        per_rank: dict[int, list[int]] = {}
        for handle in handles:
            if (rank := self._forget(handle)) is not None:
                per_rank.setdefault(rank.dp_rank, []).append(handle)
        for dp_rank, mine in per_rank.items():
            rank = self.ranks[dp_rank]
            if rank.dead is None:
                try:
                    self._send(rank, messages.AbortMessage(mine))
                except QueueFull as err:
                    log.error(
                        "abort lost: %s", err.message
                    )  # the rank hangs; its deadline frees the requests

    async def control(
        self, rank: RankClient, operation: ControlOperation, timeout_secs: float
    ) -> messages.ReplyMessage:
        """Ask one rank. Raises EngineDead or RequestTimeout."""
        if rank.dead is not None:
            raise EngineDead(f"rank {rank.dp_rank} of this engine is gone ({rank.dead})")
        id = next(self._control_ids)
        future: asyncio.Future[messages.ReplyMessage] = self._loop.create_future()
        self._controls[id] = (rank, future)
        try:
            self._send(rank, messages.ControlMessage(id, operation))
            return await asyncio.wait_for(future, timeout_secs)
        except asyncio.TimeoutError:
            raise RequestTimeout(
                f"rank {rank.dp_rank} did not answer {operation_name(operation)!r} within "
                f"{timeout_secs:g} s"
            ) from None
        finally:
            del self._controls[id]

    def _send(self, rank: RankClient, message: messages.ToRank) -> None:
        try:
            rank.socket.send(messages.encoder.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            raise QueueFull(
                f"rank {rank.dp_rank} does not take messages; it hangs or is gone",
                retry_after_secs=5,
            ) from None

    # ---- from the ranks --------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._pull.closed:  # the loop had planned this call already
            return
        for _ in range(DRAIN_BURST):
            try:
                raw = self._pull.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            now = time.monotonic()
            try:
                fed = self.answers.feed(raw, now)
                if fed is None:
                    self._dispatch(messages.to_front_decoder.decode(raw))
                else:
                    self._take_tokens(fed, now)
            except (ValueError, msgspec.DecodeError):
                log.exception("a rank sent a message that cannot be decoded (%d bytes)", len(raw))
        self._loop.call_soon(self._readable)

    def _dispatch(self, message: messages.ToFront) -> None:
        if isinstance(message, messages.StatsMessage):
            rank = self.ranks[message.dp_rank]
            rank.stats, rank.reported_at = message, time.monotonic()
            self.on_stats(rank)
        elif isinstance(message, messages.ReplyMessage):
            _, future = self._controls.get(message.id, (None, None))
            if future is not None and not future.done():  # else the question timed out
                future.set_result(message)
        elif isinstance(message, messages.LoadingMessage):
            self.ranks[message.dp_rank].loading[message.tp_rank] = message.done / max(
                message.total, 1
            )
        elif isinstance(message, messages.ReadyMessage):
            rank = self.ranks[message.dp_rank]
            rank.ready = True
            rank.info = message.info
            self.changed.set()
        elif isinstance(message, messages.KvEvents):
            self.on_kv_events(message)
        elif isinstance(message, messages.TimelinesMessage):
            self.on_timelines(message)
        elif isinstance(message, messages.FatalMessage):
            self.died(message.dp_rank, message.message)

    def _take_tokens(self, fed: FedBatch, now: float) -> None:
        """Hand on what the text layer made of a step's tokens."""
        for handle in fed.ended:
            self._forget(handle)
        if fed.stopped:
            self.abort(fed.stopped)
        sinks = self._sinks
        for first in fed.first_tokens:
            sinks[first.answer].on_first_token(first, now)
        for answer, tokens in fed.metered:
            sinks[answer].on_metered(tokens)
        for answer in fed.finished:
            sinks[answer].on_finish()
        for answer, chunk in fed.chunks:
            try:
                sinks[answer].on_chunk(chunk, now)
            except Exception:  # one request's trouble must not cost the other rows of the batch
                log.exception("answer %d: its output could not be written", answer)
                sinks[answer].fail(EngineError("internal error; the engine's log has the details"))
        rank = self.ranks[fed.dp_rank]
        if fed.has_output:
            rank.nonfinite = 0
        for failed in fed.failed:
            error = _error(failed)
            if isinstance(error, NonfiniteLogits):
                rank.nonfinite += 1
                rank.nonfinite_at = now
            if (sink := sinks.get(failed.answer)) is not None:  # not closed by an item before it
                sink.fail(error)

    def died(self, dp_rank: int, why: str) -> None:
        """The rank's process is gone: everything it worked on fails now. Idempotent.

        A death before the rank was ready is reported by the launcher, which then gives up.
        """
        rank = self.ranks[dp_rank]
        if rank.dead is not None:
            return
        if rank.ready:
            log.error("rank %d is gone: %s; %d requests fail", dp_rank, why, len(rank.items))
        rank.dead = why
        rank.ready = False
        rank.stats = messages.StatsMessage(dp_rank)
        self.on_stats(rank)
        for handle, (sink, _) in list(rank.items.items()):
            self._forget(handle)
            sink.fail(
                EngineDead(
                    f"rank {dp_rank} of this engine died while it worked on this request ({why})"
                )
            )
        for asked, future in self._controls.values():
            if asked is rank and not future.done():
                future.set_exception(EngineDead(f"rank {dp_rank} of this engine died ({why})"))
        self.changed.set()

    def _forget(self, handle: int) -> RankClient | None:
        rank = self._of_handle.pop(handle, None)
        if rank is not None:
            _, weight = rank.items.pop(handle)
            rank.tokens_in_flight -= weight
        return rank

    def close(self) -> None:
        if self._pull.closed:
            return
        self._loop.remove_reader(self._pull.FD)
        for socket in (self._pull, *(r.socket for r in self.ranks)):
            socket.close(linger=0)


def _error(failed: FailedAnswer) -> EngineError:
    """The rank's code and message as the exception that carries them to the client."""
    code, text, param = failed.error or ("aborted", "the request was aborted", None)
    cls = by_code(code)
    retry_after_secs = 1 if failed.retry_after_secs is None else failed.retry_after_secs
    return cls(
        text,
        param=param,
        retry_after_secs=retry_after_secs if cls.status in (429, 503) else None,
    )
