"""Processes that check grammars, and the checks that wait for them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from baton.errors import BadRequest, EngineError, QueueFull, RateLimited
from baton.server.request.grammar.checks import process as process_module
from baton.server.request.grammar.checks import queue as queue_module
from baton.server.request.grammar.checks.lane import CheckOrder
from baton.server.request.grammar.checks.messages import CheckReply, CheckSetup
from baton.server.request.grammar.checks.process import CheckProcess, SlowCheck
from baton.server.request.grammar.checks.queue import (
    LARGE_LANE,
    SMALL_CHECK_BYTES,
    SMALL_LANE,
    CheckOutcome,
    CheckQueue,
)
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import (
    GrammarCheck,
    RequestGrammar,
    make_request_grammar,
)
from tests.support.grammars.chains import lark_chain, rule_chain

SECS = 60.0
CPU_SECS = 5.0
SLOW_CPU_SECS = 0.2
"""For checks that take minutes."""


def setup() -> CheckSetup:
    return CheckSetup("bounded", {"<think>": 7})


def check_of(field: str, value: object) -> bytes:
    return msgspec.json.encode(GrammarCheck({field: value}))


def order(request: bytes, param: str = "field", client: str = "a") -> CheckOrder:
    return CheckOrder(request, hashlib.sha256(request).digest(), param, client)


SMALL = check_of("regex", "a")
LARGE = check_of("regex", "a" * SMALL_CHECK_BYTES)


@pytest.fixture
def process() -> Iterator[CheckProcess]:
    made = CheckProcess(setup)
    yield made
    made.close()


@pytest.fixture
def checks() -> Iterator[CheckQueue]:
    made = CheckQueue(setup, 0.0)
    yield made
    made.close()


def test_process_answers_grammars_and_refusals(process: CheckProcess) -> None:
    assert process.check(SMALL, "field", CPU_SECS).grammar().text
    with pytest.raises(BadRequest, match="regex is no regular expression") as caught:
        process.check(check_of("regex", "("), "field", CPU_SECS).grammar()
    assert caught.value.param == "regex"
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f><think>", "schema": {}, "end": "</f>"}]}
    text = process.check(check_of("structural_tag", tag), "field", CPU_SECS).grammar().text
    assert "<[7]>" in text


def test_grammar_is_the_one_made_in_this_process(process: CheckProcess) -> None:
    """Large and small numbers, and the order of members."""
    numbers = {"const": [2**53, 1e300, -1e-320, 0.1, 16.0]}
    schema = {"properties": {"b": numbers, "a": {"type": "string"}}, "type": "object"}
    expected = make_request_grammar(
        GrammarCheck({"guided_json": schema}), "bounded", MarkerTokens(dict)
    )
    request = check_of("guided_json", msgspec.Raw(msgspec.json.encode(schema)))
    assert process.check(request, "field", CPU_SECS).grammar() == expected


def test_check_that_overflows_the_stack_is_refused_and_others_go_on(process: CheckProcess) -> None:
    with pytest.raises(BadRequest, match="nested too deeply") as caught:
        process.check(check_of("ebnf", lark_chain(20_000)), "field", CPU_SECS)
    assert caught.value.param == "field"
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_check_over_its_cpu_time_is_ended_and_others_go_on(process: CheckProcess) -> None:
    assert process.check(SMALL, "field", CPU_SECS).cpu_secs > 0
    started = process._process
    with pytest.raises(SlowCheck):
        process.check(check_of("ebnf", rule_chain(40_000)), "field", SLOW_CPU_SECS)
    assert process._process is started, "only its child has ended"
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_process_that_hangs_is_ended_and_others_go_on(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.check(SMALL, "field", CPU_SECS)  # the process runs
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "CHECK_LIMIT_SECS", 0.05)
        with pytest.raises(BadRequest, match="not checked within"):
            process.check(check_of("ebnf", rule_chain(40_000)), "field", CPU_SECS)
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_stopped_process_that_reads_nothing_is_ended(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is larger than a pipe: it could not even be written."""
    process.check(SMALL, "field", CPU_SECS)
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "CHECK_LIMIT_SECS", 0.2)
        with pytest.raises(BadRequest, match="not checked within"):
            process.check(check_of("regex", "a" * 2**20), "field", CPU_SECS)
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_fault_of_the_process_is_not_the_clients(process: CheckProcess) -> None:
    with pytest.raises(EngineError, match="has ended") as caught:
        process.check(b"no check", "field", CPU_SECS)
    assert caught.value.status == 500
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_end_of_the_process_is_not_the_clients_fault(process: CheckProcess) -> None:
    process.check(SMALL, "field", CPU_SECS)
    ending = process._ending
    assert process._process is not None
    assert ending is not None
    process._process.kill()
    with pytest.raises(EngineError, match="has ended") as caught:
        process.check(SMALL, "field", CPU_SECS)
    assert caught.value.status == 500
    assert not ending.alive, "nothing is kept of a process that has ended"
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_closed_process_leaves_no_child(process: CheckProcess) -> None:
    """Also while the child is in the middle of a check."""
    process.check(SMALL, "field", CPU_SECS)
    started = process._process
    assert started is not None
    checking = threading.Thread(target=check_until_closed, args=(process,))
    checking.start()
    until = time.monotonic() + SECS
    group = started.pid
    while not any(used_secs(pid) > 0.1 for pid in children_of(group)):
        assert time.monotonic() < until
        time.sleep(0.01)
    process.close()
    checking.join(SECS)
    while is_group_there(group):  # the kernel may take a moment
        assert time.monotonic() < until
        time.sleep(0.01)


