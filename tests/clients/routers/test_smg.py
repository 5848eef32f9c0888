"""Our engines behind smg 1.13.0 (Shepherd Model Gateway)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.routers.cases import Behind, check_two_ranks
from tests.clients.routers.environment import gateway, pair_flags
from tests.support.processes.cluster import Cluster

NAME, MODULE = "smg", "smg.launch_router"


class TestRegular(Behind):
    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, solo: Cluster) -> Cluster:
        return solo

    @pytest.fixture(scope="class")
    @classmethod
    def front(cls, reference: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        log = tmp_path_factory.mktemp(NAME) / "regular.log"
        with gateway(NAME, MODULE, ["--worker-urls", reference], 1, log) as url:
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
        """The peer answers with P's or D's error, the first one, under its own code; D's as a stream, if asked."""
        if stream and body.startswith(b"data: "):
            return
        assert json.loads(body)["error"]["code"] in ("prefill_bad_request", "decode_bad_request")


def test_dp_aware_pair(wide: Cluster, reference: str, tmp_path: Path) -> None:
    """The peer chooses both ranks: `routed_dp_rank`, and `disagg_prefill_dp_rank` for D."""
    with gateway(NAME, MODULE, [*pair_flags(wide), "--dp-aware"], 4, tmp_path / "log") as front:
        check_two_ranks(front, reference, wide)
