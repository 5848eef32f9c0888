"""The mask kernel in Triton's interpreter against numpy: run by tests/unit/layers/kernels/test_masks.py.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its own.
"""

from __future__ import annotations

import numpy as np
import torch

from baton.layers.kernels.masks import mask_rows

BLOCK = 64


def check(vocab: int, count: int, extra_words: int, seed: int) -> None:
    """Masks of random bits for some rows, in any order, beside rows without a mask."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count + 3, vocab)).astype(np.float32)
    rows = rng.permutation(count + 3)[:count]
    words = -(-vocab // 32) + extra_words
    masks = rng.integers(-(2**31), 2**31, size=(count, words)).astype(np.int32)
    masks[0] = 0
    masks[-1, 0] = -1
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    expected = logits.copy()
    expected[rows] = np.where(bits == 1, logits[rows], -np.inf)
    masked = torch.from_numpy(logits.copy())
    mask_rows(masked, torch.from_numpy(rows), torch.from_numpy(masks), BLOCK)
    np.testing.assert_array_equal(masked.numpy(), expected)


def check_refusal() -> None:
    logits = torch.zeros(1, 65)
    try:
        mask_rows(logits, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32))
    except ValueError as err:
        print(err)


def main() -> None:
    shapes = [
        (vocab, count, extra)
        for vocab in (1, 31, 32, 64, 65, 200)
        for count in (1, 5)
        for extra in (0, 2)
    ]
    for seed, (vocab, count, extra) in enumerate(shapes):
        check(vocab, count, extra, seed)
    print(f"{len(shapes)} shapes")
    check_refusal()


if __name__ == "__main__":
    main()
