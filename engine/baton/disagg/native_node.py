"""baton._native.TransferNode with signatures, and with structs in the place of its tuples."""

from __future__ import annotations

from typing import Any, Protocol, get_args

from msgspec.structs import astuple

from baton.disagg.calls import TransferCall
from baton.disagg.events import NodeEvent, read_event
from baton.disagg.transfer_driver import TransferNode


class TransferRuntime(TransferNode, Protocol):
    """TransferNode of a driver, and the calls of the rank process beside those of the driver."""

    @property
    def event_fd(self) -> int:
        """Readable while `poll` has events."""

    def rooms_json(self, room: int | None = None) -> str: ...
    def stats_json(self) -> str: ...
    def close(self) -> None: ...


class NativeTransferNode:
    """The transfer runtime of this process. See the docstrings of baton._native.TransferNode."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._methods = {
            kind: getattr(native, kind.__struct_config__.tag) for kind in get_args(TransferCall)
        }

    def register(self, bootstrap_host: str, bootstrap_port: int, timeout_ms: int) -> None:
        self._native.register(bootstrap_host, bootstrap_port, timeout_ms)

    def call(self, call: TransferCall) -> None:
        self._methods[type(call)](*astuple(call))

    def poll(self, max: int) -> list[NodeEvent]:
        return [read_event(event) for event in self._native.poll(max)]

    def close(self) -> None:
        self._native.close()

    @property
    def event_fd(self) -> int:
        return int(self._native.event_fd)

    @property
    def is_healthy(self) -> bool:
        return bool(self._native.healthy)

    def rooms_json(self, room: int | None = None) -> str:
        return str(self._native.rooms_json(room))

    def stats_json(self) -> str:
        return str(self._native.stats_json())
