"""Values of a row that the sampler hands to a draw: the one place where their order stands."""

from __future__ import annotations

from typing import NamedTuple


class DrawColumns(NamedTuple):
    """All that a draw knows of a row. The kernel (`draw`) gets one column per field, in the order
    of the fields."""

    temperature: float
    u: float
    """Decides among the tokens that are kept, in order of id; in [0, 1)."""
    top_k: float
    """A whole number; 0: no limit."""
    top_p: float
    min_p: float
