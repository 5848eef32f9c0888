"""Checks of the routers: what each of them says of itself and of its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.cli.doctor import host
from baton.cli.doctor.check import CheckResult, fail, merge, problems_or_ok, skip, warn
from baton.cli.doctor.fleet import FleetView


def check_routers_reachable(view: FleetView) -> list[CheckResult]:
    name, problems = "router.reachable", []
    for router in view.routers:
        if router.problem:
            remedy = "give the router's address with --router; keys: --key (control plane) or --api-key"
            problems.append(fail(name, f"{router.url} does not list its workers: {router.problem}", remedy))
    found = "; ".join(f"{router.url} lists {_count(router.workers)}" for router in view.routers)
    return problems_or_ok(name, problems, found)


def _count(workers: list[dict[str, Any]]) -> str:
    roles = [str(worker.get("worker_type")) for worker in workers]
    return ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles)) or "no worker"


def check_routers_ready(view: FleetView) -> list[CheckResult]:
    name, problems = "router.ready", []
    for router in view.routers:
        if router.problem or router.is_ready:
            continue
        reason = router.readiness.get("reason") or router.readiness.get("status") or "no reason given"
        remedy = "start engines of the missing role, or add them: POST /workers; GET /workers says why one is not ready"
        problems.append(fail(name, f"{router.url} is not ready: {reason}", remedy))
    return problems_or_ok(name, problems, f"routers that accept requests: {len(view.routers)}")


def check_router_metrics(view: FleetView) -> list[CheckResult]:
    name, problems = "router.metrics", []
    for router in view.routers:
        if not router.problem and router.metrics_problem:
            sentence = f"{router.url}/metrics cannot be scraped: {router.metrics_problem}"
            problems.append(warn(name, sentence, "scrape the port of --prometheus-port, if it is set"))
    return problems_or_ok(name, problems, f"routers whose metrics can be scraped: {len(view.routers)}")


def check_discovery(view: FleetView) -> list[CheckResult]:
    name, problems = "router.discovery", []
    sources = 0
    for router in view.routers:
        for sample in router.metrics:
            if sample.name == "baton_router_discovery_is_stale":
                sources += 1
                if sample.value:
                    sentence = (
                        f"{router.url} cannot read its workers from {sample.labels.get('source')}: the last list stays"
                    )
                    remedy = "its log names the error; check the discovery file, or the API server and the Role"
                    problems.append(fail(name, sentence, remedy))
            if (
                sample.name == "baton_router_discovered_workers"
                and sample.labels.get("state") == "kept"
                and sample.value
            ):
                sentence = (
                    f"{router.url} keeps {sample.value:g} workers that {sample.labels.get('source')} no longer names"
                )
                problems.append(
                    warn(name, sentence, "no other worker of their role is ready: start one, or fix the selector")
                )
    if not sources and not problems:
        return [skip(name, "workers are named by flags or POST /workers")]
    return problems_or_ok(name, problems, f"sources of workers that are read: {sources}")


def check_router_keys(view: FleetView) -> list[CheckResult]:
    name, problems = "router.keys", []
    for router in view.routers:
        if router.is_open and router.outer_address is not None:
            sentence = f"{router.url} changes its fleet without a key for anyone who reaches {router.outer_address}"
            remedy = "set --api-key or --control-plane-api-keys (docs/operations.md, Keys), or --host 127.0.0.1"
            problems.append(warn(name, sentence, remedy))
    guarded = [router for router in view.routers if not router.problem and not router.is_open]
    local = [router for router in view.routers if router.is_open]
    return problems_or_ok(
        name,
        problems,
        f"routers with a key: {len(guarded)}, without one and reachable from this host only: {len(local)}",
    )


def check_router_clocks(view: FleetView) -> list[CheckResult]:
    found = [(f"router {r.url}", r.clock_offset_secs) for r in view.routers if r.clock_offset_secs is not None]
    if not found:
        return [skip("router.clock", "no router sent a Date header")]
    return merge(host.skew(label, offset).under("router") for label, offset in found)


def check_routers_agree(view: FleetView) -> list[CheckResult]:
    name = "router.agreement"
    routers = [router for router in view.routers if not router.problem]
    if len(routers) < 2:
        return [skip(name, "one router was asked; name the others with --router, too")]
    problems = []
    known = [{worker["url"] for worker in router.workers} for router in routers]
    everything = set().union(*known)
    for router, workers in zip(routers, known, strict=True):
        if missing := sorted(everything - workers):
            sentence = f"{router.url} does not know {', '.join(missing[:4])}, which another router has"
            problems.append(warn(name, sentence, "give all routers the same discovery flags"))
    versions = {router.version for router in routers}
    if len(versions) > 1:
        listed = ", ".join(f"{router.url} {router.version}" for router in routers)
        problems.append(warn(name, f"routers have different versions: {listed}", "finish the rollout"))
    return problems_or_ok(name, problems, f"{len(routers)} routers know the same {len(everything)} workers")


def check_kv_events(view: FleetView) -> list[CheckResult]:
    name, problems = "router.kv_events", []
    states: dict[str, set[str]] = {}
    for router in view.routers:
        feeds = [(worker, feed) for worker in router.workers for feed in worker.get("kv_events") or []]
        states[router.url] = {str(feed.get("state")) for _, feed in feeds}
        for worker, feed in feeds:
            if feed.get("state") in ("connecting", "doubtful"):
                sentence = (
                    f"{router.url} does not know what {worker['url']} has cached: {feed['state']}, {feed.get('reason')}"
                )
                problems.append(warn(name, sentence, "check the engine's --kv-events-config and the way to its port"))
    if len(view.routers) > 1 and any("off" in found for found in states.values()):
        off = sorted(url for url, found in states.items() if "off" in found)
        sentence = f"{', '.join(off)}: without KV events each router knows only the prefixes that it sent itself"
        remedy = (
            "--kv-events on for all routers, --kv-events-config '{\"enable_kv_cache_events\": true}' for all engines"
        )
        problems.append(warn(name, sentence, remedy))
    shown = ", ".join(sorted(set().union(*states.values()))) or "no worker"
    return problems_or_ok(name, problems, f"KV events: {shown}")


ROUTER_CHECKS: tuple[Callable[[FleetView], list[CheckResult]], ...] = (
    check_routers_reachable,
    check_routers_ready,
    check_router_metrics,
    check_discovery,
    check_router_keys,
    check_router_clocks,
    check_routers_agree,
    check_kv_events,
)


def check_routers(view: FleetView) -> list[CheckResult]:
    """With no router that answers nothing else is known."""
    if all(router.problem for router in view.routers):
        return check_routers_reachable(view)
    return [result for check in ROUTER_CHECKS for result in check(view)]
