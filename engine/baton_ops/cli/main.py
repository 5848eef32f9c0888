"""The `baton` command: one subcommand per thing a user does.

Nothing heavy is imported before it is known to be needed.

`baton router …` hands its arguments to the router unread, so that no router flag is written twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from baton import DISTRIBUTION


def _main_of(module: str) -> Callable[[Sequence[str]], int]:
    """`main` of a module that is imported when it is called."""
    return lambda argv: int(import_module(module).main(argv))


def _run_native(*command: str) -> Callable[[Sequence[str]], int]:
    """The router's program under the name, and with the subcommand, that `command` gives it."""
    return lambda argv: int(import_module("baton._native").router_main([*command, *argv]))


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "up": (
        "start a whole cluster on this machine: router, prefill and decode nodes",
        _main_of("baton_ops.launch.local_cluster"),
    ),
    "chat": ("talk to a model in the terminal", _main_of("baton_ops.chat")),
    "router": ("run the router", _run_native("baton router")),
    "engine": (
        "run one engine: a prefill node, a decode node, or both in one",
        _main_of("baton.server.launch.engine"),
    ),
    "drain": (
        "take engines out of service without breaking a stream, or return them",
        _main_of("baton_ops.drain"),
    ),
    "doctor": (
        "check a machine, a fleet or a Kubernetes namespace: what is wrong, and what to do",
        _main_of("baton_ops.doctor.main"),
    ),
    "top": ("show nodes, pairs and slow requests of a running fleet", _main_of("baton_ops.top")),
    "bench": (
        "replay a recorded trace against servers",
        _main_of("baton_ops.bench.main"),
    ),
    "simulate": (
        "replay a trace through the scheduler in virtual time and compare queue orders",
        _main_of("baton_ops.sim.main"),
    ),
    "replay": ("decide a router's decision log again, and compare", _run_native("baton", "replay")),
    "completion": (
        "print a script that completes commands and flags in bash, zsh or fish",
        _main_of("baton_ops.cli.completion"),
    ),
}
"""Help and function of each subcommand."""

PARSERS = {
    "up": "baton_ops.launch.cluster_plan",
    "chat": "baton_ops.chat",
    "engine": "baton.config.parsing",
    "drain": "baton_ops.drain",
    "doctor": "baton_ops.doctor.main",
    "top": "baton_ops.top",
    "bench": "baton_ops.bench.main",
    "simulate": "baton_ops.sim.main",
    "completion": "baton_ops.cli.completion",
}
"""Modules whose `make_parser` knows the flags of a subcommand.

Those of the others are the router's.
"""

ELSEWHERE = dict.fromkeys(
    ("serve", "launch", "launch_server", "run", "start"),
    "baton up --model-path MODEL starts a whole cluster here, baton engine --model-path "
    "MODEL one engine",
)
"""Words that start a server elsewhere, and what to do here."""


def format_usage() -> str:
    rows = "\n".join(f"  {name:<10} {text}" for name, (text, _) in COMMANDS.items())
    return (
        "usage: baton COMMAND [options]    (baton COMMAND --help lists them)\n"
        "\n"
        f"{rows}\n"
        "\n"
        "  --version\n"
    )


def own_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown (not installed)"


def router() -> int:
    """Entry point of the command `baton-router` where the native program is not installed."""
    return _run_native("baton-router")(sys.argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv else "--help"
    if name == "help" and argv[1:] and argv[1] in COMMANDS:  # baton help up
        argv = [argv[1], "--help"]
        name = argv[0]
    if name in ("-h", "--help", "help"):
        print(format_usage(), end="")
        return 0 if argv else 2
    if name in ("-V", "--version", "version"):
        print(f"baton {own_version()}")
        return 0
    if name not in COMMANDS:
        advice = ELSEWHERE.get(name, f"there are {', '.join(COMMANDS)}")
        print(f"baton: there is no command {name!r}; {advice}", file=sys.stderr)
        return 2
    _, run = COMMANDS[name]
    return run(argv[1:])
