"""Random constraints through a prefill and a decode node: each is refused by its check, or answered as it says."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.grammars.random_constraints import RandomConstraint, random_constraint
from tests.support.grammars.random_walks import can_judge
from tests.support.processes.cluster import Cluster

COUNT = int(os.environ.get("BATON_TEST_CONSTRAINTS", "300"))
AT_ONCE = 8
MAX_TOKENS = 150


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_nodes_refuse_constraints_or_answer_them(pair: Cluster) -> None:
    def ask(seed: int) -> tuple[RandomConstraint, int, dict[str, Any]]:
        constraint = random_constraint(random.Random(seed))
        body = {
            "model": "demo",
            "prompt": "An answer, please:",
            "max_tokens": MAX_TOKENS,
            "temperature": 1.2,
            "seed": seed,
            **constraint.body,
        }
        return constraint, *pair.post("/v1/completions", body)

    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for constraint, status, answer in pool.map(ask, range(COUNT)):
            if status == 400:
                assert answer["error"]["code"] in ("invalid_value", "unsupported_parameter"), answer
                outcomes["refused"] += 1
                continue
            assert status == 200, (constraint.body, answer)
            choice = answer["choices"][0]
            outcomes[choice["finish_reason"]] += 1
            is_judged = constraint.is_strict and can_judge(constraint, choice["text"])
            if choice["finish_reason"] == "stop" and is_judged:
                assert constraint.judge(choice["text"]), (constraint.body, choice["text"])
                outcomes["judged"] += 1
    print(dict(outcomes))
    assert outcomes["stop"] > COUNT // 3
    assert outcomes["judged"] > COUNT // 6
    pair.assert_nothing_is_held()
