"""Flags about time limits, metrics, traces and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.config.flags import opt


@dataclass(frozen=True, kw_only=True)
class ServiceFlags:
    HEADING: ClassVar = "time limits, metrics and logs"

    request_timeout_secs: float = opt(
        1800.0, "a request ends with 'timeout' after this long [s]", gt=0, lt=1e9
    )
    drain_timeout_secs: float = opt(
        60.0,
        "on SIGTERM wait this long for running requests [s]",
        ge=0,
        lt=1e9,
        simulated=False,
    )
    random_seed: int = opt(0, "seed of dummy weights", simulated=False)
    metrics_compat: str = opt(
        "none",
        "names of other engines under which GET /metrics repeats its numbers (docs/metrics.md)",
        choices=("none", "sglang", "vllm", "all"),
        simulated=False,
    )
    enable_trace: bool = opt(
        False,
        "export a trace of each request: spans of the front and of the ranks",
        simulated=False,
    )
    otlp_traces_endpoint: str = opt(
        "localhost:4317",
        "address of the trace collector: HOST:PORT for OTLP/gRPC, "
        "http://HOST:PORT[/PATH] for OTLP/HTTP",
        simulated=False,
    )
    decision_log: str | None = opt(
        None,
        "append each scheduling decision to this file as a JSON line (docs/scheduling/metrics.md)",
        simulated=False,
    )
    scheduler_trace: str | None = opt(
        None,
        "write every input of the scheduler, prompts included, for baton simulate --replay",
        simulated=False,
    )
    log_level: str = opt(
        "info",
        "least severe log line shown",
        choices=("debug", "info", "warning", "error"),
        simulated=False,
    )
    log_format: str = opt("text", "format of log lines", choices=("text", "json"), simulated=False)
