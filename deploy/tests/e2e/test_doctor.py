"""`baton doctor` on a real Kubernetes: the demo is well, and faults planted in its objects are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deploy.tests.e2e.cluster import TestCluster, wait_until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
NAMESPACE = "baton"


def examine(demo: TestCluster, *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the first check of each name."""
    command = [sys.executable, "-m", "baton_ops.cli", "doctor", "--json", *flags]
    env = {**os.environ, "BATON_API_KEY": "demo", "BATON_CONTROL_KEY": "demo-admin"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.stdout, done.stderr
    checks: dict[str, dict[str, str]] = {}
    for check in json.loads(done.stdout)["checks"]:
        checks.setdefault(check["name"], check)
    return done.returncode, checks


def namespace(demo: TestCluster) -> tuple[int, dict[str, dict[str, str]]]:
    return examine(
        demo, "--namespace", NAMESPACE, f"--kubectl=kubectl --kubeconfig={demo.kubeconfig}"
    )


def test_demo_is_well(demo: TestCluster) -> None:
    last: dict[str, dict[str, str]] = {}

    def is_well() -> bool:
        """Also when the rollout of an earlier test is over."""
        code, checks = namespace(demo)
        last.update(checks)
        return code == 0 and "service/router 1 of 1" in checks["kube.selectors"]["sentence"]

    wait_until(is_well, "baton doctor --namespace finds nothing wrong, and one router")
    assert last["kube.access"]["sentence"] == "baton-router may list and watch pods"
    assert last["kube.secrets"]["status"] == "ok"


def test_pairs_of_the_demo_are_well(demo: TestCluster) -> None:
    """From the host, which reaches pods: the test cluster enforces no network policy."""
    router = demo.endpoints("router")[0]
    _, checks = examine(demo, "--fleet", "--router", router)
    status = {name: check["status"] for name, check in checks.items()}
    wanted = (
        "router.ready",
        "router.discovery",
        "engine.reachable",
        "pair.cluster_key",
        "pair.fingerprint",
        "pair.reachable",
    )
    assert {name: status.get(name) for name in wanted} == dict.fromkeys(wanted, "ok"), checks
    assert "tcp" in checks["pair.transport"]["sentence"]


def test_misspelt_selector_of_the_service_is_named(demo: TestCluster) -> None:
    def select(component: str) -> None:
        patch = {"spec": {"selector": {"app.kubernetes.io/component": component}}}
        demo.kubectl("patch", "service", "router", "-n", NAMESPACE, "-p", json.dumps(patch))

    select("ruter")
    try:
        code, checks = namespace(demo)
    finally:
        select("router")
    assert code == 2
    assert checks["kube.selectors"]["sentence"].startswith("service/router selects no pod")


def test_denied_access_is_named(demo: TestCluster) -> None:
    role = demo.get("role", "baton-router")
    demo.kubectl("delete", "role", "baton-router", "-n", NAMESPACE)
    try:
        code, checks = namespace(demo)
    finally:
        kept = {"apiVersion": role["apiVersion"], "kind": "Role", "rules": role["rules"]}
        kept["metadata"] = {"name": "baton-router", "namespace": NAMESPACE}
        demo.kubectl("apply", "-f", "-", stdin=json.dumps(kept))
    assert code == 2
    assert "baton-router may not list pods" in checks["kube.access"]["sentence"]
