"""Engine of `baton up`: its role, its ports and its command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from baton.config import SECRETS
from baton.config.flags import flag_name
from baton.config.groups.steps import SpeculationFlags
from baton_ops.launch.cluster_plan import MODE, ClusterPlan
from baton_ops.launch.supervisor import ChildProcess

NOT_FOR_PREFILL = frozenset(f.name for f in fields(SpeculationFlags))
"""Flags about answers, which a prefill node does not compute: it refuses them."""


@dataclass
class ClusterNode:
    """Engine of the cluster.

    Ports are 0 until it has reported those it got; from then on it keeps them.
    """

    role: str
    name: str
    plan: ClusterPlan
    port: int = 0
    health_port: int = 0
    bootstrap_port: int = 0
    child: ChildProcess = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health_url(self) -> str:
        """URL of its probes, on a port that clients cannot fill."""
        return f"http://127.0.0.1:{self.health_port}/health"

    @property
    def pid(self) -> int:
        return self.child.pid

    def argv(self) -> list[str]:
        node_flags = {
            "host": "127.0.0.1",
            "port": self.port,
            "health_port": self.health_port,
            "disaggregation_mode": MODE[self.role],
        }
        if self.role == "prefill":
            node_flags["disaggregation_bootstrap_port"] = self.bootstrap_port
        threads = (
            {}
            if "simulate" in self.plan.engine
            else {"cpu_threads": max(1, _count_cores() // self.plan.processes)}
        )
        # An engine refuses flags about what its role does not do.
        unused = NOT_FOR_PREFILL if self.role == "prefill" else frozenset()
        shared = {
            name: value
            for name, value in self.plan.engine.items()
            if name not in SECRETS and name not in unused
        }
        flags = command_words({**node_flags, **threads, **self.plan.gpu_share, **shared})
        return [sys.executable, "-m", "baton_ops.cli", "engine", *flags, *self.plan.args[self.role]]


def command_words(flags: Mapping[str, object]) -> list[str]:
    """Command line of flags by their field names; the value of a switch is True."""
    named = ((flag_name(name), value) for name, value in flags.items())
    return [
        word for flag, value in named for word in ([flag] if value is True else [flag, str(value)])
    ]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))
