"""CONTRIBUTING.md's example of a rank's metric, followed in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.unit.repository.test_contributing import ROOT, code_of, insert

EXPORT = """
from baton import config
from baton.sched.setup import from_config
from baton.server.observability.metrics import EngineMetrics
from baton.server.worker.messages import StatsMessage
from tests.support.sched.sched_sim import Node, request

now = 0.0
limits = from_config.limits(
    config.parse_config(["--max-running-requests", "1", "--page-size", "4"]), 64
)
node = Node(limits, depth=1, clock=lambda: now)
for handle in range(2):
    node.sched.add(request(handle, [handle + 1] * 4, 9, ignore_eos=True))
for now in (1.0, 3.0):
    node.step()
    node.absorb()
stats = node.sched.stats
metrics = EngineMetrics()
metrics.report(StatsMessage(0, stats.gauges(), stats.counters(), stats.histograms()))
print(metrics.text().decode())
"""


def test_steps_of_the_rank_metric_example_make_a_metric(tmp_path: Path) -> None:
    # Bytecode goes along: it is that of a file with the same time and size.
    unneeded = shutil.ignore_patterns("*.so")
    for folder in ("engine/baton", "tests/support/sched", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    for native in (ROOT / "engine/baton").glob("*.so"):
        (tmp_path / "engine/baton" / native.name).symlink_to(native)
    for name in ("tests/__init__.py", "tests/support/__init__.py", "tests/support/probes.py"):
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'engine'}:{tmp_path}"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    method, member, row = code_of("a metric of a rank")
    collector = tmp_path / "engine/baton/sched/metrics/collector.py"
    metrics = tmp_path / "engine/baton/server/observability/metrics.py"
    insert(collector, r"^    def gauges\(self\)", textwrap.indent(method, "    ") + "\n")
    insert(collector, r"^            \*\*\{f.starving_requests", member)
    insert(metrics, r"^\)\n\n_FAMILIES = ", textwrap.indent(row.rstrip() + ",\n", "    "))

    exported = run("-c", EXPORT)
    name = "baton_longest_wait_seconds"
    help_text = "time that the first of the waiting requests has waited"
    assert f"# HELP {name} {help_text}\n" in exported
    assert f'{name}{{dp_rank="0"}} 2.0\n' in exported
    tables = run("-m", "baton.server.observability.metrics")
    assert f"| `{name}` | gauge | - | {help_text} |\n" in tables
