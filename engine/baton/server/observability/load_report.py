"""Load reports of the front's ranks for routers: GET /v1/loads, GET /get_load, answer headers.

The ranks report their load with their metrics, once a second and when they turn idle; the front
itself counts requests and tokens in flight. A dead rank, or one that has not reported, shows only
the counts of the front.
"""

from __future__ import annotations

import time
from typing import Any

from baton.sched.types.request_timeline import FirstTokenStages
from baton.server.text.native import native_extension
from baton.server.worker.client import RankClient


def make_sglang_load(rank: RankClient) -> dict[str, Any]:
    """Make an element of SGLang's GET /get_load."""
    return {
        "dp_rank": rank.dp_rank,
        "num_reqs": len(rank.items),
        "num_running_reqs": int(rank.stats.gauges.get('requests{state="running"}', 0)),
        "num_waiting_reqs": int(rank.stats.gauges.get('requests{state="waiting"}', 0)),
        "num_tokens": rank.tokens_in_flight,
        "token_usage": rank.stats.gauges.get("kv_usage_ratio", 0.0),
    }


def make_load(rank: RankClient) -> dict[str, Any]:
    """Make an element of GET /v1/loads: SGLang's keys, token counts, and the LoadReport."""
    return {
        **make_sglang_load(rank),
        **_count_tokens(rank, "_tokens"),
        "age_ms": _report_age_ms(rank),
        "load": rank.stats.load,
    }


def format_incarnation_header(process_id: str) -> str:
    """The `x-baton-load` header of an answer that no rank gave: the id of the front's process."""
    return f"{native_extension().load_keys.INCARNATION}={process_id}"


def format_load_header(rank: RankClient, process_id: str) -> str:
    """The `x-baton-load` header: the load of this rank, as `name=number;…`.

    Keys: docs/protocol.md §2 (Load), defined in router/src/observability/worker_headers.rs.
    """
    keys = native_extension().load_keys
    values: dict[str, Any] = {
        keys.INCARNATION: process_id,
        keys.RANK: rank.dp_rank,
        keys.REQUESTS: len(rank.items),
        keys.TOKENS: rank.tokens_in_flight,
    }
    load = rank.stats.load
    if load is not None:
        values |= {
            keys.AGE_MS: _report_age_ms(rank),
            keys.RUNNING: load.running_requests,
            keys.QUEUED: load.queued_requests,
            keys.QUEUED_TOKENS: load.queued_tokens,
            keys.STARTED_TOKENS: load.started_tokens,
            keys.PAGES_FREE: load.pages_free + load.pages_evictable,
            keys.PAGES: load.pages,
            keys.PREFILL_RATE: round(load.prefill_tokens_per_s),
            keys.DECODE_RATE: round(load.decode_tokens_per_s),
            **_count_tokens(rank),
        }
        if load.further_pages:
            values[keys.FURTHER_PAGES] = sum(usage.held for usage in load.further_pages.values())
        if load.bands:
            values[keys.BANDS] = ",".join(
                f"{name}:{entry.tokens}" for name, entry in load.bands.items()
            )
    return ";".join(f"{name}={value}" for name, value in values.items())


def format_stages_header(stages: FirstTokenStages) -> str:
    """The `x-baton-stages` header: stages up to the first token, as `name=number;…` in µs."""
    keys = native_extension().stage_keys
    values: dict[str, Any] = {keys.QUEUE_US: round(stages.queue_seconds * 1e6)}
    pulled = stages.pulled
    if pulled is not None:
        values |= {
            keys.TRANSPORT: pulled.transport,
            keys.PAGES: pulled.pages,
            keys.BYTES: pulled.bytes,
            keys.PULL_US: round(pulled.pull_seconds * 1e6),
        }
    return ";".join(f"{name}={value}" for name, value in values.items())


def _count_tokens(rank: RankClient, suffix: str = "") -> dict[str, int]:
    """Count tokens since the rank's start, as of its last report."""
    keys = native_extension().load_keys
    counters = {
        keys.PREFILLED: "prompt_tokens_computed_total",
        keys.GENERATED: "generated_tokens_total",
        keys.DRAFTED: "spec_decode_num_draft_tokens_total",
        keys.ACCEPTED: "spec_decode_num_accepted_tokens_total",
    }
    return {
        f"{key}{suffix}": int(rank.stats.counters.get(counter, 0))
        for key, counter in counters.items()
    }


def _report_age_ms(rank: RankClient) -> int | None:
    return round((time.monotonic() - rank.reported_at) * 1000) if rank.stats.load else None
