"""The `baton` command: one subcommand per thing a user does. Nothing heavy is imported before it is known to be needed.

`baton router …` hands its arguments to the router unread, so that no router flag is written twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from baton import DISTRIBUTION


def _up(argv: Sequence[str]) -> int:
    from baton.server.launch.local_cluster import main

    return main(argv)


def _router(argv: Sequence[str]) -> int:
    from baton._native import router_main

    return int(router_main(["baton router", *argv]))


def _replay(argv: Sequence[str]) -> int:
    from baton._native import router_main

    return int(router_main(["baton", "replay", *argv]))


def _engine(argv: Sequence[str]) -> int:
    from baton.config import parse
    from baton.server.launch.engine import run_engine

    return run_engine(parse(argv))


def _drain(argv: Sequence[str]) -> int:
    from baton.cli.drain import main

    return main(argv)


def _bench(argv: Sequence[str]) -> int:
    from baton.cli.bench.serving import main

    return main(argv)


def _simulate(argv: Sequence[str]) -> int:
    from baton.sim.main import main

    return main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from baton.cli.doctor.main import main

    return main(argv)


def _top(argv: Sequence[str]) -> int:
    from baton.cli.doctor.top import main

    return main(argv)


@dataclass(frozen=True, slots=True)
class Command:
    help: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    "up": Command("start a whole cluster on this machine: router, prefill and decode nodes", _up),
    "router": Command("run the router", _router),
    "replay": Command("decide a router's decision log again, and compare", _replay),
    "engine": Command("run one engine: a prefill node, a decode node, or both in one", _engine),
    "drain": Command("take engines out of service without breaking a stream, or return them", _drain),
    "doctor": Command("check a machine, a fleet or a Kubernetes namespace: what is wrong, and what to do", _doctor),
    "top": Command("show nodes, pairs and slow requests of a running fleet", _top),
    "bench": Command("send the same load to several servers and compare them", _bench),
    "simulate": Command("replay a trace through the scheduler in virtual time and compare queue orders", _simulate),
}


def usage() -> str:
    rows = "\n".join(f"  {name:<8} {command.help}" for name, command in COMMANDS.items())
    return f"usage: baton COMMAND [options]    (baton COMMAND --help lists them)\n\n{rows}\n\n  --version\n"


def own_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown (not installed)"


def router() -> int:
    """Entry point of the command `baton-router`, for where the native program of that name is not installed."""
    from baton._native import router_main

    return int(router_main(["baton-router", *sys.argv[1:]]))


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage(), end="")
        return 0 if argv else 2
    if name in ("-V", "--version"):
        print(f"baton {own_version()}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        print(f"baton: there is no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return command.run(argv[1:])
