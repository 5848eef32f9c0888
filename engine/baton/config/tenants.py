"""--tenant-config, a JSON file or the JSON itself: limits by tenant; every mistake in it is
reported at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from baton.config.classes import LEAST_PRIORITY, MOST_PRIORITY
from baton.config.files import read_regular_file
from baton.errors import ConfigError

DEFAULT_TENANT = "default"
OTHER = "other"
INTERNAL = "internal"
"""Labels of metrics: tenants without one of their own, and requests of no tenant."""
TENANT_NAME = re.compile(r"[A-Za-z0-9._~:@/+=-]{1,128}")
"""Safe as a metric label and in a log line."""
NAME_RULE = "1 to 128 letters, digits or . _ ~ : @ / + = -"
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TenantRule:
    """Limits of one tenant. None: no limit."""

    weight: float = 1.0
    max_running: int | None = None
    """Requests with a slot, per rank."""
    max_queued: int | None = None
    """Requests waiting, per rank."""
    max_kv_tokens: int | None = None
    """Tokens that its running requests are expected to hold at their end, per rank."""
    tokens_per_minute: int | None = None
    """Prompt and generated tokens, per engine."""
    priority_class: str | None = None
    """The best class its requests may have, and the one of requests that ask for none."""
    min_priority: int | None = None
    max_priority: int | None = None

    def clamp_priority(self, priority: int | None, low_values_first: bool) -> int | None:
        """The priority inside the tenant's range; none at all counts as the least important end."""
        if priority is None:
            return self.max_priority if low_values_first else self.min_priority
        low = -math.inf if self.min_priority is None else self.min_priority
        high = math.inf if self.max_priority is None else self.max_priority
        return int(min(max(priority, low), high))


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Limits of `named` tenants, and those that each other tenant gets."""

    default: TenantRule = field(default_factory=TenantRule)
    named: Mapping[str, TenantRule] = field(default_factory=dict)

    def rule_of(self, tenant: str) -> TenantRule:
        return self.named.get(tenant, self.default)

    @property
    def all(self) -> Iterable[TenantRule]:
        return (self.default, *self.named.values())


_RANGES: dict[str, tuple[float, float]] = {
    "weight": (0.001, 1e6),
    "max_running": (1, INT32_MAX),
    "max_queued": (0, INT32_MAX),
    "max_kv_tokens": (1, 2**53),
    "tokens_per_minute": (1, 2**53),
    "min_priority": (LEAST_PRIORITY, MOST_PRIORITY),
    "max_priority": (LEAST_PRIORITY, MOST_PRIORITY),
}


def parse_rules(document: object, class_names: Collection[str]) -> tuple[TenantRules, list[str]]:
    """A decoded tenant file → rules and every mistake in it. `class_names`: the classes that exist.

    Form: {"default": {limits}, "tenants": {name: {limits}}}; both parts may be left out.
    """
    if not isinstance(document, dict):
        return TenantRules(), [
            f"the file holds {type(document).__name__}; give an object with default and tenants"
        ]
    bad = [
        f"{key}: unknown; the file has default and tenants"
        for key in document
        if key not in ("default", "tenants")
    ]
    default = _parse_rule("default", document.get("default", {}), class_names, bad)
    tenants = document.get("tenants", {})
    if not isinstance(tenants, dict):
        bad.append(f"tenants is {tenants!r}; give an object, a tenant's name to its limits")
        tenants = {}
    named = {}
    for name, limits in tenants.items():
        if not TENANT_NAME.fullmatch(name):
            bad.append(f"tenants.{name}: a name has {NAME_RULE}")
        named[name] = _parse_rule(f"tenants.{name}", limits, class_names, bad)
    return TenantRules(default, named), bad


def _parse_rule(
    where: str, entry: object, class_names: Collection[str], bad: list[str]
) -> TenantRule:
    if not isinstance(entry, dict):
        bad.append(f"{where} is {entry!r}; give an object of limits")
        return TenantRule()
    values: dict[str, Any] = {}
    known_limits = [f.name for f in fields(TenantRule)]
    for key, value in entry.items():
        if key not in known_limits:
            bad.append(f"{where}.{key}: unknown; limits are {', '.join(known_limits)}")
        elif key == "priority_class":
            if value not in class_names:
                there = ", ".join(class_names) or "none: give --priority-classes"
                bad.append(f"{where}.priority_class is {value!r}; there is {there}")
            values[key] = value
        else:
            low, high = _RANGES[key]
            kind, kinds = (
                ("a number", (int, float)) if key == "weight" else ("a whole number", (int,))
            )
            if type(value) in kinds and low <= value <= high:
                values[key] = value
            else:
                bad.append(f"{where}.{key} is {value!r}; give {kind} from {low:g} to {high:g}")
    rule = TenantRule(**values)
    if (
        rule.min_priority is not None
        and rule.max_priority is not None
        and rule.min_priority > rule.max_priority
    ):
        bad.append(
            f"{where}: min_priority {rule.min_priority} is above max_priority {rule.max_priority}"
        )
    return rule


def text_of(value: str) -> str:
    """The JSON that the flag stands for.

    Raises ConfigError when it names a file that cannot be read.
    """
    if value.lstrip().startswith("{"):
        return value
    try:
        return read_regular_file(Path(value)).decode()
    except OSError as err:
        raise ConfigError(f"--tenant-config {value}: cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"--tenant-config {value}: is not JSON: {err}") from err


def load_rules(value: str, class_names: Collection[str]) -> TenantRules:
    """Raises ConfigError: the file cannot be read, or holds something else than limits of
    tenants.
    """
    text = text_of(value)
    where = "--tenant-config" if text is value else f"--tenant-config {value}"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{where}: is not JSON: {err}") from err
    rules, bad = parse_rules(document, class_names)
    if bad:
        raise ConfigError("\n".join(f"{where}: {line}" for line in bad))
    return rules
