"""A cluster in use: drained nodes, killed pods, a rollout that cannot start, an API server that does not answer."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_requests_are_served_while_the_api_server_is_silent(doubled: TestCluster, undisturbed: dict[int, str]) -> None:
    routers = doubled.endpoints("router")
    with doubled.paused("kube-apiserver"):
        answers = [ask(doubled, number, routers[number % len(routers)]) for number in undisturbed]
    assert {a.number: a.problem or a.text for a in answers} == undisturbed
