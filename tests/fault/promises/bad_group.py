"""One bad group of twelve does not take the others down.

Each request that the bad group takes hangs and then fails, while its health check is good. Clients ask one request
after the other, so that every hang costs throughput. The policy keeps new requests away from a group where others hang,
the circuit breaker leaves it out after ten failures, and the retry budget keeps failures of all groups from multiplying
the load.

    python -m tests.fault.promises.bad_group [--short]

A real router before groups that are servers of this process. The long form compares the defaults with a router that
has none of the three, and prints the throughput before, while and after, then what retries add while all groups fail;
the short form counts attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from tests.fault.promises.show import Show, run_script
from tests.support.processes.router import Router

GROUPS = 12
BAD = 7
CLIENTS = 48
ANSWER_SECS = 0.1
SHORT_REQUESTS = 240
SHORT_HANG_SECS = 0.02
SHORT_ANSWER_SECS = 0.005
BREAKER_FAILURES = 10
"""Default of --cb-failure-threshold."""
HANG_SECS = 5.0
"""The reported ones hung for 300 s, of answers of some seconds: sgl-project/sglang#28651."""
BEFORE_SECS = 6.0
BAD_SECS = 20.0
AFTER_SECS = 10.0
ALL_BAD_SECS = 5.0
BUDGET_RATIO = 0.1
BUDGET_FLOOR = 64
"""Defaults of --retry-budget-ratio and --retry-budget-floor."""
ROUND_ROBIN = ("--policy", "round_robin")
NO_LIMITS = (
    "--disable-circuit-breaker", "--retry-budget-ratio", "1000", "--retry-budget-floor", "1000000",
)  # fmt: skip


