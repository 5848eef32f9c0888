"""Bounds of the work for grammars."""

from collections.abc import Mapping
from typing import Any

COMPILE_LIMIT_SECS = 5.0
"""A request whose grammar is not compiled so long after its turn came is refused."""
MAX_ALTERNATIVES = 5000
"""Objects and arrays that an enum lists; texts and numbers are one lexeme together."""
MATCHER_LIMITS: Mapping[str, Any] = {
    # An object's optional properties take four each: 1,500 of them are served, with 10 ms for a
    # mask behind a comma.
    "max_items_in_row": 6200,
    "step_max_items": 100_000,
    "step_lexer_fuel": 200_000,
}
"""llguidance's limits where a front checks a grammar, with one token per byte.

All are numbers of steps, not times.
"""
RANK_LIMITS = {name: 2 * limit for name, limit in MATCHER_LIMITS.items()}
"""A vocabulary leads to more places than single bytes, and an answer must not meet a limit that its
check has not met.
"""
