"""Whatever the ranks send and however it is grouped: a stream and a whole answer say the same, and each ends once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from baton._native import AnswerFormat, AnswerTable
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineError, KvTransferFailed, RequestTimeout
from baton.sched.metrics.histogram import GAP_BUCKETS
from baton.sched.types.events import EmittedTokens, RowError
from baton.sched.types.plan import TokenLogprobs
from baton.sched.types.request import FinishReason, SamplingParams, ValidatedRequest
from baton.server.observability.metrics import EngineMetrics
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.prompt.items import PromptItem
from baton.server.response.generation import ClientConnection, Generation
from baton.server.text.answer_spec import AnswerSpec, Dialect
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.client import AnswerSink, RankClient, RankSet
from baton.server.worker.messages import TokenBatch, encoder
from tests.support.effort import examples
from tests.support.models import tiny_model

Options = dict[str, Any]
"""Fields of AnswerSpec."""
METRICS = EngineMetrics()
EOS = 1
PAD = 2


class StubRanks(RankSet):
    """Takes submits; the test plays the rank with `send`. Only the text layer is real."""

    def __init__(self, answers: AnswerTable) -> None:
        self.answers = answers
        self.ranks = [RankClient(0, None)]  # type: ignore[arg-type]
        self._sinks = {}
        self._of_handle = {}
        self._handles = itertools.count(1)
        self.submitted: list[int] = []
        self.aborted: list[int] = []

    def choose(self, wanted: int | None) -> RankClient:
        return self.ranks[0]

    def submit(self, rank: RankClient, request: ValidatedRequest, sink: AnswerSink) -> None:
        self.submitted.append(request.handle)
        self._of_handle[request.handle] = rank
        rank.items[request.handle] = (sink, 0)

    def abort(self, handles: Sequence[int]) -> None:
        self.aborted += [handle for handle in handles if self._forget(handle) is not None]

    def feed(self, rows: list[EmittedTokens]) -> None:
        now = time.monotonic()
        fed = self.answers.feed(encoder.encode(TokenBatch(0, rows)), now)
        assert fed is not None
        self._take_tokens(fed, now)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_model.make(tmp_path_factory.mktemp("model")))


def accept(n: int, options: Options, logprobs: int, *, stream: bool = True) -> AcceptedRequest:
    params = SamplingParams(max_new_tokens=64, stop_token_ids=(EOS,), logprobs=logprobs)
    items = tuple(PromptItem(0, i, array("i", [5, 6]), params) for i in range(n))
    answer = AnswerSpec(
        rid="r",
        stream=stream,
        include_usage=True,
        logprobs=logprobs if logprobs >= 0 else None,
        is_batch=n > 1,
        skip_special_tokens=True,
        **options,
    )
    return AcceptedRequest(items=items, n=n, answer=answer)


def plain_format(tokenizer: Tokenizer) -> AnswerFormat:
    """Answers that are one text."""
    return AnswerFormat(None, tokenizer.native, "none", "none")


def begin(
    accepted: AcceptedRequest,
    tokenizer: Tokenizer,
    timeout_secs: float = 60.0,
    dialect: Dialect = Dialect.CHAT,
) -> tuple[Generation, StubRanks]:
    ranks = StubRanks(AnswerTable(tokenizer.native, plain_format(tokenizer), GAP_BUCKETS))
    g = Generation(
        rid="r",
        request_id="r",
        accepted=accepted,
        dialect=dialect,
        ranks=ranks,
        metrics=METRICS,
        endpoint="test",
        arrived=time.monotonic(),
        timeout_secs=timeout_secs,
    )
    g.start()
    return g, ranks


@dataclass
class Script:
    """Output of one item's rank: bursts of tokens, then an end."""

    bursts: list[list[int]]
    end: FinishReason
    end_with_last: bool


scripts = st.builds(
    Script,
    bursts=st.lists(st.lists(st.integers(2, 383), min_size=1, max_size=4), max_size=8),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    end_with_last=st.booleans(),
)


