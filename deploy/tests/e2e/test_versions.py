"""Two versions of the engines, which differ in their fingerprints, side by side and in place of one another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from deploy.tests.e2e.cluster import TestCluster, wait_until
from deploy.tests.e2e.streams import StreamLoad, StreamResult, ask
from deploy.tests.manifests import main_container, render, workloads

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
CONTROL = {"Authorization": "Bearer demo-admin"}
ENGINES = ("prefill", "decode")
VERSION = "app.kubernetes.io/version"


def next_version(role: str) -> str:
    """The role's Deployment as a second one beside it, with another page size."""
    deployment: dict[str, Any] = workloads(render("overlays/cpu-demo"))[role]
    deployment["metadata"]["name"] = f"{role}-next"
    template = deployment["spec"]["template"]
    for labels in (deployment["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
        labels[VERSION] = "next"
    deployment["spec"]["minReadySeconds"] = 0
    main_container(deployment)["args"].append("--page-size=32")
    return yaml.safe_dump(deployment)


class Versions:
    """Versions of all engines that there were, by their URLs."""

    def __init__(self, demo: TestCluster) -> None:
        self._demo = demo
        self._router = demo.endpoints("router")[0]
        self.of: dict[str, str] = {}
        self.fingerprints: dict[str, set[str]] = defaultdict(set)

    def install_next(self, role: str) -> None:
        self._demo.kubectl("apply", "-f", "-", stdin=next_version(role))
        self._wait(f"deployment/{role}-next")

    def scale(self, names: list[str], replicas: int) -> None:
        deployments = [f"deployment/{name}" for name in names]
        self._demo.kubectl("-n", "baton", "scale", *deployments, f"--replicas={replicas}")
        for deployment in deployments:
            self._wait(deployment)

    def _wait(self, deployment: str) -> None:
        self._demo.kubectl("-n", "baton", "rollout", "status", deployment, "--timeout=300s")

    def pods(self, role: str) -> dict[str, str]:
        """Versions of a role's pods by URL."""
        pods = [pod for pod in self._demo.pods(role) if pod["status"].get("podIP")]
        return {
            f"http://{pod['status']['podIP']}:30000": pod["metadata"]["labels"].get(VERSION, "old")
            for pod in pods
        }

    def settle(self, wanted: dict[str, set[str]]) -> None:
        """Wait until the router serves with exactly these versions of each role; remember what they are."""

        def serving() -> dict[str, set[str]]:
            now = {url: version for role in ENGINES for url, version in self.pods(role).items()}
            found: dict[str, set[str]] = {role: set() for role in ENGINES}
            for worker in httpx.get(f"{self._router}/workers", headers=CONTROL, timeout=30).json()[
                "workers"
            ]:
                if worker["url"] in now and worker["state"] == "ready":
                    self.of[worker["url"]] = now[worker["url"]]
                    self.fingerprints[now[worker["url"]]].add(str(worker["fingerprint"]))
                found[worker["worker_type"]].add(now.get(worker["url"], "gone"))
            return found

        wait_until(lambda: serving() == wanted, f"the router has {wanted}")

    def unpaired(self) -> dict[str, float]:
        """Numbers of ready workers without a partner by role; roles without any are left out, as in the metric."""
        text = httpx.get(f"{self._router}/metrics", timeout=30).text
        found = re.findall(
            r'^baton_router_unpaired_workers\{role="(\w+)"\} (\S+)$', text, re.MULTILINE
        )
        return {role: float(count) for role, count in found if float(count)}

    def of_attempts(self, results: list[StreamResult]) -> list[set[str]]:
        """Versions that took part in each attempt of these streams."""
        attempts: dict[tuple[str, int], set[str]] = defaultdict(set)
        for result in results:
            url = f"{self._router}/v1/requests/{result.request_id}"
            for leg in httpx.get(url, headers=CONTROL, timeout=30).json()["legs"]:
                attempts[result.request_id, leg["attempt"]].add(self.of[leg["worker"]])
        return list(attempts.values())


def more(load: StreamLoad, count: int = 8) -> list[StreamResult]:
    """Streams that begin from now on."""
    before = load.started

    def ended() -> list[StreamResult]:
        return [result for result in load.results if result.index > before]

    wait_until(lambda: len(ended()) >= count, f"{count} more streams")
    return ended()


@pytest.fixture
def installed(demo: TestCluster) -> Iterator[TestCluster]:
    yield demo
    demo.kubectl(
        "-n",
        "baton",
        "delete",
        "deployment",
        "--ignore-not-found",
        *(f"{role}-next" for role in ENGINES),
    )
    demo.kubectl(
        "-n", "baton", "scale", *(f"deployment/{role}" for role in ENGINES), "--replicas=1"
    )


def test_versions_replace_each_other_and_no_pair_is_mixed(installed: TestCluster) -> None:
    demo = installed
    undisturbed = {number: ask(demo, number).text for number in range(StreamLoad.questions)}
    versions = Versions(demo)
    versions.settle({"prefill": {"old"}, "decode": {"old"}})
    with StreamLoad(demo) as load:
        more(load)
        versions.install_next("prefill")
        versions.settle({"prefill": {"old", "next"}, "decode": {"old"}})
        wait_until(
            lambda: versions.unpaired() == {"prefill": 1}, "the new prefill node has no partner"
        )
        alone = more(load)
        versions.install_next("decode")
        versions.settle({"prefill": {"old", "next"}, "decode": {"old", "next"}})
        wait_until(lambda: versions.unpaired() == {}, "all are paired")
        more(load, 16)
        versions.scale(list(ENGINES), 0)
        versions.settle({"prefill": {"next"}, "decode": {"next"}})
        replaced = more(load)
        versions.scale(list(ENGINES), 1)
        versions.settle({"prefill": {"old", "next"}, "decode": {"old", "next"}})
        more(load, 16)
        demo.kubectl("-n", "baton", "delete", "deployment", *(f"{role}-next" for role in ENGINES))
        versions.settle({"prefill": {"old"}, "decode": {"old"}})
        restored = more(load)
    assert load.problems == [], demo.report()
    assert [r.number for r in load.results if r.text != undisturbed[r.number]] == []
    assert versions.fingerprints.keys() == {"old", "next"}
    assert not versions.fingerprints["old"] & versions.fingerprints["next"]
    attempts = versions.of_attempts(load.results)
    assert [versions for versions in attempts if len(versions) > 1] == []
    for phase, version in ((alone, "old"), (replaced, "next"), (restored, "old")):
        assert set.union(*versions.of_attempts(phase)) == {version}
    count = {version: sum(a == {version} for a in attempts) for version in ("old", "next")}
    print(f"{len(load.results)} streams, none broken; attempts: {count}")
