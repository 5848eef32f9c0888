"""deploy/systemd: units that systemd accepts, hardened, with the grace periods and flags of the rest of deploy/.

The units were not run: where systemd-analyze is absent, only the comparisons are made.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.tests.programs import (
    DEPLOY,
    check_router_flags,
    engine_config,
    env_file,
    port_of,
    router_limits,
    router_memory,
    timing,
)

SYSTEMD = DEPLOY / "systemd"
UNITS = {"baton-router.service": "ROUTER", "baton-engine@.service": "ENGINE"}
EXPOSURE = 25
"""Highest exposure that `systemd-analyze security` may report, in tenths; without any hardening it is 96."""


def directives(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / unit).read_text().replace("\\\n", "").splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def command(unit: str, values: dict[str, str]) -> list[str]:
    """Words of ExecStart: ${NAME} stays one word, $NAME is split."""
    words = []
    for word in shlex.split(directives(unit)["ExecStart"][0]):
        if match := re.fullmatch(r"\$(\w+)", word):
            words += values[match[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], word))
    return words


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_killed_only_after_its_drain(unit: str) -> None:
    role = UNITS[unit]
    assert directives(unit)["TimeoutStopSec"] == [str(timing()[f"{role}_GRACE_SECONDS"])]
    assert env_file("systemd/baton.env.example")[f"{role}_DRAIN_SECONDS"] == str(
        timing()[f"{role}_DRAIN_SECONDS"]
    )
    assert timing()[f"{role}_GRACE_SECONDS"] >= timing()[f"{role}_DRAIN_SECONDS"] + 10


def test_router_accepts_the_command_of_its_unit() -> None:
    program, *args = command("baton-router.service", env_file("systemd/baton.env.example"))
    assert program.endswith("/baton-router")
    check_router_flags(args)
    assert f"--port={port_of('router', 'http')}" in args
    assert f"--health-port={port_of('router', 'health')}" in args
    assert f"--shutdown-grace-period-secs={timing()['ROUTER_DRAIN_SECONDS']}" in args


def test_router_has_the_memory_and_the_limits_of_the_manifests() -> None:
    assert directives("baton-router.service")["MemoryMax"] == [router_memory("G")]
    assert router_limits().items() <= env_file("systemd/baton.env.example").items()


def test_engines_accept_their_commands_and_are_where_the_router_looks() -> None:
    values = env_file("systemd/baton.env.example")
    router = command("baton-router.service", values)
    for role in ("prefill", "decode"):
        own = {**values, **env_file(f"systemd/engine-{role}.env.example")}
        program, name, *args = command("baton-engine@.service", own)
        assert (program, name) == ("/opt/baton/bin/baton", "engine")
        parsed = engine_config(args)
        assert parsed.disaggregation_mode == role
        assert parsed.kv_events_config
        assert parsed.drain_timeout_secs == timing()["ENGINE_DRAIN_SECONDS"]
        assert f"--{role}=http://{parsed.host}:{parsed.port}" in router
        if role == "prefill":
            assert parsed.port == port_of("prefill", "http")
            assert parsed.disaggregation_bootstrap_port == port_of("prefill", "bootstrap")
            assert parsed.transfer_port == port_of("prefill", "transfer")


def test_keys_are_empty_in_the_example_and_in_no_unit() -> None:
    keys = {
        name: value
        for name, value in env_file("systemd/baton.env.example").items()
        if "KEY" in name
    }
    assert keys == dict.fromkeys(
        ("BATON_CLUSTER_KEY", "BATON_API_KEY", "BATON_ROUTER_FLAG_CONTROL_PLANE_API_KEYS"), ""
    )
    for unit in UNITS:
        assert "KEY" not in (SYSTEMD / unit).read_text()


def require_systemd() -> str:
    return shutil.which("systemd-analyze") or pytest.skip(
        "systemd-analyze is not in PATH, so no unit was verified (Debian: systemd)"
    )


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, Path]:
    """Units as on a host that has the programs: systemd-analyze looks whether they exist."""
    paths = {}
    for unit in UNITS:
        text = re.sub(
            r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", (SYSTEMD / unit).read_text()
        )
        paths[unit] = tmp_path / unit.replace("@", "@prefill")
        paths[unit].write_text(text)
    return paths


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_knows_every_directive(installed: dict[str, Path], unit: str) -> None:
    done = subprocess.run(
        [require_systemd(), "verify", str(installed[unit])], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_misspelt_directive_is_found(installed: dict[str, Path]) -> None:
    path = installed["baton-router.service"]
    path.write_text(path.read_text().replace("ProtectSystem=", "ProtectSytem="))
    done = subprocess.run([require_systemd(), "verify", str(path)], capture_output=True, text=True)
    assert "ProtectSytem" in done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_hardened(unit: str) -> None:
    program = require_systemd()
    args = [
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={EXPOSURE}",
        str(SYSTEMD / unit),
    ]
    done = subprocess.run([program, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
