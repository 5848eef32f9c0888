"""`--simulate`: what it accepts, how long its steps take, what its transfers tell D, and its tokenizer."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import msgspec
import pytest

from baton.config import build_config
from baton.config.simulated import parse_device
from baton.disagg.calls import AbortCall, FinishCall, GroupPages, TransferCall
from baton.errors import ConfigError
from baton.runtime.simulated.device import SimRunner, answer_tokens
from baton.runtime.simulated.engine import PacedTransfer
from baton.sched.types.plan import AdmittedSeq, Row, StepPlan, StopReason
from baton.sched.types.request import SamplingParams
from baton.server.text.tokenizer import Tokenizer


def plan(step: int, *rows: Row, admitted: tuple[AdmittedSeq, ...] = ()) -> StepPlan:
    return StepPlan(step, rows, 0, admitted, array("i"), StopReason.QUEUE_EMPTY)


def chunk(slot: int, start: int, n: int, *, sample: bool) -> Row:
    return Row(slot, slot, start, n, sample, array("i", [5] * n), 0, array("i"))


def test_numbers_of_a_device_are_replaced_and_mistakes_reported_together() -> None:
    got = parse_device("h200-8b,speed=8,length_scale=16,token_us=50")
    assert (got.speed, got.length_scale, got.model.token_us, got.model.weights_ms) == (
        8,
        16,
        50,
        4.2,
    )
    with pytest.raises(ConfigError) as error:
        parse_device("h100,speed=0,length_scale=3,token_us=fast,tokens=3")
    assert len(error.value.message.splitlines()) == 5


def test_node_is_as_large_as_the_device_unless_flags_say_otherwise() -> None:
    config = build_config({"simulate": "reference,length_scale=8", "max_running_requests": 7})
    assert (config.max_total_tokens, config.chunked_prefill_size, config.max_running_requests) == (
        125_000,
        1024,
        7,
    )
    assert build_config({}).max_total_tokens == 0


def test_flags_about_a_real_device_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        build_config({"simulate": "nothing", "kv_pool_mib": 3, "device": "auto"})
    assert [line.split()[0] for line in error.value.message.splitlines()] == [
        "--simulate",
        "--device",
        "--kv-pool-mib",
    ]


def test_step_that_waited_begins_where_the_last_one_ended() -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds + 0.001  # woken late

    runner = SimRunner(
        parse_device("reference,speed=2,attention_ns=0,step_ms=0"),
        (7,),
        None,
        lambda: now[0],
        sleep,
    )
    runner.execute(plan(0, chunk(0, 0, 1000, sample=False)))
    runner.execute(plan(1, chunk(0, 1000, 1000, sample=False)))
    now[0] += 1
    runner.execute(plan(2, chunk(0, 2000, 1000, sample=False)))
    assert slept == [0.05, 0.049, 0.05]  # 1000 tokens of 100 us at twice the speed


def test_answers_depend_on_the_position_and_logprobs_come_when_asked_for() -> None:
    answer = answer_tokens(build_config({"simulate": "reference"}))
    runner = SimRunner(parse_device("reference,speed=1000"), answer)
    asks = AdmittedSeq(0, 0, SamplingParams(max_new_tokens=2, logprobs=1), 3, array("i"))
    silent = AdmittedSeq(1, 1, SamplingParams(max_new_tokens=2), 3, array("i"))
    rows = (chunk(0, 0, 3, sample=True), chunk(1, 2, 1, sample=True))
    result = runner.execute(plan(0, *rows, admitted=(asks, silent)))
    assert list(result.tokens) == [answer[3], answer[3]]
    assert list(result.logprobs) == [0]
    assert Tokenizer.four_byte().decode(result.tokens).split() == ["in", "in"]


@pytest.mark.parametrize("text", ["", "a", "four", "many more of them", "zwölf Wörter, 日本"])
def test_four_bytes_are_a_token(text: str) -> None:
    ids = Tokenizer.four_byte().encode(text)
    assert len(ids) == -(-len(text.encode()) // 4)
    assert all(0 <= i < Tokenizer.four_byte().vocab_size for i in ids)
    if text.isascii():
        assert Tokenizer.four_byte().decode(ids) == text


class Wire:
    """A TransferNode that records the ends it gets."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.heard = threading.Event()
        self.error = error

    def call(self, call: TransferCall) -> None:
        self.calls.append(msgspec.structs.astuple(call))
        if isinstance(call, FinishCall):
            self.heard.set()
            if self.error is not None:
                raise self.error

    def poll(self, max: int) -> list[tuple[object, ...]]:
        return []


def one_page(tokens: int) -> tuple[GroupPages, ...]:
    return (GroupPages(0, 0, 1, tokens),)


def finish(room: int, tokens: int, payload: bytes) -> FinishCall:
    return FinishCall(room, one_page(tokens), payload)


def test_ends_reach_d_in_order_of_their_transfers_and_not_after_an_abort() -> None:
    wire = Wire()
    paced = PacedTransfer(wire, parse_device("reference,transfer_ms=20,transfer_us=10000"), 16)  # type: ignore[arg-type]
    paced.call(finish(1, 9, b"long"))
    paced.call(finish(2, 5, b"aborted"))
    paced.call(finish(3, 1, b"short"))
    paced.call(AbortCall(2, "CLIENT_GONE"))
    while len(wire.calls) < 3:
        assert wire.heard.wait(10)
        wire.heard.clear()
    assert wire.calls == [(2, "CLIENT_GONE"), (3, one_page(1), b"short"), (1, one_page(9), b"long")]


def test_error_of_the_transfer_runtime_reaches_the_rank() -> None:
    wire = Wire(RuntimeError("full"))
    paced = PacedTransfer(wire, parse_device("reference,transfer_ms=0,transfer_us=0"), 16)  # type: ignore[arg-type]
    paced.call(finish(1, 1, b""))
    assert wire.heard.wait(10)
    paced.stopped.wait(10)
    with pytest.raises(RuntimeError, match="full"):
        paced.poll(1)
