"""The device sampler on the device, against the host's on the same logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baton.layers.cuda.stream import CudaStream
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import SamplingLaunch
from baton.sched.types.plan import INVALID_TOKEN
from tests.support.models.plain_sampler import sample
from tests.unit.runtime.sampling.test_sampler import (
    FILTERS,
    MIX,
    chi_square,
    naive_distribution,
    noise,
    row,
)

CUDA = torch.device("cuda")


def draw(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    made = SamplingLaunch(rows, logits.shape[1], CudaStream(CUDA).put)
    with torch.inference_mode():
        return list(made.read_result(made.queue_draw(logits.to(CUDA, copy=True))).tokens)


@pytest.mark.parametrize("vocab", [300, 5000, 151_936])
def test_greedy_tokens_are_the_hosts(vocab: int) -> None:
    logits = noise(64, vocab).bfloat16().float()  # with equals: the lowest id among them
    rows = [row(temperature=0.0) for _ in range(64)]
    assert draw(logits, rows) == sample(logits.clone(), rows).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [300, 5000, 151_936])
def test_drawn_tokens_are_nearly_always_the_hosts(vocab: int) -> None:
    """Sums round differently: a number that falls on the edge between two tokens may take the other one."""
    kinds = [*FILTERS, *MIX, {"top_k": 300, "temperature": 1.5}]
    n = 10 * len(kinds)
    rows = [row(seed=i, **kinds[i % len(kinds)]) for i in range(n)]
    logits = noise(n, vocab)
    host, device = sample(logits.clone(), rows).tokens, draw(logits, rows)
    assert sum(a == b for a, b in zip(host, device, strict=True)) >= 0.98 * n


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("vocab", [40, 700])
def test_draws_follow_the_filtered_distribution(params: dict[str, float], vocab: int) -> None:
    n = 6000
    logits = noise(1, vocab, scale=1.5)
    rows = [row(seed=i, **params) for i in range(n)]
    counts = np.bincount(draw(logits.repeat(n, 1), rows), minlength=vocab)
    expected = naive_distribution(logits[0], rows[0].params)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected * n) < 4


def test_row_draws_the_same_alone_and_in_a_batch() -> None:
    kinds = [*FILTERS, *MIX]
    n = 4 * len(kinds)
    rows = [row(seed=i, **kinds[i % len(kinds)]) for i in range(n)]
    logits = noise(n, 5000)
    together = draw(logits, rows)
    alone = [draw(logits[i : i + 1], [rows[i]])[0] for i in range(n)]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 0.98 * n


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_with_nonfinite_logits_get_no_token(value: float) -> None:
    kinds = [{"temperature": 0.0}, *FILTERS, *MIX]
    rows = [row(seed=i, **kind) for i, kind in enumerate(kinds)]
    logits = noise(len(rows), 5000)
    logits[::2] = value
    bad = [i % 2 == 0 for i in range(len(rows))]
    assert [token == INVALID_TOKEN for token in draw(logits, rows)] == bad
    if value != -math.inf:
        logits = noise(len(rows), 5000)
        logits[::2, 4999] = value
        assert [token == INVALID_TOKEN for token in draw(logits, rows)] == bad
