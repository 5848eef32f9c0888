"""The request of /health_generate: a token on every rank."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array

from baton.sched.types.request import SamplingParams
from baton.server.observability.metrics import EngineMetrics
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.prompt.items import PromptItem
from baton.server.response.generation import Generation
from baton.server.text.answer_spec import AnswerSpec
from baton.server.worker.client import RankSet

HEALTH_GENERATE_SECS = 20.0


class HealthProbe:
    """Generates a token on every rank; those that ask meanwhile wait for the same one."""

    def __init__(self, ranks: RankSet) -> None:
        self._ranks = ranks
        self._running: asyncio.Task[None] | None = None

    async def run(self, token: int) -> None:
        """Generate behind a prompt of this token. Raises EngineError where a rank fails."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._generate(token))
            self._running.add_done_callback(_note_failure)
        # The task goes on when this caller leaves: others may wait for it.
        await asyncio.shield(self._running)

    async def _generate(self, token: int) -> None:
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        items = tuple(
            PromptItem(r.dp_rank, 0, array("i", [token]), params, None, r.dp_rank)
            for r in self._ranks.ranks
        )
        # Nothing reads the answer: any form will do.
        answer = AnswerSpec(skip_special_tokens=True)
        rid = "health-" + uuid.uuid4().hex
        probe = Generation(
            rid=rid,
            request_id=rid,
            accepted=AcceptedRequest(items=items, n=1, answer=answer),
            dialect=answer.dialect,
            ranks=self._ranks,
            metrics=EngineMetrics(),
            endpoint="health",
            arrived=time.monotonic(),
            timeout_secs=HEALTH_GENERATE_SECS,
        )
        try:
            probe.start()
            while not probe.finished:
                await probe.next()
        finally:
            probe.close()


def _note_failure(task: asyncio.Task[None]) -> None:
    """A failure is the callers' to report; where all have left, asyncio would log it as
    forgotten.
    """
    if not task.cancelled():
        task.exception()
