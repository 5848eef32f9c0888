"""--kv-events-config: the keys of vLLM's option of that name, checked.

Pure: read by baton.config (the check), sched.setup.from_config (how much is kept) and the server
(where it goes).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FLAG = "--kv-events-config"
MAX_BUFFER_STEPS = 1_000_000
_TCP = re.compile(r"tcp://(\S+):(\d+|\*)")
_BOUND = re.compile(r"tcp://\S+:(\d+|\*)|ipc://\S+")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Names and defaults match vLLM's KVEventsConfig."""

    enable_kv_cache_events: bool = False
    publisher: str = ""
    """zmq, or null: only over HTTP (GET /v1/kv_events). Empty: zmq if enabled."""
    endpoint: str = "tcp://*:5557"
    """PUB socket: bound if it has a *, :: or ipc://, else connected to.

    DP rank r adds r to the port.
    """
    replay_endpoint: str | None = None
    """ROUTER socket for missed batches, always bound; None: there is none."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches that may wait for a slow subscriber; more are lost for it."""
    topic: str = ""

    @property
    def uses_zmq(self) -> bool:
        return self.enable_kv_cache_events and self.publisher in ("", "zmq")

    def of_rank(self, dp_rank: int) -> KvEventsConfig:
        """With the endpoints of this DP rank."""
        replay = (
            None
            if self.replay_endpoint is None
            else _offset_endpoint(self.replay_endpoint, dp_rank)
        )
        return dataclasses.replace(
            self, endpoint=_offset_endpoint(self.endpoint, dp_rank), replay_endpoint=replay
        )


def _offset_endpoint(endpoint: str, dp_rank: int) -> str:
    address = _TCP.fullmatch(endpoint)
    if dp_rank == 0 or (address is not None and address[2] == "*"):
        return endpoint
    return (
        f"{endpoint}_dp{dp_rank}"
        if address is None
        else f"tcp://{address[1]}:{int(address[2]) + dp_rank}"
    )


def is_bind_endpoint(endpoint: str) -> bool:
    """Bind or connect: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def parse_events_config(text: str) -> KvEventsConfig:
    """The config of a text in which `find_mistakes` found none; empty: no events are announced."""
    return KvEventsConfig(**(json.loads(text) if text else {}))


def find_mistakes(text: str, dp_size: int) -> list[str]:
    """List the mistakes in the flag's value, one sentence each."""
    if not text:
        return []
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as err:
        return [
            f"{FLAG} {text[:100]}: is no JSON ({err}); give an object like "
            + '{"enable_kv_cache_events": true}'
        ]
    if not isinstance(values, dict):
        return [
            f"{FLAG} {text[:100]}: give a JSON object like " + '{"enable_kv_cache_events": true}'
        ]
    known_keys = ", ".join(sorted(_VALUES))
    bad = [
        f"{FLAG}: there is no key {key!r}; there are {known_keys}"
        for key in sorted(values.keys() - _VALUES.keys())
    ]
    for key in sorted(values.keys() & _VALUES.keys()):
        fits, remedy = _VALUES[key]
        if not fits(values[key]):
            bad.append(f"{FLAG}: {key} {json.dumps(values[key])[:100]}: give {remedy}")
    return bad or _port_mistakes(KvEventsConfig(**values), dp_size)


def _is_endpoint(value: Any) -> bool:
    return isinstance(value, str) and _BOUND.fullmatch(value) is not None


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enable_kv_cache_events": (lambda value: isinstance(value, bool), "true or false"),
    "publisher": (
        lambda value: value in ("", "zmq", "null"),
        '"zmq", or "null" for events over HTTP only',
    ),
    "endpoint": (
        _is_endpoint,
        '"tcp://HOST:PORT" (port 1 to 65535, or * for a free one) or "ipc://PATH"',
    ),
    "replay_endpoint": (
        lambda value: value is None or _is_endpoint(value),
        '"tcp://HOST:PORT" (port 1 to 65535, or * for a free one), "ipc://PATH", or null for none',
    ),
    "buffer_steps": (
        lambda value: _is_count(value, MAX_BUFFER_STEPS),
        f"an integer from 1 to {MAX_BUFFER_STEPS}",
    ),
    "hwm": (lambda value: _is_count(value, 2**31 - 1), "an integer from 1 to 2147483647"),
    "topic": (lambda value: isinstance(value, str), "a string"),
}
"""By key: a test of the value, and what to give instead of one that fails it."""


def _port_mistakes(config: KvEventsConfig, dp_size: int) -> list[str]:
    bad = []
    users: dict[str, str] = {}
    for key in ("endpoint", "replay_endpoint"):
        for rank in range(dp_size):
            mine = getattr(config.of_rank(rank), key)
            address = None if mine is None else _TCP.fullmatch(mine)
            if mine is None or (address is not None and address[2] == "*"):
                continue
            if address is not None and not 1 <= int(address[2]) <= 65535:
                bad.append(
                    f"{FLAG}: {key} {mine} of DP rank {rank}: ports are 1 to 65535; choose a lower "
                    "first port"
                )
                break
            place = mine if address is None else address[2]
            if place in users:
                bad.append(
                    f"{FLAG}: {key} {mine} of DP rank {rank} is also {users[place]}; leave "
                    f"{dp_size} between"
                )
                break
            users[place] = f"the {key} of DP rank {rank}"
    return bad
