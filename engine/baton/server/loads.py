"""What the front tells routers about its ranks: GET /v1/loads, GET /get_load and the header of every answer.

The ranks report their load with their metrics, once a second and when they turn idle; what is in flight in this process
is known at any moment. A dead rank, or one that has not reported, shows only the latter.
"""

from __future__ import annotations

import time
from typing import Any

from baton.server.ranks import Rank

LOAD_HEADER = "x-baton-load"


def short(rank: Rank) -> dict[str, Any]:
    """One element of SGLang's GET /get_load."""
    return {
        "dp_rank": rank.dp_rank,
        "num_reqs": len(rank.sinks),
        "num_running_reqs": int(rank.gauges.get('requests{state="running"}', 0)),
        "num_waiting_reqs": int(rank.gauges.get('requests{state="waiting"}', 0)),
        "num_tokens": rank.tokens_in_flight,
        "token_usage": rank.gauges.get("kv_usage_ratio", 0.0),
    }


def full(rank: Rank) -> dict[str, Any]:
    """One element of GET /v1/loads: the same, and all of sched.load.Load."""
    return {**short(rank), "age_ms": _age_ms(rank), "load": rank.load or None}


def header(rank: Rank) -> str:
    """The part of it that changes quickly, as `name=number` with semicolons between (docs/protocol.md)."""
    values: dict[str, Any] = {"rank": rank.dp_rank, "reqs": len(rank.sinks), "tokens": rank.tokens_in_flight}
    load = rank.load
    if load:
        values |= {
            "age_ms": _age_ms(rank),
            "running": load["running_requests"],
            "queued": load["queued_requests"],
            "queued_tokens": load["queued_tokens"],
            "started_tokens": load["started_tokens"],
            "pages_free": load["pages_free"] + load["pages_evictable"],
            "pages": load["pages"],
            "prefill_rate": round(load["prefill_tokens_per_s"]),
            "decode_rate": round(load["decode_tokens_per_s"]),
        }
        if load["bands"]:
            values["bands"] = ",".join(f"{name}:{entry['tokens']}" for name, entry in load["bands"].items())
    return ";".join(f"{name}={value}" for name, value in values.items())


def _age_ms(rank: Rank) -> int | None:
    return round((time.monotonic() - rank.reported_at) * 1000) if rank.load else None
