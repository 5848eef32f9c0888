"""Running request in the front: its items on the ranks, and the bytes that it owes its client.

1. `Generation.start` submits every item (all or none) and opens an answer in the text layer;
2. the layer makes bytes of what the ranks send, in the event loop, so that a rank stops at a stop
   string even while the client reads slowly; they wait here until the HTTP handler takes them with
   `next()`;
3. once the head of a stream is out, the handler lets them go to the connection directly
   (`write_directly`); while the connection's buffer is full, output gathers in the layer;
4. `close()` aborts what still runs. It is called in a `finally`: a disconnect, an error and a
   normal end all free the rank.

Invariants: after an error the other items are aborted and `next` raises, once what came before has
been taken.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from baton.errors import EngineError, RequestTimeout
from baton.sched.types.request import ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages
from baton.server.observability.metrics import EngineMetrics
from baton.server.observability.spans import ParentSpan
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.prompt.items import PromptItem
from baton.server.text.answer_spec import AnswerSpec, ChoiceSpec, Dialect, encode_spec
from baton.server.text.native import native_extension
from baton.server.text.reasoning_format import MAX_CONTEXT_TOKENS, end_of_prompt
from baton.server.worker.client import RankClient, RankSet

log = logging.getLogger("baton.front")

if TYPE_CHECKING:  # launch reports a missing extension in a sentence
    from baton._native import AnswerCounts, FirstToken

DEADLINE_GRACE_SECS = 5.0
"""The rank ends a request at its deadline; the front waits this much longer before it does it
itself.
"""

encode_json = msgspec.json.Encoder().encode
decode_stages = msgspec.msgpack.Decoder(FirstTokenStages).decode


@dataclass(slots=True)
class RunningItem:
    """An item and where it runs."""

    index: int
    item: PromptItem
    handle: int
    rank: RankClient | None = None
    """None until the item is submitted."""


@dataclass(frozen=True, slots=True)
class ClientConnection:
    """Connection to which the events of a stream are written."""

    transport: asyncio.WriteTransport
    drain: Callable[[], Awaitable[None]]
    """Returns when the transport has room again."""
    high_water: int
    """Bytes in the transport's buffer above which a client counts as slow."""
    is_chunked: bool
    """Events need the framing of HTTP/1.1's chunked coding."""


