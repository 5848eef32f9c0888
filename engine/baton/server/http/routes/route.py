"""A path of an engine or a router: its methods, handler, key, and description."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from aiohttp.typedefs import Handler
from msgspec import Struct

from baton.server.http.anthropic_errors import is_anthropic_path
from baton.server.text.answer_spec import Dialect

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
HTML = "text/html"
PLAIN_TEXT = "text/plain"
BYTES = "application/octet-stream"
JSON_LINES = "application/x-ndjson"
_PATTERN = re.compile(r"\{(\w+):[^}]+\}")


class Server(Enum):
    ENGINE = "engine"
    ROUTER = "router"


class Access(Enum):
    """Key that a request needs where the server has keys."""

    OPEN = "none"
    CLIENT = "API key"
    CONTROL = "control key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A path with the methods that one handler answers."""

    path: str
    """As aiohttp takes it: `{id}` ends at a slash, `{id:.+}` does not."""
    methods: tuple[str, ...]
    """In lower case, as OpenAPI writes them."""
    summary: str
    tag: str
    handler: Handler | None = None
    """The engine's. `None`: only routers have the path."""
    on_router: bool = True
    """True if routers have the path."""
    dialect: Dialect | None = None
    """API that generates text and that the path belongs to."""
    body: tuple[type[Struct], ...] = ()
    """Structs that read the body; empty: none is read."""
    example: dict[str, Any] | None = None
    """A body that any model answers."""
    answer: type[Struct] | None = None
    """`None`: an object without a documented form, or no JSON."""
    media_type: str = JSON
    generates: bool = False
    """True if the model answers, and `"stream": true` in the body asks for events."""
    status: int = 200
    query: tuple[str, ...] = ()
    engine_access: Access = Access.CLIENT
    router_access: Access = Access.CLIENT

    @property
    def described_path(self) -> str:
        """The path as OpenAPI writes it, without patterns."""
        return _PATTERN.sub(r"{\1}", self.path)

    @property
    def servers(self) -> list[Server]:
        """Servers that have the path."""
        has_path = {Server.ENGINE: self.handler is not None, Server.ROUTER: self.on_router}
        return [server for server in Server if has_path[server]]

    def access(self, server: Server) -> Access:
        return self.engine_access if server is Server.ENGINE else self.router_access

    @property
    def has_anthropic_errors(self) -> bool:
        return is_anthropic_path(self.path)


def with_paths(route: Route, *others: str) -> list[Route]:
    """The route, and the same one under other paths."""
    return [route, *(replace(route, path=path) for path in others)]
