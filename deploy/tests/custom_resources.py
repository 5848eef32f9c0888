"""Strict schemas of the custom resources in components: the CRDs that the controllers' own Go modules carry."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.tests.manifests import Object

OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
FILES = {
    "PodMonitor": (
        OPERATOR,
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "PrometheusRule": (
        OPERATOR,
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "ScaledObject": (KEDA, "config/crd/bases/keda.sh_scaledobjects.yaml"),
    "InferencePool": (None, "inferencepools.yaml"),
    "HTTPRoute": (None, "httproutes.yaml"),
}
"""Go module of each CRD and its path there; None: a part of it, in crds/ beside this file."""
GROUPS = (
    "monitoring.coreos.com/",
    "keda.sh/",
    "inference.networking.k8s.io/",
    "gateway.networking.k8s.io/",
)
DOWNLOAD_SECS = 300.0


def is_custom(item: Object) -> bool:
    return str(item["apiVersion"]).startswith(GROUPS)


def crd_file(kind: str) -> Path:
    """The CRD of `kind` in the module cache; where it is neither there nor can be downloaded, skip."""
    found = fetch(kind)
    return found if isinstance(found, Path) else pytest.skip(f"no schema of {kind}: {found}")


def fetch(kind: str) -> Path | str:
    """Returns the CRD of `kind`, downloaded if need be, or why it cannot be had."""
    module, inside = FILES[kind]
    if module is None:
        return Path(__file__).parent / "crds" / inside
    cache = os.environ.get("GOMODCACHE") or str(
        Path(os.environ.get("GOPATH") or Path.home() / "go") / "pkg" / "mod"
    )
    path = Path(cache) / module / inside
    if path.exists():
        return path
    go = shutil.which("go")
    if go is None:
        return f"it is in the Go module {module}, and Go is not installed (https://go.dev/dl/)"
    command = [go, "mod", "download", module]
    try:
        # Outside of any module, so that no go.mod changes.
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, timeout=DOWNLOAD_SECS
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} took longer than {DOWNLOAD_SECS:g} s"
    return (
        path if path.exists() else f"{' '.join(command)} did not make {path}: {done.stderr.strip()}"
    )


def _closed(schema: Any) -> Any:
    """The schema without room for unknown fields, which an API server would drop with a warning."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(part) for key, part in schema.items()}
    may_be_open = (
        schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    )
    if isinstance(schema.get("properties"), dict) and not may_be_open:
        result["additionalProperties"] = False
    if "(?i)" in schema.get("pattern", "") and isinstance(schema["pattern"], str):
        result["pattern"] = "(?i)" + schema["pattern"].replace(
            "(?i)", ""
        )  # Go takes the flag anywhere, Python in front
    if schema.get("x-kubernetes-int-or-string"):
        result = {"type": ["integer", "string"]}
    return result


@functools.cache
def _schema(kind: str, version: str) -> Any:
    definition = yaml.safe_load(crd_file(kind).read_text())
    found = next(v for v in definition["spec"]["versions"] if v["name"] == version)
    schema = _closed(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def validate(item: Object) -> None:
    """Raises jsonschema.ValidationError where an API server would refuse the object or warn about it."""
    jsonschema.validate(item, _schema(item["kind"], item["apiVersion"].rpartition("/")[2]))


if __name__ == "__main__":  # kube/run.sh, before it leaves the network
    for wanted in FILES:
        print(fetch(wanted))
