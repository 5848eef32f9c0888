"""A rank of a simulated engine: the production loop, scheduler and transfer before a device that
only takes time.

1. `load` stands in for runtime.build.load: no torch, no model, pages of a few bytes;
2. the rank process (server.worker.process) drives it like any other: messages, reports, events,
   rooms;
3. on a P node `PacedTransfer` tells D of a finished prompt when a link of the modeled speed would
   have carried its pages. They do travel, through the real transfer runtime, but they are too small
   for their time to count.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from baton.config import EngineConfig
from baton.config.simulated import CONTEXT_LENGTH, PAGE_BYTES, VOCAB_SIZE, Simulated, parse_device
from baton.disagg.calls import AbortCall, FinishCall, TransferCall
from baton.disagg.events import NodeEvent
from baton.disagg.transfer_driver import TransferDriver, TransferNode
from baton.errors import ConfigError
from baton.layers.kv_spec import GroupDescriptor, KVSpec
from baton.runtime.engine_loop import EngineLoop, PoolSizes, make_engine
from baton.runtime.grammar.waiting import GrammarQueue
from baton.runtime.simulated.device import SimRunner, answer_tokens

log = logging.getLogger("baton.sim")


@dataclass(frozen=True, slots=True)
class SimLoaded:
    """Simulated counterpart of runtime.build.LoadedModel."""

    config: EngineConfig
    simulated: Simulated
    num_pages: int
    native_pool: Any
    kv_spec: KVSpec
    layout: dict[str, Any]
    info: dict[str, object]
    vocab_size: ClassVar[int] = VOCAB_SIZE

    def make_engine_loop(
        self,
        driver: TransferDriver | None = None,
        trace: Callable[[str], None] | None = None,
        grammars: GrammarQueue | None = None,
    ) -> EngineLoop:
        """`grammars`: not used, simulated answers follow none."""
        refusing = GrammarQueue(None, "a simulated engine has no model that could follow a grammar")
        announced = self.native_pool if self.config.disaggregation_mode == "prefill" else None
        runner = SimRunner(self.simulated, answer_tokens(self.config), announced)
        return make_engine(
            self.config,
            PoolSizes(self.num_pages, 0, PAGE_BYTES),
            runner,
            driver,
            trace,
            grammars=refusing,
        )

    def pace_transfer(self, node: TransferNode) -> TransferNode:
        """The transfer runtime as a P node's driver should see it."""
        return PacedTransfer(node, self.simulated, self.config.page_size)


def load_simulated(config: EngineConfig) -> SimLoaded:
    """Raises ConfigError."""
    assert config.simulate is not None, "only called with --simulate"
    simulated = parse_device(config.simulate)
    num_pages = config.max_total_tokens // config.page_size
    pool = None
    if config.disaggregation_mode != "null":
        try:
            from baton._native import KvPool
        except ImportError as err:
            raise ConfigError(
                f"--disaggregation-mode {config.disaggregation_mode} needs the native extension "
                f"({err}); build it with maturin"
            ) from err
        pool = KvPool(num_pages, PAGE_BYTES)
    tokens = num_pages * config.page_size
    kv_spec = _page_groups(config.page_size)
    layout = kv_spec.layout("simulated")
    info: dict[str, object] = {
        "max_total_num_tokens": tokens,
        "context_length": min(config.context_length or CONTEXT_LENGTH, tokens),
        "kv_pool_bytes": num_pages * PAGE_BYTES,
        "num_pages": num_pages,
        "host_pages": 0,
        "dtype": "simulated",
        "num_parameters": 0,
        "cpu_threads": 0,
        "device": f"simulated: {config.simulate}",
        "layout": layout,
    }
    log.info(
        "simulating %s: pool of %d pages x %d tokens", config.simulate, num_pages, config.page_size
    )
    return SimLoaded(config, simulated, num_pages, pool, kv_spec, layout, info)


def _page_groups(page_size: int) -> KVSpec:
    """Pages whose bytes mean nothing."""
    group = GroupDescriptor(
        id=0,
        kind="full",
        layers=((0, 1),),
        heads=((0, 1),),
        dims="simulated",
        dtype="simulated",
        page_tokens=page_size,
        page_bytes=PAGE_BYTES,
        retain="all",
        shape=(PAGE_BYTES,),
    )
    return KVSpec((group,))


class PacedTransfer:
    """A P node's TransferNode whose `FinishCall` takes effect after the modeled time of the
    transfer.
    """

    def __init__(self, node: TransferNode, simulated: Simulated, page_size: int) -> None:
        self._node = node
        self._simulated = simulated
        self._page_size = page_size
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, int]] = []
        """(when, order, room), soonest first."""
        self._waiting: dict[int, FinishCall] = {}
        """By room; an aborted room is not in it."""
        self._order = itertools.count()
        self._error: Exception | None = None
        self.stopped = threading.Event()
        """An end could not be reported; `poll` raises why."""
        threading.Thread(target=self._run_due, name="paced-transfer", daemon=True).start()

    def call(self, call: TransferCall) -> None:
        """Calls other than `FinishCall` take effect at once."""
        match call:
            case FinishCall():
                self._delay(call)
                return
            case AbortCall():
                with self._changed:
                    self._waiting.pop(call.room, None)
        self._node.call(call)

    def _delay(self, call: FinishCall) -> None:
        pages = call.groups[0]  # the first group has every token of the prompt
        tokens = (pages.total_pages - 1) * self._page_size + pages.last_page_tokens
        tokens *= self._simulated.length_scale
        due_at = (
            time.monotonic()
            + self._simulated.model.transfer_seconds(tokens) / self._simulated.speed
        )
        with self._changed:
            self._waiting[call.room] = call
            heapq.heappush(self._due, (due_at, next(self._order), call.room))
            self._changed.notify()

    def poll(self, max: int) -> Sequence[NodeEvent]:
        if self._error is not None:
            raise self._error
        return self._node.poll(max)

    def _run_due(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                room = heapq.heappop(self._due)[2]
                call = self._waiting.pop(room, None)
            if call is None:
                continue
            try:
                self._node.call(call)
            except Exception as err:  # noqa: BLE001 - the rank's thread raises it at its next poll
                self._error = err
                self.stopped.set()
                return
