"""Lists of allowed tokens as requests carry them in an engine."""

from __future__ import annotations

from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """As `SamplingParams.allowed_tokens`."""
    bits = sum(1 << token for token in set(ids))
    return bits.to_bytes(bits.bit_length() // 8 + 1, "little")
