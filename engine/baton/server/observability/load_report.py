"""Load reports of the front's ranks for routers: GET /v1/loads, GET /get_load and the header of every answer.

The ranks report their load with their metrics, once a second and when they turn idle; what is in flight in this process
is known at any moment. A dead rank, or one that has not reported, shows only the latter.
"""

from __future__ import annotations

import time
from typing import Any

from baton.sched.types.request_timeline import FirstTokenStages
from baton.server.worker.client import RankClient

LOAD_HEADER = "x-baton-load"
STAGES_HEADER = "x-baton-stages"


def short(rank: RankClient) -> dict[str, Any]:
    """Element of SGLang's GET /get_load."""
    return {
        "dp_rank": rank.dp_rank,
        "num_reqs": len(rank.items),
        "num_running_reqs": int(rank.stats.gauges.get('requests{state="running"}', 0)),
        "num_waiting_reqs": int(rank.stats.gauges.get('requests{state="waiting"}', 0)),
        "num_tokens": rank.tokens_in_flight,
        "token_usage": rank.stats.gauges.get("kv_usage_ratio", 0.0),
    }


def full(rank: RankClient) -> dict[str, Any]:
    """Element of GET /v1/loads: the same, tokens since the start, and all of sched.state.load_report.LoadReport."""
    return {
        **short(rank),
        **_totals(rank, "_tokens"),
        "age_ms": _age_ms(rank),
        "load": rank.stats.load,
    }


def incarnation(process_id: str) -> str:
    """Header of an answer that no rank gave: the id of the front's process alone."""
    return f"inc={process_id}"


def header(rank: RankClient, process_id: str) -> str:
    """The part of it that changes quickly, as `name=number` with semicolons between (docs/protocol.md)."""
    values: dict[str, Any] = {
        "inc": process_id,
        "rank": rank.dp_rank,
        "reqs": len(rank.items),
        "tokens": rank.tokens_in_flight,
    }
    if (load := rank.stats.load) is not None:
        values |= {
            "age_ms": _age_ms(rank),
            "running": load.running_requests,
            "queued": load.queued_requests,
            "queued_tokens": load.queued_tokens,
            "started_tokens": load.started_tokens,
            "pages_free": load.pages_free + load.pages_evictable,
            "pages": load.pages,
            "prefill_rate": round(load.prefill_tokens_per_s),
            "decode_rate": round(load.decode_tokens_per_s),
            **_totals(rank),
        }
        if load.bands:
            values["bands"] = ",".join(
                f"{name}:{entry.tokens}" for name, entry in load.bands.items()
            )
    return ";".join(f"{name}={value}" for name, value in values.items())


def stages_header(stages: FirstTokenStages) -> str:
    """The way to the first token, in the same form; times in µs (docs/protocol.md)."""
    values: dict[str, Any] = {"queue_us": round(stages.queue_seconds * 1e6)}
    if (pulled := stages.pulled) is not None:
        values |= {
            "transport": pulled.transport,
            "pages": pulled.pages,
            "bytes": pulled.bytes,
            "pull_us": round(pulled.pull_seconds * 1e6),
        }
    return ";".join(f"{name}={value}" for name, value in values.items())


def _totals(rank: RankClient, suffix: str = "") -> dict[str, int]:
    """Tokens since the rank's start, as of its last report."""
    return {
        f"prefilled{suffix}": int(rank.stats.counters.get("prompt_tokens_computed_total", 0)),
        f"generated{suffix}": int(rank.stats.counters.get("generated_tokens_total", 0)),
    }


def _age_ms(rank: RankClient) -> int | None:
    return round((time.monotonic() - rank.reported_at) * 1000) if rank.stats.load else None
