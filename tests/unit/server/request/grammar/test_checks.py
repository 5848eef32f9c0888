"""Processes that check grammars, and the checks that wait for them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from baton.errors import BadRequest, EngineError, QueueFull
from baton.server.request.grammar.checks import process as process_module
from baton.server.request.grammar.checks import queue as queue_module
from baton.server.request.grammar.checks.messages import CheckReply, CheckSetup
from baton.server.request.grammar.checks.process import CheckProcess
from baton.server.request.grammar.checks.queue import SMALL_CHECK_BYTES, CheckQueue
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import (
    GrammarCheck,
    RequestGrammar,
    make_request_grammar,
)
from tests.support.grammars.chains import lark_chain, rule_chain

SECS = 60.0


def setup() -> CheckSetup:
    return CheckSetup("bounded", {"<think>": 7})


def check_of(field: str, value: object) -> bytes:
    return msgspec.json.encode(GrammarCheck({field: value}))


SMALL = check_of("regex", "a")
LARGE = check_of("regex", "a" * SMALL_CHECK_BYTES)


@pytest.fixture
def process() -> Iterator[CheckProcess]:
    made = CheckProcess(setup)
    yield made
    made.close()


@pytest.fixture
def checks() -> Iterator[CheckQueue]:
    made = CheckQueue(setup)
    yield made
    made.close()


def test_process_answers_grammars_and_refusals(process: CheckProcess) -> None:
    assert process.check(SMALL, "field").grammar().text
    with pytest.raises(BadRequest, match="regex is no regular expression") as caught:
        process.check(check_of("regex", "("), "field").grammar()
    assert caught.value.param == "regex"
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f><think>", "schema": {}, "end": "</f>"}]}
    text = process.check(check_of("structural_tag", tag), "field").grammar().text
    assert "<[7]>" in text


def test_grammar_is_the_one_made_in_this_process(process: CheckProcess) -> None:
    """Large and small numbers, and the order of members."""
    numbers = {"const": [2**53, 1e300, -1e-320, 0.1, 16.0]}
    schema = {"properties": {"b": numbers, "a": {"type": "string"}}, "type": "object"}
    expected = make_request_grammar(
        GrammarCheck({"guided_json": schema}), "bounded", MarkerTokens(dict)
    )
    request = check_of("guided_json", msgspec.Raw(msgspec.json.encode(schema)))
    assert process.check(request, "field").grammar() == expected


def test_check_that_overflows_the_stack_is_refused_and_others_go_on(process: CheckProcess) -> None:
    with pytest.raises(BadRequest, match="nested too deeply") as caught:
        process.check(check_of("ebnf", lark_chain(20_000)), "field")
    assert caught.value.param == "field"
    assert process.check(SMALL, "field").grammar().text


def test_check_over_its_cpu_time_is_ended_and_others_go_on(process: CheckProcess) -> None:
    with pytest.raises(BadRequest, match="not checked within 5 s"):
        process.check(check_of("ebnf", rule_chain(40_000)), "field")
    assert process.check(SMALL, "field").grammar().text


def test_process_that_hangs_is_ended_and_others_go_on(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.check(SMALL, "field")  # the process runs
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "CHECK_LIMIT_SECS", 0.05)
        with pytest.raises(BadRequest, match="not checked within"):
            process.check(check_of("ebnf", rule_chain(40_000)), "field")
    assert process.check(SMALL, "field").grammar().text


def test_stopped_process_that_reads_nothing_is_ended(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is larger than a pipe: it could not even be written."""
    process.check(SMALL, "field")
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "CHECK_LIMIT_SECS", 0.2)
        with pytest.raises(BadRequest, match="not checked within"):
            process.check(check_of("regex", "a" * 2**20), "field")
    assert process.check(SMALL, "field").grammar().text


def test_fault_of_the_process_is_not_the_clients(process: CheckProcess) -> None:
    process.check(SMALL, "field")
    ending = process._ending
    assert ending is not None
    with pytest.raises(EngineError, match="has ended") as caught:
        process.check(b"no check", "field")
    assert caught.value.status == 500
    assert not ending.alive, "nothing is kept of a process that has ended"
    assert process.check(SMALL, "field").grammar().text


def test_schema_too_deep_for_its_decoder_is_refused(process: CheckProcess) -> None:
    depth = 2000
    schema = msgspec.Raw(b'{"properties":{"a":' * depth + b"{}" + b"}}" * depth)
    with pytest.raises(BadRequest, match="nested too deeply") as caught:
        process.check(check_of("guided_json", schema), "field").grammar()
    assert caught.value.param == "field"
    assert process.check(SMALL, "field").grammar().text


def test_process_that_does_not_start_fails_the_request(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "WORKER", "baton.no_such_module")
        with pytest.raises(EngineError, match="does not start") as caught:
            process.check(SMALL, "field")
    assert caught.value.status == 500
    assert process.check(SMALL, "field").grammar().text


def test_small_check_does_not_wait_for_a_large_one(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    hold_large(monkeypatch, release)

    async def go() -> None:
        large = asyncio.create_task(checks.check(LARGE, "field"))
        assert await checks.check(SMALL, "field") == RequestGrammar("checked")
        assert not large.done()
        release.set()
        assert await large == RequestGrammar("checked")

    asyncio.run(go())


def test_waiting_checks_are_bounded(checks: CheckQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    hold_large(monkeypatch, release)
    monkeypatch.setattr(queue_module, "MAX_WAITING", 2)

    async def go() -> None:
        waiting = [asyncio.create_task(checks.check(LARGE, "field")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await checks.check(LARGE, "field")
        release.set()
        assert await asyncio.gather(*waiting) == [RequestGrammar("checked")] * 2
        assert await checks.check(LARGE, "field") == RequestGrammar("checked")

    asyncio.run(go())


def test_check_that_waited_too_long_is_refused(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "WAIT_LIMIT_SECS", -1.0)
    with pytest.raises(QueueFull) as caught:
        asyncio.run(checks.check(SMALL, "field"))
    assert caught.value.retry_after_secs


def test_cancelled_check_gives_its_place_to_the_next(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    seen = hold_large(monkeypatch, release)

    async def go() -> None:
        first = asyncio.create_task(checks.check(LARGE, "first"))
        until = time.monotonic() + SECS
        while not seen and time.monotonic() < until:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(checks.check(LARGE, "second"))
        await asyncio.sleep(0)
        second.cancel()
        third = asyncio.create_task(checks.check(LARGE, "third"))
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(first, third)
        assert second.cancelled()

    asyncio.run(go())
    assert seen == ["first", "third"]


def hold_large(monkeypatch: pytest.MonkeyPatch, release: threading.Event) -> list[str]:
    """Large checks last until `release`; returns the fields of those that have begun."""
    begun: list[str] = []

    def check(process: CheckProcess, request: bytes, param: str) -> CheckReply:
        if request == LARGE:
            begun.append(param)
            assert release.wait(SECS)
        return CheckReply("checked")

    monkeypatch.setattr(CheckProcess, "check", check)
    return begun
