"""Our engines behind sglang-router 0.3.2."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.routers.cases import Behind, check_many_at_once, check_two_ranks
from tests.clients.routers.environment import gateway, pair_flags
from tests.support.processes.cluster import Cluster, metric

NAME, MODULE = "sglang-router", "sglang_router.launch_router"


class TestRegular(Behind):
    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, solo: Cluster) -> Cluster:
        return solo

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, reference: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        # Its breaker counts 4xx in regular mode: ten mistakes of one client shut everybody out for a minute.
        log = tmp_path_factory.mktemp(NAME) / "regular.log"
        with gateway(
            NAME, MODULE, ["--worker-urls", reference, "--disable-circuit-breaker"], 1, log
        ) as url:
            yield url


class TestPair(Behind):
    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, pair: Cluster) -> Cluster:
        return pair

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        log = tmp_path_factory.mktemp(NAME) / "pair.log"
        with gateway(NAME, MODULE, pair_flags(pair), 2, log) as url:
            yield url

    def check_error(self, body: bytes, expected: dict[str, Any], stream: bool) -> None:
        """The peer answers with D's error under a code of its own; before a stream, in Python's notation."""
        if stream:
            assert body.startswith(b"data: {'error': ")
        else:
            assert ast.literal_eval(body.decode())["error"]["code"] == "decode_bad_request"


def test_room_number_decides_the_prefill_rank(
    wide: Cluster, reference: str, tmp_path: Path
) -> None:
    """Without --dp-aware (which serves nothing in this version) it knows of no ranks; the rooms it draws spread."""
    with gateway(NAME, MODULE, pair_flags(wide), 2, tmp_path / "log") as front:
        check_two_ranks(front, reference, wide)


def test_dp_aware_in_regular_mode(wide_solo: Cluster, reference: str, tmp_path: Path) -> None:
    """The peer sends `data_parallel_rank` in the body."""
    engine = wide_solo.node("worker")["url"]
    with gateway(
        NAME, MODULE, ["--worker-urls", engine, "--dp-aware"], 2, tmp_path / "log"
    ) as front:
        check_many_at_once(front, reference, wide_solo)
    assert all(metric(engine, "baton_generated_tokens_total", dp_rank=rank) > 0 for rank in "01")
