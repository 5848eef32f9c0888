"""One prompt, asked in many ways that must not matter: where it stands in the batch, what is cached, who disturbs it.

`Cluster` is one engine, or a prefill and a decode engine with a real transfer between them, behind one face. An `Arena`
adds what surrounds the probe: other prompts, a warmed cache, a disturbance.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.errors import WrongState
from baton.runtime.engine_loop import EngineLoop
from baton.sched.types.plan import TokenLogprobs
from baton.sched.types.request import FinishReason, Rendezvous, SamplingParams, ValidatedRequest
from tests.support.engines.engine_run import greedy, make_engine

_handles = itertools.count(10**6)


class Cluster:
    """route: one (a single process), shm or tcp (P and D with that transport)."""

    def __init__(self, path: Path | str, route: str = "one", **flags: object) -> None:
        self._pair: Any = None
        self._make_decode_node: Callable[[], Any] = lambda: None
        if route == "one":
            self.engines: list[EngineLoop] = [make_engine(path, **flags)]
        else:
            pair = pytest.importorskip(
                "tests.support.engines.pair",
                reason="needs the native module: make setup",
                exc_type=ImportError,
            )
            self._pair = pair.Pair(path, route, **flags)
            shared = {
                name: flag for name, flag in flags.items() if name not in ("p_more", "d_more")
            }
            d_flags: Any = shared | flags.get("d_more", {})  # type: ignore[operator]
            self._make_decode_node = lambda: pair.Half(path, "decode", route, **d_flags)
            self.engines = [self._pair.p.engine, self._pair.d.engine]
        self.got: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {}
        """By handle, one for each token."""
        self.ends: dict[int, FinishReason] = {}
        """Why answers ended, by handle."""
        self.suspended = 0
        """Suspensions that `suspend_at` has asked for and got."""

    @property
    def finished(self) -> set[int]:
        return set(self.ends)

    def submit(self, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> int:
        handle = next(_handles)
        meet = (
            None
            if self._pair is None
            else Rendezvous("127.0.0.1", self._pair.bootstrap.port, handle)
        )
        req = ValidatedRequest(
            handle, f"r{handle}", array("i", prompt), params, arrival=time.monotonic(), rendezvous=meet,
            priority=priority,
        )  # fmt: skip
        self.got[handle] = []
        self.logprobs[handle] = []
        for engine in self.engines:
            engine.submit(req)
        return handle

    def turn(self) -> None:
        """One turn of every engine; the client hears the last one. Waits for the wire when nothing else is to do."""
        busy = False
        for engine in self.engines:
            outputs, more = engine.step(time.monotonic())
            busy |= more
            for out in outputs:
                assert out.finish is not FinishReason.ERROR, out.error
                if engine is self.engines[-1]:
                    self.got[out.handle].extend(out.tokens)
                    self.logprobs[out.handle].extend([out.logprobs] * len(out.tokens))
                    self.cached[out.handle] = out.cached_tokens
                    if out.finish is not None:
                        self.ends[out.handle] = out.finish
        if not busy and self._pair is not None:
            self._pair.wait()

    def until(
        self, done: Callable[[], bool], disturb: Callable[[int], None] = lambda _: None
    ) -> None:
        for number in range(100_000):
            if done():
                return
            disturb(number)
            self.turn()
        raise AssertionError(
            f"no end in sight: {[engine.sched.report.counts() for engine in self.engines]}"
        )

    def rest(self) -> None:
        """Let everything end, and balance the books."""
        self.until(lambda: all(engine.sched.is_idle for engine in self.engines))
        for engine in self.engines:
            while engine.step(time.monotonic())[1]:
                pass
            engine.gauges()
            assert engine.not_accepting_reason is None

    def resume_all(self) -> None:
        for engine in self.engines:
            engine.sched.resume(list(self.got))

    def ask(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        handle = self.submit(prompt, params)
        self.until(lambda: handle in self.finished)
        self.rest()
        return self.got[handle]

    def replace_decode_node(self) -> None:
        """It dies, and another one is there."""
        self._pair.d.close()
        self._pair.d = self._make_decode_node()
        self.engines[-1] = self._pair.d.engine

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()
        else:
            self.engines[0].close()


class Arena:
    """Asks probes in a cluster; every method leaves it at rest."""

    def __init__(self, cluster: Cluster, others: Sequence[Sequence[int]]) -> None:
        self.cluster = cluster
        self.others = others

    def warm(self, prefix: str, probe: Sequence[int]) -> None:
        """cold: nothing of it is cached; part: its first four fifths; full: all of it."""
        for engine in self.cluster.engines:
            engine.sched.flush_cache()
        share = {"cold": 0, "part": len(probe) * 4 // 5, "full": len(probe)}[prefix]
        if share:
            self.cluster.ask(probe[:share], greedy(1))

    def ask(
        self,
        probe: Sequence[int],
        params: SamplingParams,
        place: str,
        disturb: Callable[[int], None],
    ) -> int:
        """The probe's handle; `place`: alone, first, middle or last of the batch."""
        cluster, half = self.cluster, len(self.others) // 2
        before = {"alone": 0, "first": 0, "middle": half, "last": len(self.others)}[place]
        behind = 0 if place == "alone" else len(self.others)
        noise = SamplingParams(max_new_tokens=params.max_new_tokens * 2, temperature=1.0, seed=1)
        for other in self.others[:before]:
            cluster.submit(other, noise)
        handle = cluster.submit(probe, params)
        for other in self.others[before:behind]:
            cluster.submit(other, noise)
        cluster.until(lambda: handle in cluster.finished, disturb)
        cluster.resume_all()
        cluster.rest()
        return handle


def preempt_at(cluster: Cluster, turn: int, prompt: Sequence[int]) -> Callable[[int], None]:
    """A far more important request arrives before turn `turn`."""

    def disturb(number: int) -> None:
        if number == turn:
            cluster.submit(prompt, greedy(3), priority=100)

    return disturb


SUSPENDED_TURNS = 3


def suspend_at(cluster: Cluster, turn: int) -> Callable[[int], None]:
    """An operator suspends everything that can be before turn `turn`, and lets it go on some turns later."""

    def disturb(number: int) -> None:
        if number == turn + SUSPENDED_TURNS:
            cluster.resume_all()
        if number != turn:
            return
        for engine in cluster.engines:
            for handle in cluster.got:
                with contextlib.suppress(WrongState):  # its KV is on the way, or leased
                    cluster.suspended += engine.sched.suspend([handle])

    return disturb
