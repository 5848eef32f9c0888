"""The settings that deployments share, and questions to our programs about their arguments."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from baton import config

DEPLOY = Path(__file__).parents[1]


def timing() -> dict[str, int]:
    """Numbers of kubernetes/base/config.env, which all deployments follow."""
    return {
        name: int(value)
        for name, value in env_file("kubernetes/base/config.env").items()
        if value.isdigit()
    }


def router_limits() -> dict[str, str]:
    """Variables of config.env that limit the memory that a router uses for its clients."""
    return {
        name: value
        for name, value in env_file("kubernetes/base/config.env").items()
        if name.startswith("BATON_ROUTER_FLAG_")
    }


def router_memory(giga: str) -> str:
    """ROUTER_MEMORY of config.env with the unit that another system has for 2**30 bytes."""
    memory = env_file("kubernetes/base/config.env")["ROUTER_MEMORY"]
    assert memory.endswith("Gi"), memory
    return memory.removesuffix("Gi") + giga


def env_file(path: str | Path) -> dict[str, str]:
    lines = (DEPLOY / path).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def port_of(role: str, name: str) -> int:
    """Port of a row of ports.yaml."""
    rows = yaml.safe_load((DEPLOY / "ports.yaml").read_text())
    return next(int(row["port"]) for row in rows if (row["to"], row["name"]) == (role, name))


def engine_config(args: Sequence[str]) -> Any:
    """Return what `baton engine ARGS` parses, or fail with its message."""
    errors = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(errors),
            mock.patch.dict(os.environ, {"BATON_CLUSTER_KEY": "x" * 32}),
        ):
            return config.parse_config(list(args))
    except SystemExit:
        raise AssertionError(f"baton engine {' '.join(args)}: {errors.getvalue()}") from None


def check_router_flags(args: Sequence[str]) -> None:
    """Fail with the router's message if it does not accept these flags."""
    command = [sys.executable, "-m", "baton_ops.cli", "router", *args, "--print-flags"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"baton-router {' '.join(args)}: {done.stderr}"
