"""Checks of each engine by itself: its state, keys, limits, host, clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.cli.doctor import host
from baton.cli.doctor.check import CheckResult, fail, is_problem, merge, ok, problems_or_ok, skip, warn
from baton.cli.doctor.fleet import EngineView, FleetView
from baton.config import UNSPECIFIED_HOSTS, is_loopback
from baton.server.observability.host_facts import HostFacts

RUN_NEARER = "run baton doctor where the engines are reachable, e.g. in a pod of the cluster"


def check_engines_reachable(view: FleetView) -> list[CheckResult]:
    name, problems = "engine.reachable", []
    for engine in view.engines:
        seen = engine.worker.get("state")
        if engine.is_unreachable and seen == "ready":
            sentence = f"{engine.label} does not answer here ({engine.problem}), but the router reaches it"
            problems.append(warn(name, sentence, RUN_NEARER))
        elif engine.is_unreachable:
            sentence = f"{engine.label} does not answer: {engine.problem}; the router has it as {seen}"
            problems.append(fail(name, sentence, "restart it; its log and its supervisor say why it ended"))
        elif engine.problem:
            remedy = "give the engines' key with --api-key or BATON_API_KEY"
            problems.append(fail(name, f"{engine.label} refuses to show its settings: {engine.problem}", remedy))
    return problems_or_ok(name, problems, f"engines that answer: {len(view.engines)}")


def check_engine_states(view: FleetView) -> list[CheckResult]:
    name, problems = "engine.state", []
    for engine in view.engines:
        seen, reason = str(engine.worker.get("state")), engine.worker.get("reason")
        own = str(engine.info.get("state") or engine.info.get("status") or seen)
        because = f": {reason}" if reason else ""
        dead = [state for state in engine.info.get("internal_states", []) if state.get("dead")]
        if engine.is_unreachable:
            continue  # engine.reachable names it
        if dead:
            sentence = f"{engine.label} has lost rank {dead[0].get('dp_rank')}: {dead[0]['dead']}"
            problems.append(fail(name, sentence, "restart the engine"))
        elif own == "dead":
            problems.append(fail(name, f"{engine.label} reports that it is dead{because}", "restart the engine"))
        elif "draining" in (seen, own):
            sentence = (
                f"{engine.label} is draining with {engine.worker.get('load', 0)} requests left: it gets no new ones"
            )
            problems.append(warn(name, sentence, "wait, then stop it; or take it back into service"))
        elif own in ("starting", "loading"):
            problems.append(warn(name, f"{engine.label} loads its model{because}", "wait; its log shows the progress"))
        elif seen != "ready":
            problems.append(
                fail(name, f"{engine.label} is {seen} for the router{because}", "its /readyz and log say why")
            )
        elif engine.worker.get("circuit") not in (None, "closed"):
            sentence = f"the router's circuit of {engine.label} is {engine.worker['circuit']}: its requests failed"
            problems.append(warn(name, sentence, "look at baton_router_upstream_errors_total and the engine's log"))
    return problems_or_ok(name, problems, f"engines that are ready: {len(view.engines)}")


def check_engine_versions(view: FleetView) -> list[CheckResult]:
    name = "engine.versions"
    by_version: dict[str, list[str]] = {}
    for engine in view.engines:
        if engine.is_baton:
            by_version.setdefault(str(engine.info.get("version")), []).append(engine.label)
    for router in view.routers:
        if router.version is not None:
            by_version.setdefault(router.version, []).append(f"router {router.url}")
    if len(by_version) > 1:
        listed = "; ".join(f"{version}: {', '.join(labels[:4])}" for version, labels in sorted(by_version.items()))
        remedy = "finish the rollout; until then only nodes with equal fingerprints are paired"
        return [warn(name, f"{len(by_version)} versions run: {listed}", remedy)]
    for engine in view.diagnosed:
        facts = engine.facts
        if facts is not None and (result := host.check_versions(facts)).remedy and "torch" in facts.versions:
            return [fail(name, f"{engine.label}: {result.sentence}", result.remedy)]
    return [ok(name, f"all run version {next(iter(by_version), 'unknown')}")]


def check_engine_metrics(view: FleetView) -> list[CheckResult]:
    name, problems = "engine.metrics", []
    for engine in view.engines:
        if engine.info and engine.metrics_problem:
            remedy = "SGLang: --enable-metrics; Prometheus and autoscalers read this page"
            problems.append(warn(name, f"{engine.url}/metrics cannot be scraped: {engine.metrics_problem}", remedy))
    return problems_or_ok(
        name, problems, f"engines whose metrics can be scraped: {sum(bool(e.metrics) for e in view.engines)}"
    )


def check_engine_keys(view: FleetView) -> list[CheckResult]:
    name, problems = "engine.keys", []
    for engine in view.engines:
        listens = str(engine.info.get("host", ""))
        if engine.is_open and listens and not is_loopback(listens):
            everywhere = "all addresses" if listens in UNSPECIFIED_HOSTS else listens
            sentence = f"{engine.label} listens on {everywhere} without a key: who reaches it can use and flush it"
            remedy = "give engines and routers the same --api-key (BATON_API_KEY), or --host an inner address"
            problems.append(warn(name, sentence, remedy))
        if engine.info.get("insecure_kv"):
            sentence = (
                f"{engine.label} runs with --insecure-kv: who reaches its KV ports can read prompts and forge answers"
            )
            problems.append(warn(name, sentence, "give all engines the same --cluster-key (BATON_CLUSTER_KEY) instead"))
    return problems_or_ok(name, problems, "no engine is open to other hosts without a key")


def check_engine_hosts(view: FleetView) -> list[CheckResult]:
    """Limits and memory of each engine's process, as it reports them."""
    if not view.diagnosed:
        reason = next((e.diagnosis_problem for e in view.engines if e.diagnosis_problem), "no engine of Baton answers")
        return [skip("engine.host", f"no engine reports its host: {reason}")]
    checks: tuple[Callable[[HostFacts], CheckResult], ...] = (host.check_memfd, host.check_shm, host.check_memory)
    results = []
    for check in checks:
        results += _of_engines(view, lambda engine, check=check: check(_facts(engine)))  # type: ignore[misc]
    results += _of_engines(view, lambda engine: host.check_open_files(_facts(engine), _wanted_files(engine)))
    levels = {str(_facts(engine).cpu_isa) for engine in view.diagnosed if engine.info.get("device") == "cpu"}
    if len(levels) > 1:
        sentence = f"CPU engines have kernels of levels {', '.join(sorted(levels))}: bfloat16 answers may differ"
        results.append(
            warn("engine.cpu", sentence, "use one kind of processor, or BATON_CPU_ISA with the lowest level")
        )
    else:
        results.append(ok("engine.cpu", f"all engines have kernels of level {', '.join(levels) or 'of their GPU'}"))
    return results


