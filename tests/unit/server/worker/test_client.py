"""The front's side of the messages: handles, columns, deaths, limits; over real sockets, with the test as the rank."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from baton._native import AnswerFormat, AnswerTable, FirstToken

from baton.errors import EngineDead, EngineError, QueueFull, RequestTimeout
from baton.sched.types.events import EmittedTokens, RowError
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest
from baton.sched.types.request_timeline import FirstTokenStages, PulledPages
from baton.server.http.lifecycle import NodeState, ServerLifecycle
from baton.server.response.generation import decode_stages
from baton.server.text.answer_spec import ChoiceSpec, Dialect, encode_spec
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.client import RankSet
from baton.server.worker.control import (
    AbortByRoom,
    ControlOperation,
    CountRemaining,
    EndTransfers,
    FlushCache,
    ReadKvSnapshot,
    ReadLedger,
    ReadSteps,
    ResumeItems,
    SuspendItems,
)
from baton.server.worker.messages import (
    AbortMessage,
    ControlMessage,
    FatalMessage,
    ReadyMessage,
    ReplyMessage,
    StatsMessage,
    SubmitMessage,
    ToFront,
    TokenBatch,
    ToRank,
    encoder,
    to_rank_decoder,
)
from tests.support.models.streamed_text import stream_spec

DEADLINE_SECS = 30.0


@dataclass
class Recorder:
    """A sink that keeps what it gets."""

    chunks: list[bytes] = field(default_factory=list)
    errors: list[EngineError] = field(default_factory=list)
    stages: list[bytes | None] = field(default_factory=list)
    is_finished: bool = False
    breaks: bool = False
    answer: int = 0

    def on_first_token(self, first: FirstToken, now: float) -> None:
        self.stages.append(first.stages)

    def on_metered(self, tokens: int) -> None:
        raise AssertionError("no answer here is metered")

    def on_chunk(self, chunk: bytes, now: float) -> None:
        if self.breaks:
            raise ValueError("this request's connection is broken")
        self.chunks.append(chunk)

    def on_finish(self) -> None:
        self.is_finished = True

    def fail(self, error: EngineError) -> None:
        self.errors.append(error)

    @property
    def answers(self) -> list[tuple[list[int], int, Any]]:
        """Ids so far, cached tokens and finish reason of each event."""
        events = b"".join(self.chunks).removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
        answers = [json.loads(event.removeprefix(b"data: ")) for event in events]
        return [
            (a["output_ids"], a["meta_info"]["cached_tokens"], a["meta_info"]["finish_reason"])
            for a in answers
        ]


@dataclass
class Stage:
    """Two ranks, played by the test."""

    ranks: RankSet
    push: zmq.asyncio.Socket
    pulls: list[zmq.asyncio.Socket]

    async def say(self, message: ToFront) -> None:
        await self.push.send(encoder.encode(message))

    async def hear(self, rank: int = 0) -> ToRank:
        return to_rank_decoder.decode(
            await asyncio.wait_for(self.pulls[rank].recv(), DEADLINE_SECS)
        )

    async def ready(self) -> None:
        for rank in (0, 1):
            await self.say(ReadyMessage(rank, {}))
        await until(lambda: self.ranks.all_ready)

    def submit(self, sink: Recorder, rank: int | None = None, prompt: int = 3) -> int:
        handle = self.ranks.draw_handle()
        request = ValidatedRequest(
            handle, "r", array("i", range(prompt)), SamplingParams(max_new_tokens=4)
        )
        self.ranks.submit(self.ranks.choose(rank), request, sink)
        choice = ChoiceSpec(
            handle=handle,
            counts_prompt=True,
            prompt_tokens=prompt,
        )
        spec = encode_spec(stream_spec(Dialect.GENERATE, choice))
        sink.answer = self.ranks.open_answer(spec, sink)
        return handle


async def until(fact: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not fact():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), DEADLINE_SECS)


def batch(rows: list[tuple[int, list[int], int]], **more: dict[int, Any]) -> TokenBatch:
    """`more`: further fields of EmittedTokens, by row."""
    made = [
        EmittedTokens(h, tuple(tokens), FinishReason(f) if f else None, 2) for h, tokens, f in rows
    ]
    for name, values in more.items():
        for row, value in values.items():
            made[row] = made[row]._replace(**{name: value})
    return TokenBatch(0, made)


def play(
    tmp_path: Path, scene: Callable[[Stage], Coroutine[Any, Any, None]], limit: int = 8
) -> None:
    async def run() -> None:
        context: zmq.Context[Any] = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.bind(f"ipc://{tmp_path}/front")
        pushes = []
        for i in (0, 1):
            pushes.append(context.socket(zmq.PUSH))
            pushes[-1].bind(f"ipc://{tmp_path}/rank{i}")
        theirs = zmq.asyncio.Context()
        push, pulls = theirs.socket(zmq.PUSH), [theirs.socket(zmq.PULL) for _ in (0, 1)]
        push.connect(f"ipc://{tmp_path}/front")
        for i, socket in enumerate(pulls):
            socket.connect(f"ipc://{tmp_path}/rank{i}")
        for (
            push_to_rank
        ) in pushes:  # a rank is connected long before it is ready: it loads the model in between
            assert await asyncio.to_thread(push_to_rank.poll, 1000 * DEADLINE_SECS, zmq.POLLOUT)
        tokenizer = Tokenizer.four_byte().native
        answers = AnswerTable(tokenizer, AnswerFormat(None, tokenizer, "none", "none"), [0.5])
        ranks = RankSet(pull, pushes, limit, answers)
        try:
            await scene(Stage(ranks, push, pulls))
        finally:
            ranks.close()
            context.destroy(0)
            theirs.destroy(0)

    asyncio.run(run())


def test_rows_reach_their_sinks_and_a_finish_ends_them(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        a, b = Recorder(), Recorder()
        ha, hb = stage.submit(a, 0), stage.submit(b, 1)
        first = await stage.hear(0)
        assert isinstance(first, SubmitMessage)
        assert (first.request.handle, ha != hb) == (ha, True)
        rows = [(ha, [5, 6], 0), (hb, [], 0), (ha, [7], 2), (999, [1], 0), (hb, [8], 1)]
        stages = FirstTokenStages(0.5, PulledPages("tcp", 1, 64, 0.1, 0.2))
        await stage.say(batch(rows, stages={0: stages, 3: stages}))
        await until(lambda: stage.ranks.in_flight == 0)
        assert b.stages == [None]
        assert [decode_stages(packed) for packed in a.stages if packed] == [stages]
        length = {"type": "length", "length": 3}
        assert a.answers == [([5, 6, 7], 2, length)], "the rows of a step make one event"
        assert b.answers == [([8], 2, {"type": "stop", "matched": None})]
        assert a.is_finished
        assert b.is_finished
        assert all(r.tokens_in_flight == 0 for r in stage.ranks.ranks)

    play(tmp_path, scene)


def test_start_that_fails_at_once_is_quiet(tmp_path: Path) -> None:
    """The loop may have planned a look at the sockets before they were closed."""

    async def scene(stage: Stage) -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: complaints.append(context)
        )
        stage.ranks.close()
        asyncio.get_running_loop().call_soon(stage.ranks._readable)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert complaints == []

    play(tmp_path, scene)


def test_error_rows_become_typed_errors(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        sinks = [Recorder() for _ in range(6)]
        handles = [stage.submit(s, 0) for s in sinks]
        finishes = [4, 4, 3, 4, 4, 4]
        errors = {
            0: RowError("queue_full", "full", "prompt"),
            1: RowError("no_such_code", "x"),
            4: RowError("queue_timeout", "x"),
            5: RowError("deadline", "x"),
        }
        rows = [(h, [], f) for h, f in zip(handles, finishes, strict=True)]
        await stage.say(batch(rows, error=errors, retry_after_secs={4: 17, 5: 3}))
        await until(lambda: all(s.errors for s in sinks))
        codes = [
            "queue_full",
            "internal_error",
            "aborted",
            "internal_error",
            "queue_timeout",
            "deadline",
        ]
        assert [s.errors[0].code for s in sinks] == codes
        assert [s.errors[0].param for s in sinks[:3]] == ["prompt", None, None]
        assert [s.errors[0].retry_after_secs for s in sinks] == [1, None, None, None, 17, None]

    play(tmp_path, scene)


def test_broken_sink_does_not_cost_the_other_rows(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        broken, fine = Recorder(breaks=True), Recorder()
        rows = [(stage.submit(broken, 0), [1], 0), (stage.submit(fine, 0), [2], 0)]
        await stage.say(batch(rows))
        await until(lambda: bool(fine.chunks))
        assert broken.errors[0].code == "internal_error"

    play(tmp_path, scene)


def test_aborted_handles_get_no_more_events(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        sink, other = Recorder(), Recorder()
        handle, second = stage.submit(sink, 0), stage.submit(other, 0)
        stage.ranks.abort([handle, 12345])
        stage.ranks.abort([handle])
        assert stage.ranks.close_answer(sink.answer) is not None
        assert stage.ranks.close_answer(sink.answer) is None
        await stage.hear()
        await stage.hear()
        heard = await stage.hear()
        assert isinstance(heard, AbortMessage)
        assert heard.handles == [handle]
        await stage.say(batch([(handle, [1], 2), (second, [1], 2)]))
        await until(lambda: bool(other.chunks))
        assert sink.chunks == []

    play(tmp_path, scene)


def test_in_flight_requests_are_bounded_per_rank(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        for _ in range(2):
            stage.submit(Recorder(), 0)
        with pytest.raises(QueueFull, match="has 2 requests in flight, its limit is 2"):
            stage.submit(Recorder(), 0)
        stage.submit(Recorder(), 1)

    play(tmp_path, scene, limit=2)


def test_least_loaded_living_rank_is_chosen(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        stage.submit(Recorder(), 0, prompt=100)
        assert [stage.ranks.choose(None).dp_rank for _ in range(3)] == [1, 1, 1]
        stage.ranks.died(1, "gone")
        assert stage.ranks.choose(None).dp_rank == 0
        with pytest.raises(EngineDead, match="rank 1 of this engine is gone"):
            stage.ranks.choose(1)
        stage.ranks.died(0, "gone too")
        with pytest.raises(EngineDead, match="no rank of this engine is alive"):
            stage.ranks.choose(None)

    play(tmp_path, scene)


def test_fatal_message_fails_requests_and_questions_of_that_rank_only(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        mine, other = Recorder(), Recorder()
        stage.submit(mine, 1)
        stage.submit(other, 0)
        asked = asyncio.create_task(
            stage.ranks.control(stage.ranks.ranks[1], ReadLedger(), DEADLINE_SECS)
        )
        await asyncio.sleep(0)
        await stage.say(FatalMessage(1, "out of memory"))
        with pytest.raises(EngineDead, match="out of memory"):
            await asked
        assert [e.code for e in mine.errors] == ["engine_dead"]
        assert other.errors == []
        assert not stage.ranks.all_ready

    play(tmp_path, scene)


OPERATIONS: list[ControlOperation] = [
    FlushCache(),
    ReadKvSnapshot(),
    ReadLedger(),
    ReadLedger(room=0),
    CountRemaining(),
    ReadSteps(limit=9),
    AbortByRoom([7, 2**53 - 1], "rid", all_leases=False),
    EndTransfers(),
    SuspendItems([1, 2]),
    ResumeItems([1]),
]


def test_controls_are_answered_by_id_or_time_out(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.ready()
        rank = stage.ranks.ranks[0]
        tasks = [
            asyncio.create_task(stage.ranks.control(rank, operation, DEADLINE_SECS))
            for operation in OPERATIONS
        ]
        heard = [await stage.hear() for _ in OPERATIONS]
        for message in reversed(heard):
            assert isinstance(message, ControlMessage)
            position = OPERATIONS.index(message.operation)
            await stage.say(ReplyMessage(message.id, True, {"position": position}))
        replies = [(await task).result["position"] for task in tasks]
        assert replies == list(range(len(OPERATIONS)))
        with pytest.raises(RequestTimeout, match=r"did not answer 'left' within 0\.01 s"):
            await stage.ranks.control(rank, CountRemaining(), 0.01)

    play(tmp_path, scene)


def test_stats_are_kept_and_announced(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        seen: list[int] = []
        stage.ranks.on_stats = lambda rank: seen.append(rank.dp_rank)
        await stage.say(StatsMessage(1, {"g": 1.0}, {"c": 2.0}))
        await until(lambda: seen == [1])
        assert stage.ranks.ranks[1].stats.gauges == {"g": 1.0}
        assert stage.ranks.ranks[1].stats.not_accepting_reason is None
        await stage.say(
            StatsMessage(
                1, {"g": 1.0}, {"c": 2.0}, not_accepting_reason="its KV transfer runtime has failed"
            )
        )
        await until(lambda: seen == [1, 1])
        now = ServerLifecycle(stage.ranks).condition()
        assert (now.state, now.reason) == (NodeState.DEAD, "rank_failed")
        assert isinstance(now.refusal, EngineDead)
        assert (
            "rank 1 of this engine takes no new requests: its KV transfer runtime"
            in now.refusal.message
        )
        stage.ranks.died(1, "gone")
        assert (seen, stage.ranks.ranks[1].stats.gauges) == ([1, 1, 1], {})

    play(tmp_path, scene)


def test_garbage_on_the_socket_is_logged_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.push.send(b"garbage")
        await stage.ready()

    play(tmp_path, scene)
    assert "cannot be decoded" in caplog.text
