"""Gauges of an engine that count what requests hold: pages, pins, requests, rooms and leases.

Idle engines have 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGE_STATES = {"kv_pages": ("held", "in_transfer"), "kv_host_pages": ("pinned",)}
"""The states of pages in which they belong to a request; free and cached ones do not."""
GAUGES = ("requests", "kv_rooms", "kv_leases")
_NAME = re.compile(r'^(\w+)(?:\{state="(\w+)"\})?$')


def is_holding(name: str, state: str | None) -> bool:
    """`name`: a gauge without its prefix `baton_`."""
    if name in PAGE_STATES:
        return state in PAGE_STATES[name]
    return name in GAUGES


def holdings(gauges: Mapping[str, float]) -> dict[str, float]:
    """The gauges among these, named as a rank reports them, that are not zero and should be when it
    is idle.
    """
    found = {}
    for key, value in gauges.items():
        match = _NAME.match(key)
        if value and match is not None and is_holding(match[1], match[2]):
            found[key] = value
    return found
