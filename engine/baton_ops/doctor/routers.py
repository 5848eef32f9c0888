"""Checks of the routers: what each of them says of itself and of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baton_ops.clients.http_client import connection_remedy
from baton_ops.doctor import host
from baton_ops.doctor.check import Check, CheckResult, add_check, fail, ok, run_checks, skip, warn
from baton_ops.doctor.fleet import FleetView

ROUTER_CHECKS: list[Check[FleetView]] = []


@add_check(ROUTER_CHECKS, "router.reachable")
def check_routers_reachable(view: FleetView) -> Iterator[CheckResult]:
    for router in view.routers:
        if router.problem:
            sentence = f"{router.url} does not list its workers: {router.problem}"
            remedy = connection_remedy(router.url, router.problem)
            keys = "keys: --key (control plane) or --api-key"
            yield fail(sentence, remedy or f"give the router's address with --router; {keys}")
    yield ok(
        "; ".join(f"{router.url} lists {_count_workers(router.workers)}" for router in view.routers)
    )


def _count_workers(workers: list[dict[str, Any]]) -> str:
    roles = [str(worker.get("worker_type")) for worker in workers]
    return ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles)) or "no worker"


@add_check(ROUTER_CHECKS, "router.process")
def check_router_processes(view: FleetView) -> Iterator[CheckResult]:
    """Name URLs that do not lead to one router each, which the other checks compare and judge."""
    remedy = "give the URL of each router once, not that of a load balancer in front of them"
    urls: dict[str, list[str]] = {}
    for router in view.routers:
        if router.is_several:
            yield warn(
                f"{router.url} leads to several processes, of which each knows its own", remedy
            )
        elif router.incarnation is not None:
            urls.setdefault(router.incarnation, []).append(router.url)
    for names in urls.values():
        if len(names) > 1:
            yield warn(f"{', '.join(names)} lead to the same router", remedy)
    if urls:
        yield ok(f"routers, each at a URL of its own: {len(urls)}")
    yield skip("no router states its incarnation")


@add_check(ROUTER_CHECKS, "router.ready")
def check_routers_ready(view: FleetView) -> Iterator[CheckResult]:
    for router in view.routers:
        if router.problem or router.is_ready:
            continue
        reason = (
            router.readiness.get("reason") or router.readiness.get("status") or "no reason given"
        )
        remedy = (
            "start engines of the missing role, or add them: POST /workers; GET /workers says "
            "why one is not ready"
        )
        yield fail(f"{router.url} is not ready: {reason}", remedy)
    yield ok(f"routers that accept requests: {len(view.routers)}")


@add_check(ROUTER_CHECKS, "router.serves")
def check_routers_serve(view: FleetView) -> Iterator[CheckResult]:
    """A router stays ready without workers; requests then wait and fail."""
    for router in view.routers:
        if router.problem or not router.is_ready or router.readiness.get("serves") is not False:
            continue  # router.ready names those that are not ready
        reason = router.readiness.get("reason") or "no reason given"
        remedy = (
            "return drained engines to service (baton drain ENGINE --undo), start engines of the "
            "missing role, or give both roles the same checkpoint and flags; the checks below name "
            "what is wrong with each"
        )
        yield fail(f"{router.url} can serve no request: {reason}", remedy)
    if any("serves" in router.readiness for router in view.routers):
        yield ok(f"routers that can serve a request: {len(view.routers)}")
    yield skip("/readyz of the routers does not tell whether they can serve a request")


@add_check(ROUTER_CHECKS, "router.metrics")
def check_router_metrics(view: FleetView) -> Iterator[CheckResult]:
    for router in view.routers:
        if not router.problem and router.metrics_problem:
            sentence = f"{router.url}/metrics cannot be scraped: {router.metrics_problem}"
            yield warn(sentence, "scrape the port of --prometheus-port, if it is set")
    yield ok(f"routers whose metrics can be scraped: {len(view.routers)}")


@add_check(ROUTER_CHECKS, "router.discovery")
def check_discovery(view: FleetView) -> Iterator[CheckResult]:
    sources = 0
    for router in view.routers:
        for sample in router.metrics:
            source = sample.labels.get("source")
            if sample.name == "baton_router_discovery_is_stale":
                sources += 1
                if sample.value:
                    sentence = (
                        f"{router.url} cannot read its workers from {source}: the last list stays"
                    )
                    remedy = (
                        "its log names the error; check the discovery file, or the API server "
                        "and the Role"
                    )
                    yield fail(sentence, remedy)
            is_kept = (
                sample.name == "baton_router_discovered_workers"
                and sample.labels.get("state") == "kept"
            )
            if is_kept and sample.value:
                sentence = (
                    f"{router.url} keeps {sample.value:g} workers that {source} no longer names"
                )
                yield warn(
                    sentence,
                    "no other worker of their role is ready: start one, or fix the selector",
                )
    if sources:
        yield ok(f"sources of workers that are read: {sources}")
    yield skip("workers are named by flags or POST /workers")


@add_check(ROUTER_CHECKS, "router.keys")
def check_router_keys(view: FleetView) -> Iterator[CheckResult]:
    for router in view.routers:
        if router.is_open and router.outer_address is not None:
            sentence = (
                f"{router.url} changes its fleet without a key for anyone who reaches "
                f"{router.outer_address}"
            )
            remedy = (
                "set --api-key or --control-plane-api-keys (docs/guide/security.md), or "
                "--host 127.0.0.1"
            )
            yield warn(sentence, remedy)
    guarded = sum(not router.problem and not router.is_open for router in view.routers)
    local = sum(router.is_open for router in view.routers)
    yield ok(
        f"routers with a key: {guarded}, without one and reachable from this host only: {local}"
    )


@add_check(ROUTER_CHECKS, "router.clock")
def check_router_clocks(view: FleetView) -> Iterator[CheckResult]:
    for router in view.routers:
        if router.clock_offset_secs is not None:
            yield host.check_skew(f"router {router.url}", router.clock_offset_secs)
    yield skip("no router sent a Date header")


@add_check(ROUTER_CHECKS, "router.agreement")
def check_routers_agree(view: FleetView) -> Iterator[CheckResult]:
    routers = [router for router in view.routers if not router.problem]
    if len(routers) < 2:
        yield skip("one router was asked; name the others with --router, too")
        return
    known_urls = [{worker["url"] for worker in router.workers} for router in routers]
    everything = set().union(*known_urls)
    for router, workers in zip(routers, known_urls, strict=True):
        if missing := sorted(everything - workers):
            sentence = (
                f"{router.url} does not know {', '.join(missing[:4])}, which another router has"
            )
            yield warn(sentence, "give all routers the same discovery flags")
    if len({router.version for router in routers}) > 1:
        listed = ", ".join(f"{router.url} {router.version}" for router in routers)
        yield warn(f"routers have different versions: {listed}", "finish the rollout")
    yield ok(f"{len(routers)} routers know the same {len(everything)} workers")


@add_check(ROUTER_CHECKS, "router.kv_events")
def check_kv_events(view: FleetView) -> Iterator[CheckResult]:
    states: dict[str, set[str]] = {}
    for router in view.routers:
        feeds = [
            (worker, feed) for worker in router.workers for feed in worker.get("kv_events") or []
        ]
        states[router.url] = {str(feed.get("state")) for _, feed in feeds}
        for worker, feed in feeds:
            if feed.get("state") in ("connecting", "doubtful"):
                feed_state = f"{feed['state']}, {feed.get('reason')}"
                sentence = (
                    f"{router.url} does not know what {worker['url']} has cached: {feed_state}"
                )
                yield warn(
                    sentence, "check the engine's --kv-events-config and the way to its port"
                )
    off = sorted(url for url, feed_states in states.items() if "off" in feed_states)
    if len(view.routers) > 1 and off:
        sentence = (
            f"{', '.join(off)}: without KV events each router knows only the prefixes that "
            "it sent itself"
        )
        engine_flag = "--kv-events-config '{\"enable_kv_cache_events\": true}'"
        yield warn(sentence, f"--kv-events on for all routers, {engine_flag} for all engines")
    yield ok(f"KV events: {', '.join(sorted(set().union(*states.values()))) or 'no worker'}")


def check_routers(view: FleetView) -> list[CheckResult]:
    """With no router that answers nothing else is known."""
    if all(router.problem for router in view.routers):
        return check_routers_reachable(view)
    return run_checks(ROUTER_CHECKS, view)
