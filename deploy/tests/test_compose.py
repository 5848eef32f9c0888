"""deploy/compose: resolved as compose does, and compared with ports.yaml, the grace periods and our programs' flags."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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

COMPOSE = DEPLOY / "compose"
OURS = ("router", "prefill", "decode", "prefill-gpu", "decode-gpu")
ENGINES = OURS[1:]


def resolve(text: str, values: dict[str, str]) -> str:
    """Replace ${NAME}, ${NAME:-default} and ${NAME:?message}, as compose does; $$ stands for $."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, kind, rest = match["name"], match["kind"], match["rest"]
        if values.get(name):
            return values[name]
        assert kind == ":-", f"${{{name}}} has no value: {rest}"
        return rest

    return re.sub(r"\$\$|\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)


def filled() -> dict[str, str]:
    """.env.example with a key wherever it asks for one."""
    return {
        name: value or "key-of-a-test" for name, value in env_file("compose/.env.example").items()
    }


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(
        yaml.safe_load(resolve((COMPOSE / "compose.yaml").read_text(), filled()))["services"]
    )


def test_compose_refuses_to_start_without_keys() -> None:
    empty = {name for name, value in env_file("compose/.env.example").items() if not value}
    assert empty == {"BATON_API_KEY", "BATON_ADMIN_KEY", "BATON_CLUSTER_KEY", "GRAFANA_PASSWORD"}
    text = (COMPOSE / "compose.yaml").read_text()
    for name in empty:
        with pytest.raises(AssertionError, match=name):
            resolve(text, {**filled(), name: ""})


def test_every_variable_is_in_the_example_or_has_a_default() -> None:
    names = set(re.findall(r"\$\{(\w+):\?", (COMPOSE / "compose.yaml").read_text()))
    assert names <= env_file("compose/.env.example").keys()


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_profile_is_router_one_pair_and_monitoring(services: dict[str, Any], profile: str) -> None:
    assert env_file("compose/.env.example")["COMPOSE_PROFILES"] == "cpu"
    started = {name: s for name, s in services.items() if profile in s.get("profiles", [profile])}
    roles = {
        alias
        for s in started.values()
        for alias in s.get("networks", {}).get("default", {}).get("aliases", ())
    }
    assert roles == {"prefill", "decode"}
    assert {"router", "prometheus", "grafana"} <= started.keys()
    assert len(started) == 5


def test_router_accepts_its_flags_and_finds_the_engines(services: dict[str, Any]) -> None:
    command = services["router"]["command"]
    check_router_flags(command)
    for role in ("prefill", "decode"):
        assert f"--{role}=http://{role}:{port_of(role, 'http')}" in command
    port = port_of("router", "http")
    assert f"--port={port}" in command
    assert services["router"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    health = port_of("router", "health")
    assert f"--health-port={health}" in command
    assert f"/dev/tcp/127.0.0.1/{health} " in services["router"]["healthcheck"]["test"][-1]
    assert f"--shutdown-grace-period-secs={timing()['ROUTER_DRAIN_SECONDS']}" in command


def test_router_has_the_memory_and_the_limits_of_the_manifests(services: dict[str, Any]) -> None:
    router = services["router"]
    assert router["mem_limit"] == router_memory("g")
    (settings,) = router["env_file"]
    assert router_limits().items() <= env_file(COMPOSE / settings).items()
    assert not router_limits().keys() & router["environment"].keys()


@pytest.mark.parametrize("name", ENGINES)
def test_engine_accepts_its_flags_and_uses_the_common_ports(
    services: dict[str, Any], name: str
) -> None:
    role, _, gpu = name.partition("-")
    command = services[name]["command"]
    assert command[0] == "engine"
    parsed = engine_config(command[1:])
    assert parsed.disaggregation_mode == role
    assert parsed.port == port_of(role, "http")
    assert parsed.health_port == port_of(role, "health")
    assert f":{parsed.health_port}/readyz" in services[name]["healthcheck"]["test"][-1]
    assert parsed.drain_timeout_secs == timing()["ENGINE_DRAIN_SECONDS"]
    if role == "prefill":
        assert parsed.disaggregation_bootstrap_port == port_of("prefill", "bootstrap")
        assert parsed.transfer_port == port_of("prefill", "transfer")
        assert parsed.kv_advertise_host == "prefill"
    assert parsed.device == ("cuda" if gpu else "cpu")
    assert ("deploy" in services[name]) is bool(gpu)
    assert services[name]["environment"]["BATON_CLUSTER_KEY"] == "key-of-a-test"


@pytest.mark.parametrize("name", OURS)
def test_containers_are_hardened_and_stopped_after_their_drain(
    services: dict[str, Any], name: str
) -> None:
    service = services[name]
    assert service["user"] == "65532:65532"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    grace = timing()["ROUTER_GRACE_SECONDS" if name == "router" else "ENGINE_GRACE_SECONDS"]
    assert service["stop_grace_period"] == f"{grace}s"


def test_no_image_is_latest_and_ours_have_this_version(services: dict[str, Any]) -> None:
    version = re.search(r'^version = "(.+)"$', (DEPLOY.parent / "Cargo.toml").read_text(), re.M)
    assert version
    for name, service in services.items():
        image, _, tag = service["image"].partition(":")
        assert tag not in ("", "latest"), name
        if image.startswith("baton-"):
            assert tag == version[1]


def test_mounted_files_exist(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if (
                source.startswith(".")
                and source != env_file("compose/.env.example")["BATON_MODEL_DIR"]
            ):
                assert (COMPOSE / source).exists(), source


def test_podman_compose_resolves_the_file(tmp_path: Path) -> None:
    if shutil.which("podman-compose") is None or shutil.which("podman") is None:
        pytest.skip(
            "podman and podman-compose are not in PATH: compose.yaml was resolved by this test's own code only"
        )
    values = tmp_path / "env"
    values.write_text("".join(f"{name}={value}\n" for name, value in filled().items()))
    for profile in ("cpu", "gpu"):
        command = [
            "podman-compose",
            "--env-file",
            str(values),
            "--profile",
            profile,
            "-f",
            "compose.yaml",
            "config",
        ]
        done = subprocess.run(
            command, cwd=COMPOSE, capture_output=True, text=True, timeout=60, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        assert "WARN" not in done.stderr
