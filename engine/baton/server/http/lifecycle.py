"""State of a node, drain included: what it does now, whether it takes requests, and what is left
before it can stop.

1. starting → loading (weights are being read) → ready; dead when a rank died or can no longer
   serve;
2. `ServerLifecycle.begin_drain`: new requests are refused with `draining`, those that run finish, a
   P node keeps its leases until the decode nodes have pulled them. POST /drain does that, and so
   does SIGTERM, which makes it final;
3. `ServerLifecycle.end_drain` (POST /undrain) takes requests again, unless the drain is final;
4. `ServerLifecycle.until_finished` waits until nothing is left; then the process can be stopped
   without a loss.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from baton.errors import Draining, EngineDead, EngineError, NotReady, QueueFull, WrongState
from baton.server.http.request_handler import RequestHandler
from baton.server.worker.client import RankClient, RankSet
from baton.server.worker.control import CountRemaining

log = logging.getLogger("baton.front")

ASK_SECS = 10.0
"""For a rank's answer to what it has left."""
POLL_SECS = 0.05
"""Between two looks at what the ranks have left: nothing announces to the front that D has
pulled.
"""
RETRY_SECS = 2
NONFINITE_IN_A_ROW = 3
"""Number of answers in a row that end in NaN or infinity and make the node unhealthy."""
NONFINITE_SECS = 30.0
"""Seconds until an unhealthy node is tried again; the next such answer makes it unhealthy at
once.
"""
PEERS_VALID_SECS = 30.0
"""A router probes each 5 s by default; a number that is older says nothing about now."""


