"""Token ids and page ids in messages: arrays of typecode 'i', which travel as their bytes.

msgspec evaluates annotations, and before Python 3.12 `array[int]` has no value: such fields are of
type `IntArray`.
"""

from __future__ import annotations

from array import array
from operator import methodcaller
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    IntArray = array[int]
else:
    IntArray = array

pack = methodcaller("tobytes")
"""Encoder for msgspec's enc_hook."""


def unpack(kind: type[IntArray], packed: bytes) -> IntArray:
    """Decode an array, for msgspec's dec_hook."""
    return kind("i", packed)
