"""Flags made of a dataclass: `opt` describes a field, `FlagParser` reads it and reports all
mistakes at once.

A program with many flags names the few that a first start needs (`essentials`): --help shows these,
--help-all all.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import math
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from baton.config.unsupported_flags import INSTEAD

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Interval that a number has to lie in."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __contains__(self, value: float) -> bool:
        return (
            value >= self.ge
            and value <= self.le
            and (value > self.gt or self.gt == -math.inf)
            and value < self.lt
        )

    def __str__(self) -> str:
        if self.ge > -math.inf and self.le < math.inf:
            return f"{_format_bound(self.ge)} to {_format_bound(self.le)}"
        low = (
            f"at least {_format_bound(self.ge)}"
            if self.ge > -math.inf
            else f"above {_format_bound(self.gt)}"
        )
        high = (
            f"at most {_format_bound(self.le)}"
            if self.le < math.inf
            else f"below {_format_bound(self.lt)}"
        )
        return low if high == "below inf" else f"{low} and {high}"


def _format_bound(bound: float) -> str:
    return (
        str(bound)
        if isinstance(bound, int)
        else f"{bound:g}".replace("e+0", "e").replace("e+", "e")
    )


def opt(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    env: str = "",
    also: Sequence[str] = (),
    simulated: bool = True,
    on_device: bool = False,
    secret: bool = False,
    **bounds: float,
) -> Any:
    """A field that is also a flag. `help` names the unit in brackets; `env` is read when the flag
    is absent.

    Args:
        also: names of the same flag in SGLang and vLLM.
        simulated: False for a flag of an engine that `baton simulate` does not have.
        on_device: the flag is about a device that is there: engines refuse it with --simulate, and
            `baton simulate` does not have it.
        secret: the value is never shown or recorded.
        bounds: `ge`, `gt`, `le`, `lt` of a number; checked by `out_of_range`, shown in
            docs/flags.md.
    """
    metadata: dict[str, Any] = {"help": help, "choices": choices, "env": env, "also": also}
    metadata |= {"simulated": simulated and not on_device, "on_device": on_device}
    metadata["secret"] = secret
    return dataclasses.field(
        default=default, metadata={**metadata, "range": ValueRange(**bounds) if bounds else None}
    )


def out_of_range(config: Any) -> Iterator[str]:
    """Sentences about the fields of a config whose number is outside its bounds.

    None is always inside.
    """
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        allowed = f.metadata["range"]
        if allowed is not None and value is not None and value not in allowed:
            bounds = f"a number {allowed}" if " and " in str(allowed) else str(allowed)
            unit = re.search(r" \[[^]]+\]$", f.metadata["help"])
            yield f"{flag_name(f.name)} {value}: give {bounds}{unit[0] if unit else ''}"


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def base_type(annotation: Any) -> Callable[[str], Any]:
    base = (*typing.get_args(annotation), annotation)[0]  # the type before `| None`, or alone
    assert base in (int, float, str, bool), annotation
    return typing.cast(Callable[[str], Any], base)


class FlagMistake(str):
    """Sentence that stands where a value would be, so that parsing continues and finds the other
    mistakes.
    """


def make_reader(
    flag: str, kind: Callable[[str], Any], choices: Sequence[str]
) -> Callable[[str], Any]:
    form = {int: "an integer", float: "a number"}.get(typing.cast(type, kind), "text")

    def read_value(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            return FlagMistake(f"{flag} {text}: give {form}")
        if choices and value not in choices:
            return FlagMistake(f"{flag} {text}: give one of {', '.join(choices)}")
        return value

    return read_value


def _metavar(field_name: str) -> str:
    last = field_name.upper().rsplit("_", 1)[-1]
    return last if len(last) > 2 else "N"


def add_environment(cls: type, values: dict[str, Any]) -> list[str]:
    """Add to `values` the fields of `cls` that are absent and whose environment variable is set;
    returns mistakes.
    """
    hints = typing.get_type_hints(cls)
    bad = []
    for f in dataclasses.fields(cls):
        env = f.metadata["env"]
        if env and f.name not in values and os.environ.get(env):
            value = make_reader(flag_name(f.name), base_type(hints[f.name]), f.metadata["choices"])(
                os.environ[env]
            )
            if isinstance(value, FlagMistake):
                bad.append(f"environment {env}: {value}")
            else:
                values[f.name] = value
    return bad


def _read_headings(cls: type) -> dict[str, str]:
    """Titles by the first field that each stands above: HEADING of each base of a config class."""
    headings = {}
    for base in cls.__mro__:
        heading = vars(base).get("HEADING")
        if heading is not None:
            headings[dataclasses.fields(base)[0].name] = heading
    return headings


def add_flags(
    parser: argparse._ActionsContainer, cls: type, skip: Collection[str] = frozenset()
) -> None:
    """Add one flag per field of `cls` to `parser` (or to a group of it), except the fields in
    `skip`.

    They come under the headings of `cls`, unless `parser` is a group already.
    """
    hints = typing.get_type_hints(cls)
    into: argparse._ActionsContainer = parser
    headings = _read_headings(cls) if isinstance(parser, FlagParser) else {}
    for f in dataclasses.fields(cls):
        if f.name in headings:
            into = parser.add_argument_group(headings[f.name])
        if f.name in skip:
            continue
        flag = flag_name(f.name)
        kind = base_type(hints[f.name])
        choices = f.metadata["choices"]
        shown = "" if f.default in (None, "") or kind is bool else f" (default: {f.default})"
        env = f"; environment {f.metadata['env']}" if f.metadata["env"] else ""
        text = f.metadata["help"].replace("%", "%%") + env + shown
        options: dict[str, Any] = {"action": "store_true"}
        if kind is not bool:
            metavar = "{" + ",".join(choices) + "}" if choices else _metavar(f.name)
            options = {"type": make_reader(flag, kind, choices), "metavar": metavar}
        into.add_argument(
            flag, *f.metadata["also"], default=argparse.SUPPRESS, help=text, **options
        )


class _FlagHelpFormatter(argparse.HelpFormatter):
    """argparse's, but no flag is divided at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class FlagParser(argparse.ArgumentParser):
    """A parser for `add_flags` that collects mistakes, one sentence each, where argparse ends at
    the first.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        elsewhere: Mapping[str, str] | None = None,
        *,
        essentials: Sequence[str] = (),
        word_remedy: str = "leave it out",
    ) -> None:
        """
        Args:
            elsewhere: flags that are not for this program, with a remedy.
            essentials: fields whose flags --help shows; --help-all shows all. Empty: --help
                shows all.
            word_remedy: advice for a word that follows no flag; {word} stands for it.
        """
        super().__init__(
            prog=prog,
            usage=f"{prog} [flags]",
            description=description,
            allow_abbrev=False,
            add_help=not essentials,
            formatter_class=_FlagHelpFormatter,
        )
        self._elsewhere = {**INSTEAD, **(elsewhere or {})}
        self._essentials = [flag_name(name) for name in essentials]
        self._word_remedy = word_remedy
        self._argv: Sequence[str] = ()
        if essentials:
            self.add_argument(
                "-h",
                "--help",
                action=_ShortHelp,
                nargs=0,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help="show the flags used most",
            )
            self.add_argument("--help-all", action="help", help="show all flags")

    def format_short_help(self) -> str:
        """Help with the essential flags alone, in their order."""
        short = argparse.ArgumentParser(
            prog=self.prog,
            usage=self.usage,
            description=self.description,
            add_help=False,
            formatter_class=_FlagHelpFormatter,
        )
        group = short.add_argument_group("flags used most")
        for flag in self._essentials:
            group._add_action(self._option_string_actions[flag])
        others = len(self._actions) - len(self._essentials) - 2  # --help and --help-all
        return f"{short.format_help()}\n{self.prog} --help-all shows {others} more flags.\n"

    def read(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The values given, by field name, and what is wrong with the others."""
        self._argv = argv
        space, unknown_words = self.parse_known_args(argv)
        values = vars(space)
        bad: list[str] = [value for value in values.values() if isinstance(value, FlagMistake)]
        return {
            k: v for k, v in values.items() if not isinstance(v, FlagMistake)
        }, bad + self._unknown_word_mistakes(unknown_words)

    def read_config(
        self, cls: type[Config], argv: Sequence[str]
    ) -> tuple[Config, dict[str, Any], list[str]]:
        """A config of the values given and of the environment, the values that are not its own, and
        all mistakes.
        """
        values, bad = self.read(argv)
        bad += add_environment(cls, values)
        own_values = {
            name: values.pop(name) for name in typing.get_type_hints(cls) if name in values
        }
        config = cls(**own_values)
        return config, values, [*bad, *out_of_range(config)]

    def _unknown_word_mistakes(self, words: Sequence[str]) -> list[str]:
        bad = []
        after_flag = False
        for word in words:
            is_flag = word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)
            name = word.partition("=")[0]
            if is_flag and name in self._elsewhere:
                bad.append(f"{name}: {self._elsewhere[name]}")
            elif is_flag:
                near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.7)
                bad.append(
                    f"{name}: there is no such flag; "
                    + (f"is it {near[0]}?" if near else f"{self._full_help} lists them")
                )
            elif not after_flag:  # else it is the unknown flag's value
                bad.append(f"{word!r} follows no flag; {self._word_remedy.format(word=word)}")
            after_flag = is_flag and "=" not in word
        return bad

    @property
    def _full_help(self) -> str:
        """Flag that lists every flag."""
        return "--help-all" if self._essentials else "--help"

    def error(self, message: str) -> NoReturn:
        """A flag without its value: argparse cannot continue."""
        text = message.removeprefix("argument ")
        names = text.partition(":")[0].split("/")
        remedy = self._value_remedy(names) or f"{self._full_help} lists the flags"
        self.exit(2, f"{self.prog}: {text}; {remedy}\n")

    def _value_remedy(self, names: Sequence[str]) -> str | None:
        """Advice for a flag whose value looks like a flag, as that of --decode-args does."""
        for flag, value in itertools.pairwise(self._argv):
            is_other_flag = value.partition("=")[0] in self._option_string_actions
            takes_flags = flag.endswith("-args")
            if flag in names and value.startswith("-") and (takes_flags or not is_other_flag):
                return f"a value that begins with - follows an equals sign: {flag}={value!r}"
        return None


