"""A prefill and a decode engine in one process, with real transfer runtimes between them (sockets, shared memory)."""

from __future__ import annotations

import itertools
import json
import select
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from baton._native import BootstrapServer, TransferNode

from baton.config import build_config
from baton.disagg.calls import GroupIds
from baton.disagg.native_node import NativeTransferNode
from baton.disagg.transfer_driver import DecodeTransferDriver, PrefillTransferDriver
from baton.runtime import build as runtime
from baton.runtime.communicators import make_backend
from baton.runtime.engine_loop import EngineLoop
from baton.runtime.simulated.engine import SimLoaded, load_simulated
from baton.sched.types.request import FinishReason, Rendezvous, SamplingParams, ValidatedRequest
from tests.support.devices.stand_in import StandIn

_rooms = itertools.count(1000)
TIMEOUT_SECS = 30.0


def next_room() -> int:
    """A room that no pair of this process has used."""
    return next(_rooms)


class Half:
    """One engine with its transfer node."""

    def __init__(
        self,
        path: Path | str,
        role: str,
        transport: str,
        settings: dict[str, Any] | None = None,
        wrap: Callable[[Any], Any] | None = None,
        stand_in: StandIn | None = None,
        **flags: object,
    ) -> None:
        """`settings`: over the transfer node's; `wrap`: what to put around the maker of communicators; `stand_in`: the
        device that has the pages. With the flag `simulate` there is no model at `path`."""
        values: dict[str, object] = {
            "page_size": 4, "max_total_tokens": 2048, "chunked_prefill_size": 64, "disaggregation_mode": role,
            "disaggregation_transfer_backend": transport,
        }  # fmt: skip
        loaded: runtime.LoadedModel | SimLoaded
        if "simulate" in flags:
            config = build_config({**values, **flags})
            loaded = load_simulated(config)
        else:
            values |= {"model_path": str(path), "dtype": "float32", "cpu_threads": 1}
            config = build_config({**values, **flags})
            with nullcontext() if stand_in is None else stand_in.used():
                loaded = runtime.load_rank(config, str(path))
        node_settings = {
            "role": role, "host": "127.0.0.1", "advertise_host": "127.0.0.1", "port": 0, "transports": [transport],
            "cluster_key": None, "layout": loaded.layout, "dp_rank": 0, "dp_size": 1, "lease_ms": 30000,
            "heartbeat_ms": 1000, "copy_threads": 1, "fault": None, **(settings or {}),
        }  # fmt: skip
        backend = make_backend(config, "127.0.0.1", node_settings["transports"])
        if backend is not None and wrap is not None:
            backend = wrap(backend)
        self.native: Any = loaded.native_pool
        self.node = NativeTransferNode(
            TransferNode(self.native, json.dumps(node_settings), backend)
        )
        watched = self.node if stand_in is None else stand_in.watched(self.node)
        groups = GroupIds.of(loaded.layout)
        if role == "prefill":
            self.engine: EngineLoop = loaded.make_engine_loop(
                PrefillTransferDriver(watched, TIMEOUT_SECS, groups)
            )
        else:
            self.engine = loaded.make_engine_loop(
                DecodeTransferDriver(watched, TIMEOUT_SECS, groups, loaded.vocab_size)
            )
        self.got: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.finished: set[int] = set()
        self.takes_errors = False
        """Requests may end with an error: `errors` has it."""
        self.errors: dict[int, str] = {}

    def turn(self) -> bool:
        outputs, busy = self.engine.step(time.monotonic())
        for out in outputs:
            if out.finish is FinishReason.ERROR:
                assert self.takes_errors, out.error
                self.errors[out.handle] = str(out.error)
            self.got.setdefault(out.handle, []).extend(out.tokens)
            self.cached[out.handle] = out.cached_tokens
            if out.finish is not None:
                self.finished.add(out.handle)
        return busy

    def close(self) -> None:
        self.node.close()
        self.engine.close()


class Pair:
    def __init__(
        self,
        path: Path | str,
        transport: str,
        p_more: dict[str, Any] | None = None,
        d_more: dict[str, Any] | None = None,
        **flags: object,
    ) -> None:
        """`p_more`, `d_more`: further arguments of one half."""
        self.bootstrap: Any = BootstrapServer("127.0.0.1", 0, None)
        self.p = Half(path, "prefill", transport, **(p_more or {}), **flags)
        self.d = Half(path, "decode", transport, **(d_more or {}), **flags)
        self._disturb: Callable[[Half], None] | None = None
        self.p.node.register("127.0.0.1", self.bootstrap.port, 5000)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        disturb: Callable[[Half, list[int]], None] | None = None,
    ) -> list[list[int]]:
        """Answer of the D half to each prompt, all at once; `disturb`: called with each half before its turns."""
        rooms = self.submit(prompts, params)
        self._disturb = None if disturb is None else lambda half: disturb(half, rooms)
        self.until(lambda: self.d.finished.issuperset(rooms))
        self.until(lambda: self.p.engine.sched.is_idle and self.d.engine.sched.is_idle)
        for half in (self.p, self.d):
            half.engine.gauges()
            assert half.engine.not_accepting_reason is None
        return [self.d.got[room] for room in rooms]

    def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[int]:
        """Give each prompt to both halves; their rooms, by which the engines know them."""
        rooms = [next_room() for _ in prompts]
        for room, prompt in zip(rooms, prompts, strict=True):
            meet = Rendezvous("127.0.0.1", self.bootstrap.port, room)
            req = ValidatedRequest(
                room,
                f"r{room}",
                array("i", prompt),
                params,
                arrival=time.monotonic(),
                rendezvous=meet,
            )
            self.p.engine.submit(req)
            self.d.engine.submit(req)
        return rooms

    def until(self, done: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_SECS
        while not done():
            assert time.monotonic() < deadline, (
                self.p.engine.sched.report.counts(),
                self.d.engine.sched.report.counts(),
            )
            busy = []
            for half in (self.p, self.d):
                if self._disturb is not None:
                    self._disturb(half)
                busy.append(half.turn())
            if not any(busy) and self._disturb is None:
                self.wait()

    def wait(self) -> None:
        """Until one of the transfer runtimes has events."""
        select.select([self.p.node.event_fd, self.d.node.event_fd], [], [], 0.5)

    def pulled(self) -> dict[str, Any]:
        return dict(json.loads(self.d.node.stats_json())["counters"])

    def close(self) -> None:
        self.p.close()
        self.d.close()
        self.bootstrap.stop()
