"""Print figures of the sources beside the committed ones; with `accept`, write those of today."""

from __future__ import annotations

import argparse
import sys

from tests.structure import figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["print", "accept"], default="print")
    measured = figures.measure()
    if parser.parse_args().command == "accept":
        figures.write(measured)
        return 0
    committed = figures.read()
    print(figures.table(measured, committed))
    worse = figures.steps_backwards(measured, committed)
    if worse:
        print("", *worse, figures.HOW_TO_ACCEPT, sep="\n", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