@dataclass(eq=False)
class Generation:
    """All items of one accepted request. Implements worker.client.AnswerSink."""

    rid: str
    request_id: str
    accepted: AcceptedRequest
    dialect: Dialect
    ranks: RankSet
    metrics: EngineMetrics
    endpoint: str
    arrived: float
    timeout_secs: float
    eos_token_ids: tuple[int, ...] = ()
    """The model's end tokens."""
    on_generated: Callable[[int], None] | None = None
    """Called with the number of tokens as they come."""
    parent: ParentSpan | None = None
    """Parent of the ranks' spans."""
    reports_tokens: bool = False
    """The stream has comments with which a router can resume it."""

    def __post_init__(self) -> None:
        self.submitted_at: float | None = None
        self.first_token_at: float | None = None
        self.stages: FirstTokenStages | None = None
        """The way of the first item to its first token."""
        self.created = (
            int(time.time()) if self.accepted.resume is None else self.accepted.resume.created
        )
        """Unix seconds: what its events say."""
        self.items = [
            RunningItem(i, item, self.ranks.draw_handle())
            for i, item in enumerate(self.accepted.items)
        ]
        self.counts: AnswerCounts | None = None
        """Token counts, once the answer is closed."""
        self._answer: int | None = None
        """Id in the text layer, while it is open."""
        self._deadline = self.arrived + self.timeout_secs
        self._error: EngineError | None = None
        self._failure_end = b""
        """Last bytes of a stream that an error ends."""
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._has_all = False
        self._connection: ClientConnection | None = None
        """Where chunks go directly."""
        self._is_held = False
        self._last_output_at = self.arrived

    def start(self) -> None:
        """Submit every item. Raises QueueFull, NotReady, EngineDead; then nothing runs."""
        self.submitted_at = time.monotonic()
        try:
            if self.accepted.is_computed:
                self._submit_items(self.submitted_at)
            self._answer = self.ranks.open_answer(encode_spec(self._spec()), self)
        except EngineError:
            self.close()
            raise
        if not self.accepted.is_computed:
            self._release()

    def _submit_items(self, now: float) -> None:
        many = len(self.items) > 1
        trace = b"" if self.parent is None else self.parent.packed(now)
        ttft_secs = self.accepted.ttft_deadline_secs
        prediction = array("i") if (given := self.accepted.prediction) is None else given
        for running in self.items:
            item = running.item
            rank = self.ranks.choose(item.dp_rank)
            request = ValidatedRequest(
                handle=running.handle,
                rid=f"{self.rid}-{running.index}" if many else self.rid,
                prompt=item.prompt,
                params=item.params,
                priority=self.accepted.priority,
                priority_class=self.accepted.priority_class,
                tenant=self.accepted.tenant,
                namespace=self.accepted.namespace,
                rendezvous=item.rendezvous,
                arrival=self.arrived,
                trace=trace,
                deadline=self._deadline,
                ttft_deadline=None if ttft_secs is None else self.arrived + ttft_secs,
                prediction=prediction,
                draft_limit=self.accepted.draft_limit,
            )
            self.ranks.submit(rank, request, self)
            running.rank = rank

    def _spec(self) -> AnswerSpec:
        """The options of the request, with what is known now that its items are on their ranks."""
        seed = self.items[0].item.params.seed
        return msgspec.structs.replace(
            self.accepted.answer,
            dialect=self.dialect,
            request_id=self.request_id,
            model=self.metrics.model_name,
            created=self.created,
            arrived=self.arrived,
            comment_seed=seed if self.reports_tokens else None,
            is_metered=self.on_generated is not None,
            choices=[self._choice_spec(running) for running in self.items],
        )

    def _choice_spec(self, running: RunningItem) -> ChoiceSpec:
        item = running.item
        accepted = self.accepted
        answer = accepted.answer
        prompt = item.prompt[: item.asked_tokens]
        continues_prompt = accepted.continues_prompt
        left_context = prompt[-MAX_CONTEXT_TOKENS:]
        prompt_end = end_of_prompt(prompt, continues_prompt=continues_prompt)
        has_prompt_ids = answer.return_prompt_ids or answer.prompt_logprobs is not None
        return ChoiceSpec(
            handle=running.handle,
            counts_prompt=item.choice == 0,
            prompt_tokens=item.asked_tokens,
            left_context=left_context.tolist() if continues_prompt else (),
            prompt_end=() if answer.reading is None else prompt_end.tolist(),
            stop_token_ids=item.params.stop_token_ids,
            grammar_end_ids=self.eos_token_ids if item.params.grammar else (),
            echo=accepted.echo[item.prompt_index] if accepted.echo else "",
            prompt_ids=prompt.tolist() if has_prompt_ids else (),
        )

    # ---- from the ranks and the text layer -------------------------------------------------------

    def on_first_token(self, first: FirstToken, now: float) -> None:
        """A choice has its first tokens."""
        if self.first_token_at is None:
            self.first_token_at = now
        if first.choice == 0 and first.stages is not None:
            self.stages = decode_stages(first.stages)
        self.metrics.of_endpoint(self.endpoint).ttft.observe(now - self.arrived)

    def on_metered(self, tokens: int) -> None:
        if self.on_generated is not None:
            self.on_generated(tokens)

    def on_chunk(self, chunk: bytes, now: float) -> None:
        """Bytes for the client."""
        self._last_output_at = now
        if self._connection is None:
            self._chunks.append(chunk)
            self.wake()
            return
        transport = self._connection.transport
        if transport.is_closing():
            return  # the handler is cancelled in a moment
        transport.write(chunk)
        if transport.get_write_buffer_size() > self._connection.high_water:
            self._hold()

    def on_finish(self) -> None:
        """The next chunk is the last."""
        self._has_all = True
        self.wake()

    def fail(self, error: EngineError) -> None:
        """End it with an error, as when one item failed; the other items stop."""
        if self._error is None:
            self._error = error
            self._write_failure(error)
            self._close_answer()
            self.wake()

    def break_off(self, error: EngineError) -> bytes:
        """End it with an error that the client has not seen: the last bytes of its stream."""
        self._write_failure(error)
        self.close()
        return self._failure_end

    def _write_failure(self, error: EngineError) -> None:
        """Make the end of the stream while the text layer has the answer."""
        if self._failure_end:
            return
        native = native_extension()
        body = encode_json(error.body())
        self._failure_end = native.broken_stream_end(body)
        if self._answer is None:
            return
        try:
            end = self.ranks.answers.write_failure(self._answer, body)
        except ValueError:
            log.exception("rid=%s: the text layer could not write the stream's end", self.rid)
            return
        self._failure_end = end or self._failure_end

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- to the client ---------------------------------------------------------------------------

    async def next(self, timeout_secs: float | None = None) -> bytes | None:
        """Wait for output and return all of it, or b"" at the end. None: nothing came for
        `timeout_secs`.

        Raises the request's error once what came before it has been taken.
        """
        limit = self._deadline + DEADLINE_GRACE_SECS
        idle_secs = math.inf if timeout_secs is None else timeout_secs
        self._last_output_at = time.monotonic()
        while True:
            if self._chunks:
                chunks = b"".join(self._chunks)
                self._chunks.clear()
                return chunks
            if self._error is not None:
                raise self._error
            if self._is_held:
                await self._wait_for_reader()
                continue
            if self._has_all:
                return b""
            now = time.monotonic()
            if now >= limit:
                raise RequestTimeout(
                    f"no end after {self.timeout_secs:g} s; the engine hangs or is overloaded"
                )
            wait_until = self._last_output_at + idle_secs
            if now >= wait_until:
                return None
            await self._woken_within(min(limit, wait_until) - now)

    @property
    def finished(self) -> bool:
        """True once the answer ended without an error and all of its output was taken."""
        return self._error is None and self._has_all and not self._chunks and not self._is_held

    def write_directly(self, connection: ClientConnection) -> None:
        """Let chunks go to the connection, unless some wait here. The head of the response must be
        out.
        """
        if self._connection is not None or self._chunks or self._answer is None:
            return
        self._connection = connection
        if connection.is_chunked:
            self.ranks.answers.begin_framing(self._answer)

    def _hold(self) -> None:
        """The client reads slowly."""
        if self._answer is not None:
            self._is_held = True
            self.ranks.answers.hold(self._answer)
            self.wake()

    async def _wait_for_reader(self) -> None:
        assert self._connection is not None
        await self._connection.drain()
        self._is_held = False
        self._release()

    def _release(self) -> None:
        """Take what the text layer holds."""
        if self._answer is None:
            return
        now = time.monotonic()
        chunk, is_last = self.ranks.answers.release(self._answer, now)
        if is_last:
            self._has_all = True
        if chunk:
            self.on_chunk(chunk, now)

    async def _woken_within(self, secs: float) -> None:
        """Sleep until `wake` or for `secs`. Not asyncio.wait_for: before Python 3.12 it can swallow
        a cancellation.
        """
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(secs, self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self._connection = None
        self._close_answer()

    def _close_answer(self) -> None:
        self.ranks.abort([running.handle for running in self.items])
        if self._answer is not None:
            self.counts = self.ranks.close_answer(self._answer)
            self._answer = None

    # ---- numbers for the log, once it is closed --------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return 0 if self.counts is None else self.counts.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return 0 if self.counts is None else self.counts.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return 0 if self.counts is None else self.counts.completion_tokens