def check_until_closed(process: CheckProcess) -> None:
    with pytest.raises(EngineError):
        process.check(check_of("ebnf", rule_chain(40_000)), "field", SECS)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def used_secs(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_group_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_schema_too_deep_for_its_decoder_is_refused(process: CheckProcess) -> None:
    depth = 2000
    schema = msgspec.Raw(b'{"properties":{"a":' * depth + b"{}" + b"}}" * depth)
    with pytest.raises(BadRequest, match="nested too deeply") as caught:
        process.check(check_of("guided_json", schema), "field", CPU_SECS).grammar()
    assert caught.value.param == "field"
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_process_that_does_not_start_fails_the_request(
    process: CheckProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(process_module, "WORKER", "baton.no_such_module")
        with pytest.raises(EngineError, match="does not start") as caught:
            process.check(SMALL, "field", CPU_SECS)
    assert caught.value.status == 500
    assert process.check(SMALL, "field", CPU_SECS).grammar().text


def test_small_check_does_not_wait_for_a_large_one(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = HeldLanes(monkeypatch, {LARGE})

    async def go() -> None:
        large = asyncio.create_task(checks.check(order(LARGE)))
        assert await checks.check(order(SMALL)) == CHECKED
        assert not large.done()
        lanes.release.set()
        assert await large == CHECKED

    asyncio.run(go())


def test_small_check_that_is_slow_moves_and_others_go_on(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = check_of("regex", "slow")
    lanes = HeldLanes(monkeypatch, {slow})

    async def go() -> None:
        moving = asyncio.create_task(checks.check(order(slow)))
        await lanes.until_begun(2)
        assert await checks.check(order(SMALL)) == CHECKED
        lanes.release.set()
        assert await moving == CHECKED

    asyncio.run(go())
    limits = [cpu_secs for request, _, cpu_secs in lanes.begun if request == slow]
    assert limits == [SMALL_LANE.cpu_secs, LARGE_LANE.cpu_secs]
    assert checks.outcomes[CheckOutcome.MOVED] == 1


def test_check_that_was_too_slow_is_refused_at_once_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real processes, with a limit that a chain of 40,000 rules exceeds by far."""
    monkeypatch.setattr(queue_module, "LARGE_LANE", replace(LARGE_LANE, cpu_secs=SLOW_CPU_SECS))
    checks = CheckQueue(setup, 1000.0)
    slow = order(check_of("ebnf", rule_chain(40_000)), "ebnf")

    async def go() -> None:
        with pytest.raises(BadRequest, match="was not checked within") as caught:
            await checks.check(slow)
        assert caught.value.param == "ebnf"
        cpu_secs = dict(checks.cpu_secs)
        with pytest.raises(BadRequest, match="before; simplify it"):
            await checks.check(order(slow.request, client="another"))
        assert checks.cpu_secs == cpu_secs, "it is not checked again"
        assert (await checks.check(order(SMALL))).text

    asyncio.run(go())
    checks.close()
    assert checks.outcomes[CheckOutcome.KNOWN_SLOW] == 1


def test_client_over_its_budget_is_served_small_checks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = CheckQueue(setup, 1.0)
    HeldLanes(monkeypatch, set(), cpu_secs=3.0)

    async def go() -> None:
        assert await checks.check(order(LARGE)) == CHECKED
        with pytest.raises(RateLimited, match="has used its 1 s of CPU time") as caught:
            await checks.check(order(LARGE))
        assert caught.value.retry_after_secs is not None
        assert 100 < caught.value.retry_after_secs <= 120  # 2 s overdrawn, 1 s in a minute
        assert await checks.check(order(SMALL)) == CHECKED
        assert await checks.check(order(LARGE, client="b")) == CHECKED

    asyncio.run(go())
    checks.close()
    assert checks.outcomes[CheckOutcome.OVER_BUDGET] == 1


def test_client_with_many_checks_leaves_the_next_turn_to_others(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = HeldLanes(monkeypatch, {LARGE})

    async def go() -> None:
        many = [asyncio.create_task(checks.check(order(LARGE, str(i), "many"))) for i in range(4)]
        await lanes.until_begun(1)
        few = asyncio.create_task(checks.check(order(LARGE, "few", "few")))
        await lanes.until_begun(2)
        assert checks.waiting[LARGE_LANE.name] == 3
        lanes.release.set()
        await asyncio.gather(few, *many)

    asyncio.run(go())
    assert {param for _, param, _ in lanes.begun[:2]} == {"0", "few"}, "one of a client at a time"


def test_equal_check_that_ended_meanwhile_spares_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[bytes, RequestGrammar] = {}
    checks = CheckQueue(setup, 0.0, known.get)
    lanes = HeldLanes(monkeypatch, {LARGE})
    asked = order(LARGE)

    async def go() -> None:
        first = asyncio.create_task(checks.check(asked))
        second = asyncio.create_task(checks.check(asked))
        await lanes.until_begun(1)
        known[asked.digest] = RequestGrammar("kept")
        lanes.release.set()
        assert await first == CHECKED
        assert await second == RequestGrammar("kept")

    asyncio.run(go())
    checks.close()


def test_check_without_a_process_is_answered_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, checks: CheckQueue
) -> None:
    """Out of memory or descriptors: no process starts."""

    async def ask_twice() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", fail_to_start)
            with pytest.raises(EngineError, match="cannot be checked"):
                await asyncio.wait_for(checks.check(order(SMALL)), 60)
        assert (await asyncio.wait_for(checks.check(order(SMALL)), 60)).text

    asyncio.run(ask_twice())


def fail_to_start(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_waiting_checks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "LARGE_LANE", replace(LARGE_LANE, max_waiting=2))
    checks = CheckQueue(setup, 0.0)
    lanes = HeldLanes(monkeypatch, {LARGE})

    async def go() -> None:
        waiting = [asyncio.create_task(checks.check(order(LARGE))) for _ in range(3)]
        await lanes.until_begun(1)
        with pytest.raises(QueueFull):
            await checks.check(order(LARGE))
        lanes.release.set()
        assert await asyncio.gather(*waiting) == [CHECKED] * 3
        assert await checks.check(order(LARGE)) == CHECKED

    asyncio.run(go())
    checks.close()


def test_check_that_waited_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "LARGE_LANE", replace(LARGE_LANE, wait_secs=0.01))
    checks = CheckQueue(setup, 0.0)
    lanes = HeldLanes(monkeypatch, {LARGE})

    async def go() -> None:
        first = asyncio.create_task(checks.check(order(LARGE)))
        await lanes.until_begun(1)
        with pytest.raises(QueueFull) as caught:
            await checks.check(order(LARGE))
        assert caught.value.retry_after_secs
        lanes.release.set()
        assert await first == CHECKED

    asyncio.run(go())
    checks.close()
    assert checks.outcomes[CheckOutcome.QUEUE_FULL] == 1


def test_cancelled_check_gives_its_place_to_the_next(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = HeldLanes(monkeypatch, {LARGE})

    async def go() -> None:
        first = asyncio.create_task(checks.check(order(LARGE, "first")))
        await lanes.until_begun(1)
        second = asyncio.create_task(checks.check(order(LARGE, "second")))
        await asyncio.sleep(0)
        second.cancel()
        third = asyncio.create_task(checks.check(order(LARGE, "third")))
        await asyncio.sleep(0)
        lanes.release.set()
        await asyncio.gather(first, third)
        assert second.cancelled()

    asyncio.run(go())
    assert [param for _, param, _ in lanes.begun] == ["first", "third"]


def test_client_that_leaves_while_its_check_is_in_work_gets_no_second_one(
    checks: CheckQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = HeldLanes(monkeypatch, {LARGE})

    async def go() -> None:
        left = asyncio.create_task(checks.check(order(LARGE, "left")))
        await lanes.until_begun(1)
        left.cancel()
        back = asyncio.create_task(checks.check(order(LARGE, "back")))
        other = asyncio.create_task(checks.check(order(LARGE, "other", "b")))
        await lanes.until_begun(2)
        lanes.release.set()
        await asyncio.gather(back, other)

    asyncio.run(go())
    assert [param for _, param, _ in lanes.begun] == ["left", "other", "back"]


CHECKED = RequestGrammar("checked")


class HeldLanes:
    """Checks of processes: those in `held` last until `release`, or are too slow where they may take little."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, held: set[bytes], *, cpu_secs: float = 0.0
    ) -> None:
        """`cpu_secs`: CPU time that they say they took."""
        self.release = threading.Event()
        self.begun: list[tuple[bytes, str, float]] = []
        """Request, field and CPU time of each check of `held`."""

        def check(
            process: CheckProcess, request: bytes, param: str, limit_secs: float
        ) -> CheckReply:
            if request in held:
                self.begun.append((request, param, limit_secs))
                if limit_secs < LARGE_LANE.cpu_secs:
                    raise SlowCheck
                assert self.release.wait(SECS)
            return CheckReply(text=CHECKED.text, cpu_secs=cpu_secs)

        monkeypatch.setattr(CheckProcess, "check", check)

    async def until_begun(self, count: int) -> None:
        until = time.monotonic() + SECS
        while len(self.begun) < count:
            assert time.monotonic() < until
            await asyncio.sleep(0.001)
