"""Ports for servers that must know their number before they listen."""

from __future__ import annotations

import socket


def reserve_port() -> int:
    """Return a port of 127.0.0.1 that the system gives to no other socket for the next minute.

    A port that was merely free a moment ago is given to the next socket that asks for any, perhaps
    of the test beside this one. Here a connection has just ended at the port (TIME_WAIT): a server
    that names it may listen (SO_REUSEADDR), and no socket that asks for any port gets it.
    """
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = int(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the end that closes first waits
            assert client.recv(1) == b""
    return port
