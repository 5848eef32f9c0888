"""--kv-events-config: vLLM's keys, every mistake named with its remedy, endpoints of each DP rank."""

from __future__ import annotations

import json

import pytest

from baton import config
from baton.config.kv_events import KvEventsConfig, binds, mistakes, read
from baton.errors import ConfigError
from baton.sched.setup import from_config

ON = '{"enable_kv_cache_events": true}'


def test_nothing_is_announced_by_default() -> None:
    assert read("") == KvEventsConfig()
    assert not read("").uses_zmq
    assert from_config.limits(config.parse([]), 64).kv_event_batches == 0


def test_enabled_means_zmq_unless_said_otherwise() -> None:
    assert read(ON).uses_zmq
    assert not read('{"enable_kv_cache_events": true, "publisher": "null"}').uses_zmq
    assert not read('{"publisher": "zmq"}').uses_zmq
    limits = from_config.limits(
        config.parse(["--kv-events-config", ON[:-1] + ', "buffer_steps": 7}']), 64
    )
    assert limits.kv_event_batches == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "give a JSON object"),
        (
            '{"enable": true}',
            "there is no key 'enable'; there are buffer_steps, enable_kv_cache_events",
        ),
        ('{"max_queue_size": 10}', "there is no key 'max_queue_size'"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events 1: give true or false"),
        ('{"publisher": "nats"}', 'publisher "nats": give "zmq", or "null"'),
        ('{"endpoint": "inproc://x"}', 'endpoint "inproc://x": give "tcp://HOST:PORT"'),
        ('{"endpoint": null}', "endpoint null: give"),
        ('{"endpoint": "tcp://*"}', 'endpoint "tcp://*": give'),
        ('{"endpoint": "tcp://*:0"}', "endpoint tcp://*:0 of DP rank 0: ports are 1 to 65535"),
        (
            '{"endpoint": "tcp://*:65535"}',
            "endpoint tcp://*:65536 of DP rank 1: ports are 1 to 65535",
        ),
        (
            '{"replay_endpoint": "tcp://*:5558"}',
            "replay_endpoint tcp://*:5558 of DP rank 0 is also the endpoint of DP",
        ),
        ('{"buffer_steps": 0}', "buffer_steps 0: give an integer from 1 to 1000000"),
        ('{"buffer_steps": true}', "buffer_steps true: give an integer"),
        ('{"hwm": 0}', "hwm 0: give an integer from 1"),
        ('{"topic": 5}', "topic 5: give a string"),
    ],
)
def test_mistakes_name_key_value_and_remedy(text: str, says: str) -> None:
    found = mistakes(text, dp_size=2)
    assert len(found) == 1
    assert found[0].startswith("--kv-events-config")
    assert says in found[0]
    with pytest.raises(ConfigError) as caught:
        config.build({"kv_events_config": text, "dp_size": 2})
    assert says in caught.value.message


def test_several_mistakes_are_reported_together() -> None:
    assert len(mistakes(json.dumps({"hwm": 0, "topic": 1, "nope": 2}), 1)) == 3


def test_events_without_a_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is cached with --disable-radix-cache"):
        config.build({"kv_events_config": ON, "disable_radix_cache": True})


def test_each_rank_has_its_own_endpoints_as_in_vllm() -> None:
    given = KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://127.0.0.1:6000")
    assert given.of_rank(0) == given
    assert (given.of_rank(3).endpoint, given.of_rank(3).replay_endpoint) == (
        "tcp://*:5560",
        "tcp://127.0.0.1:6003",
    )
    free = KvEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="ipc:///tmp/x")
    assert (free.of_rank(1).endpoint, free.of_rank(1).replay_endpoint) == (
        "tcp://127.0.0.1:*",
        "ipc:///tmp/x_dp1",
    )


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/x", True),
        ("tcp://router:5557", False),
    ],
)
def test_endpoint_says_whether_to_bind(endpoint: str, bound: bool) -> None:
    assert binds(endpoint) is bound
    assert mistakes(json.dumps({"endpoint": endpoint}), 1) == []
