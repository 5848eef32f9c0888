"""Overlay cpu-demo on a real Kubernetes: applied, hardened, serving, and rolled over without a broken stream."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.tests.checks import EXTERNAL_SECRETS
from deploy.tests.custom_resources import is_custom
from deploy.tests.e2e.cluster import TestCluster, names, wait_until, with_changes
from deploy.tests.e2e.streams import StreamLoad, ask
from deploy.tests.manifests import TARGETS, main_container, pod_spec, render, render_text, workloads

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
ROLES = ("router", "prefill", "decode")
DRY_RUN = (
    "apply",
    "--server-side",
    "--force-conflicts",
    "--dry-run=server",
    "--validate=strict",
    "-f",
    "-",
)


def test_demo_answers_a_chat_request_with_a_stream(demo: TestCluster) -> None:
    answer = ask(demo, 0)
    assert not answer.problem, answer.problem + demo.report()
    assert answer.text


def test_every_role_runs_the_number_of_pods_it_asks_for(demo: TestCluster) -> None:
    assert {role: len(demo.pods(role)) for role in ROLES} == dict.fromkeys(ROLES, 1)


@pytest.mark.parametrize("target", TARGETS)
def test_server_accepts_every_directory_without_a_warning(
    demo: TestCluster, target: str, request: pytest.FixtureRequest
) -> None:
    if any(map(is_custom, render(target))):
        request.getfixturevalue("custom_resources")
    demo.kubectl(*DRY_RUN, "--warnings-as-errors", stdin=render_text(target))


def test_secrets_of_the_readme_have_the_keys_that_the_base_names(demo: TestCluster) -> None:
    demo.run_readme("Install for real")
    have = {
        (item["metadata"]["name"], key)
        for item in demo.get("secrets")["items"]
        for key in item["data"]
    }
    named = {
        (reference["name"], reference["key"])
        for workload in workloads(render("base")).values()
        for variable in main_container(workload)["env"]
        if (reference := variable.get("valueFrom", {}).get("secretKeyRef"))
        and not reference.get("optional")
    }
    assert {name for name, _ in named} == EXTERNAL_SECRETS.keys()
    assert named <= have


def test_misspelt_field_is_refused(demo: TestCluster) -> None:
    def misspell(objects: list[dict[str, Any]]) -> None:
        pod_spec(workloads(objects)["prefill"])["terminationGracePeriodSecond"] = 1

    error = demo.kubectl(
        *DRY_RUN, stdin=with_changes(render_text("overlays/cpu-demo"), misspell), fails=True
    )
    assert "terminationGracePeriodSecond" in error


def test_pod_security_warns_of_a_kept_capability(demo: TestCluster) -> None:
    def keep(objects: list[dict[str, Any]]) -> None:
        del main_container(workloads(objects)["router"])["securityContext"]["capabilities"]

    text = with_changes(render_text("overlays/cpu-demo"), keep)
    assert "violate PodSecurity" in demo.kubectl(
        *DRY_RUN, "--warnings-as-errors", stdin=text, fails=True
    )


@pytest.mark.parametrize("role", ROLES)
def test_containers_run_without_privileges(demo: TestCluster, role: str) -> None:
    (pod,) = demo.pods(role)
    user = demo.run_in_pod(pod, "id", "-u")
    assert user.stdout.strip() == "65532", user.stderr
    status = demo.run_in_pod(pod, "cat", "/proc/1/status").stdout.splitlines()
    capabilities = {
        line.split()[0]: int(line.split()[1], 16) for line in status if line.startswith("Cap")
    }
    assert set(capabilities.values()) == {0}, capabilities
    assert "NoNewPrivs:\t1" in status
    assert "Read-only file system" in demo.run_in_pod(pod, "touch", "/etc/written").stderr
    assert demo.run_in_pod(pod, "touch", "/tmp/written").returncode == 0
    has_token = (
        demo.run_in_pod(pod, "ls", "/var/run/secrets/kubernetes.io/serviceaccount").returncode == 0
    )
    assert has_token is (role == "router")


def test_rollout_of_all_roles_breaks_no_stream(demo: TestCluster) -> None:
    undisturbed = {number: ask(demo, number).text for number in range(StreamLoad.questions)}
    before = {role: names(demo.pods(role)) for role in ROLES}
    with StreamLoad(demo) as load:
        wait_until(lambda: len(load.results) >= 8, "streams before the rollout")
        demo.run_readme("Change, roll back, restart")
        old = set.union(*before.values())
        wait_until(
            lambda: not any(old & names(demo.pods(role)) for role in ROLES),
            "old pods are gone",
            400,
        )
        finished = len(load.results)
        wait_until(lambda: len(load.results) >= finished + 8, "streams after the rollout")
    assert load.problems == [], demo.report()
    assert {result.number: result.text for result in load.results} == undisturbed
    assert all(result.text == undisturbed[result.number] for result in load.results)
    print(f"{len(load.results)} streams, none broken")


def test_router_uses_each_right_of_its_role_and_asks_for_no_other(demo: TestCluster) -> None:
    requests = [
        r
        for r in demo.audited()
        if r["user"]["username"] == "system:serviceaccount:baton:baton-router"
    ]
    assert {(r["objectRef"].get("resource"), r["verb"]) for r in requests} == {
        ("pods", "list"),
        ("pods", "watch"),
    }
    assert [r for r in requests if r.get("responseStatus", {}).get("code", 200) >= 400] == []
    assert {r["user"]["username"] for r in demo.audited()} == {
        "system:serviceaccount:baton:baton-router"
    }
