"""Kills of decode nodes while a client's answer is under way."""

from __future__ import annotations

from dataclasses import dataclass

from tests.e2e.failover.test_failover import kill_busy, resumed
from tests.support.processes.cluster import Cluster, eventually


@dataclass
class DecodeKills:
    """Test's side of `interrupted_answer` in scripts/conversation.py."""

    cluster: Cluster
    resumed_before: float = 0.0
    killed: int | None = None
    restarts: int = 0

    def reply(self, signal: str) -> str:
        """Act on a script's signal, and return what the script is answered."""
        if signal == "ready":
            self.await_nodes()
            self.resumed_before = resumed(self.cluster)
        elif signal == "streaming":
            self.kill()
        elif signal == "streamed":
            return "resumed" if resumed(self.cluster) > self.resumed_before else "again"
        else:
            raise AssertionError(f"unknown signal {signal!r}")
        return "go"

    def kill(self) -> None:
        """Kill the decode node that has a request, if one has."""
        restarts = [self.cluster.node("decode", i)["restarts"] for i in (0, 1)]
        self.killed = kill_busy(self.cluster)
        if self.killed is not None:
            self.restarts = restarts[self.killed] + 1

    def await_nodes(self) -> None:
        """Until the node that was killed is back, and the router may choose every node."""
        if self.killed is not None:
            self.cluster.await_restart("decode", self.killed, self.restarts)
            self.killed = None
        eventually(
            "the router has all nodes",
            lambda: {node["url"] for node in self.cluster.state["nodes"]} <= self.cluster.ready(),
        )
