"""Write allowed.txt: what breaks a rule today."""

from __future__ import annotations

from tests.structure.allowed import PATH
from tests.structure.rules import offenses


def main() -> None:
    lines = sorted(f"{rule} {what} {count}" for (rule, what), count in offenses().items())
    PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} lines in {PATH.name}")


if __name__ == "__main__":
    main()
