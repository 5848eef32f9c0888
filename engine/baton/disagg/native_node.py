"""baton._native.TransferNode with signatures, and with structs in the place of its tuples."""

from __future__ import annotations

from typing import Any, Protocol

from baton.disagg.events import NodeEvent, read_event
from baton.disagg.transfer_driver import TransferNode


class TransferRuntime(TransferNode, Protocol):
    """TransferNode of a driver, and the calls of the rank process beside those of the driver."""

    @property
    def event_fd(self) -> int:
        """Readable while `poll` has events."""

    def rooms_json(self, room: int | None = None) -> str: ...
    def stats_json(self) -> str: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class NativeTransferNode:
    """The transfer runtime of this process. See the docstrings of baton._native.TransferNode."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def register(self, bootstrap_host: str, bootstrap_port: int, timeout_ms: int) -> None:
        self._native.register(bootstrap_host, bootstrap_port, timeout_ms)

    def offer(self, room: int, attempt: int, prompt_hash: bytes, deadline_ms: int) -> None:
        self._native.offer(room, attempt, prompt_hash, deadline_ms)

    def publish(self, room: int, first_page: int, pages: bytes) -> None:
        self._native.publish(room, first_page, pages)

    def finish(self, room: int, total_pages: int, last_page_tokens: int, payload: bytes) -> None:
        self._native.finish(room, total_pages, last_page_tokens, payload)

    def open(
        self, room: int, attempt: int, bootstrap_host: str, bootstrap_port: int, prefill_dp_rank: int,
        prompt_hash: bytes, deadline_ms: int,
    ) -> None:  # fmt: skip
        self._native.open(
            room,
            attempt,
            bootstrap_host,
            bootstrap_port,
            prefill_dp_rank,
            prompt_hash,
            deadline_ms,
        )

    def grant(self, room: int, start_page: int, dst_pages: bytes) -> None:
        self._native.grant(room, start_page, dst_pages)

    def revoke(self, room: int) -> None:
        self._native.revoke(room)

    def abort(self, room: int, code: str) -> None:
        self._native.abort(room, code)

    def poll(self, max: int) -> list[NodeEvent]:
        return [read_event(event) for event in self._native.poll(max)]

    def drain(self) -> None:
        self._native.drain()

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
