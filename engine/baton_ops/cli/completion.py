"""`baton completion SHELL`: a script that completes commands, flags and the values of flags.

1. `read_commands` asks the parser of each subcommand for its flags; those of the router come from
   the router itself;
2. `SCRIPTS` has a function per shell that writes them down: the script starts no program when a key
   is pressed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from baton.config.flags import FlagParser, exit_with_mistakes

PROG = "baton completion"
INSTALL = {
    "bash": 'eval "$(baton completion bash)"    in ~/.bashrc',
    "zsh": 'eval "$(baton completion zsh)"    in ~/.zshrc, after compinit',
    "fish": "baton completion fish > ~/.config/fish/completions/baton.fish",
}


@dataclass(frozen=True, slots=True)
class CommandFlag:
    """Flag of a subcommand. `values`: those it takes, where they are known."""

    name: str
    help: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandWords:
    """Words that follow a subcommand."""

    name: str
    help: str
    flags: tuple[CommandFlag, ...]
    words: tuple[str, ...] = ()
    """Words that are no flags."""


def first_sentence(text: str) -> str:
    """Beginning of a help text, short enough for one line beside the flag."""
    return re.split(r"[;:(\[]", text.replace("%%", "%"), maxsplit=1)[0].strip()


def flags_of(parser: argparse.ArgumentParser) -> list[CommandFlag]:
    """Flags that the parser knows, with their aliases."""
    flags = []
    for action in parser._actions:
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        values = tuple(metavar[1:-1].split(",")) if metavar.startswith("{") else ()
        text = first_sentence(action.help or "")
        flags += [CommandFlag(name, text, values) for name in action.option_strings]
    return flags


def router_flags(*command: str) -> list[CommandFlag]:
    """Flags of the router, as it prints them: name, values, help; tabs between."""
    outcome = subprocess.run(
        [sys.executable, "-m", "baton_ops.cli", "router", "--print-completion"],
        capture_output=True,
        text=True,
        check=True,
    )
    flags = []
    for line in outcome.stdout.splitlines():
        name, values, text = line.split("\t")
        choices = tuple(values.split(",")) if values else ()
        flags.append(CommandFlag(name, first_sentence(text), choices))
    return flags


def read_commands() -> list[CommandWords]:
    from baton_ops.cli.main import COMMANDS, PARSERS

    router = router_flags()
    commands = []
    for name, (text, _) in COMMANDS.items():
        if name in PARSERS:
            flags = flags_of(import_module(PARSERS[name]).make_parser())
        elif name == "replay":
            flags = [CommandFlag("--json", "print one JSON object"), *router]
        else:
            flags = router
        words = tuple(SCRIPTS) if name == "completion" else ()
        commands.append(CommandWords(name, text, tuple(flags), words))
    return commands


# ---- scripts -------------------------------------------------------------------------------------


def bash_script(commands: Sequence[CommandWords]) -> str:
    names = " ".join(command.name for command in commands)
    lines = [
        "# Completion of baton for bash.",
        "_baton() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        "    local words=''",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f"        words='{names} --help --version'",
        "    else",
        '        case "${COMP_WORDS[1]} $before" in',
    ]
    for command in commands:
        for flag in command.flags:
            if flag.values:
                values = " ".join(flag.values)
                lines.append(f"            '{command.name} {flag.name}') words='{values}' ;;")
    lines += [
        "        esac",
        '        if [ -z "$words" ]; then',
        '            case "${COMP_WORDS[1]}" in',
    ]
    for command in commands:
        flags = " ".join([*command.words, *(flag.name for flag in command.flags)])
        lines.append(f"                {command.name}) words='{flags}' ;;")
    lines += [
        "            esac",
        "        fi",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o bashdefault -o default -F _baton baton",
    ]
    return "\n".join(lines) + "\n"


def zsh_script(commands: Sequence[CommandWords]) -> str:
    """Descriptions stand behind a colon, as _describe wants them."""

    def quoted(name: str, text: str) -> str:
        escaped = f"{name}:{text}".replace("'", "'\\''")
        return f"'{escaped}'"

    lines = [
        "#compdef baton",
        "_baton() {",
        "    local -a found",
        "    if (( CURRENT == 2 )); then",
        "        found=(",
        *(f"            {quoted(command.name, command.help)}" for command in commands),
        "        )",
        "        _describe command found",
        "        return",
        "    fi",
        '    case "$words[2] $words[CURRENT-1]" in',
    ]
    for command in commands:
        for flag in command.flags:
            if flag.values:
                values = " ".join(flag.values)
                lines.append(
                    f"        '{command.name} {flag.name}') found=({values}); _describe value "
                    "found; return ;;"
                )
    lines += ["    esac", '    case "$words[2]" in']
    for command in commands:
        lines += [
            f"        {command.name}) found=(",
            *(f"            '{word}'" for word in command.words),
            *(f"            {quoted(flag.name, flag.help)}" for flag in command.flags),
            "        ) ;;",
        ]
    lines += [
        "    esac",
        "    _describe -o flag found",
        "    _files",
        "}",
        "compdef _baton baton",
    ]
    return "\n".join(lines) + "\n"


def fish_script(commands: Sequence[CommandWords]) -> str:
    def quoted(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    lines = ["# Completion of baton for fish.", "complete -c baton -n __fish_use_subcommand -f"]
    for command in commands:
        lines.append(
            f"complete -c baton -n __fish_use_subcommand -a {command.name} -d "
            f"{quoted(command.help)}"
        )
    for command in commands:
        condition = quoted(f"__fish_seen_subcommand_from {command.name}")
        for word in command.words:
            lines.append(f"complete -c baton -n {condition} -f -a {word}")
        for flag in command.flags:
            if not flag.name.startswith("--"):
                continue
            values = f" -x -a {quoted(' '.join(flag.values))}" if flag.values else ""
            lines.append(
                f"complete -c baton -n {condition} -l {flag.name[2:]} -d "
                f"{quoted(flag.help)}{values}"
            )
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[Sequence[CommandWords]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}


def make_parser() -> FlagParser:
    rows = "; ".join(INSTALL.values())
    parser = FlagParser(PROG, f"Print a script that completes baton's commands and flags: {rows}.")
    parser.usage = f"{PROG} {{{','.join(SCRIPTS)}}}"
    parser.add_argument("shell", nargs="?", metavar="SHELL", help=", ".join(SCRIPTS))
    return parser


def main(argv: Sequence[str]) -> int:
    values, bad = make_parser().read(argv)
    shell = values["shell"]
    if shell not in SCRIPTS:
        given = "no shell is given" if shell is None else f"{shell}: unknown shell"
        bad.append(f"{given}; give one of {', '.join(SCRIPTS)}")
    if bad:
        exit_with_mistakes(PROG, bad)
    print(SCRIPTS[shell](read_commands()), end="")
    return 0
