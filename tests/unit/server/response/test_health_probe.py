"""Probes of /health_generate that come at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from baton.errors import EngineDead
from baton.server.response.health_probe import HealthProbe


def test_probes_that_come_meanwhile_wait_for_the_same_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []

    async def go() -> None:
        release = asyncio.Event()

        async def generate(probe: HealthProbe, token: int) -> None:
            begun.append(token)
            await release.wait()
            if len(begun) == 2:
                raise EngineDead("a rank is gone")

        monkeypatch.setattr(HealthProbe, "_generate", generate)
        ranks: Any = None
        probe = HealthProbe(ranks)
        asking = [asyncio.create_task(probe.run(7)) for _ in range(50)]
        await asyncio.sleep(0)
        asking[0].cancel()
        release.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asking[0]
        await asyncio.gather(*asking[1:])
        assert begun == [7]
        with pytest.raises(EngineDead):
            await probe.run(7)
        await probe.run(7)

    asyncio.run(go())
    assert begun == [7, 7, 7], "each is a new one when none is in progress"
