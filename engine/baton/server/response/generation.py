"""Running request in the front: its items on the ranks, their text, and what the response builder takes next.

1. `Generation.start` submits every item (all or none);
2. rows arrive in the event loop: tokens become text and stop strings are looked for at once, so that the rank stops
   working even while the client reads slowly; results pile up per item as one `TextDelta`;
3. the HTTP handler takes deltas with `next()`; what piled up since the last take is one delta (one SSE event);
4. `close()` aborts what still runs. It is called in a `finally`: a disconnect, an error and a normal end all free the
   rank.

Invariants: an item yields at most one delta with a finish reason; after an error the other items are aborted and
`next` raises.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import EngineError, RequestTimeout
from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages
from baton.server.observability.metrics import EngineMetrics
from baton.server.observability.spans import ParentSpan
from baton.server.request.validation import AcceptedRequest, PromptItem
from baton.server.text.detokenizer import Detokenizer, StopMatcher
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.client import RankClient, RankSet

DEADLINE_GRACE_SECS = 5.0
"""The rank ends a request at its deadline; the front waits this much longer before it does it itself."""


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs of consecutive tokens, row by row."""

    ids: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def extend(self, other: TokenLogprobs) -> None:
        self.ids += other.ids
        self.chosen += other.chosen
        self.top += other.top


@dataclass(slots=True)
class TextDelta:
    """Output of one item since the last take."""

    item: ChoiceState
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    finish: str | None = None


class ChoiceState:
    """Progress of one item. Implements worker.client.EventSink."""

    __slots__ = (
        "_detok", "_matcher", "_min_tokens", "_owner", "_skip_stop_token", "cached_tokens", "completion_tokens",
        "delta", "done", "finish", "handle", "index", "item", "last_token_at", "matched_stop", "rank", "resumed_text",
        "seen", "stages",
    )  # fmt: skip

    def __init__(self, owner: Generation, index: int, item: PromptItem) -> None:
        rules, tokenizer = owner.accepted.text, owner.tokenizer
        skip = rules.skip_special_tokens
        self._owner = owner
        self._detok = Detokenizer(
            lambda ids: tokenizer.decode(ids, skip_special_tokens=skip),
            item.prompt[: item.asked_tokens] if rules.continues_prompt else (),
        )
        self._matcher = (
            StopMatcher(rules.stops, include=rules.include_stop) if rules.stops else None
        )
        self._min_tokens = rules.min_tokens
        self._skip_stop_token = not rules.include_stop
        self.index = index
        self.item = item
        self.handle = 0
        self.rank: RankClient | None = None
        self.delta: TextDelta | None = None
        self.done = False
        self.finish: str | None = None
        self.matched_stop: str | int | None = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.last_token_at = 0.0
        self.stages: FirstTokenStages | None = None
        self.seen = False
        """For response builders: an event of this item was already sent."""
        self.resumed_text = ""
        """Text the client has seen of it, from another engine."""
        if resume := owner.accepted.resume:
            self.resumed_text = self._text(list(resume.ids), None)[0]
            self.completion_tokens = len(resume.ids)
            self.seen = True

    def on_tokens(self, row: EmittedTokens) -> None:
        if self.done:
            return
        self.stages = row.stages or self.stages
        self.cached_tokens = min(row.cached_tokens, self.item.asked_tokens)
        text, ids, finish_name = self._text(list(row.tokens), row.finish)
        if ids:
            self._owner.note_tokens(self, len(ids))
        self.completion_tokens += len(ids)
        delta = self._pending_delta()
        delta.text += text
        delta.tokens += ids
        if (found := row.logprobs) is not None and self.item.params.logprobs >= 0:
            if delta.logprobs is None:
                delta.logprobs = TokenLogprobs()
            if ids:
                top = list(zip(found.top_ids, found.top_logprobs, strict=True))[
                    : self.item.params.logprobs
                ]
                delta.logprobs.extend(TokenLogprobs(ids, [found.chosen], [top]))
        if finish_name is not None:
            delta.finish = self.finish = finish_name
            self.done = True
            if row.finish is None:  # a stop string: the rank does not know it yet
                self._owner.ranks.abort([self.handle])
        self._owner.wake()

    def on_error(self, error: EngineError) -> None:
        if not self.done:
            self.done = True
            self._owner.fail(error)

    def end_empty(self) -> None:
        """Nothing was to be generated."""
        self.done, self.finish = True, "length"
        self._pending_delta().finish = "length"

    def _pending_delta(self) -> TextDelta:
        if self.delta is None:
            self.delta = TextDelta(self)
        return self.delta

    def _text(
        self, ids: list[int], finish: FinishReason | None
    ) -> tuple[str, list[int], str | None]:
        """New text, the tokens that count (those up to a stop string), and the finish reason if there is one now."""
        shown = ids
        if finish is FinishReason.STOP and ids and ids[-1] in self.item.params.stop_token_ids:
            self.matched_stop = ids[-1]
            if self._skip_stop_token:
                shown = ids[:-1]  # the token that stopped it counts, its text does not show
        name = None if finish is None else ("length" if finish is FinishReason.LENGTH else "stop")
        if self._matcher is None:
            text = self._detok.feed(shown) if shown else ""
            return (text + self._detok.flush() if finish is not None else text), ids, name
        pieces = []
        for used, token in enumerate(
            shown, 1
        ):  # one by one, so that the count ends at the stop string
            search = self.completion_tokens + used > self._min_tokens
            pieces.append(self._matcher.feed(self._detok.feed((token,)), search=search))
            if self._matcher.matched is not None:
                self.matched_stop = self._matcher.matched
                return "".join(pieces), ids[:used], "stop"
        if finish is not None:
            pieces.append(self._matcher.feed(self._detok.flush()))
            if self._matcher.matched is not None:
                self.matched_stop, name = self._matcher.matched, "stop"
            pieces.append(self._matcher.flush())
        return "".join(pieces), ids, name