@dataclass
class Groups:
    """Twelve servers that answer every completion alike."""

    answer_secs: float
    hang_secs: float
    bad: set[int] = field(default_factory=set)
    all_fail: bool = False
    attempts: Counter[str] = field(default_factory=Counter)
    urls: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls, answer_secs: float, hang_secs: float) -> AsyncIterator[Groups]:
        groups = cls(answer_secs, hang_secs)
        runners = []
        for number in range(GROUPS):
            runner = web.AppRunner(groups._application(number), access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            runners.append(runner)
            host, port = runner.addresses[0][:2]
            groups.urls.append(f"http://{host}:{port}")
        try:
            yield groups
        finally:
            for runner in runners:
                await runner.cleanup()

    def _application(self, number: int) -> web.Application:
        async def complete(request: web.Request) -> web.Response:
            await request.read()
            if self.all_fail or number in self.bad:
                self.attempts["while all failed" if self.all_fail else "at the bad group"] += 1
                await asyncio.sleep(0 if self.all_fail else self.hang_secs)
                error = {"message": "no KV", "type": "server_error", "code": "kv_transfer_failed"}
                return web.json_response({"error": error}, status=502)
            self.attempts["at good groups"] += 1
            await asyncio.sleep(self.answer_secs)
            choice = {"index": 0, "text": "right", "finish_reason": "stop", "logprobs": None}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            return web.json_response(
                {
                    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "demo",
                    "choices": [choice], "usage": usage,
                }
            )  # fmt: skip

        async def models(request: web.Request) -> web.Response:
            return web.json_response(
                {"object": "list", "data": [{"id": "demo", "object": "model"}]}
            )

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        application = web.Application()
        application.router.add_post("/v1/completions", complete)
        application.router.add_get("/v1/models", models)
        application.router.add_get("/health", health)
        return application


class Clients:
    """They ask one request after the other, all the while."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.answered_at: list[float] = []
        self.outcomes: Counter[str] = Counter()

    async def ask(self, number: int) -> None:
        body = {"model": "demo", "prompt": f"request {number}", "max_tokens": 1}
        async with self._session.post("/v1/completions", json=body) as response:
            text = await response.text()
        is_right = response.status == 200 and json.loads(text)["choices"][0]["text"] == "right"
        self.outcomes["right" if is_right else f"status {response.status}"] += 1
        if is_right:
            self.answered_at.append(time.monotonic())

    async def ask_until(self, end: float) -> None:
        async def work(first: int) -> None:
            number = first
            while time.monotonic() < end:
                await self.ask(number)
                number += CLIENTS

        await asyncio.gather(*(work(first) for first in range(CLIENTS)))


def short(show: Show) -> None:
    async def run() -> tuple[Counter[str], Counter[str]]:
        async with Groups.serving(SHORT_ANSWER_SECS, SHORT_HANG_SECS) as groups:
            groups.bad.add(BAD)
            async with _session_before(groups, ROUND_ROBIN) as session:
                clients = Clients(session)
                numbers = iter(range(SHORT_REQUESTS))

                async def work() -> None:
                    for number in numbers:
                        await clients.ask(number)

                await asyncio.gather(*(work() for _ in range(GROUPS)))
            return groups.attempts, clients.outcomes

    attempts, outcomes = asyncio.run(run())
    show.keep("every request was answered", outcomes["right"] == SHORT_REQUESTS, dict(outcomes))
    limit = BREAKER_FAILURES + GROUPS  # those under way when the circuit opens
    show.keep(
        f"the bad group got at most {limit} of {SHORT_REQUESTS}",
        0 < attempts["at the bad group"] <= limit,
        dict(attempts),
    )


@contextlib.asynccontextmanager
async def _session_before(
    groups: Groups, flags: Sequence[str]
) -> AsyncIterator[aiohttp.ClientSession]:
    """A router before the groups. It starts and ends in a thread, since this one's loop serves them."""
    router = Router.up("--worker-urls", *groups.urls, *flags)
    url = await asyncio.to_thread(router.__enter__)
    try:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            yield session
    finally:
        await asyncio.to_thread(router.__exit__, None, None, None)


def long(show: Show) -> None:
    for name, flags in (
        ("defaults", ()),
        ("round_robin", ROUND_ROBIN),
        ("round_robin, no breaker, no budget", (*ROUND_ROBIN, *NO_LIMITS)),
    ):
        asyncio.run(_storm(show, name, flags))


async def _storm(show: Show, name: str, flags: Sequence[str]) -> None:
    async with (
        Groups.serving(ANSWER_SECS, HANG_SECS) as groups,
        _session_before(groups, flags) as session,
    ):
        clients = Clients(session)
        started = time.monotonic()
        bad_at = started + BEFORE_SECS
        healed_at = bad_at + BAD_SECS
        end = healed_at + AFTER_SECS
        asking = asyncio.ensure_future(clients.ask_until(end))
        await asyncio.sleep(bad_at - time.monotonic())
        groups.bad.add(BAD)
        await asyncio.sleep(healed_at - time.monotonic())
        groups.bad.clear()
        await asking
        _show_throughput(show, name, clients.answered_at, (started, bad_at, healed_at, end))
        total = clients.outcomes.total()
        is_kept = clients.outcomes["right"] == total
        found = f"{dict(clients.outcomes)}, attempts {dict(groups.attempts)}"
        show.keep(f"{name}: every request has one answer, the right one", is_kept, found)
        groups.all_fail = True
        failing = Clients(session)
        await failing.ask_until(time.monotonic() + ALL_BAD_SECS)
    attempts = groups.attempts["while all failed"]
    total = failing.outcomes.total()
    show.tell(
        f"{name}: while all groups failed for {ALL_BAD_SECS:g} s, {attempts} attempts for {total} requests"
    )
    if NO_LIMITS[0] not in flags:
        limit = BUDGET_FLOOR + BUDGET_RATIO * (total + clients.outcomes.total())
        show.keep(
            f"{name}: retries are within the budget", attempts - total <= limit,
            f"{attempts - total} of {limit:.0f}",
        )  # fmt: skip


def _show_throughput(
    show: Show, name: str, times: Sequence[float], phases: tuple[float, float, float, float]
) -> None:
    started, bad_at, healed_at, end = phases
    before = _rate(times, started + 1, bad_at)
    shares = [_rate(times, bad_at + i, bad_at + i + 1) / before for i in range(int(end - bad_at))]
    bad_shares = shares[: int(BAD_SECS)]
    recovered = next((i for i, share in enumerate(shares[int(BAD_SECS) :]) if share >= 0.9), None)
    show.tell(
        f"{name}: {before:.0f} answers/s before; of that, with a bad group, "
        f"{_rate(times, bad_at, healed_at) / before:.0%} on average, {min(bad_shares):.0%} in the worst second, "
        f"{sum(share < 0.5 for share in bad_shares)} s below a half; 90 % again "
        f"{'never' if recovered is None else f'{recovered} s after it was healed'}"
    )


def _rate(times: Sequence[float], begin: float, end: float) -> float:
    return sum(begin <= at < end for at in times) / (end - begin)


if __name__ == "__main__":
    run_script(__doc__, long, short)
