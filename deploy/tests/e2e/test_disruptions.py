"""A cluster in use: drained nodes, killed pods, rollouts that cannot start, a lost API server, a missing Role."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from deploy.tests.e2e.cluster import TestCluster, names, wait_until
from deploy.tests.e2e.streams import StreamLoad, ask

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
ROLES = ("router", "prefill", "decode")


@pytest.fixture(scope="module")
def doubled(demo: TestCluster) -> Iterator[TestCluster]:
    """The demo with two pods of each role, spread over both nodes."""
    deployments = [f"deployment/{role}" for role in ROLES]
    demo.kubectl("-n", "baton", "scale", *deployments, "--replicas=2")
    for deployment in deployments:
        demo.kubectl("-n", "baton", "rollout", "status", deployment, "--timeout=300s")
    yield demo
    demo.kubectl("-n", "baton", "scale", *deployments, "--replicas=1")


@pytest.fixture(scope="module")
def undisturbed(doubled: TestCluster) -> dict[int, str]:
    return {number: ask(doubled, number).text for number in range(StreamLoad.questions)}


def assert_whole(load: StreamLoad, undisturbed: dict[int, str]) -> None:
    assert load.problems == [], load.cluster.report()
    assert [r.number for r in load.results if r.text != undisturbed[r.number]] == []


def wait_for_more(load: StreamLoad, count: int = 6) -> None:
    until = len(load.results) + count
    wait_until(lambda: len(load.results) >= until, f"{count} more streams")


def test_pods_of_a_role_are_spread_over_nodes(doubled: TestCluster) -> None:
    for role in ROLES:
        assert len({pod["spec"]["nodeName"] for pod in doubled.pods(role)}) == 2, role


def test_forced_kill_of_a_decode_pod_breaks_no_stream(doubled: TestCluster, undisturbed: dict[int, str]) -> None:
    victim = doubled.pods("decode")[0]["metadata"]["name"]
    with StreamLoad(doubled) as load:
        wait_for_more(load)
        doubled.kubectl("-n", "baton", "delete", "pod", victim, "--grace-period=0", "--force")
        wait_for_more(load, 10)
    assert_whole(load, undisturbed)
    doubled.kubectl("-n", "baton", "rollout", "status", "deployment/decode", "--timeout=300s")


def test_drained_node_breaks_no_stream(doubled: TestCluster, undisturbed: dict[int, str]) -> None:
    with StreamLoad(doubled) as load:
        wait_for_more(load)
        doubled.kubectl("drain", "node-a", "--delete-emptydir-data", "--timeout=600s")
        assert {pod["spec"]["nodeName"] for role in ROLES for pod in doubled.pods(role)} == {"node-b"}
        doubled.kubectl("uncordon", "node-a")
        wait_for_more(load)
    assert_whole(load, undisturbed)


def test_rollout_that_cannot_start_stops_at_one_pod_and_is_undone(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
    def stuck() -> list[str]:
        statuses = [s for pod in doubled.pods("decode") for s in pod["status"].get("containerStatuses", [])]
        return [reason for s in statuses if "Image" in (reason := s["state"].get("waiting", {}).get("reason", ""))]

    before = names(doubled.pods("decode"))
    with StreamLoad(doubled) as load:
        doubled.kubectl("-n", "baton", "set", "image", "deployment/decode", "engine=baton-engine:missing")
        wait_until(stuck, "a pod whose image is missing")
        assert len(stuck()) == 1
        assert before < names(doubled.pods("decode"))
        wait_for_more(load)
        doubled.kubectl("-n", "baton", "rollout", "undo", "deployment/decode")
        doubled.kubectl("-n", "baton", "rollout", "status", "deployment/decode", "--timeout=300s")
        wait_until(lambda: names(doubled.pods("decode")) == before, "only the old pods")
    assert_whole(load, undisturbed)


def shows_stale(router: str, is_stale: bool) -> bool:
    text = httpx.get(f"{router}/metrics", timeout=30).text
    line = f'baton_router_discovery_is_stale{{source="prefill_pods"}} {int(is_stale)}'
    return line in text.splitlines()


@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_lost_api_server_is_shown_and_breaks_no_stream(
    doubled: TestCluster, undisturbed: dict[int, str], fault: str
) -> None:
    """A frozen one is noticed by its silence, a killed one by refused connections."""
    routers = doubled.endpoints("router")
    with StreamLoad(doubled, routers=routers) as load:
        with doubled.paused("kube-apiserver") if fault == "paused" else doubled.killed("kube-apiserver"):
            for router in routers:
                wait_until(lambda router=router: shows_stale(router, True), "discovery is stale")
            wait_for_more(load)
        for router in routers:
            wait_until(lambda router=router: shows_stale(router, False), "discovery works again")
    assert_whole(load, undisturbed)


def test_deleted_role_is_named_and_breaks_no_stream(doubled: TestCluster, undisturbed: dict[int, str]) -> None:
    """Watches that are open stay so: a new router shows what is missing, and the old ones serve on."""
    role = doubled.get("role", "baton-router")
    kept = {key: role[key] for key in ("apiVersion", "kind", "rules")}
    kept["metadata"] = {"name": "baton-router", "namespace": "baton"}
    before = names(doubled.pods("router"))
    with StreamLoad(doubled) as load:
        doubled.kubectl("-n", "baton", "delete", "role", "baton-router")
        doubled.kubectl("-n", "baton", "rollout", "restart", "deployment/router")
        assert_new_router_says(doubled, before, "verbs list and watch on pods")
        wait_for_more(load)
        doubled.kubectl("create", "-f", "-", stdin=json.dumps(kept))
        doubled.kubectl("-n", "baton", "rollout", "status", "deployment/router", "--timeout=300s")
    assert_whole(load, undisturbed)


def test_misspelt_selector_is_named_and_breaks_no_stream(doubled: TestCluster, undisturbed: dict[int, str]) -> None:
    """A router that no pod matches does not become ready, so the rollout stops."""
    before = names(doubled.pods("router"))
    arguments = doubled.get("deployment", "router")["spec"]["template"]["spec"]["containers"][0]["args"]
    wrong = [a.replace("component=prefill", "component=prefil") if "prefill-selector" in a else a for a in arguments]
    assert wrong != arguments
    patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": wrong}]
    with StreamLoad(doubled) as load:
        doubled.kubectl("-n", "baton", "patch", "deployment", "router", "--type=json", "-p", json.dumps(patch))
        assert_new_router_says(doubled, before, "no pod has these labels")
        wait_for_more(load)
        assert before & names(doubled.pods("router"))
        doubled.kubectl("-n", "baton", "rollout", "undo", "deployment/router")
        doubled.kubectl("-n", "baton", "rollout", "status", "deployment/router", "--timeout=300s")
    assert_whole(load, undisturbed)


def assert_new_router_says(doubled: TestCluster, before: set[str], text: str) -> None:
    def said() -> bool:
        return any(text in doubled.logs(pod) for pod in names(doubled.pods("router")) - before)

    wait_until(said, f"a new router logs: {text}")
    ready = {
        pod["metadata"]["name"]
        for pod in doubled.pods("router")
        for condition in pod["status"]["conditions"]
        if condition["type"] == "Ready" and condition["status"] == "True"
    }
    assert ready <= before