def rows(script: Script) -> list[tuple[list[int], FinishReason | None]]:
    out: list[tuple[list[int], FinishReason | None]] = [(b, None) for b in script.bursts]
    last = [EOS] if script.end is FinishReason.STOP else []
    if script.end_with_last and out:
        out[-1] = (out[-1][0] + last, script.end)
    else:
        out.append((last, script.end))
    return out


def send(
    ranks: StubRanks, handle: int, tokens: list[int], finish: FinishReason | None, logprobs: int
) -> None:
    if logprobs < 0:
        ranks.feed([EmittedTokens(handle, tuple(tokens), finish, 1)])
        return
    found = TokenLogprobs(-0.5, [3] * logprobs, [-1.0] * logprobs)
    rows = [EmittedTokens(handle, (token,), None, 1, found) for token in tokens[:-1]]
    last = EmittedTokens(handle, tuple(tokens[-1:]), finish, 1, found if tokens else None)
    ranks.feed([*rows, last])  # a row for each token


def play(
    tokenizer: Tokenizer,
    dialect: Dialect,
    given: list[Script],
    options: Options,
    logprobs: int,
    takes: list[bool],
    stream: bool,
) -> tuple[Any, StubRanks]:
    """Run the scripts side by side; `takes` says after which rows the handler takes bytes."""

    async def run() -> tuple[Any, StubRanks]:
        accepted = accept(len(given), options, logprobs, stream=stream)
        g, ranks = begin(accepted, tokenizer, dialect=dialect)
        out = b""
        queues = {i + 1: rows(s) for i, s in enumerate(given)}
        step = 0
        while any(queues.values()):
            for handle, queue in queues.items():
                if queue and handle not in ranks.aborted:
                    send(ranks, handle, *queue.pop(0), logprobs)
                else:
                    queue.clear()
                step += 1
                if takes[step % len(takes)] and not g.finished:
                    out += await g.next(0.001) or b""
        while not g.finished:
            out += await g.next(0.001) or b""
        g.close()
        if not stream:
            return json.loads(out), ranks
        *events, done, end = out.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events], ranks

    return asyncio.run(run())


@given(
    given=st.lists(scripts, min_size=1, max_size=3),
    stops=st.lists(
        st.sampled_from(["the", " ", "a", "ha", "\ufffd", "relay"]), max_size=2, unique=True
    ),
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
    logprobs=st.sampled_from([-1, 0, 2]),
    takes=st.lists(st.booleans(), min_size=1, max_size=5),
    form=st.sampled_from([Dialect.CHAT, Dialect.COMPLETIONS]),
)
@settings(max_examples=examples(200), deadline=None)
def test_stream_and_whole_answer_agree(
    tokenizer: Tokenizer, given: list[Script], stops: list[str], include: bool, min_tokens: int, logprobs: int,
    takes: list[bool], form: Any,
) -> None:  # fmt: skip
    options = {"stops": tuple(stops), "include_stop": include, "min_tokens": min_tokens}
    whole, _ = play(tokenizer, form, given, options, logprobs, [False], stream=False)
    events, ranks = play(tokenizer, form, given, options, logprobs, takes, stream=True)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        if form is Dialect.CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text, expected = (
                "".join(c["delta"].get("content", "") for c in mine),
                choice["message"]["content"],
            )
        else:
            text, expected = "".join(c["text"] for c in mine), choice["text"]
        assert text == expected
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"], "nothing follows the finish"
        assert mine[-1]["matched_stop"] == choice["matched_stop"]
        if logprobs >= 0:
            assert _logprobs(form, mine) == _logprobs(form, [choice])
        stopped = any(s in text for s in stops) and not include and min_tokens == 0
        assert not stopped, "a stop string is in the text"
    handles = [h for h in ranks.submitted if h not in ranks.aborted]
    matched_early = [c["index"] + 1 for c in whole["choices"] if isinstance(c["matched_stop"], str)]
    assert set(ranks.aborted) <= set(matched_early)
    assert set(handles) | set(ranks.aborted) == set(ranks.submitted)


