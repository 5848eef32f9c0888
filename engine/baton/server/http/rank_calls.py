"""Control operations that handlers ask of the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from baton.errors import NotReady
from baton.server.worker.client import RankSet
from baton.server.worker.control import ControlOperation
from baton.server.worker.messages import ReplyMessage

CONTROL_SECS = 10.0


async def call_all_ranks(ranks: RankSet, operation: ControlOperation) -> list[dict[str, Any]]:
    """Results of a control operation that no living rank refuses."""
    if not any(rank.ready for rank in ranks.ranks):
        raise NotReady("no rank is ready", retry_after_secs=2)
    living = [rank.dp_rank for rank in ranks.ranks if rank.dead is None]
    replies = await call_ranks(ranks, dict.fromkeys(living, operation))
    return [{"dp_rank": dp_rank, **reply.result} for dp_rank, reply in replies.items()]


async def call_ranks(
    ranks: RankSet, operations: Mapping[int, ControlOperation]
) -> dict[int, ReplyMessage]:
    """Replies of these ranks, each to its operation."""
    replies = await asyncio.gather(
        *(
            ranks.control(ranks.ranks[dp_rank], operation, CONTROL_SECS)
            for dp_rank, operation in operations.items()
        )
    )
    return dict(zip(operations, replies, strict=True))
