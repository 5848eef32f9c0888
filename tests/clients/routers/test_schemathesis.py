"""Schemathesis against the API as it is described: no server error, and answers as described."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.clients.environments import python_of
from tests.support.processes.cluster import Cluster

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
LEFT_OUT = {
    "engine": ("/drain", "/undrain", "/v1/kv_events", "/debug/diagnosis"),
    "router": ("/add_worker", "/remove_worker", "/workers", "/workers/{id}", "/ui/feed"),
}
"""Paths that end the service, do not end themselves, or connect to any address they are given."""


def run_schemathesis(url: str, server: str, folder: Path) -> None:
    command = [
        str(python_of("schemathesis").with_name("schemathesis")),
        "run",
        f"{url}/openapi.json",
        "--phases=examples,coverage,fuzzing",
        "--max-examples=10",
        "--seed=1",
        "--request-timeout=120",
        "--continue-on-failure",
        "--no-color",
        f"--checks={','.join(CHECKS)}",
        *(f"--exclude-path={path}" for path in LEFT_OUT[server]),
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_engine_answers_as_described(reference: str, tmp_path: Path) -> None:
    run_schemathesis(reference, "engine", tmp_path)


def test_router_answers_as_described(pair: Cluster, tmp_path: Path) -> None:
    run_schemathesis(pair.url, "router", tmp_path)
