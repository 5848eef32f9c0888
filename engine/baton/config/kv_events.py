"""--kv-events-config: the keys of vLLM's option of that name, checked.

Pure: read by baton.config (the check), sched.setup (how much is kept) and the server (where it goes).
"""

from __future__ import annotations

import dataclasses
import json
import re
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
    """PUB socket: bound if it has a *, :: or ipc://, else connected to. DP rank r adds r to the port."""
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
        replay = self.replay_endpoint
        return dataclasses.replace(
            self,
            endpoint=_offset(self.endpoint, dp_rank),
            replay_endpoint=None if replay is None else _offset(replay, dp_rank),
        )


def _offset(endpoint: str, dp_rank: int) -> str:
    found = _TCP.fullmatch(endpoint)
    if dp_rank == 0 or (found is not None and found[2] == "*"):
        return endpoint
    return f"{endpoint}_dp{dp_rank}" if found is None else f"tcp://{found[1]}:{int(found[2]) + dp_rank}"


def binds(endpoint: str) -> bool:
    """Bind or connect: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def read(text: str) -> KvEventsConfig:
    """The config that a text which `mistakes` found none in stands for; empty: nothing is announced."""
    return KvEventsConfig(**(json.loads(text) if text else {}))


def mistakes(text: str, dp_size: int) -> list[str]:
    """List the mistakes in the flag's value, one sentence each."""
    if not text:
        return []
    try:
        values = json.loads(text)
    except ValueError as err:
        return [f"{FLAG} {text[:100]}: is no JSON ({err}); give an object like " + '{"enable_kv_cache_events": true}']
    if not isinstance(values, dict):
        return [f"{FLAG} {text[:100]}: give a JSON object like " + '{"enable_kv_cache_events": true}']
    known = {f.name for f in dataclasses.fields(KvEventsConfig)}
    bad = [
        f"{FLAG}: there is no key {key!r}; there are {', '.join(sorted(known))}"
        for key in sorted(values.keys() - known)
    ]
    for key in sorted(values.keys() & known):
        if not _fits(key, values[key]):
            bad.append(f"{FLAG}: {key} {json.dumps(values[key])[:100]}: give {_WANTED[key]}")
    if bad:
        return bad
    config = KvEventsConfig(**values)
    return _port_mistakes(config, dp_size)


_WANTED = {
    "enable_kv_cache_events": "true or false",
    "publisher": '"zmq", or "null" for events over HTTP only',
    "endpoint": '"tcp://HOST:PORT" (port 1 to 65535, or * for a free one) or "ipc://PATH"',
    "replay_endpoint": '"tcp://HOST:PORT" (port 1 to 65535, or * for a free one), "ipc://PATH", or null for none',
    "buffer_steps": f"an integer from 1 to {MAX_BUFFER_STEPS}",
    "hwm": "an integer from 1 to 2147483647",
    "topic": "a string",
}


def _fits(key: str, value: Any) -> bool:
    if key == "enable_kv_cache_events":
        return isinstance(value, bool)
    if key == "publisher":
        return value in ("", "zmq", "null")
    if key in ("buffer_steps", "hwm"):
        most = MAX_BUFFER_STEPS if key == "buffer_steps" else 2**31 - 1
        return type(value) is int and 1 <= value <= most
    if value is None:
        return key == "replay_endpoint"
    return isinstance(value, str) and (key == "topic" or _BOUND.fullmatch(value) is not None)


def _port_mistakes(config: KvEventsConfig, dp_size: int) -> list[str]:
    bad = []
    taken: dict[str, str] = {}
    for key, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
        if endpoint is None:
            continue
        for rank in range(dp_size):
            mine = _offset(endpoint, rank)
            found = _TCP.fullmatch(mine)
            if found is not None and found[2] == "*":
                continue
            if found is not None and not 1 <= int(found[2]) <= 65535:
                bad.append(f"{FLAG}: {key} {mine} of DP rank {rank}: ports are 1 to 65535; choose a lower first port")
                break
            place = mine if found is None else found[2]
            if place in taken:
                bad.append(f"{FLAG}: {key} {mine} of DP rank {rank} is also {taken[place]}; leave {dp_size} between")
                break
            taken[place] = f"the {key} of DP rank {rank}"
    return bad
