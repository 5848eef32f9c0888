"""Pieces of the rank process that need no process: output messages and the stream interval."""

from __future__ import annotations

import gc
import io
import sys
from types import SimpleNamespace

import msgspec
import pytest

from baton.config import EngineConfig
from baton.sched.types.events import EmittedTokens, RowError, new_token
from baton.sched.types.plan import PromptLogprobs, TokenLogprobs
from baton.sched.types.request import FinishReason
from baton.sched.types.request_timeline import FirstTokenStages, PulledPages
from baton.server.worker import process
from baton.server.worker.messages import TokenBatch, encoder, to_front_decoder
from baton.server.worker.process import StreamBuffer, flatten_transfer_stats, next_idle_report
from baton.server.worker.rank_config import BootstrapAddress, RankConfig, decode_line, encode_line

STAGES = FirstTokenStages(0.25, PulledPages("shm", 3, 12288, 0.002, 0.01))


def one(handle: int, token: int, finish: FinishReason | None = None) -> EmittedTokens:
    return EmittedTokens(handle, (token,), finish, 0)


def test_token_batch_round_trips() -> None:
    outputs = [
        new_token(
            (
                7,
                (5,),
                None,
                3,
                TokenLogprobs(-0.5, [5, 6], [-0.5, -1.0], [-2.0]),
                None,
                None,
                STAGES,
                None,
                None,
            )
        ),
        EmittedTokens(
            9, (), FinishReason.ERROR, 0, error=RowError("timeout", "too late"), retry_after_secs=4
        ),
        EmittedTokens(8, (), None, 0, prompt_logprobs=PromptLogprobs(1, 2, 0, b"sixteen bytes...")),
    ]
    batch = to_front_decoder.decode(encoder.encode(TokenBatch(0, outputs)))
    assert isinstance(batch, TokenBatch)
    assert batch.rows == outputs
    assert batch.rows[1].finish is FinishReason.ERROR


def test_stream_interval_groups_tokens_but_delays_neither_first_nor_last() -> None:
    buffer = StreamBuffer(3)
    sent = [[o.tokens[0] for o in buffer.take([one(1, t)])] for t in range(6)]
    assert sent == [[0], [], [], [1, 2, 3], [], []]
    assert [o.tokens[0] for o in buffer.take([one(1, 6, FinishReason.STOP)])] == [4, 5, 6]
    buffer.take([one(2, 0)])
    buffer.take([one(2, 1)])
    buffer.forget(2)
    assert buffer.take([one(3, 9)]) == [one(3, 9)]


def test_idle_rank_with_a_transfer_runtime_goes_on_reporting() -> None:
    assert next_idle_report(8.0, is_at_rest=False, has_peers=False) == 8.0, (
        "the rate has to fall to zero"
    )
    assert next_idle_report(8.0, is_at_rest=True, has_peers=False) is None
    assert next_idle_report(8.0, is_at_rest=True, has_peers=True) == 13.0


def test_health_of_the_transfer_runtime_is_reported_with_its_numbers() -> None:
    gauges: dict[str, float] = {}
    counters: dict[str, float] = {}
    stats = {
        "gauges": {"kv_peers": 1.0},
        "counters": {"kv_x_total": 2.0},
        "healthy": True,
        "unhealthy_reason": None,
    }
    assert flatten_transfer_stats(stats, gauges, counters) is None
    assert (gauges, counters) == ({"kv_peers": 1.0}, {"kv_x_total": 2.0})
    failed = flatten_transfer_stats(
        stats | {"healthy": False, "unhealthy_reason": "data thread: gone"}, gauges, {}
    )
    assert failed == "its KV transfer runtime has failed: data thread: gone"


def test_objects_of_the_start_are_kept_from_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless they are frozen, a full collection within the loop walks the model and all modules."""
    frozen: list[int] = []
    rank_config = RankConfig(
        config=EngineConfig(),
        dp_rank=0,
        tp_rank=0,
        folder="/nowhere",
        to_rank="inproc://rank",
        to_front="inproc://front",
    )
    made = SimpleNamespace(run=lambda: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(process, "RankProcess", lambda *_: made)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(encode_line(rank_config).decode()))
    before = gc.get_freeze_count()
    try:
        assert process.main() == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > before + 1000


def test_rank_config_round_trips_with_values_that_are_not_defaults() -> None:
    rank_config = RankConfig(
        config=EngineConfig(page_size=32, cluster_key="0123456789abcdef", kv_lease_secs=60),
        dp_rank=3,
        tp_rank=1,
        folder="/run/user/engine",
        to_rank="ipc:///run/user/engine/rank3",
        to_front="ipc:///run/user/engine/front",
        bootstrap=BootstrapAddress("127.0.0.1", 8998),
    )
    line = encode_line(rank_config)
    assert line.count(b"\n") == 1
    assert decode_line(line.decode()) == rank_config


def test_rank_config_without_a_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="dp_rank"):
        decode_line('{"config": {}}')
