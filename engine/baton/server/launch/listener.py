"""Client connections of an engine: how many there are, how long each may wait, and which one ends
for a new one.

1. A connection waits for a request from its start, and again after each answer. `aiohttp` closes it
   when it has waited --idle-connection-timeout-secs, and this module --header-read-timeout-secs
   after the first byte of a request whose head does not end.
2. Nothing here ends a connection while a request is in progress: from its whole head to its
   answer's last byte.
3. Beyond --max-connections the connection that has waited longest is closed for a new one. Beyond a
   quarter of them an address closes its own: connections with requests do not count, because
   routers have many.
4. Where all connections have requests, the new one is closed.

Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import itertools
import logging
import resource
import termios
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from baton.config import EngineConfig
from baton.server.http.access.client_identity import network_of

log = logging.getLogger("baton.launch")

HEALTH_CONNECTIONS = 64
"""Connections of --health-port."""
BACKLOG = 1024
"""Connections that wait in the kernel's queue; the event loop accepts up to so many at once."""
RESERVED_DESCRIPTORS = BACKLOG + 256
"""For connections that are accepted before others have ended, and for sockets and files of the
process.
"""
UNSENT_SECS = 10.0
"""A client that has not taken the rest of its answer after this long may lose it to another
client.
"""
WARNING_PAUSE_SECS = 60.0
"""Between two warnings that all connections are in use."""
CANDIDATES = 32
"""Connections looked at for one that can end: the event loop does nothing else meanwhile."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    most: int
    head_secs: float
    """Longest time from the first byte of a request's head to its last."""
    idle_secs: float

    @property
    def most_waiting_per_address(self) -> int:
        """Connections of one address without a request."""
        return max(self.most // 4, 1)


def fit_descriptors(wanted: int) -> int:
    """Raises the limit of open files as far as it goes; returns how many of `wanted` connections
    fit it.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit = hard
    except (OSError, ValueError) as err:  # some sandboxes refuse it
        log.warning("cannot raise the limit of open files from %d to %d: %s", limit, hard, err)
    if limit == resource.RLIM_INFINITY:
        return wanted
    fitting = max(limit - RESERVED_DESCRIPTORS, limit // 2, 1)
    if fitting < wanted:
        # No warning about the default, because a start with it on a machine with a lower limit is
        # healthy.
        level = logging.DEBUG if wanted == EngineConfig().max_connections else logging.WARNING
        log.log(
            level,
            "--max-connections is lowered from %d to %d, so that it fits the limit of open files, "
            "%d; raise the limit "
            "(ulimit -Hn)",
            wanted,
            fitting,
            limit,
        )
    return min(wanted, fitting)


class ConnectionTable:
    """Connections of one listener."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, None] = {}
        """Connections without a request, the one that has waited longest first."""
        self._waiting_of: dict[str, dict[HttpConnection, None]] = {}
        """Connections without a request, by address."""
        self._heads: dict[HttpConnection, float] = {}
        """Connections with a part of a head, and when it has to be whole, earliest first."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._warned_at = -WARNING_PAUSE_SECS

    def add(self, connection: HttpConnection) -> None:
        """Count a new connection: another one may end for it, or it ends itself."""
        self._open.add(connection)
        self.begin_wait(connection)
        own = self._waiting_of[connection.source]
        if len(own) > self._limits.most_waiting_per_address:
            # None can end while all have requests that are not read yet: a router's, after a pause.
            self._end_longest_waiting(own, besides=connection)
        if len(self._open) <= self._limits.most:
            return
        self._warn_full()
        if not self._end_longest_waiting(self._waiting, besides=connection):
            connection.end_now()

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection whose socket is closed, or about to be."""
        self._open.discard(connection)
        self.end_wait(connection)

    def begin_wait(self, connection: HttpConnection) -> None:
        """Note that a connection has come, or that its last answer is written."""
        if connection not in self._open or connection in self._waiting:
            return
        connection.waits_since = time.monotonic()
        self._waiting[connection] = None
        self._waiting_of.setdefault(connection.source, {})[connection] = None

    def end_wait(self, connection: HttpConnection) -> None:
        """Note that a request's head is whole, or that the connection has ended."""
        if connection not in self._waiting:
            return
        del self._waiting[connection]
        self._heads.pop(connection, None)
        own = self._waiting_of[connection.source]
        del own[connection]
        if not own:
            del self._waiting_of[connection.source]

    def begin_head(self, connection: HttpConnection) -> None:
        """Note that bytes came that are no whole head. The first ones of a head start its time."""
        if connection not in self._waiting or connection in self._heads:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + self._limits.head_secs
        self._heads[connection] = due
        if self._head_timer is None:
            self._head_timer = loop.call_at(due, self._end_late_heads)

    def _end_late_heads(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._head_timer = None
        # All have the same time, so that they are in the order in which they end.
        for connection, due in list(self._heads.items()):
            if due > now:
                self._head_timer = loop.call_at(due, self._end_late_heads)
                return
            log.debug("a client took too long over the head of a request")
            connection.end_now()

    @staticmethod
    def _end_longest_waiting(
        candidates: dict[HttpConnection, None], *, besides: HttpConnection
    ) -> bool:
        """End the connection that has waited longest; False if none of the first ones can end."""
        for connection in itertools.islice(candidates, CANDIDATES):
            if connection is not besides and connection.can_end():
                connection.end_now()
                return True
        return False

    def _warn_full(self) -> None:
        now = time.monotonic()
        if now - self._warned_at < WARNING_PAUSE_SECS:
            return
        self._warned_at = now
        log.warning(
            "all --max-connections (%d) are in use; a new one closes the one that has waited "
            "longest without a "
            "request, or is closed while all have requests",
            self._limits.most,
        )


class HttpConnection(web.RequestHandler):
    """A client's connection, which tells its table whether it waits for a request."""

    def __init__(self, table: ConnectionTable, server: web.Server, idle_secs: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=idle_secs,
            access_log=None,  # type: ignore[arg-type]  # as web.AppRunner passes it
        )
        self._table = table
        self.source = ""
        self.waits_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.source = _source_of(transport.get_extra_info("peername"))
        self._table.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            self._table.end_wait(self)
        else:
            self._table.begin_head(self)

    async def _handle_request(self, *args: Any, **kwargs: Any) -> tuple[web.StreamResponse, bool]:
        """Handle a request, from its whole head to the end of its answer."""
        self._table.end_wait(self)
        try:
            return await super()._handle_request(*args, **kwargs)
        finally:
            if not self._messages:  # else the next request is there already
                self._table.begin_wait(self)

    def can_end(self) -> bool:
        """False while a request may be in the kernel's buffer, or the end of an answer has not
        left.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return True
        if transport.get_write_buffer_size():
            return time.monotonic() - self.waits_since > UNSENT_SECS
        unread = array.array("i", [0])
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, unread)
        return unread[0] == 0

    def end_now(self) -> None:
        """Close the socket, whatever is still unsent."""
        transport = self.transport
        self._table.remove(self)
        self.force_close()
        if isinstance(transport, asyncio.Transport):
            transport.abort()


def _source_of(peer: Any) -> str:
    """Source that a share is counted for: an IPv4 address, or the network of an IPv6 address."""
    # Without a peer, the client has left already.
    return network_of(str(peer[0]) if isinstance(peer, tuple) else None)
