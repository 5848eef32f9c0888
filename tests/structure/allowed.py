"""What breaks a rule and is allowed to, for now."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).with_name("allowed.txt")


def allowed() -> dict[tuple[str, str], int]:
    """(rule, what breaks it) → by how much at most."""
    entries = {}
    for line in PATH.read_text(encoding="utf-8").split("\n"):
        if line:
            rule, rest = line.split(" ", 1)
            what, count = rest.rsplit(" ", 1)
            entries[rule, what] = int(count)
    return entries
