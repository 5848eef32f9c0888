"""Processes of a tensor-parallel group: `load_first_rank` in the first rank, `run_executor` in the
others.

Their life cycle is in channel.py.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from baton.config import EngineConfig
from baton.disagg.events import NodeEvent, RoomCommitted
from baton.disagg.native_node import NativeTransferNode
from baton.server.text import model_info
from baton.server.worker import transfer_setup
from baton.server.worker.rank_config import BootstrapAddress
from baton.server.worker.tensor_parallel import channel, transfer_node
from baton.server.worker.tensor_parallel.calls import call_decoder
from baton.server.worker.tensor_parallel.channel import (
    OrderKind,
    TpExecutors,
    TpGroup,
    TransferEvents,
    encode_report,
)

if TYPE_CHECKING:
    from baton.runtime.build import LoadedModel

log = logging.getLogger("baton.tp")


def load_first_rank(
    config: EngineConfig,
    group: TpGroup,
    context: zmq.Context[Any],
    on_progress: Callable[[int, int], None],
) -> tuple[LoadedModel, TpExecutors]:
    """Load the first rank's share, and wait until the others have theirs. Raises what engine.load
    raises.
    """
    from baton.layers.collectives import TpContext
    from baton.layers.shard import Shard
    from baton.runtime import build  # torch: seconds, and half a gigabyte

    executors = TpExecutors(context, group, config.dist_timeout)
    place = TpContext(Shard(0, group.tp_size), group.meeting_point, executors.send_step)
    loaded = build.load_rank(config, str(model_info.resolve(config.model_path)), place, on_progress)
    executors.await_loaded(loaded)
    return loaded, executors


def run_executor(
    config: EngineConfig,
    group: TpGroup,
    context: zmq.Context[Any],
    bootstrap: BootstrapAddress | None,
    on_progress: Callable[[int, int], None],
) -> None:
    """Load this rank's share and execute orders until the stop order. An exception ends the
    process, and the group.
    """
    from baton.layers import collectives
    from baton.layers.shard import Shard
    from baton.runtime import build

    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # a service manager signals every process; the first rank decides
    orders = context.socket(zmq.PULL)
    reports = context.socket(zmq.PUSH)
    orders.connect(group.address(group.tp_rank))
    reports.connect(group.address(0))
    shard = Shard(group.tp_rank, group.tp_size)
    place = collectives.TpContext(shard, group.meeting_point, receive=lambda: orders.recv()[1:])
    loaded = build.load_rank(config, str(model_info.resolve(config.model_path)), place, on_progress)
    node = None
    if config.disaggregation_mode != "null":
        node = transfer_setup.start(
            config, loaded.native_pool, loaded.layout, group.dp_rank, group.tp_rank, bootstrap
        )
    reports.send(
        encode_report(
            channel.LoadedReport(group.tp_rank, os.getpid(), loaded.kv.num_pages, loaded.host_pages)
        )
    )
    _execute(group, loaded, node, orders, reports)
    log.info("rank %d of %d stops", group.tp_rank, group.tp_size)
    if node is not None:
        node.close()
    collectives.leave_group()


def _execute(
    group: TpGroup,
    loaded: LoadedModel,
    node: NativeTransferNode | None,
    orders: zmq.Socket[bytes],
    reports: zmq.Socket[bytes],
) -> None:
    """Run until the stop order."""
    poller = zmq.Poller()
    poller.register(orders, zmq.POLLIN)
    if node is not None:
        poller.register(node.event_fd, zmq.POLLIN)
    # Each poll of the transfer runtime reports progress to its peers; without a runtime, nothing
    # wakes the rank.
    timeout_ms = channel.ALIVE_EVERY_MS if node is not None else None
    is_healthy = True
    while True:
        poller.poll(timeout_ms)
        while node is not None and (events := node.poll(channel.EVENTS_AT_ONCE)):
            reported = [_without_payload(event) for event in events]
            reports.send(encode_report(TransferEvents(group.tp_rank, reported)))
        if node is not None and is_healthy and not node.is_healthy:
            is_healthy = False
            reports.send(
                encode_report(
                    TransferEvents(
                        group.tp_rank, [], json.loads(node.stats_json())["unhealthy_reason"]
                    )
                )
            )
        try:
            message = orders.recv(zmq.DONTWAIT)
        except zmq.Again:
            continue
        body = message[1:]
        match OrderKind(message[:1]):
            case OrderKind.STOP:
                return
            case OrderKind.STEP:
                loaded.runner.execute_remote(body)
            case OrderKind.CALL:
                assert node is not None, "calls of a transfer runtime reach ranks of P and D only"
                refused = transfer_node.execute_call(node, group, call_decoder.decode(body))
                if refused is not None:
                    reports.send(encode_report(TransferEvents(group.tp_rank, [refused])))


def _without_payload(event: NodeEvent) -> NodeEvent:
    """P's message reaches the scheduler from the first rank alone."""
    if isinstance(event, RoomCommitted):
        return msgspec.structs.replace(event, payload=b"")
    return event
