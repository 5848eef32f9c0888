"""Names of queue orders and eviction policies are the same wherever they are listed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from baton.cache import eviction
from baton.config.groups.queue import EVICTION_ORDERS, QUEUE_ORDERS
from baton.sched import policies
from baton.sched.policies import POLICIES

SCHEDULING = Path(__file__).parents[4] / "docs" / "scheduling"


def first_table(text: str) -> list[str]:
    """First cells of the first Markdown table, without its head."""
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [row.split("|")[1].strip(" `") for row in table[1].splitlines()]


def test_values_of_schedule_policy_are_auto_and_every_policy() -> None:
    assert QUEUE_ORDERS[0] == "auto"
    assert sorted(QUEUE_ORDERS[1:]) == sorted(POLICIES)


def test_tables_of_policies_name_every_policy() -> None:
    page = (SCHEDULING / "orders.md").read_text(encoding="utf-8")
    assert sorted(first_table(inspect.getdoc(policies) or "")) == sorted(POLICIES)
    assert sorted(first_table(page)) == sorted(POLICIES)


def test_values_of_radix_eviction_policy_are_every_policy() -> None:
    assert sorted(EVICTION_ORDERS) == sorted(eviction.EVICTION_POLICIES)


def test_tables_of_eviction_policies_name_every_policy() -> None:
    page = (SCHEDULING / "cache.md").read_text(encoding="utf-8")
    assert sorted(first_table(inspect.getdoc(eviction) or "")) == sorted(EVICTION_ORDERS)
    assert sorted(first_table(page)) == sorted(EVICTION_ORDERS)
