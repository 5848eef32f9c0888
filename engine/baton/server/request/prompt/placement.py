"""Where the two halves of a request run: bootstrap rooms, DP ranks, and the seed both halves share.

The router's fields are those of docs/protocol.md §2; older and newer SGLang names are both read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from baton.errors import MissingField
from baton.sched.types.hashing import mix64
from baton.sched.types.request import Rendezvous
from baton.server.fields import bad, first
from baton.server.request.schema import INT64_MAX, RequestFields

DEFAULT_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, slots=True)
class Placement:
    rendezvous: Rendezvous | None
    dp_rank: int | None


def seed_of_room(room: int) -> int:
    """A seed both nodes of a pair derive alone: splitmix64's finalizer, cut to 63 bits."""
    return mix64(room) & INT64_MAX


def seed_for(asked: int | None, rendezvous: Rendezvous | None, choice: int) -> int:
    """The client's seed (choice by choice), else the room's so that P and D agree, else chance."""
    if asked is not None:
        return (asked + choice) & INT64_MAX
    if rendezvous is not None:
        return seed_of_room(rendezvous.room)
    return random.getrandbits(63)


def place(f: RequestFields, prompts: int, n: int, mode: str, dp_size: int) -> list[Placement]:
    """Where each item's halves run, from the router's fields (docs/protocol.md §2); a prompt's
    answers in a row.
    """
    count = prompts * n
    hosts = _column(f, "bootstrap_host", prompts, n, str)
    ports = _column(f, "bootstrap_port", prompts, n, int, 1, 65535)
    rooms = _column(f, "bootstrap_room", prompts, n, int, 0, INT64_MAX)
    raw = f.bootstrap_room
    if type(raw) is int:
        rooms = [
            (raw + i) & INT64_MAX for i in range(count)
        ]  # matches SGLang 0.5.7: a scalar numbers the batch
    elif type(raw) is list and len(raw) != count:
        # sglang-router 0.3.2 and smg 1.13 draw one room per prompt of a batch, whatever n is.
        rooms = [
            None if room is None else (room + i % n) & INT64_MAX for i, room in enumerate(rooms)
        ]
    name, own = first(
        f,
        "routed_dp_rank",
        "data_parallel_rank_decode" if mode == "decode" else "data_parallel_rank",
    )
    if own is not None and own >= dp_size:
        raise bad(name, f"is {own}, this node has {dp_size} ranks (0 to {dp_size - 1})")
    if mode == "null":
        return [Placement(None, own)] * count
    _, remote = first(f, "disagg_prefill_dp_rank", "data_parallel_rank")
    out = []
    for host, port, room in zip(hosts, ports, rooms, strict=True):
        if room is None:
            out.append(Placement(None, own))
            continue
        if host is None and mode == "decode":
            raise MissingField(
                "bootstrap_room needs bootstrap_host, the prefill node's address",
                param="bootstrap_host",
            )
        rank = own if own is not None or mode == "decode" else room % dp_size
        # -1: D does not know P's dp_size; the transfer layer takes room % dp_size from P's /route.
        known = rank if mode == "prefill" else remote
        rendezvous = Rendezvous(
            host=(host or "").removeprefix("[").removesuffix("]"),  # of an IPv6 address, as in URLs
            port=port or DEFAULT_BOOTSTRAP_PORT,
            room=room,
            prefill_dp_rank=-1 if known is None else known,
        )
        out.append(Placement(rendezvous, rank))
    return out


def _column(
    f: RequestFields,
    name: str,
    prompts: int,
    n: int,
    kind: type,
    low: int = 0,
    high: int = INT64_MAX,
) -> list[Any]:
    """A scalar for all items, or one value per prompt, or one per item."""
    count = prompts * n
    value = getattr(f, name)
    if type(value) is not list:
        value = [value] * count
    elif len(value) == prompts:
        value = [v for v in value for _ in range(n)]
    elif len(value) != count:
        raise bad(
            name,
            f"has {len(value)} entries for {count} answers (prompts times n); send one per answer",
        )
    for v in value:
        if v is None:
            continue
        if type(v) is not kind or (isinstance(v, int) and not low <= v <= high):
            raise bad(
                name,
                f"must be an integer from {low} to {high}" if kind is int else "must be a string",
            )
    return value
