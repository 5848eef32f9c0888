"""A cluster in use: drained nodes, killed pods, rollouts that cannot start, a lost API server, a missing Role."""

from __future__ import annotations

import json
import subprocess
import sys
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
    assert len(load.results) == load.started
    assert [r.number for r in load.results if r.text != undisturbed[r.number]] == []


def wait_for_more(load: StreamLoad, count: int = 6) -> None:
    until = len(load.results) + count
    wait_until(lambda: len(load.results) >= until, f"{count} more streams")


def test_pods_of_a_role_are_spread_over_nodes(doubled: TestCluster) -> None:
    for role in ROLES:
        assert len({pod["spec"]["nodeName"] for pod in doubled.pods(role)}) == 2, role


def test_engines_of_a_drained_node_are_killed_without_a_loss(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
    """After "safe to stop" nothing runs there, so that nothing has to be resumed elsewhere either."""
    pods = [pod for role in ("prefill", "decode") for pod in doubled.pods(role)]
    engines = names([pod for pod in pods if pod["spec"]["nodeName"] == "node-a"])
    resumed = failovers(doubled)
    with StreamLoad(doubled) as load:
        wait_for_more(load)
        router = (
            f"--router={doubled.endpoints('router')[0]}",
            "--key=demo-admin",
        )  # then reading pods is enough
        done = baton_drain(doubled, "node/node-a", "--wait", *router)
        assert done.returncode == 0, done.stdout + done.stderr
        last = done.stdout.splitlines()[-1]
        assert last.startswith("safe to stop: ")
        assert set(last.removeprefix("safe to stop: ").split(", ")) == {
            f"pod/{name}" for name in engines
        }
        assert len(engines) == 2
        wait_until(lambda: not engines & ready_names(doubled), "draining pods are not Ready")
        wait_for_more(load)
        doubled.kubectl("-n", "baton", "delete", "pod", *engines, "--grace-period=0", "--force")
        wait_for_more(load)
        for role in ("prefill", "decode"):
            doubled.kubectl(
                "-n", "baton", "rollout", "status", f"deployment/{role}", "--timeout=300s"
            )
    assert_whole(load, undisturbed)
    assert failovers(doubled) == resumed


def test_drained_pod_returns_to_service(doubled: TestCluster, undisturbed: dict[int, str]) -> None:
    """By `kubectl exec` in its container."""
    name = doubled.pods("decode")[0]["metadata"]["name"]
    with StreamLoad(doubled) as load:
        wait_for_more(load)
        done = baton_drain(doubled, f"pod/{name}", "--wait")
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (
            0,
            [f"safe to stop: pod/{name}"],
        ), done.stderr
        wait_until(lambda: name not in ready_names(doubled), "a draining pod is not Ready")
        wait_for_more(load)
        done = baton_drain(doubled, f"pod/{name}", "--undo")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: name in ready_names(doubled), "the pod is Ready again")
        wait_for_more(load)
    assert_whole(load, undisturbed)


def baton_drain(doubled: TestCluster, *args: str) -> subprocess.CompletedProcess[str]:
    kubectl = f"--kubectl=kubectl --kubeconfig={doubled.kubeconfig}"
    command = [sys.executable, "-m", "baton_ops.cli", "drain", kubectl, "--timeout=300", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def failovers(doubled: TestCluster) -> float:
    """Answers that some router resumed on another worker."""
    texts = [
        httpx.get(f"{router}/metrics", timeout=30).text for router in doubled.endpoints("router")
    ]
    lines = [
        line
        for text in texts
        for line in text.splitlines()
        if line.startswith("baton_router_failovers_total")
    ]
    return sum(float(line.split()[-1]) for line in lines)


def ready_names(doubled: TestCluster, *roles: str) -> set[str]:
    return {
        pod["metadata"]["name"]
        for role in roles or ROLES
        for pod in doubled.pods(role)
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }


def test_rollout_of_all_roles_breaks_none_of_200_streams(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
    old = names([pod for role in ROLES for pod in doubled.pods(role)])
    with StreamLoad(doubled, clients=200) as load:
        wait_until(lambda: load.most_at_once == 200, "200 streams at once")
        doubled.run_readme("Change, roll back, restart")
        wait_until(
            lambda: not old & names([p for role in ROLES for p in doubled.pods(role)]),
            "old pods are gone",
            600,
        )
        wait_for_more(load, 200)
    assert_whole(load, undisturbed)
    print(f"{len(load.results)} streams, {load.most_at_once} at once, none broken")


def test_forced_kill_of_a_decode_pod_breaks_no_stream(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
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
        assert {pod["spec"]["nodeName"] for role in ROLES for pod in doubled.pods(role)} == {
            "node-b"
        }
        doubled.kubectl("uncordon", "node-a")
        wait_for_more(load)
    assert_whole(load, undisturbed)


def test_rollout_that_cannot_start_stops_at_one_pod_and_is_undone(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
    def stuck() -> list[str]:
        statuses = [
            s for pod in doubled.pods("decode") for s in pod["status"].get("containerStatuses", [])
        ]
        return [
            reason
            for s in statuses
            if "Image" in (reason := s["state"].get("waiting", {}).get("reason", ""))
        ]

    before = names(doubled.pods("decode"))
    with StreamLoad(doubled) as load:
        doubled.kubectl(
            "-n", "baton", "set", "image", "deployment/decode", "engine=baton-engine:missing"
        )
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
        with (
            doubled.paused("kube-apiserver")
            if fault == "paused"
            else doubled.killed("kube-apiserver")
        ):
            for router in routers:
                wait_until(lambda router=router: shows_stale(router, True), "discovery is stale")
            wait_for_more(load)
        for router in routers:
            wait_until(lambda router=router: shows_stale(router, False), "discovery works again")
    assert_whole(load, undisturbed)


def test_deleted_role_is_named_and_breaks_no_stream(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
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


def test_misspelt_selector_is_named_and_breaks_no_stream(
    doubled: TestCluster, undisturbed: dict[int, str]
) -> None:
    """A router that no pod matches does not become ready, so the rollout stops."""
    before = names(doubled.pods("router"))
    arguments = doubled.get("deployment", "router")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    wrong = [
        a.replace("component=prefill", "component=prefil") if "prefill-selector" in a else a
        for a in arguments
    ]
    assert wrong != arguments
    patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": wrong}]
    with StreamLoad(doubled) as load:
        doubled.kubectl(
            "-n", "baton", "patch", "deployment", "router", "--type=json", "-p", json.dumps(patch)
        )
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
    assert ready_names(doubled, "router") <= before
