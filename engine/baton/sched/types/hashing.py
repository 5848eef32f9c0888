"""Hash behind every random decision: pure functions of their arguments, no generator state to carry
or to replay.
"""

from __future__ import annotations

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """A bijection of 64-bit integers that flips each output bit with probability 1/2 per input bit
    (SplitMix64).
    """
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, determined by (seed, position)."""
    return (mix64(mix64(seed & _MASK64) + position * _GOLDEN) >> 11) * 2.0**-53