def _logprobs(form: Any, choices: list[Any]) -> list[Any]:
    """All logprob entries of some choices, in order, whatever their columns."""
    out = []
    for choice in choices:
        given = choice["logprobs"]
        if given is None:
            continue
        if form is Dialect.CHAT:
            out += given["content"]
        else:
            top = given["top_logprobs"] or [None] * len(given["tokens"])
            out += list(
                zip(
                    given["tokens"], given["token_logprobs"], top, given["text_offset"], strict=True
                )
            )
    return out


@given(
    text=st.text(st.sampled_from("ax é日😀\u0301\n"), min_size=1, max_size=12),
    takes=st.lists(st.booleans(), min_size=1, max_size=3),
    special_every=st.integers(1, 4),
)
@settings(max_examples=examples(60), deadline=None)
def test_offset_of_a_token_is_the_place_of_its_character(
    tokenizer: Tokenizer, text: str, takes: list[bool], special_every: int
) -> None:
    """The judge is the text: a token's offset is the number of whole characters before its first byte."""
    raw = text.encode()
    ids: list[int] = []
    starts: list[int] = []
    at = 0
    for count, token in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        if count % special_every == 0 and _is_boundary(raw, at):
            ids.append(PAD)  # between characters, and not in the text
            starts.append(at)
        ids.append(token)
        starts.append(at)
        at += len(tokenizer.token_bytes(token))
    script = Script([[i] for i in ids], FinishReason.LENGTH, True)
    events, _ = play(tokenizer, Dialect.COMPLETIONS, [script], {}, 0, takes, stream=True)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    offsets = [at for c in choices if c["logprobs"] for at in c["logprobs"]["text_offset"]]
    assert offsets == [len(raw[:start].decode(errors="ignore")) for start in starts]


def _is_boundary(raw: bytes, at: int) -> bool:
    return at == len(raw) or raw[at] & 0xC0 != 0x80


@given(
    given=st.lists(scripts, min_size=1, max_size=2),
    takes=st.lists(st.booleans(), min_size=1, max_size=3),
)
@settings(max_examples=examples(50), deadline=None)
def test_native_stream_ends_with_the_whole_answer(
    tokenizer: Tokenizer, given: list[Script], takes: list[bool]
) -> None:
    whole, _ = play(tokenizer, Dialect.GENERATE, given, {}, 1, [False], stream=False)
    events, _ = play(tokenizer, Dialect.GENERATE, given, {}, 1, takes, stream=True)
    whole = whole if isinstance(whole, list) else [whole]
    for answer in [*whole, *events]:
        del answer["meta_info"]["e2e_latency"]
    for answer in whole:
        mine = [e for e in events if e["meta_info"]["id"] == answer["meta_info"]["id"]]
        mine[-1].pop("index", None)
        assert mine[-1] == answer
        assert [e["meta_info"]["finish_reason"] for e in mine[:-1]] == [None] * (len(mine) - 1)


def test_error_comes_after_what_was_there_and_stops_the_other_items(
    tokenizer: Tokenizer,
) -> None:
    async def run() -> None:
        g, ranks = begin(accept(2, {}, -1), tokenizer, dialect=Dialect.COMPLETIONS)
        error = RowError("kv_transfer_failed", "PEER_DEAD")
        row = EmittedTokens(1, (260,), None, 1)
        ranks.feed([row, EmittedTokens(2, (), FinishReason.ERROR, 0, error=error)])
        assert ranks.aborted == [1], "the failed item has no handle any more"
        assert (await g.next() or b"").count(b"data: ") == 1
        with pytest.raises(KvTransferFailed):
            await g.next()
        assert not g.finished
        send(ranks, 1, [261], FinishReason.LENGTH, -1)
        with pytest.raises(KvTransferFailed):
            await g.next()

    asyncio.run(run())


