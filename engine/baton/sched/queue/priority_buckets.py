"""Bands of priority: a few names for all integers, so that metrics and load reports stay small.

A band reaches from its lower edge up to the next one; its name is that edge. Values are normalized
(larger is better, sched.types.priority.PriorityRule.base); a request without a priority is
"default" and ranks below every given value.
"""

from __future__ import annotations

import bisect

from baton.cache.eviction import LOWEST_PRIORITY
from baton.sched.types.priority import PriorityRule
from baton.sched.types.sequence import Seq

EDGES = (-1024, -256, -64, -16, -4, 0, 1, 4, 16, 64, 256, 1024)
"""Powers of four: sharp where priorities are usually given, a band each for what is far off."""
DEFAULT = "default"
LOW = "low"
BANDS = (*(str(edge) for edge in reversed(EDGES)), LOW, DEFAULT)
"""All names, most important first."""


def band(value: float) -> str:
    """The band's name, e.g. "4" for 4 to 15; "low" below all edges; "default" for a missing
    priority.
    """
    if value <= LOWEST_PRIORITY / 2:  # aging lifts it a little
        return DEFAULT
    index = bisect.bisect_right(EDGES, value)
    return str(EDGES[index - 1]) if index else LOW


def class_of(seq: Seq, rule: PriorityRule) -> str:
    """The request's label in metrics without --priority-classes: its band where priorities count,
    else one for all.
    """
    return band(rule.base(seq)) if rule.enabled else DEFAULT
