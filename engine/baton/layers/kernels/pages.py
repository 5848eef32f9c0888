"""Copy pages and take their checksums in one launch, in Triton.

One program copies and sums BLOCK words of one page; programs of one page add up in device memory.
Sums wrap around at 64 bits, so their order does not matter. Tested on the CPU by Triton's
interpreter (tests/unit/layers/kernels/test_pages.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""32-bit words that one program takes: 16 KiB."""
WARPS = 8


def sum_pages(rows: Tensor, pages: Tensor, weights: Tensor, sums: Tensor) -> None:
    """Add the checksum of each of `pages` to `sums`.

    Args:
        rows: int32 [num_pages, W], contiguous.
        pages: int64 [n], n >= 1.
        weights: int64 [W], one per word (`pool::weighted` in the crate kv_transfer).
        sums: int64 [n], zero before.
    """
    _launch_kernel(rows, pages, rows, pages, weights, sums, copies=False)


def copy_pages(
    source: Tensor, source_pages: Tensor, target: Tensor, target_pages: Tensor, weights: Tensor, sums: Tensor
) -> None:  # fmt: skip
    """Copy `source_pages` of `source` to `target_pages` of `target`, and add the checksum of each
    to `sums`.

    Args: as of `sum_pages`; both matrices have rows of W words, both lists of pages have the same
    length.
    """
    _launch_kernel(source, source_pages, target, target_pages, weights, sums, copies=True)


def _launch_kernel(
    source: Tensor, source_pages: Tensor, target: Tensor, target_pages: Tensor, weights: Tensor, sums: Tensor,
    *, copies: bool,
) -> None:  # fmt: skip
    words = source.shape[1]
    grid = (len(source_pages), triton.cdiv(words, BLOCK))
    _copy_and_sum[grid](
        source, source_pages, target, target_pages, weights, sums, words,
        COPIES=copies, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


# Page lists are slices of one copy: without alignment there is one variant to compile.
@triton.jit(do_not_specialize_on_alignment=["source_pages", "target_pages", "sums"])
def _copy_and_sum(
    source, source_pages, target, target_pages, weights, sums, words,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    source_row = source + tl.load(source_pages + place) * words
    content = tl.load(source_row + word, mask=inside, other=0)
    if COPIES:
        target_row = target + tl.load(target_pages + place) * words
        tl.store(target_row + word, content, mask=inside)
    weight = tl.load(weights + word, mask=inside, other=0)
    tl.atomic_add(sums + place, tl.sum(content.to(tl.int64) * weight, 0))