@dataclass(eq=False)
class Generation:
    """All items of one accepted request."""

    rid: str
    accepted: AcceptedRequest
    ranks: RankSet
    tokenizer: Tokenizer
    metrics: EngineMetrics
    endpoint: str
    arrived: float
    timeout_secs: float
    on_generated: Callable[[int], None] = lambda count: None
    """Called with the number of tokens as they come."""
    parent: ParentSpan | None = None
    """Parent of the ranks' spans."""

    def __post_init__(self) -> None:
        self.submitted_at: float | None = None
        self.first_token_at: float | None = None
        self.created = (
            int(time.time()) if self.accepted.resume is None else self.accepted.resume.created
        )
        """Unix seconds: what its events say."""
        self._deadline = self.arrived + self.timeout_secs
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.tracks = [ChoiceState(self, i, item) for i, item in enumerate(self.accepted.items)]

    def start(self) -> None:
        """Submit every item. Raises QueueFull, NotReady, EngineDead; then nothing runs."""
        if self.accepted.max_tokens_zero:
            for track in self.tracks:
                track.end_empty()
            return
        many = len(self.tracks) > 1
        self.submitted_at = now = time.monotonic()
        trace = b"" if self.parent is None else self.parent.packed(now)
        ttft_secs = self.accepted.ttft_deadline_secs
        try:
            for track in self.tracks:
                item = track.item
                rank = self.ranks.choose(item.dp_rank)
                request = ValidatedRequest(
                    handle=0,
                    rid=f"{self.rid}-{track.index}" if many else self.rid,
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
                )
                track.rank = rank
                track.handle = self.ranks.submit(rank, request, track)
        except EngineError:
            self.close()
            raise

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Fail the request because one item failed; the other items stop."""
        if self._error is None:
            self._error = error
            self.close()
            self.wake()

    def note_tokens(self, track: ChoiceState, count: int) -> None:
        now = time.monotonic()
        self.on_generated(count)
        if self.first_token_at is None:
            self.first_token_at = now
        if track.last_token_at:
            self.metrics.itl.observe((now - track.last_token_at) / count)
        else:
            self.metrics.ttft.labels(self.metrics.model_name, self.endpoint).observe(
                now - self.arrived
            )
        track.last_token_at = now

    async def next(self, timeout_secs: float | None = None) -> list[TextDelta] | None:
        """Wait for output and return all of it, in item order. None: `timeout_secs` passed. [] never: see `finished`.

        Raises the request's error once what came before it has been taken.
        """
        limit = self._deadline + DEADLINE_GRACE_SECS
        wait_until = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
        while True:
            deltas = [d for t in self.tracks if (d := t.delta) is not None]
            if deltas:
                for track in self.tracks:
                    track.delta = None
                return deltas
            if self._error is not None:
                raise self._error
            now = time.monotonic()
            if now >= limit:
                raise RequestTimeout(
                    f"no end after {self.timeout_secs:g} s; the engine hangs or is overloaded"
                )
            if now >= wait_until:
                return None
            await self._woken_within(min(limit, wait_until) - now)

    async def _woken_within(self, secs: float) -> None:
        """Sleep until `wake` or for `secs`. Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(secs, self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    @property
    def finished(self) -> bool:
        """Every item ended well and everything was taken."""
        return self._error is None and all(t.done and t.delta is None for t in self.tracks)

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        self.ranks.abort([t.handle for t in self.tracks if t.handle and not t.done])
        for track in self.tracks:
            track.done = True

    # ---- numbers for usage and the log -------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(t.item.asked_tokens for t in self.tracks if t.item.choice == 0)

    @property
    def cached_tokens(self) -> int:
        return sum(t.cached_tokens for t in self.tracks if t.item.choice == 0)

    @property
    def completion_tokens(self) -> int:
        return sum(t.completion_tokens for t in self.tracks)
