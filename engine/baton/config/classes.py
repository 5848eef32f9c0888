"""--priority-classes: their names, weights and priorities, and the class that a request belongs
to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LEAST_PRIORITY = -(2**31)
MOST_PRIORITY = 2**31 - 1
"""Bounds of a priority, wherever it is stated: requests, tenants, traces, the adjustment
function.
"""
MAX_CLASSES = 16
MAX_WEIGHT = 1000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_TIERS = {
    "priority": "first",
    "scale": "first",
    "default": "middle",
    "auto": "middle",
    "flex": "last",
}
"""OpenAI's service_tier → place among the classes."""
SERVICE_TIERS = tuple(_TIERS)


@dataclass(frozen=True, slots=True)
class PriorityClass:
    name: str
    weight: int = 1
    bound: int | None = None
    """Requests that name no class come here from this priority on (as the client counts it)."""


@dataclass(frozen=True, slots=True)
class ClassRules:
    """The classes, most important first. Empty: everything is one class."""

    classes: tuple[PriorityClass, ...] = ()
    low_values_first: bool = False
    """Smaller priority values are more important: a bound is then the largest value of its
    class.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.classes)

    def of_tier(self, tier: str) -> str:
        """The class of an OpenAI service_tier; KeyError for an unknown one."""
        places = {"first": 0, "middle": (len(self.classes) - 1) // 2, "last": -1}
        return self.classes[places[_TIERS[tier]]].name

    def of_priority(self, priority: int | None) -> str:
        """The class of a request that names none: by its priority where the classes have bounds,
        else the middle.
        """
        if priority is None or self.classes[0].bound is None:
            return self.of_tier("default")
        sign = -1 if self.low_values_first else 1
        reached = (
            c.name
            for c in self.classes
            if c.bound is not None and sign * priority >= sign * c.bound
        )
        return next(reached, self.classes[-1].name)

    def no_better(self, name: str, ceiling: str) -> str:
        """`name`, or `ceiling` where that is the less important class."""
        return max(name, ceiling, key=self.names.index)


def parse_classes(text: str, *, low_values_first: bool = False) -> tuple[ClassRules, list[str]]:
    """`name:weight` or `name:weight:bound`, comma separated, most important first → rules and every
    mistake.
    """
    classes: list[PriorityClass] = []
    bad: list[str] = []
    for part in text.split(","):
        name, *numbers = (piece.strip() for piece in part.split(":"))
        if not _NAME.fullmatch(name):
            bad.append(
                f"{part.strip()!r}: a class begins with its name, a letter and up to 31 letters, "
                "digits, - or _"
            )
        elif not 1 <= len(numbers) <= 2 or not all(
            re.fullmatch(r"-?\d{1,10}", number) for number in numbers
        ):
            bad.append(
                f"{part.strip()!r}: write name:weight or name:weight:min_priority, in whole numbers"
            )
        elif not 1 <= int(numbers[0]) <= MAX_WEIGHT:
            bad.append(f"{part.strip()!r}: the weight must be 1 to {MAX_WEIGHT}")
        else:
            classes.append(
                PriorityClass(name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None)
            )
    names = [c.name for c in classes]
    bad += [
        f"{name!r}: is named twice"
        for name in dict.fromkeys(n for n in names if names.count(n) > 1)
    ]
    if len(classes) > MAX_CLASSES:
        bad.append(f"{len(classes)} classes: at most {MAX_CLASSES} are possible")
    bounds = [c.bound for c in classes if c.bound is not None]
    if bounds and len(bounds) < len(classes):
        bad.append("give min_priority to every class or to none")
    elif bounds != sorted(bounds, reverse=not low_values_first) or len(set(bounds)) < len(bounds):
        direction = "grow" if low_values_first else "shrink"
        bad.append(
            f"min_priority must {direction} from one class to the next, most important class first"
        )
    return ClassRules(tuple(classes), low_values_first), bad
