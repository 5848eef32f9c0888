"""HTTP servers of tests, in a thread of this process."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Writes nothing to standard error, which tests read."""

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve_requests(
    handler: type[BaseHTTPRequestHandler],
    host: str = "127.0.0.1",
    *,
    tls: ssl.SSLContext | None = None,
) -> Iterator[ThreadingHTTPServer]:
    """A server on a free port until the end of the block."""
    with ThreadingHTTPServer((host, 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
