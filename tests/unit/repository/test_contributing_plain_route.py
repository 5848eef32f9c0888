"""CONTRIBUTING.md's example of a plain route, followed in a copy of the packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.unit.repository.test_contributing import ROOT, code_of, insert

DESCRIBE = """
import json
from baton.server.http.openapi.document import openapi_document
from baton.server.http.routes.route import Server
print(json.dumps(openapi_document(Server.ENGINE)["paths"]["/state"]))
"""


def test_steps_of_the_plain_route_example_make_an_engine_answer(tmp_path: Path) -> None:
    # Bytecode goes along: it is that of a file with the same time and size.
    unneeded = shutil.ignore_patterns("*.so")
    for folder in ("engine/baton", "engine/baton_ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    for native in (ROOT / "engine/baton").glob("*.so"):
        (tmp_path / "engine/baton" / native.name).symlink_to(native)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "engine")}
    handler, row = code_of("a plain route")
    routes = tmp_path / "engine/baton/server/http/routes"
    insert(routes / "health.py", r"^async def show_liveness", handler + "\n\n")
    insert(
        routes / "table.py",
        r"^    \*fleet\.PROBES,",
        textwrap.indent(row.rstrip() + ",\n", "    "),
    )

    described = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(described.stdout)["get"]["summary"] == "State of this node"

    command = [sys.executable, "-c", "from baton_ops.cli.main import main; main()", "engine"]
    command += ["--simulate", "reference", "--port", "0", "--api-key", "secret"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as engine:
        try:
            check_state(engine)
        finally:
            engine.terminate()


def check_state(engine: subprocess.Popen[str]) -> None:
    assert engine.stdout is not None
    ready = next(line for line in engine.stdout if line.startswith("READY "))
    url = json.loads(ready.removeprefix("READY "))["url"]
    request = urllib.request.Request(f"{url}/state")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()
    assert refused.value.code == 401, "the row says nothing else: a client needs its key"
    request.add_header("authorization", "Bearer secret")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["state"] in ("starting", "loading", "ready")
