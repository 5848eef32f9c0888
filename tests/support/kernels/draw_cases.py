"""The draw kernel in Triton's interpreter against the host's sampler: run by tests/unit/layers/kernels/test_draw.py.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its own.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from baton.layers.kernels.draw import draw_rows
from baton.layers.kernels.draw_columns import DrawColumns
from baton.runtime.sampling import sampler
from baton.sched.types.plan import INVALID_TOKEN
from tests.support import effort

BLOCK = 128
VOCAB = 150
"""A whole block and a part of one."""


def drawn(logits: Tensor, columns: list[DrawColumns]) -> list[int]:
    """By the kernel; the rows in reverse order, with one between them that does not draw."""
    n = len(columns)
    spread = torch.full((2 * n, logits.shape[1]), torch.nan)
    spread[::2] = logits
    rows = torch.arange(0, 2 * n, 2).flip(0)
    tokens = torch.full((2 * n,), VOCAB)
    draw_rows(
        spread,
        rows,
        torch.tensor(columns, dtype=torch.float64).flip(0).T.contiguous(),
        tokens,
        BLOCK,
    )
    assert (tokens[1::2] == VOCAB).all(), "rows that do not draw keep their tokens"
    return tokens[::2].tolist()


def check(name: str, logits: Tensor, columns: list[DrawColumns]) -> None:
    want, got = sampler.draw_tokens(logits.clone(), columns), drawn(logits, columns)
    wrong = [
        (i, a, b, columns[i]) for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b
    ]
    assert not wrong, f"{name}: row, host, kernel, columns: {wrong}"
    print(f"{name}: {len(want)} rows")


def noise(rows: int, scale: float, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(7)
    filters = list(itertools.product((0, 1, 5, 64, 149), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05)))
    columns = [
        DrawColumns(float(rng.choice([0.3, 1.0, 2.5])), float(rng.random()), *of_row)
        for of_row in filters
    ]
    rng.shuffle(columns)
    many = columns[: 16 if effort.EVERY else 6]
    check("noise", noise(len(many), 2.0, 0), many)
    few = columns[16 : 24 if effort.EVERY else 19]
    check("equal logits", noise(len(few), 2.0, 1).round(), few)
    check("all equal", torch.zeros(len(few), VOCAB), few)
    banned = noise(len(few), 2.0, 2)
    banned[:, 1::2] = -torch.inf
    check("banned", banned, few)
    signs = torch.zeros(len(few), VOCAB)
    signs[:, ::3] = -0.0
    check("negative zero equals zero", signs, few)
    ends = torch.full((6, VOCAB), -torch.inf)
    ends[:, 3] = ends[:, 140] = 0.0
    us = (0.0, 2.0**-53, 0.5 - 2.0**-53, 0.5, 0.75, 1 - 2.0**-53)
    assert drawn(ends, [DrawColumns(1.0, u, 0, 1.0, 0.0) for u in us]) == [3, 3, 3, 140, 140, 140]
    check("ends of the range", ends, [DrawColumns(1.0, u, 0, 0.99, 0.0) for u in us])
    check_names_of_columns()
    check_nonfinite(noise(6, 2.0, 3))


def check_names_of_columns() -> None:
    """Each column alone decides which token the kernel draws."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 70] = 1.0
    plain = DrawColumns(temperature=1.0, u=0.99, top_k=0, top_p=1.0, min_p=0.0)
    expected = {"temperature": 70, "u": 0, "top_k": 70, "top_p": 70, "min_p": 70}
    extremes = {"temperature": 0.001, "u": 0.0, "top_k": 1, "top_p": 0.001, "min_p": 1.0}
    assert tuple(expected) == tuple(extremes) == DrawColumns._fields
    assert drawn(logits, [plain]) == [148]
    for name, value in extremes.items():
        got = drawn(logits, [plain._replace(**{name: value})])
        assert got == [expected[name]], f"{name}: {got}"
    print(f"names of columns: {len(extremes)}")


def check_nonfinite(logits: Tensor) -> None:
    """A NaN in either block, +inf, -inf alone: no token; rows with bans, and a row that has no token before."""
    columns = [DrawColumns(0.7, 0.5, 0, 1.0, 0.0), DrawColumns(1.3, 0.1, 5, 0.9, 0.1)] * 3
    want = sampler.draw_tokens(logits.clone(), columns)
    logits[0, 1] = logits[1, VOCAB - 1] = math.nan
    logits[2, 7] = math.inf
    logits[3] = -math.inf
    assert drawn(logits, columns) == [INVALID_TOKEN] * 4 + want[4:]
    tokens = torch.tensor([3, 3, 3, 3, INVALID_TOKEN, 3])
    at = torch.tensor([4, 5])
    draw_rows(
        logits, at, torch.tensor(columns[4:], dtype=torch.float64).T.contiguous(), tokens, BLOCK
    )
    assert tokens.tolist() == [3, 3, 3, 3, INVALID_TOKEN, want[5]]
    print("not finite: 6 rows")


if __name__ == "__main__":
    main()
