"""The page kernels against plain integers: run in Triton's interpreter by tests/unit/layers/kernels/test_pages.py, and
by tests/gpu.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its own.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from baton.layers.cuda.device_pages import weights
from baton.layers.kernels.pages import BLOCK, copy_pages, sum_pages
from tests.support.kernels.pages import bytes_of, naive_sum

WORDS = (2, 24, BLOCK - 2, BLOCK, BLOCK + 2, 3 * BLOCK + 16)
PAGES = 6


def check(words: int, seed: int, device: torch.device) -> None:
    """Sums of pages in any order, with repetition, and copies between two pools."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    here, there = (
        torch.randint(-(2**31), 2**31, (PAGES, words), generator=generator, dtype=torch.int32)
        for _ in range(2)
    )
    on_device = torch.from_numpy(weights(words)).to(device)
    ours = here.to(device)
    theirs = there.to(device)

    order = [rng.randrange(PAGES) for _ in range(8)]
    sums = torch.zeros(len(order), dtype=torch.int64, device=device)
    sum_pages(ours, torch.tensor(order, device=device), on_device, sums)
    assert unsigned(sums) == [naive_sum(bytes_of(here, page)) for page in order]

    source = rng.sample(range(PAGES), 4)
    target = rng.sample(range(PAGES), 4)
    sums = torch.zeros(4, dtype=torch.int64, device=device)
    copy_pages(
        theirs,
        torch.tensor(source, device=device),
        ours,
        torch.tensor(target, device=device),
        on_device,
        sums,
    )
    assert unsigned(sums) == [naive_sum(bytes_of(there, page)) for page in source]
    here[target] = there[source]
    assert torch.equal(ours.cpu(), here)
    assert torch.equal(theirs.cpu(), there)


def unsigned(sums: torch.Tensor) -> list[int]:
    return sums.cpu().numpy().view(np.uint64).tolist()


if __name__ == "__main__":
    for seed, words in enumerate(WORDS):
        check(words, seed, torch.device("cpu"))
    print(f"{len(WORDS)} sizes")
