"""Runs a command in this network namespace, whose loopback has one server: a relay to a unix socket.

Usage: unshare --net python run_on_loopback.py SOCKET PORT COMMAND…
"""

from __future__ import annotations

import asyncio
import subprocess
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    except ConnectionError:
        pass  # the other side left: so does this one
    finally:
        writer.close()


async def run(socket: str, port: int, command: list[str]) -> int:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", port):
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
        return await process.wait()


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    socket, port, *command = sys.argv[1:]
    sys.exit(asyncio.run(run(socket, int(port), command)))


main()
