"""Exceptions from the rules: what breaks one today, and by how much at most."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).with_name("allowed.txt")

Counts = dict[tuple[str, str], int]
"""(rule, what breaks it) → by how much."""


def allowed() -> Counts:
    entries = {}
    for line in PATH.read_text(encoding="utf-8").split("\n"):
        if line:
            rule, rest = line.split(" ", 1)
            what, count = rest.rsplit(" ", 1)
            entries[rule, what] = int(count)
    return entries


def write(counts: Counts) -> None:
    lines = sorted(f"{rule} {what} {count}" for (rule, what), count in counts.items())
    PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")


def outdated(limits: Counts, found: Counts) -> list[str]:
    """Entries that are no longer needed, or that could be lower."""
    return sorted(
        f"{rule} {what}: {found.get((rule, what), 0)}, allowed {limit}"
        for (rule, what), limit in limits.items()
        if found.get((rule, what), 0) < limit
    )


def grown(limits: Counts, found: Counts) -> list[str]:
    """Rules whose exceptions add up to more than the list allows; a renamed file keeps the sum."""
    return sorted(
        f"{rule}: {now}, allowed {before}"
        for rule in {rule for rule, _ in found}
        if (now := _total(found, rule)) > (before := _total(limits, rule))
    )


def _total(counts: Counts, rule: str) -> int:
    return sum(count for (of, _), count in counts.items() if of == rule)
