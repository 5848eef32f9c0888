"""Pages of a pool as tests look at them."""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor


def ids(pages: list[int]) -> bytes:
    """As the transfer runtime names them."""
    return array("i", pages).tobytes()


def bytes_of(rows: Tensor, page: int) -> bytes:
    return rows[page].contiguous().view(torch.uint8).cpu().numpy().tobytes()


def naive_sum(page: bytes) -> int:
    """The checksum as the crate defines it, in Python's integers."""
    total = state = 0
    for word in np.frombuffer(page, np.int32).tolist():
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += word * ((z ^ z >> 31) | 1)
    return total % 2**64
