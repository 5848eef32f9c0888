"""Two routers in front of the same engines: each knows what engines have cached, whichever router sent it there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from deploy.tests.e2e.cluster import TestCluster, names, wait_until
from deploy.tests.e2e.streams import HEADERS, StreamLoad, ask

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
PREFIXES = 8
PREFIX_TOKENS, SUFFIX_TOKENS = 512, 64
"""Whole blocks of the router (--block-size 64)."""
ROUNDS = 3
CONTROL = {"Authorization": "Bearer demo-admin", "x-baton-explain": "dry-run"}
SHARE_POINTS = 0.02


@pytest.fixture(scope="module")
def routers(demo: TestCluster) -> Iterator[list[str]]:
    """Two routers, two prefill nodes, one decode node."""
    deployments = ("deployment/router", "deployment/prefill")
    demo.kubectl("-n", "baton", "scale", *deployments, "--replicas=2")
    for deployment in deployments:
        demo.kubectl("-n", "baton", "rollout", "status", deployment, "--timeout=300s")
    yield sorted(demo.endpoints("router"))
    demo.kubectl("-n", "baton", "scale", *deployments, "--replicas=1")


class Prompts:
    """Prompts as token ids, which routers without a tokenizer can match with what engines announce."""

    def __init__(self) -> None:
        self._rng = random.Random(13)
        self.prefixes = [self._ids(PREFIX_TOKENS) for _ in range(PREFIXES)]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(300, 1000) for _ in range(count)]

    def with_prefix(self, number: int) -> list[int]:
        """A prompt of this prefix and a suffix that no other has."""
        return self.prefixes[number] + self._ids(SUFFIX_TOKENS)


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens that engines counted for some requests."""

    prompt: int
    cached: int

    @property
    def share(self) -> float:
        return self.cached / self.prompt


def complete(router: str, ids: list[int], headers: dict[str, str]) -> dict[str, Any]:
    body = {"model": "demo", "prompt": ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{router}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ask_all(router: str, prompts: Prompts) -> CachedTokens:
    """Send a request for each prefix in turn, `ROUNDS` times."""
    usages = [
        complete(router, prompts.with_prefix(number), HEADERS)["usage"]
        for _ in range(ROUNDS)
        for number in range(PREFIXES)
    ]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return CachedTokens(sum(usage["prompt_tokens"] for usage in usages), cached)


def knows(router: str, prefix: list[int]) -> bool:
    """True if the router expects the whole prefix in the cache of a prefill node."""
    found = complete(router, prefix + [5] * SUFFIX_TOKENS, CONTROL)
    candidates = [
        c
        for d in found["decisions"]
        if d["role"] == "prefill"
        for c in d["explanation"]["candidates"]
    ]
    return any(c["cached_tokens"] >= PREFIX_TOKENS for c in candidates)


def wait_until_known(routers: list[str], prompts: Prompts) -> None:
    for router in routers:
        for number, prefix in enumerate(prompts.prefixes):
            wait_until(
                lambda router=router, prefix=prefix: knows(router, prefix),
                f"{router} knows prefix {number}",
            )


def test_routers_reuse_the_same_share_and_survive_each_other(
    demo: TestCluster, routers: list[str]
) -> None:
    prompts = Prompts()
    for number in range(PREFIXES):  # each router sends half of them for the first time
        complete(routers[number % 2], prompts.with_prefix(number), HEADERS)
    wait_until_known(routers, prompts)
    first, second = (ask_all(router, prompts) for router in routers)
    assert abs(first.share - second.share) <= SHARE_POINTS, (first, second)
    assert first.cached >= 0.98 * ROUNDS * PREFIXES * PREFIX_TOKENS, first

    text = ask(demo, 0, routers[1]).text
    victim = next(
        p for p in demo.pods("router") if routers[0] == f"http://{p['status']['podIP']}:8000"
    )
    with StreamLoad(demo, routers=[routers[1]], questions=1) as load:
        wait_until(lambda: len(load.results) >= 4, "streams before the kill")
        finished = len(load.results)
        demo.kubectl(
            "-n",
            "baton",
            "delete",
            "pod",
            victim["metadata"]["name"],
            "--grace-period=0",
            "--force",
        )
        wait_until(lambda: len(load.results) >= finished + 8, "streams after the kill")
    assert load.problems == [], demo.report()
    assert {result.text for result in load.results} == {text}
    alone = ask_all(routers[1], prompts)
    assert alone.share >= second.share - SHARE_POINTS, (second, alone)

    demo.kubectl("-n", "baton", "rollout", "status", "deployment/router", "--timeout=300s")
    (successor,) = set(demo.endpoints("router")) - set(routers)
    assert victim["metadata"]["name"] not in names(demo.pods("router"))
    wait_until_known([successor], prompts)
    late = ask_all(successor, prompts)
    assert abs(late.share - alone.share) <= SHARE_POINTS, (alone, late)
    shares = {"first": first, "second": second, "alone": alone, "successor": late}
    print({name: f"{100 * tokens.share:.1f} %" for name, tokens in shares.items()})
