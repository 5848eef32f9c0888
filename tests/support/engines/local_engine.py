"""A front and a rank in this process: requests of all APIs as their bodies, answers as clients get them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton._native import AnswerTable, translate_request

from baton.config import build_config
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.grammar.store import GrammarStore
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.sched.metrics.histogram import GAP_BUCKETS
from baton.sched.types.events import EmittedTokens
from baton.sched.types.request import ValidatedRequest
from baton.server.observability.metrics import EngineMetrics
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.validation import RequestValidator
from baton.server.response.generation import Generation
from baton.server.text import model_info
from baton.server.text.answer_format import load_answer_format
from baton.server.text.answer_spec import Dialect
from baton.server.text.tokenizer import Tokenizer
from baton.server.worker.client import AnswerSink, RankClient, RankSet
from baton.server.worker.messages import TokenBatch, encoder
from tests.support.engines.engine_run import FLAGS, make_engine
from tests.support.grammars.engines import follow_grammars

METRICS = EngineMetrics()
SECS = 60.0


class LocalRanks(RankSet):
    """Hands requests to an engine loop, and its rows to the text layer."""

    def __init__(self, engine: EngineLoop, answers: AnswerTable) -> None:
        self.engine = engine
        self.answers = answers
        self.ranks = [RankClient(0, None)]  # type: ignore[arg-type]
        self._sinks = {}
        self._of_handle = {}
        self._handles = itertools.count(1)

    def choose(self, wanted: int | None) -> RankClient:
        return self.ranks[0]

    def submit(self, rank: RankClient, request: ValidatedRequest, sink: AnswerSink) -> None:
        self._of_handle[request.handle] = rank
        rank.items[request.handle] = (sink, 0)
        self.engine.submit(request)

    def abort(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if self._forget(handle) is not None:
                self.engine.abort(handle)

    def step(self) -> None:
        """One turn of the engine loop, and its output."""
        now = time.monotonic()
        rows, is_busy = self.engine.step(now)
        if rows:
            self._feed(rows, now)
        elif not is_busy:
            time.sleep(0.001)  # a grammar is being compiled on another thread

    def _feed(self, rows: list[EmittedTokens], now: float) -> None:
        fed = self.answers.feed(encoder.encode(TokenBatch(0, rows)), now)
        assert fed is not None
        self._take_tokens(fed, now)


@dataclass(frozen=True)
class ReadAnswer:
    """An answer as a client reads it, streamed or whole."""

    content: str
    reasoning: str
    finish: str | None
    """`finish_reason`, and its like in other APIs."""
    matched: int | str | None
    """The stop text or id that ended it, where the API tells it."""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each call of a chat."""


class LocalEngine:
    def __init__(self, path: Path, **flags: Any) -> None:
        config = build_config({"model_path": str(path), **FLAGS, **flags})
        facts = model_info.load(config)
        tokenizer = Tokenizer(facts.path)
        answer_format = load_answer_format(config, facts, tokenizer)
        self.validator = RequestValidator(config, facts, tokenizer, answer_format)
        engine = make_engine(path, **flags)
        text = (path / "tokenizer.json").read_text()
        trie = build_trie(TokenizerSource(text, [], self.validator.eos_token_ids), facts.vocab_size)
        store = GrammarStore(trie, MaskFiller(trie.vocab_size, facts.vocab_size, 1))
        self.engine = follow_grammars(engine, store)
        answers = AnswerTable(tokenizer.native, answer_format.native, GAP_BUCKETS)
        self.ranks = LocalRanks(self.engine, answers)
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.validator.grammars.close()
        self._loop.close()
        self.engine.close()

    def ask(self, api: Dialect, body: dict[str, Any]) -> bytes:
        """The body of the answer to a request. Raises EngineError."""
        return self._loop.run_until_complete(self._ask(api, body))

    def read(self, api: Dialect, body: dict[str, Any]) -> ReadAnswer:
        """The answer to a request, asked for whole and as a stream, which must agree."""
        whole = read_whole(api, json.loads(self.ask(api, body)))
        streamed = read_stream(api, self.ask(api, {**body, "stream": True}))
        assert streamed == whole, (streamed, whole)
        return whole

    async def _ask(self, api: Dialect, body: dict[str, Any]) -> bytes:
        generation = Generation(
            rid="r",
            request_id="r",
            accepted=await self._accept(api, body),
            dialect=api,
            ranks=self.ranks,
            metrics=METRICS,
            endpoint="test",
            arrived=time.monotonic(),
            timeout_secs=SECS,
            eos_token_ids=self.validator.eos_token_ids,
        )
        generation.start()
        out = b""
        try:
            while not generation.finished:
                self.ranks.step()
                out += await generation.next(0.0) or b""
        finally:
            generation.close()
            while self.engine.step(time.monotonic())[1]:
                pass
        return out

    async def _accept(self, api: Dialect, body: dict[str, Any]) -> AcceptedRequest:
        match api:
            case Dialect.CHAT:
                return await self.validator.chat(dict(body))
            case Dialect.COMPLETIONS:
                return await self.validator.completion(dict(body))
            case Dialect.GENERATE:
                return await self.validator.generate(dict(body))
            case Dialect.RESPONSES | Dialect.MESSAGES:
                translated = translate_request(api.value, json.dumps(body).encode())
                chat = json.loads(translated.chat)
                accepted = await self.validator.chat(chat, clamps_limit=True)
                return accepted.with_options(facts=translated.facts)


