"""Reading --tenant-config, a JSON file or the JSON itself; every mistake in it is reported at once."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from baton.errors import ConfigError
from baton.sched.tenants import TenantRules, parse_rules


def text_of(value: str) -> str:
    """The JSON that the flag stands for. Raises ConfigError when it names a file that cannot be read."""
    if value.lstrip().startswith("{"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"--tenant-config {value}: cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"--tenant-config {value}: is not JSON: {err}") from err


def load(value: str, class_names: Collection[str]) -> TenantRules:
    """Raises ConfigError: the file cannot be read, or holds something else than limits of tenants."""
    text = text_of(value)
    where = "--tenant-config" if text is value else f"--tenant-config {value}"
    try:
        document = json.loads(text)
    except ValueError as err:
        raise ConfigError(f"{where}: is not JSON: {err}") from err
    rules, bad = parse_rules(document, class_names)
    if bad:
        raise ConfigError("\n".join(f"{where}: {line}" for line in bad))
    return rules