def test_silent_rank_is_given_up_after_the_deadline(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.server.response.generation.DEADLINE_GRACE_SECS", 0.02)

    async def run() -> EngineError:
        g, _ = begin(accept(1, {}, -1), tokenizer, timeout_secs=0.03)
        assert await g.next(0.001) is None, "the wait ends before the deadline"
        with pytest.raises(RequestTimeout) as caught:
            await g.next(60)
        return caught.value

    assert asyncio.run(run()).status == 504


def test_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        ids = tokenizer.encode("the relay race hands", add_special_tokens=False)
        accepted = accept(1, {"stops": ("race",)}, -1, stream=False)
        g, ranks = begin(accepted, tokenizer)
        send(ranks, 1, ids, None, -1)
        (choice,) = json.loads(await g.next() or b"")["choices"]
        assert (choice["message"]["content"], choice["finish_reason"], choice["matched_stop"]) == (
            "the relay ",
            "stop",
            "race",
        )
        g.close()
        upto = next(i for i in range(len(ids)) if "race" in tokenizer.decode(ids[:i]))
        assert g.completion_tokens == upto
        assert ranks.aborted == [1]

    asyncio.run(run())


class SlowConnection(asyncio.WriteTransport):
    """Takes bytes; its buffer is as full as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.buffered = 0
        self.has_room = asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.buffered

    async def drain(self) -> None:
        await self.has_room.wait()


@pytest.mark.parametrize("is_chunked", [True, False])
def test_output_gathers_while_the_client_reads_slowly(
    tokenizer: Tokenizer, is_chunked: bool
) -> None:
    async def run() -> None:
        g, ranks = begin(accept(1, {}, -1), tokenizer)
        connection = SlowConnection()
        send(ranks, 1, [260], None, -1)
        g.write_directly(ClientConnection(connection, connection.drain, 100, is_chunked))
        assert connection.written == b"", "what waits goes first"
        before = await g.next() or b""
        g.write_directly(ClientConnection(connection, connection.drain, 100, is_chunked))
        send(ranks, 1, [261], None, -1)
        connection.buffered = 101
        send(ranks, 1, [262], None, -1)
        reader = asyncio.create_task(g.next(60))
        await asyncio.sleep(0)
        written = connection.written
        for token in (263, 264):
            send(ranks, 1, [token], None, -1)
        send(ranks, 1, [EOS], FinishReason.STOP, -1)
        assert connection.written == written, "output goes to a connection without room"
        assert not g.finished
        connection.buffered = 0
        connection.has_room.set()
        assert await reader == b""
        assert g.finished
        stream = before + _without_framing(connection.written, is_chunked)
        events = [json.loads(line[6:]) for line in stream.splitlines()[:-2] if line]
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
        text = "".join(delta.get("content", "") for delta in deltas)
        assert text == tokenizer.decode([260, 261, 262, 263, 264])
        assert len(events) == 6, "role, three as they came, the rest at once, usage"
        assert stream.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def _without_framing(data: bytes, is_chunked: bool) -> bytes:
    """The bodies of HTTP/1.1 chunks (RFC 9112 §7.1)."""
    if not is_chunked:
        return data
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        data = rest[length + 2 :]
    return body


def test_echo_alone_asks_no_rank(tmp_path: Path) -> None:
    """No row is needed when nothing is to be generated."""
    tokenizer = Tokenizer(tiny_model.make(tmp_path))
    item = PromptItem(0, 0, array("i", [5]), SamplingParams())
    answer = AnswerSpec(is_empty=True, skip_special_tokens=True)
    accepted = AcceptedRequest(items=(item,), n=1, answer=answer, echo=("x",))

    async def run() -> Any:
        g, ranks = begin(accepted, tokenizer, dialect=Dialect.COMPLETIONS)
        body = await g.next() or b""
        assert g.finished
        assert ranks.submitted == []
        return json.loads(body)

    whole = asyncio.run(run())
    assert whole["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "matched_stop": None,
    }  # fmt: skip
