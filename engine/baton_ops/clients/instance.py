"""Which process answers at an address: engines and routers state a random incarnation.

An address belongs to a process only while that process has it open. A supervisor reads the
incarnation of its child from the child's own READY line, and takes no other process's answer at
the child's address for one of the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp

ANSWER_SECS = 2.0
"""For an answer that is asked for again when it does not come."""
LAST_ANSWER_SECS = 60.0
"""For one that is not."""
PAUSE_SECS = 0.05
MAX_ANSWER_BYTES = 1 << 16
"""Longest answer of a probe that is read; another program may send one without an end."""


class OtherProcess(Exception):
    """Another process than the one that was asked for answers at an address."""

    def __init__(self, url: str) -> None:
        super().__init__(f"another process answers at {url}")


def stated_incarnation(body: bytes | str) -> str | None:
    """Incarnation that an answer of /livez, /readyz or /health states; None: it states none."""
    try:
        answer = json.loads(body)
    except ValueError:  # it is no JSON, and so not from Baton
        return None
    stated = answer.get("incarnation") if isinstance(answer, dict) else None
    return stated if isinstance(stated, str) else None


async def read_incarnation(response: aiohttp.ClientResponse) -> str | None:
    """Incarnation that this answer states. Raises aiohttp's errors."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            return None
    return stated_incarnation(bytes(body))


async def wait_until_well(url: str, incarnation: str) -> None:
    """Return once the process with this incarnation answers GET `url` with 200.

    The process must have the address open already, and the caller bounds the wait. Raises
    OtherProcess when another one answers.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            # Busy, or it has ended: the caller watches it.
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with session.get(url, allow_redirects=False) as response:
                    if await read_incarnation(response) != incarnation:
                        raise OtherProcess(url)
                    if response.status == 200:
                        return
            await asyncio.sleep(PAUSE_SECS)


async def is_answered_by(url: str, incarnation: str | None) -> bool:
    """True if the server `url` is the process with this incarnation now."""
    timeout = aiohttp.ClientTimeout(total=LAST_ANSWER_SECS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/livez", allow_redirects=False) as response,
        ):
            return await read_incarnation(response) == incarnation
    except (aiohttp.ClientError, asyncio.TimeoutError):
        return False
