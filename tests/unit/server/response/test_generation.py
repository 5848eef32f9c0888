"""Whatever the ranks send and however it is grouped: a stream and a whole answer say the same, and each ends once."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineError, KvTransferFailed, RequestTimeout
from baton.sched.types.events import EmittedTokens
from baton.sched.types.plan import TokenLogprobs
from baton.sched.types.request import FinishReason, SamplingParams
from baton.server.observability.metrics import EngineMetrics
from baton.server.request.validation import AcceptedRequest, PromptItem
from baton.server.response.generation import Generation
from baton.server.response.openai import ChatFormat, CompletionFormat, token_key
from baton.server.response.sglang_format import GenerateFormat
from baton.server.text.detokenizer import TextRules
from baton.server.text.tokenizer import Tokenizer
from tests.support.models import tiny_model

METRICS = EngineMetrics()
EOS = 1
PAD = 2


@dataclass
class StubRanks:
    """Takes submits and aborts; the test plays the rank through `sinks`."""

    sinks: dict[int, Any] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)

    def choose(self, wanted: int | None) -> None:
        return None

    def submit(self, rank: None, message: Any, sink: Any) -> int:
        handle = len(self.sinks) + 1
        self.sinks[handle] = sink
        return handle

    def abort(self, handles: list[int]) -> None:
        self.aborted += handles


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_model.make(tmp_path_factory.mktemp("model")))


def accept(n: int, rules: TextRules, logprobs: int) -> AcceptedRequest:
    params = SamplingParams(max_new_tokens=64, stop_token_ids=(EOS,), logprobs=logprobs)
    items = tuple(PromptItem(0, i, array("i", [5, 6]), params) for i in range(n))
    return AcceptedRequest(
        rid="r", items=items, n=n, text=rules, include_usage=True, logprobs=logprobs
    )


def begin(
    accepted: AcceptedRequest, tokenizer: Tokenizer, timeout_secs: float = 60.0
) -> tuple[Generation, StubRanks]:
    ranks: Any = StubRanks()
    g = Generation("r", accepted, ranks, tokenizer, METRICS, "test", time.monotonic(), timeout_secs)
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
    sink = ranks.sinks[handle]
    if logprobs >= 0:  # a row each
        found = TokenLogprobs(-0.5, [3] * logprobs, [-1.0] * logprobs)
        for token in tokens[:-1]:
            sink.on_tokens(EmittedTokens(handle, (token,), None, 1, found))
        sink.on_tokens(
            EmittedTokens(handle, tuple(tokens[-1:]), finish, 1, found if tokens else None)
        )
    else:
        sink.on_tokens(EmittedTokens(handle, tuple(tokens), finish, 1))


def play(
    tokenizer: Tokenizer,
    form: Any,
    given: list[Script],
    rules: TextRules,
    logprobs: int,
    takes: list[bool],
    stream: bool,
) -> tuple[Any, StubRanks]:
    """Run the scripts side by side; `takes` says after which rows the handler takes deltas."""

    async def run() -> tuple[Any, StubRanks]:
        g, ranks = begin(accept(len(given), rules, logprobs), tokenizer)
        shape = form(g, "id", "m")
        out = b""

        async def take() -> None:
            nonlocal out
            for delta in await g.next(0.001) or ():
                if stream:
                    out += shape.event(delta)
                else:
                    shape.take(delta)

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
                    await take()
        while not g.finished:
            await take()
        if not stream:
            return shape.whole(), ranks
        events = [
            json.loads(e.removeprefix("data: "))
            for e in (out + shape.end()).decode().split("\n\n")[:-1]
        ]
        return events, ranks

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
    form=st.sampled_from([ChatFormat, CompletionFormat]),
)
@settings(max_examples=200, deadline=None)
def test_stream_and_whole_answer_agree(
    tokenizer: Tokenizer, given: list[Script], stops: list[str], include: bool, min_tokens: int, logprobs: int,
    takes: list[bool], form: Any,
) -> None:  # fmt: skip
    rules = TextRules(tuple(stops), include, True, min_tokens)
    whole, _ = play(tokenizer, form, given, rules, logprobs, [False], stream=False)
    events, ranks = play(tokenizer, form, given, rules, logprobs, takes, stream=True)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        if form is ChatFormat:
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
    handles = [h for h in ranks.sinks if h not in ranks.aborted]
    matched_early = [c["index"] + 1 for c in whole["choices"] if isinstance(c["matched_stop"], str)]
    assert set(ranks.aborted) <= set(matched_early)
    assert set(handles) | set(ranks.aborted) == set(ranks.sinks)


def _logprobs(form: Any, choices: list[Any]) -> list[Any]:
    """All logprob entries of some choices, in order, whatever their columns."""
    out = []
    for choice in choices:
        given = choice["logprobs"]
        if given is None:
            continue
        if form is ChatFormat:
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
@settings(max_examples=60, deadline=None)
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
    events, _ = play(tokenizer, CompletionFormat, [script], TextRules(), 0, takes, stream=True)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    offsets = [at for c in choices if c["logprobs"] for at in c["logprobs"]["text_offset"]]
    assert offsets == [len(raw[:start].decode(errors="ignore")) for start in starts]


def _is_boundary(raw: bytes, at: int) -> bool:
    return at == len(raw) or raw[at] & 0xC0 != 0x80


def test_alternatives_that_are_parts_of_characters_have_keys_of_their_own() -> None:
    raw = "😀".encode()
    assert token_key(raw[:2]) == r"bytes:\xf0\x9f"
    assert len({token_key(bytes([byte])) for byte in range(256)}) == 256
    assert token_key(raw) == "😀"


@given(
    given=st.lists(scripts, min_size=1, max_size=2),
    takes=st.lists(st.booleans(), min_size=1, max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_native_stream_ends_with_the_whole_answer(
    tokenizer: Tokenizer, given: list[Script], takes: list[bool]
) -> None:
    whole, _ = play(tokenizer, GenerateFormat, given, TextRules(), 1, [False], stream=False)
    events, _ = play(tokenizer, GenerateFormat, given, TextRules(), 1, takes, stream=True)
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
        g, ranks = begin(accept(2, TextRules(), -1), tokenizer)
        send(ranks, 1, [260], None, -1)
        ranks.sinks[2].on_error(KvTransferFailed("PEER_DEAD"))
        assert ranks.aborted == [1], "the failed item has no handle any more"
        assert [d.tokens for d in await g.next() or ()] == [[260]]
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
        g, _ = begin(accept(1, TextRules(), -1), tokenizer, timeout_secs=0.03)
        assert await g.next(0.001) is None, "the wait ends before the deadline"
        with pytest.raises(RequestTimeout) as caught:
            await g.next(60)
        return caught.value

    assert asyncio.run(run()).status == 504


def test_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        ids = tokenizer.encode("the relay race hands", add_special_tokens=False)
        g, ranks = begin(accept(1, TextRules(("race",)), -1), tokenizer)
        send(ranks, 1, ids, None, -1)
        (delta,) = await g.next() or ()
        assert (delta.text, delta.finish, g.tracks[0].matched_stop) == (
            "the relay ",
            "stop",
            "race",
        )
        upto = next(i for i in range(len(ids)) if "race" in tokenizer.decode(ids[:i]))
        assert g.completion_tokens == len(delta.tokens) == upto
        assert ranks.aborted == [1]

    asyncio.run(run())


def test_echo_alone_asks_no_rank(tmp_path: Path) -> None:
    """No row is needed when nothing is to be generated."""
    tokenizer = Tokenizer(tiny_model.make(tmp_path))
    item = PromptItem(0, 0, array("i", [5]), SamplingParams())
    accepted = AcceptedRequest(
        rid=None, items=(item,), n=1, text=TextRules(), echo=("x",), max_tokens_zero=True
    )

    async def run() -> Any:
        g, ranks = begin(accepted, tokenizer)
        shape = CompletionFormat(g, "id", "m")
        while not g.finished:
            for delta in await g.next() or ():
                shape.take(delta)
        assert ranks.sinks == {}
        return shape.whole()

    whole = asyncio.run(run())
    assert whole["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "matched_stop": None,
    }  # fmt: skip
