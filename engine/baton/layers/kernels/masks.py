"""Set the logits of forbidden tokens to -inf in one launch, in Triton.

Each program has one block of one row: it reads the block's bits, and writes where they are 0.
Logits are not read.

Tested on the CPU by Triton's interpreter (tests/unit/layers/kernels/test_masks.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def mask_rows(logits: Tensor, rows: Tensor, packed: Tensor, block: int = BLOCK) -> None:
    """Mask some rows, in place.

    Args:
        logits: float32 [S, vocab], each row contiguous.
        rows: int64 [n], no duplicates.
        packed: int32 [n, at least vocab / 32], contiguous: bit t % 32 of word t // 32 is 1 where
            token t is allowed.
    Raises:
        ValueError: there are fewer bits than logits.
    Cost: reads the masks, writes the forbidden logits; does not synchronize the stream.
    """
    vocab = logits.shape[1]
    count, words = packed.shape
    if words * 32 < vocab:
        raise ValueError(f"masks of {words} words have fewer bits than a row has logits ({vocab})")
    _mask_row[(count, triton.cdiv(vocab, block))](
        logits,
        logits.stride(0),
        vocab,
        rows,
        packed,
        words,
        BLOCK=block,
        num_warps=WARPS,
    )


@triton.jit
def _mask_row(logits, stride, vocab, rows, packed, words, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab
    word = tl.load(packed + place * words + ids // 32, mask=is_token, other=-1)
    is_forbidden = ((word >> (ids % 32)) & 1) == 0
    row = tl.load(rows + place)
    tl.store(logits + row * stride + ids, float("-inf"), mask=is_token & is_forbidden)