class NodeState(enum.Enum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """State of the node with its reason."""

    state: NodeState
    reason: str | None = None
    """Short and stable, for people and probes; None in state ready."""
    refusal: EngineError | None = None
    """Error that refuses a request sent now; None: it is accepted."""


class ServerLifecycle:
    """The node's state. `answers` is set when the front can answer."""

    answers: RequestHandler

    def __init__(self, ranks: RankSet, mode: str = "null") -> None:
        """`mode`: --disaggregation-mode."""
        self._ranks = ranks
        self._mode = mode
        self._peers: tuple[int, float] | None = None
        """Ready peers as a router last reported them, and when."""
        self._drained_since: float | None = None
        self._final_reason: str | None = None
        self.is_loaded = False
        """All ranks have reported ready once."""
        self.bootstrap: Any = None
        """Bootstrap server of a P node (baton._native); when it stops, no D node finds the
        ranks.
        """

    # ---- state -----------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._drained_since is not None

    def condition(self) -> NodeCondition:
        """The state in force: death before drain, drain before loading."""
        ranks = self._ranks.ranks
        if dead := [r for r in ranks if r.dead is not None]:
            return self._dead(
                "rank_dead", f"rank {dead[0].dp_rank} of this engine is gone ({dead[0].dead})"
            )
        if ill := [r for r in ranks if r.stats.not_accepting_reason is not None]:
            rank = ill[0].dp_rank
            reason = ill[0].stats.not_accepting_reason
            return self._dead(
                "rank_failed",
                f"rank {rank} of this engine takes no new requests: {reason}; restart the node",
            )
        if self.bootstrap is not None and not self.bootstrap.healthy:
            return self._dead(
                "bootstrap_stopped",
                "the bootstrap server of this prefill node has stopped; restart the node",
            )
        if self.is_draining:
            return NodeCondition(NodeState.DRAINING, "draining", self._drain_refusal())
        if not self.is_loaded:
            ready = sum(r.ready for r in ranks)
            state = NodeState.LOADING if any(r.loading for r in ranks) else NodeState.STARTING
            count = f"{ready} of {len(ranks)} ranks are ready"
            refusal = NotReady(
                f"the model is loading: {count}, {self.load_progress:.0%} of the weights are in "
                "memory",
                retry_after_secs=RETRY_SECS,
            )
            return NodeCondition(state, f"loading {ready}/{len(ranks)}", refusal)
        return NodeCondition(NodeState.READY)

    def probe_condition(self) -> NodeCondition:
        """The state that probes read. Keeps routers away from a rank that computes NaN or infinity,
        for a while; requests are still accepted."""
        condition = self.condition()
        if condition.refusal is not None:
            return condition
        nonfinite = self._nonfinite_refusal()
        if nonfinite is None:
            return condition
        return NodeCondition(condition.state, "nonfinite_logits", nonfinite)

    def _nonfinite_refusal(self) -> EngineDead | None:
        since = time.monotonic() - NONFINITE_SECS
        for rank in self._ranks.ranks:
            if rank.nonfinite >= NONFINITE_IN_A_ROW and rank.nonfinite_at > since:
                return EngineDead(
                    f"the last {rank.nonfinite} answers of rank {rank.dp_rank} ended because the "
                    "model computed NaN or "
                    "infinity; check the checkpoint and --dtype, or restart the engine",
                    retry_after_secs=int(NONFINITE_SECS),
                )
        return None

    def refuse_if_not_accepting(self) -> None:
        """Raise the error that refuses a request sent now, if it is refused."""
        refusal = self.condition().refusal
        if refusal is not None:
            raise refusal

    def _dead(self, reason: str, why: str) -> NodeCondition:
        """A draining node that died says `draining` to requests: it is leaving, whatever else it
        is.
        """
        refusal = self._drain_refusal() if self.is_draining else EngineDead(why, retry_after_secs=5)
        return NodeCondition(NodeState.DEAD, reason, refusal)

    @staticmethod
    def _drain_refusal() -> Draining:
        return Draining(
            "this node is draining; send the request to another", retry_after_secs=RETRY_SECS
        )

    @property
    def load_progress(self) -> float:
        """Share of the weights that are in memory, 0 to 1, over all processes of the engine."""
        ranks = self._ranks.ranks
        return sum(r.load_progress for r in ranks) / len(ranks)

    # ---- peers -----------------------------------------------------------------------------------

    def note_ready_peers(self, header: str | None) -> None:
        """Remember the number that a router's probe carries; other probes carry none."""
        if header is not None and header.isascii() and header.isdigit() and len(header) < 10:
            self._peers = int(header), time.monotonic()

    @property
    def ready_peers(self) -> int | None:
        """Other ready workers that could take this one's requests; None: no router reported it
        lately.
        """
        if self._peers is None:
            return None
        count, reported_at = self._peers
        return count if time.monotonic() - reported_at < PEERS_VALID_SECS else None

    # ---- drain -----------------------------------------------------------------------------------

    def begin_drain(self, final_reason: str | None = None) -> None:
        """Refuse new requests from now on. Idempotent.

        Args:
            final_reason: why the process ends when all is finished; None: the drain can be undone.
        """
        if self._drained_since is None:
            self._drained_since = time.monotonic()
            log.info("draining: no new requests; %d in flight", self._ranks.in_flight)
        self._final_reason = self._final_reason or final_reason

    def end_drain(self) -> None:
        """Take requests again. Idempotent. Raises WrongState when the process is about to end."""
        if self._final_reason is not None:
            raise WrongState(
                f"this node cannot return to service: {self._final_reason}, and it exits when its "
                "work is finished; "
                "start it again"
            )
        if self._drained_since is not None:
            log.info(
                "drain undone after %.1f s: new requests are taken",
                time.monotonic() - self._drained_since,
            )
            self._drained_since = None

    async def report(self) -> dict[str, Any]:
        """The answer of /drain and /undrain. Raises EngineError when a living rank does not
        answer.
        """
        asked = [r for r in self._ranks.ranks if r.ready and r.dead is None]
        replies = await asyncio.gather(
            *(self._ranks.control(rank, CountRemaining(), ASK_SECS) for rank in asked)
        )
        now = time.monotonic()
        condition = self.condition()
        ages = [now - arrived for arrived in self.answers.arrivals.values()]
        ages += [age for reply in replies if (age := reply.result["oldest_secs"]) is not None]
        rooms = sum(reply.result["rooms"] for reply in replies)
        states: Counter[str] = (
            Counter()
        )  # requests on the ranks by scheduler state (baton_requests)
        for reply in replies:
            states.update(reply.result["requests"])
        requests = len(self.answers.arrivals)
        is_finished = not (requests or rooms or any(states.values()))
        return {
            "state": condition.state.value,
            "reason": condition.reason,
            "role": "regular" if self._mode == "null" else self._mode,
            "ready_peers": self.ready_peers,
            "is_final": self._final_reason is not None,
            "is_drained": self.is_draining and is_finished,
            "draining_secs": None
            if self._drained_since is None
            else round(now - self._drained_since, 3),
            "left": {
                "requests": requests,  # HTTP answers in progress
                "streams": self.answers.streams,  # those of them that are streams
                "waiting": states["waiting"] + states["opening"],
                "running": states["running"] + states["suspended"] + states["aborting"],
                "transfers": states["transfer"],
                "leases": states["leased"],
                # KV transfers that the runtimes of the ranks know and have not ended
                "rooms": rooms,
                "oldest_secs": round(max(ages), 3) if ages else None,
            },
        }

    async def until_finished(self) -> None:
        """Wait until no answer is in progress and no living rank has a request, lease or transfer
        left.
        """
        await self.answers.is_idle.wait()
        await asyncio.gather(
            *(self._until_rank_finished(r) for r in self._ranks.ranks if r.dead is None)
        )

    async def _until_rank_finished(self, rank: RankClient) -> None:
        """A P rank's answers are out before D has pulled the pages: wait until its books are
        empty.
        """
        try:
            while True:
                # A rank that has just become ready may not be connected in this direction yet: ask
                # again.
                try:
                    books = (await self._ranks.control(rank, CountRemaining(), ASK_SECS)).result
                    if not (books["rooms"] or any(books["requests"].values())):
                        return
                except QueueFull as err:
                    log.debug("rank %d: %s", rank.dp_rank, err.message)
                await asyncio.sleep(POLL_SECS)
        except EngineError as err:
            log.warning("rank %d did not drain: %s", rank.dp_rank, err.message)
