"""Integers of a few bits, side by side in 32-bit words, low bits first."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def word_slice(values: slice, bits: int) -> slice:
    """Words that hold these values."""
    return slice(values.start * bits // WORD_BITS, -(-values.stop * bits // WORD_BITS))


def unpack_values(words: Tensor, values: slice, bits: int) -> Tensor:
    """Values of words that `word_slice` names: uint8 [rows, values], for int32 [rows, words].

    A value may lie across the border of two words.
    """
    first_word = word_slice(values, bits).start
    count = values.stop - values.start
    start_bit = values.start * bits - first_word * WORD_BITS
    if 8 % bits == 0:
        # No value lies across the border of two bytes.
        # A single word per row counts as contiguous whatever lies between rows.
        if words.stride(-1) != 1:
            words = words.clone(memory_format=torch.contiguous_format)
        in_bytes = words.contiguous().view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        spread = (in_bytes.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        first = start_bit // bits
        return spread.flatten(1)[:, first : first + count]
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    places = start_bit + bits * torch.arange(count)
    word = places // WORD_BITS
    shift = places % WORD_BITS
    # Bits beyond the 64th fall off; the mask takes the rest.
    low = wide[:, word] >> shift
    high = wide[:, word + 1] << (WORD_BITS - shift)
    values_of_words: Tensor = (low | high) & ((1 << bits) - 1)
    return values_of_words.to(torch.uint8)