def _facts(engine: EngineView) -> HostFacts:
    return HostFacts.from_json(engine.diagnosis["host"])


def _of_engines(view: FleetView, check: Callable[[EngineView], CheckResult]) -> list[CheckResult]:
    """Each engine's problem under its name; where all are well, one sentence as an example."""

    def judge(engine: EngineView) -> CheckResult:
        result = check(engine)
        label = engine.label if is_problem(result) else f"all {len(view.diagnosed)}, e.g. {engine.label}"
        return replace(result.under("engine"), sentence=f"{label}: {result.sentence}")

    return merge(judge(engine) for engine in view.diagnosed)


def _wanted_files(engine: EngineView) -> int:
    """Each running request has a connection of its client, and as many wait for their turn."""
    rows = int(engine.info.get("max_running_requests", 0)) * int(engine.info.get("dp_size", 1))
    return host.SPARE_OPEN_FILES + 2 * rows


def check_engine_clocks(view: FleetView) -> list[CheckResult]:
    results = []
    for engine in view.engines:
        if engine.diagnosis:
            middle = (engine.diagnosis["asked_at"] + engine.diagnosis["answered_at"]) / 2
            half_width = (engine.diagnosis["answered_at"] - engine.diagnosis["asked_at"]) / 2
            offset = engine.diagnosis["host"]["unix_seconds"] - middle
            offset = 0.0 if abs(offset) <= half_width else offset - half_width if offset > 0 else offset + half_width
            results.append(host.skew(engine.label, offset).under("engine"))
        elif engine.clock_offset_secs is not None:
            results.append(host.skew(engine.label, engine.clock_offset_secs).under("engine"))
    return merge(results) or [skip("engine.clock", "no engine answers")]


def check_time_limits(view: FleetView) -> list[CheckResult]:
    """Limits of one engine of which one makes another pointless."""
    name, problems = "engine.time_limits", []
    for engine in view.engines:
        if not engine.is_baton:
            continue
        limits = {k: float(v) for k, v in engine.info.items() if k.endswith("_secs") and isinstance(v, (int, float))}
        for broken, text, remedy in _contradictions(engine.role, limits):
            if broken:
                problems.append(warn(name, f"{engine.label}: {text}", remedy))
    return problems_or_ok(name, problems, "no time limit contradicts another")


HEARTBEATS_SECS = 3.0
"""A peer is dead after so many seconds without its heartbeat."""


def _contradictions(role: str, limits: dict[str, float]) -> list[tuple[bool, str, str]]:
    drain, lease = limits.get("drain_timeout_secs", 60.0), limits.get("kv_lease_secs", 30.0)
    request, queue = limits.get("request_timeout_secs", 1800.0), limits.get("queue_timeout_secs", 0.0)
    transfer = limits.get("kv_transfer_timeout_secs", 60.0)
    return [
        (
            role == "prefill" and drain < lease,
            f"it drains for at most {drain:g} s, but leases of KV last {lease:g} s: transfers would break",
            "raise --drain-timeout-secs above --kv-lease-secs",
        ),
        (
            role == "prefill" and lease < HEARTBEATS_SECS,
            f"it holds KV for {lease:g} s, but decode nodes may be silent for {HEARTBEATS_SECS:g} s",
            "raise --kv-lease-secs",
        ),
        (
            queue >= request,
            f"--queue-timeout-secs {queue:g} is never reached: requests end after {request:g} s",
            "lower it",
        ),
        (
            role == "decode" and transfer >= request,
            f"--kv-transfer-timeout-secs {transfer:g} is never reached: requests end after {request:g} s",
            "lower it",
        ),
    ]


ENGINE_CHECKS: tuple[Callable[[FleetView], list[CheckResult]], ...] = (
    check_engines_reachable,
    check_engine_states,
    check_engine_versions,
    check_engine_metrics,
    check_engine_keys,
    check_engine_hosts,
    check_engine_clocks,
    check_time_limits,
)


def check_engines(view: FleetView) -> list[CheckResult]:
    return [result for check in ENGINE_CHECKS for result in check(view)] if view.engines else []
