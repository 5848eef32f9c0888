"""Answers of routers and engines: `read_fleet` asks the routers that are named, then every worker
that they list.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any
from urllib.parse import urlsplit

from baton.config import is_loopback
from baton.server.observability.host_facts import HostFacts
from baton.server.request.schema import MAX_PROBES
from baton.server.worker.transfer_setup import source_address
from baton_ops.clients.http_client import HttpClient, in_parallel
from baton_ops.clients.instance import stated_incarnation
from baton_ops.clients.local_keys import known_control_key
from baton_ops.clients.metrics import MetricSample, parse_metrics

CONNECT_SECS = 3.0
DIAGNOSIS_SECS = 30.0
"""An engine waits for prefill nodes in up to four steps of three seconds."""


@dataclass(frozen=True, slots=True)
class RouterView:
    url: str
    problem: str = ""
    """Why its workers are unknown."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    readiness: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False
    metrics: list[MetricSample] = field(default_factory=list)
    metrics_problem: str = ""
    clock_offset_secs: float | None = None
    is_open: bool = False
    """True if it lists its workers without a key."""
    incarnation: str | None = None
    """Incarnation of the process that answers there; None: it states none."""
    is_several: bool = False
    """True if answers came from several processes, as behind a load balancer."""
    outer_address: str | None = None
    """Where other hosts reach it; None: nowhere, as far as seen from here."""

    @property
    def version(self) -> str | None:
        return next(
            (s.labels.get("version") for s in self.metrics if s.name == "baton_router_build_info"),
            None,
        )


@dataclass(frozen=True, slots=True)
class EngineView:
    url: str
    role: str
    worker: dict[str, Any]
    """As a router lists it."""
    info: dict[str, Any] = field(default_factory=dict)
    """GET /get_server_info; empty: `problem` says why."""
    problem: str = ""
    is_unreachable: bool = False
    is_other: bool = False
    """True if another process answers at the URL, seen from here, than the router describes."""
    is_open: bool = False
    """True if it shows its server info without a key."""
    metrics: list[MetricSample] = field(default_factory=list)
    metrics_problem: str = ""
    diagnosis: dict[str, Any] = field(default_factory=dict)
    diagnosis_problem: str = ""
    clock_offset_secs: float | None = None

    @property
    def label(self) -> str:
        return f"{self.role} {self.url}"

    @property
    def is_baton(self) -> bool:
        return self.info.get("engine") == "baton"

    @property
    def facts(self) -> HostFacts:
        """Facts of its host; KeyError without a diagnosis."""
        return HostFacts.from_json(self.diagnosis["host"])

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Address of a prefill node's bootstrap server, as decode nodes get it from the router."""
        port = self.worker.get("bootstrap_port")
        host_name = urlsplit(self.url).hostname
        return (host_name, port) if self.role == "prefill" and host_name and port else None


@dataclass(frozen=True, slots=True)
class FleetView:
    routers: list[RouterView]
    engines: list[EngineView]
    closed_from_here: frozenset[tuple[str, int]] = frozenset()
    """Bootstrap servers that this host does not reach.

    They are tried where a decode node reports nothing itself.
    """

    def of_role(self, role: str) -> list[EngineView]:
        return [engine for engine in self.engines if engine.role == role]

    @property
    def diagnosed(self) -> list[EngineView]:
        return [engine for engine in self.engines if engine.diagnosis]


@dataclass(frozen=True, slots=True)
class FleetKeys:
    control: str | None
    """Opens /workers of the routers."""
    engine: str | None
    """--api-key of the engines."""


# ---- reading -------------------------------------------------------------------------------------


def read_fleet(urls: Iterable[str], keys: FleetKeys, client: HttpClient) -> FleetView:
    routers = in_parallel(
        partial(read_router, keys=keys, client=client), [url.rstrip("/") for url in urls]
    )
    workers: dict[str, dict[str, Any]] = {}
    for router in routers:
        for worker in router.workers:
            workers.setdefault(worker["url"].rstrip("/"), worker)
    engines = in_parallel(partial(_read_engine, keys=keys, client=client), workers.items())
    prefill = [engine.bootstrap for engine in engines if engine.bootstrap]
    targets = [{"host": host_name, "port": port} for host_name, port in prefill]
    diagnose = partial(
        _diagnose_engine, targets=targets, challenge=secrets.token_hex(16), keys=keys, client=client
    )
    diagnosed = in_parallel(diagnose, engines)
    is_unknown = any(
        engine.role == "decode" and engine.info and not engine.diagnosis for engine in diagnosed
    )
    closed = compress(prefill, in_parallel(_is_closed, prefill)) if is_unknown else ()
    return FleetView(routers, diagnosed, frozenset(closed))


