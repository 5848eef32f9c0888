"""Rendering of kustomize directories and small accessors for the objects in them."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

Object = dict[str, Any]
DEPLOY = Path(__file__).parents[1]
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(
    {path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml")} - {"timing"}
)
TARGETS = [
    "base",
    *(f"overlays/{name}" for name in OVERLAYS),
    *(f"base+{name}" for name in COMPONENTS),
]
"""Directories, and the base with one component each; `timing` is part of the base."""
NO_KUBECTL = (
    "kubectl is not installed, so no manifest is rendered or checked: put kubectl 1.27 or newer into PATH "
    "(https://kubernetes.io/docs/tasks/tools/, Debian: kubernetes-client of trixie or newer)"
)


def require_kubectl() -> str:
    """Return the path of kubectl; without it skip."""
    return shutil.which("kubectl") or pytest.skip(NO_KUBECTL)


@functools.cache
def render_text(target: str) -> str:
    kubectl = require_kubectl()
    directory, _, component = target.partition("+")
    if not component:
        return _kustomize(kubectl, KUBERNETES / directory)
    with tempfile.TemporaryDirectory() as combined:
        paths = [
            os.path.relpath(KUBERNETES / p, Path(combined).resolve())
            for p in (directory, f"components/{component}")
        ]
        text = {"resources": paths[:1], "components": paths[1:]}
        (Path(combined) / "kustomization.yaml").write_text(yaml.safe_dump(text))
        return _kustomize(kubectl, Path(combined))


def _kustomize(kubectl: str, directory: Path) -> str:
    command = [kubectl, "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"kustomize warns: {done.stderr}"
    return done.stdout


@functools.cache
def _parsed(target: str) -> tuple[Object, ...]:
    return tuple(item for item in yaml.safe_load_all(render_text(target)) if item)


def render(target: str) -> list[Object]:
    """Objects of a kustomize directory; a fresh copy at each call."""
    return [copy.deepcopy(item) for item in _parsed(target)]


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    return next(item for item in of_kind(objects, kind) if item["metadata"]["name"] == name)


def workloads(objects: Sequence[Object]) -> dict[str, Object]:
    """Deployments by name, which is their role."""
    return {item["metadata"]["name"]: item for item in of_kind(objects, "Deployment")}


def pod_spec(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]


def pod_labels(workload: Object) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def containers(workload: Object) -> Iterator[Object]:
    spec = pod_spec(workload)
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def main_container(workload: Object) -> Object:
    return pod_spec(workload)["containers"][0]


def settings(objects: Sequence[Object]) -> dict[str, str]:
    """Values of the generated ConfigMap baton-config."""
    maps = [
        item
        for item in of_kind(objects, "ConfigMap")
        if item["metadata"]["name"].startswith("baton-config")
    ]
    assert len(maps) == 1, f"{len(maps)} ConfigMaps baton-config"
    return maps[0]["data"]


def sidecar_engines(objects: Sequence[Object]) -> dict[str, Object]:
    """Engines by role in the router's own pod, as overlay one-pod has them; empty where engines have Deployments."""
    router = workloads(objects).get("router")
    return {c["name"]: c for c in pod_spec(router).get("initContainers", [])} if router else {}


def arguments(
    workload: Object, objects: Sequence[Object], container: Object | None = None
) -> list[str]:
    """Arguments of a container (default: the first one) with $(NAME) replaced as the kubelet does; a pod's address is
    10.0.0.1."""
    values = {**settings(objects), "POD_IP": "10.0.0.1"}
    result = []
    for argument in (container or main_container(workload))["args"]:
        for name, value in values.items():
            argument = argument.replace(f"$({name})", value)
        result.append(argument)
    return result


def flag_value(args: Sequence[str], flag: str) -> str | None:
    prefix = f"{flag}="
    return next((arg[len(prefix) :] for arg in reversed(args) if arg.startswith(prefix)), None)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Evaluate a label selector: {} matches all pods."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True