class _ShortHelp(argparse.Action):
    """--help of a parser with essentials."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, FlagParser)
        print(parser.format_short_help(), end="")
        parser.exit()


def exit_with_mistakes(prog: str, bad: Sequence[str]) -> NoReturn:
    """Print every mistake, a line each, and exit with 2."""
    print(
        "\n".join(f"{prog}: {line}" for text in bad for line in text.splitlines()), file=sys.stderr
    )
    raise SystemExit(2)


def flags_table(cls: type) -> str:
    """A flags table of docs/flags.md."""
    hints = typing.get_type_hints(cls)
    head = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    headings = _read_headings(cls)
    rows = [] if headings else head[:]
    for f in dataclasses.fields(cls):
        if f.name in headings:
            rows += [
                *([""] if rows else []),
                f"**{headings[f.name][:1].upper()}{headings[f.name][1:]}**",
                "",
                *head,
            ]
        kind = base_type(hints[f.name])
        names = {int: "integer", float: "number", str: "text", bool: "switch"}
        value = " ".join(f"`{c}`" for c in f.metadata["choices"]) or names[typing.cast(type, kind)]
        value += f", {f.metadata['range']}" if f.metadata["range"] else ""
        default = "off" if kind is bool else "-" if f.default is None else f"`{f.default}`"
        env = f"; environment `{f.metadata['env']}`" if f.metadata["env"] else ""
        flags = " ".join(f"`{name}`" for name in (flag_name(f.name), *f.metadata["also"]))
        rows.append(f"| {flags} | {value} | {default} | {f.metadata['help']}{env} |")
    return "\n".join(rows)