def _is_closed(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, CONNECT_SECS).close()
    except OSError:
        return True
    return False


def read_router(url: str, keys: FleetKeys, client: HttpClient) -> RouterView:
    without_key = client.get(f"{url}/workers")
    control_key = keys.control or known_control_key(url)
    listed = (
        without_key
        if without_key.is_ok or control_key is None
        else client.get(f"{url}/workers", control_key)
    )
    if listed.status == 0:
        return RouterView(url, listed.problem)
    workers = listed.object.get("workers")
    problem = listed.problem
    if listed.is_ok and not isinstance(workers, list):
        problem = "its /workers names no list of workers: this is no Baton router"
    alive = stated_incarnation(client.get(f"{url}/livez").text)
    ready = client.get(f"{url}/readyz")
    metrics, metrics_problem = _read_metrics(url, client)
    return RouterView(
        url=url,
        problem=problem,
        workers=[] if problem else workers or [],
        readiness=ready.object,
        is_ready=ready.is_ok,
        metrics=metrics,
        metrics_problem=metrics_problem,
        clock_offset_secs=listed.clock_offset_secs,
        is_open=without_key.is_ok,
        incarnation=alive,
        is_several=alive != stated_incarnation(ready.text),
        outer_address=_outer_address(url, alive, client),
    )


def _read_metrics(url: str, client: HttpClient) -> tuple[list[MetricSample], str]:
    """Samples, and why the page cannot be scraped."""
    answer = client.get(f"{url}/metrics")
    if not answer.is_ok:
        return [], answer.problem
    problem = "" if "# TYPE " in answer.text else "the answer is no Prometheus text"
    return parse_metrics(answer.text), problem


def _outer_address(url: str, incarnation: str | None, client: HttpClient) -> str | None:
    """Address where other hosts reach a router: its own, or instead of loopback this machine's if
    the same process answers there.
    """
    parts = urlsplit(url)
    name = parts.hostname or ""
    if not is_loopback(name):
        return f"{name}:{parts.port}"
    outer = source_address(socket.AF_INET, "192.0.2.1")
    address = f"{outer}:{parts.port}"
    answer = client.get(f"{parts.scheme}://{address}/livez") if outer else None
    is_same = answer is not None and stated_incarnation(answer.text) == incarnation
    return address if answer is not None and answer.is_ok and is_same else None


def _read_engine(
    listed: tuple[str, dict[str, Any]], keys: FleetKeys, client: HttpClient
) -> EngineView:
    url, worker = listed
    role = str(worker.get("worker_type", "regular"))
    info = client.get(f"{url}/get_server_info")
    is_open = info.is_ok
    if info.status == 401 and keys.engine is not None:
        info = client.get(f"{url}/get_server_info", keys.engine)
    if not info.is_ok:
        return EngineView(url, role, worker, problem=info.problem, is_unreachable=info.status == 0)
    if not info.object:
        problem = "its /get_server_info is no JSON object: another program answers there"
        return EngineView(url, role, worker, problem=problem, is_other=True)
    described = worker.get("incarnation")
    if described is not None and info.object.get("incarnation") != described:
        return EngineView(url, role, worker, is_other=True)
    metrics, problem = _read_metrics(url, client)
    return EngineView(
        url=url,
        role=role,
        worker=worker,
        info=info.object,
        is_open=is_open,
        clock_offset_secs=info.clock_offset_secs,
        metrics=metrics,
        metrics_problem=problem,
    )


def _diagnose_engine(
    engine: EngineView,
    targets: list[dict[str, Any]],
    challenge: str,
    keys: FleetKeys,
    client: HttpClient,
) -> EngineView:
    """The same engine with its diagnosis.

    Only decode nodes are asked how they reach prefill nodes.
    """
    if not engine.is_baton:
        return engine
    url = f"{engine.url}/debug/diagnosis"
    key = None if engine.is_open else keys.engine
    began = time.time()
    answer = client.post(url, {"challenge": challenge}, key, timeout_secs=DIAGNOSIS_SECS)
    if not answer.is_ok or "host" not in answer.object:
        return replace(engine, diagnosis_problem=answer.problem or "its answer names no host")
    diagnosis = {**answer.object, "asked_at": began, "answered_at": time.time(), "prefill": []}
    for first in range(0, len(targets) if engine.role == "decode" else 0, MAX_PROBES):
        body = {"prefill": targets[first : first + MAX_PROBES]}
        answer = client.post(url, body, key, timeout_secs=DIAGNOSIS_SECS)
        if not answer.is_ok:
            return replace(engine, diagnosis_problem=answer.problem)
        diagnosis["prefill"] += answer.object.get("prefill", [])
    return replace(engine, diagnosis=diagnosis)
