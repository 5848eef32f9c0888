"""Checks of each engine by itself: its state, keys, limits, host, clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton.config import UNSPECIFIED_HOSTS, is_loopback
from baton.errors import counted
from baton_ops.doctor import host
from baton_ops.doctor.check import (
    Check,
    CheckResult,
    add_check,
    fail,
    is_problem,
    merge_results,
    ok,
    run_checks,
    skip,
    warn,
)
from baton_ops.doctor.fleet import EngineView, FleetView

RUN_NEARER = "run baton doctor where the engines are reachable, e.g. in a pod of the cluster"
ENGINE_CHECKS: list[Check[FleetView]] = []


@add_check(ENGINE_CHECKS, "engine.reachable")
def check_engines_reachable(view: FleetView) -> Iterator[CheckResult]:
    for engine in view.engines:
        seen = engine.worker.get("state")
        if engine.is_unreachable and seen == "ready":
            sentence = (
                f"{engine.label} does not answer here ({engine.problem}), but the router reaches it"
            )
            yield warn(sentence, RUN_NEARER)
        elif engine.is_unreachable:
            sentence = (
                f"{engine.label} does not answer: {engine.problem}; the router has it as {seen}"
            )
            yield fail(sentence, "restart it; its log and its supervisor say why it ended")
        elif engine.is_other:
            sentence = (
                f"another process answers at {engine.url} here than the {engine.role} node that "
                "the router describes, and is not judged"
            )
            yield warn(sentence, f"{RUN_NEARER}; or again, if the node was restarted just now")
        elif engine.problem:
            remedy = "give the engines' key with --api-key or BATON_API_KEY"
            yield fail(f"{engine.label} refuses to show its settings: {engine.problem}", remedy)
    yield ok(f"engines that answer: {len(view.engines)}")


@add_check(ENGINE_CHECKS, "engine.state")
def check_engine_states(view: FleetView) -> Iterator[CheckResult]:
    for engine in view.engines:
        seen = str(engine.worker.get("state"))
        reason = engine.worker.get("reason")
        own = str(engine.info.get("state") or engine.info.get("status") or seen)
        because = f": {reason}" if reason else ""
        dead = [state for state in engine.info.get("internal_states", []) if state.get("dead")]
        if engine.is_unreachable:
            continue  # engine.reachable names it
        if dead:
            sentence = f"{engine.label} has lost rank {dead[0].get('dp_rank')}: {dead[0]['dead']}"
            yield fail(sentence, "restart the engine")
        elif own == "dead":
            yield fail(f"{engine.label} reports that it is dead{because}", "restart the engine")
        elif "draining" in (seen, own):
            left = f"{counted(engine.worker.get('load', 0), 'request')} left"
            sentence = f"{engine.label} is draining with {left}: it gets no new ones"
            yield warn(sentence, "wait, then stop it; or take it back into service")
        elif own in ("starting", "loading"):
            yield warn(
                f"{engine.label} loads its model{because}", "wait; its log shows the progress"
            )
        elif seen != "ready":
            yield fail(
                f"{engine.label} is {seen} for the router{because}", "its /readyz and log say why"
            )
        elif engine.worker.get("circuit") not in (None, "closed"):
            sentence = (
                f"the router's circuit of {engine.label} is {engine.worker['circuit']}: its "
                "requests failed"
            )
            yield warn(sentence, "look at baton_router_upstream_errors_total and the engine's log")
    yield ok(f"engines that are ready: {len(view.engines)}")


@add_check(ENGINE_CHECKS, "engine.versions")
def check_engine_versions(view: FleetView) -> Iterator[CheckResult]:
    members = [
        (str(engine.info.get("version")), engine.label)
        for engine in view.engines
        if engine.is_baton
    ]
    members += [
        (router.version, f"router {router.url}")
        for router in view.routers
        if router.version is not None
    ]
    by_version: dict[str, list[str]] = {}
    for version, label in members:
        by_version.setdefault(version, []).append(label)
    if len(by_version) > 1:
        listed = "; ".join(
            f"{version}: {', '.join(labels[:4])}" for version, labels in sorted(by_version.items())
        )
        remedy = "finish the rollout; until then only nodes with equal fingerprints are paired"
        yield warn(f"{len(by_version)} versions run: {listed}", remedy)
        return
    for engine in view.diagnosed:
        result = host.check_versions(engine.facts)
        if result.remedy and "torch" in engine.facts.versions:
            yield fail(f"{engine.label}: {result.sentence}", result.remedy)
            return
    yield ok(f"all run version {next(iter(by_version), 'unknown')}")


@add_check(ENGINE_CHECKS, "engine.metrics")
def check_engine_metrics(view: FleetView) -> Iterator[CheckResult]:
    for engine in view.engines:
        if engine.info and engine.metrics_problem:
            remedy = "SGLang: --enable-metrics; Prometheus and autoscalers read this page"
            yield warn(f"{engine.url}/metrics cannot be scraped: {engine.metrics_problem}", remedy)
    yield ok(f"engines whose metrics can be scraped: {sum(bool(e.metrics) for e in view.engines)}")


@add_check(ENGINE_CHECKS, "engine.keys")
def check_engine_keys(view: FleetView) -> Iterator[CheckResult]:
    for engine in view.engines:
        listens = str(engine.info.get("host", ""))
        if engine.is_open and listens and not is_loopback(listens):
            everywhere = "all addresses" if listens in UNSPECIFIED_HOSTS else listens
            sentence = (
                f"{engine.label} listens on {everywhere} without a key: who reaches it can "
                "use and flush it"
            )
            remedy = (
                "give engines and routers the same --api-key (BATON_API_KEY), or --host an "
                "inner address"
            )
            yield warn(sentence, remedy)
        if engine.info.get("insecure_kv"):
            risk = "who reaches its KV ports can read prompts and forge answers"
            remedy = "give all engines the same --cluster-key (BATON_CLUSTER_KEY) instead"
            yield warn(f"{engine.label} runs with --insecure-kv: {risk}", remedy)
    yield ok("no engine is open to other hosts without a key")


def _wanted_files(engine: EngineView) -> int:
    """Each running request has a connection of its client, and as many wait for their turn."""
    rows = int(engine.info.get("max_running_requests", 0)) * int(engine.info.get("dp_size", 1))
    return host.SPARE_OPEN_FILES + 2 * rows


HOST_CHECKS: dict[str, Callable[[EngineView], CheckResult]] = {
    "engine.memfd": lambda engine: host.check_memfd(engine.facts),
    "engine.shm": lambda engine: host.check_shm(engine.facts),
    "engine.memory": lambda engine: host.check_memory(engine.facts),
    "engine.disk": lambda engine: host.check_disk(engine.facts),
    "engine.open_files": lambda engine: host.check_open_files(engine.facts, _wanted_files(engine)),
}


@add_check(ENGINE_CHECKS, "engine.host", shows_all=True)
def check_engine_hosts(view: FleetView) -> Iterator[CheckResult]:
    """Limits and memory of each engine's process, as it reports them.

    Where all are well, one is an example.
    """
    if not view.diagnosed:
        reason = next(
            (e.diagnosis_problem for e in view.engines if e.diagnosis_problem),
            "no engine of Baton answers",
        )
        yield skip(f"no engine reports its host: {reason}")
        return
    for name, check in HOST_CHECKS.items():
        results = []
        for engine in view.diagnosed:
            result = check(engine)
            label = (
                engine.label
                if is_problem(result)
                else f"all {len(view.diagnosed)}, e.g. {engine.label}"
            )
            results.append(
                CheckResult(name, result.status, f"{label}: {result.sentence}", result.remedy)
            )
        yield from merge_results(results)


@add_check(ENGINE_CHECKS, "engine.cpu")
def check_engine_processors(view: FleetView) -> Iterator[CheckResult]:
    levels = sorted({str(e.facts.cpu_isa) for e in view.diagnosed if e.info.get("device") == "cpu"})
    if len(levels) > 1:
        sentence = (
            f"CPU engines have kernels of levels {', '.join(levels)}: bfloat16 answers may differ"
        )
        yield warn(sentence, "use one kind of processor, or BATON_CPU_ISA with the lowest level")
    if view.diagnosed:
        yield ok(f"all engines have kernels of level {', '.join(levels) or 'of their GPU'}")


@add_check(ENGINE_CHECKS, "engine.clock")
def check_engine_clocks(view: FleetView) -> Iterator[CheckResult]:
    for engine in view.engines:
        offset = engine.clock_offset_secs
        if engine.diagnosis:
            asked_at = engine.diagnosis["asked_at"]
            answered_at = engine.diagnosis["answered_at"]
            time_there = engine.diagnosis["host"]["unix_seconds"]
            # The engine read its clock between the two times: only what lies outside them is an
            # offset.
            offset = time_there - min(max(time_there, asked_at), answered_at)
        if offset is not None:
            yield host.check_skew(engine.label, offset)
    yield skip("no engine answers")


HEARTBEATS_SECS = 3.0
"""A peer is dead after so many seconds without its heartbeat."""


TIME_LIMITS = (
    "drain_timeout_secs",
    "kv_lease_secs",
    "request_timeout_secs",
    "queue_timeout_secs",
    "kv_transfer_timeout_secs",
)
"""Limits that `/get_server_info` states."""


@add_check(ENGINE_CHECKS, "engine.time_limits")
def check_time_limits(view: FleetView) -> Iterator[CheckResult]:
    """Limits of one engine of which one makes another pointless."""
    for engine in view.engines:
        if not engine.is_baton:
            continue
        limits = {
            k: float(v)
            for k, v in engine.info.items()
            if k.endswith("_secs") and isinstance(v, (int, float))
        }
        missing = sorted(set(TIME_LIMITS) - limits.keys())
        if missing:
            yield skip(f"{engine.label} does not state {', '.join(missing)}")
            continue
        drain, lease, request, queue, transfer = (limits[name] for name in TIME_LIMITS)
        if engine.role == "prefill" and drain < lease:
            text = (
                f"it drains for at most {drain:g} s, but leases of KV last {lease:g} s: "
                "transfers would break"
            )
            yield warn(
                f"{engine.label}: {text}", "raise --drain-timeout-secs above --kv-lease-secs"
            )
        if engine.role == "prefill" and lease < HEARTBEATS_SECS:
            text = (
                f"it holds KV for {lease:g} s, but decode nodes may be silent for "
                f"{HEARTBEATS_SECS:g} s"
            )
            yield warn(f"{engine.label}: {text}", "raise --kv-lease-secs")
        if queue >= request:
            text = (
                f"--queue-timeout-secs {queue:g} is never reached: requests end after {request:g} s"
            )
            yield warn(f"{engine.label}: {text}", "lower it")
        if engine.role == "decode" and transfer >= request:
            text = (
                f"--kv-transfer-timeout-secs {transfer:g} is never reached: requests end after "
                f"{request:g} s"
            )
            yield warn(f"{engine.label}: {text}", "lower it")
    yield ok("no time limit contradicts another")


def check_engines(view: FleetView) -> list[CheckResult]:
    return run_checks(ENGINE_CHECKS, view) if view.engines else []