def read_whole(api: Dialect, answer: dict[str, Any]) -> ReadAnswer:
    """Read a whole answer."""
    match api:
        case Dialect.CHAT:
            choice = answer["choices"][0]
            message = choice["message"]
            return ReadAnswer(
                message["content"] or "",
                message.get("reasoning_content") or "",
                choice["finish_reason"],
                choice["matched_stop"],
                tuple(_read_function(call) for call in message.get("tool_calls") or ()),
            )
        case Dialect.COMPLETIONS:
            choice = answer["choices"][0]
            return ReadAnswer(choice["text"], "", choice["finish_reason"], choice["matched_stop"])
        case Dialect.GENERATE:
            reason = answer["meta_info"]["finish_reason"]
            return ReadAnswer(answer["text"], "", reason["type"], reason.get("matched"))
        case Dialect.RESPONSES:
            return _read_response(answer)
        case Dialect.MESSAGES:
            blocks = answer["content"]
            return ReadAnswer(
                "".join(block.get("text", "") for block in blocks),
                "".join(block.get("thinking", "") for block in blocks),
                answer["stop_reason"],
                answer["stop_sequence"],
            )


def read_stream(api: Dialect, stream: bytes) -> ReadAnswer:
    """Read a stream by its parts, which a client joins."""
    lines = stream.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    events = [json.loads(event) for event in data[:-1]]
    match api:
        case Dialect.CHAT | Dialect.COMPLETIONS:
            return _read_chunks(events)
        case Dialect.GENERATE:
            return read_whole(api, events[-1])  # each event has the whole text so far
        case Dialect.RESPONSES:
            parts = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
            for event in events:
                if event["type"] in parts:
                    parts[event["type"]] += event["delta"]
            last = _read_response(events[-1]["response"])
            return replace(last, content=parts["response.output_text.delta"])
        case Dialect.MESSAGES:
            deltas = [event["delta"] for event in events if "delta" in event]
            return ReadAnswer(
                "".join(delta.get("text", "") for delta in deltas),
                "".join(delta.get("thinking", "") for delta in deltas),
                next(delta["stop_reason"] for delta in deltas if "stop_reason" in delta),
                next(delta["stop_sequence"] for delta in deltas if "stop_sequence" in delta),
            )


def _read_chunks(events: list[dict[str, Any]]) -> ReadAnswer:
    choices = [choice for event in events for choice in event["choices"]]
    last = choices[-1]
    deltas = [choice.get("delta", choice) for choice in choices]
    return ReadAnswer(
        "".join(delta.get("content") or delta.get("text") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        last["finish_reason"],
        last["matched_stop"],
        _join_calls(deltas),
    )


def _read_function(call: dict[str, Any]) -> tuple[str, str]:
    return call["function"]["name"], call["function"]["arguments"]


def _join_calls(deltas: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The calls of a streamed chat: a name comes once, arguments in pieces."""
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls") or ():
            name, arguments = calls.get(part["index"], ("", ""))
            function = part["function"]
            piece = function.get("arguments") or ""
            calls[part["index"]] = (name + (function.get("name") or ""), arguments + piece)
    return tuple(calls[index] for index in sorted(calls))


def _read_response(answer: dict[str, Any]) -> ReadAnswer:
    content = ""
    reasoning = ""
    for item in answer["output"]:
        for part in item.get("content") or ():
            if item["type"] == "message":
                content += part["text"]
            else:
                reasoning += part["text"]
    return ReadAnswer(content, reasoning, answer["status"], None)
