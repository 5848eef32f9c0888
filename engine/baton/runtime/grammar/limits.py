"""Bounds of the work for grammars."""

COMPILE_LIMIT_SECS = 5.0
"""A request whose grammar is not compiled so long after its turn came is refused."""
