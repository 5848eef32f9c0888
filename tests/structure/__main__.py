"""Print figures of the sources; with `write`, rewrite allowed.txt instead.

The list is not rewritten while a rule is broken more often than the list allows.
"""

from __future__ import annotations

import argparse
import sys

from tests.structure.allowed import PATH, allowed, grown, write
from tests.structure.figures import table
from tests.structure.rules import offenses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["figures", "write"], default="figures")
    if parser.parse_args().command == "write":
        return rewrite_allowed()
    print(table())
    return 0


def rewrite_allowed() -> int:
    found = offenses()
    if worse := grown(allowed(), found):
        print("the list only shrinks:", *worse, sep="\n")
        return 1
    write(found)
    print(f"{len(found)} lines in {PATH.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
