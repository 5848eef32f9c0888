"""Scheduler and cache import with every clock, socket and tensor library blocked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import baton

PACKAGES = ["baton.sched", "baton.cache", "baton.sched.types.request"]

SCRIPT = """
import importlib, importlib.abc, pathlib, pkgutil, sys
for name in [m for m in sys.modules if m.partition(".")[0] in {blocked!r}]:
    del sys.modules[name]
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r} or name == "baton._native":
            raise ImportError("a pure package imported " + name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {root!r})
seen = []
for name in {packages!r}:
    package = importlib.import_module(name)
    seen.append(name)
    for info in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        importlib.import_module(info.name)
        seen.append(info.name)
print("\\n".join(seen))
"""

BLOCKED = (
    "torch",
    "numpy",
    "zmq",
    "aiohttp",
    "msgspec",
    "asyncio",
    "time",
    "_time",
    "socket",
    "_socket",
    "threading",
)


def import_packages(
    packages: list[str], blocked: tuple[str, ...] = BLOCKED
) -> subprocess.CompletedProcess[str]:
    root = str(Path(baton.__file__).parents[1])
    script = SCRIPT.format(blocked=blocked, root=root, packages=packages)
    return subprocess.run(
        [sys.executable, "-I", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_packages_import_without_torch_sockets_or_clocks() -> None:
    done = import_packages(PACKAGES)
    assert done.returncode == 0, done.stderr
    assert {"baton.cache.radix", "baton.sched.types.request"} <= set(done.stdout.split())


def test_block_itself_works() -> None:
    """`messages` needs msgspec: were the blocker broken, this would import."""
    done = import_packages(["baton.server.worker.messages"])
    assert done.returncode != 0
    assert "a pure package imported msgspec" in done.stderr
