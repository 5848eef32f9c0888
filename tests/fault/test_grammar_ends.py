"""Constraints that were accepted are answered to their end: random schemas, choices, regexes, grammars and tags.

Random logits pass masks, matchers and the sampler. Parts without a value, names that run out and lists of thousands are
refused by their check, or left out of the grammar: no answer ends with `grammar_failed`, and no finished one is outside
its constraint.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.grammars.random_walks import WalkReport, make_piece_store, walk_constraints

COUNT = int(os.environ.get("BATON_TEST_CONSTRAINTS", "5000"))
SEED = int(os.environ.get("BATON_TEST_SEED", "1")) * 1_000_000
BATCH = 25
ANSWERS = 20
LONGEST = 300
PROCESSES = 2


def walk_batch(folder: Path, seeds: Sequence[int]) -> WalkReport:
    torch.set_num_threads(1)
    store = make_piece_store(folder)
    return walk_constraints(store, seeds, answers=ANSWERS, longest=LONGEST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_accepted_constraints_are_answered_to_their_end(tmp_path: Path) -> None:
    seeds = range(SEED, SEED + COUNT)
    batches = [seeds[start : start + BATCH] for start in range(0, COUNT, BATCH)]
    report = WalkReport()
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(partial(walk_batch, tmp_path), batches):
            report.add(part)
    print(dict(report.outcomes))
    assert not report.problems, "\n".join(report.problems[:20])
    accepted = report.outcomes["accepted"]
    assert accepted + report.outcomes["refused"] == COUNT
    assert accepted > COUNT // 2
    assert report.outcomes["stop"] > accepted * ANSWERS // 2
