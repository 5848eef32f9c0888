"""Results of checks: a stable name, a status, a sentence, what to do. Lists of checks."""

from __future__ import annotations

import enum
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from baton.errors import counted

View = TypeVar("View")


class CheckStatus(str, enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    """Subject and property, such as `pair.cluster_key`; stable, for scripts.

    Empty until the check's name is set.
    """
    status: CheckStatus
    sentence: str
    remedy: str = ""


def ok(sentence: str) -> CheckResult:
    return CheckResult("", CheckStatus.OK, sentence)


def warn(sentence: str, remedy: str) -> CheckResult:
    return CheckResult("", CheckStatus.WARN, sentence, remedy)


def fail(sentence: str, remedy: str) -> CheckResult:
    return CheckResult("", CheckStatus.FAIL, sentence, remedy)


def skip(reason: str) -> CheckResult:
    return CheckResult("", CheckStatus.SKIP, reason)


def is_problem(result: CheckResult) -> bool:
    return result.status in (CheckStatus.WARN, CheckStatus.FAIL)


def merge_results(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Results of one check: each problem, else the first that is well, else the first skipped."""
    all_results = list(results)
    problems = [result for result in all_results if is_problem(result)]
    well = [result for result in all_results if result.status is CheckStatus.OK]
    return problems or well[:1] or all_results[:1]


Find = Callable[[View], Iterable[CheckResult]]
Check = Callable[[View], list[CheckResult]]


def add_check(
    checks: list[Check[View]], name: str, *, shows_all: bool = False
) -> Callable[[Find[View]], Check[View]]:
    """Add the decorated function to `checks`.

    Its results get the name and, unless `shows_all`, are merged.

    So a check yields each problem, then what is well without any, then why it is skipped without
    either.
    """

    def add(find: Find[View]) -> Check[View]:
        @functools.wraps(find)
        def check(view: View) -> list[CheckResult]:
            results = [replace(result, name=result.name or name) for result in find(view)]
            return results if shows_all else merge_results(results)

        checks.append(check)
        return check

    return add


def run_checks(checks: Iterable[Check[View]], view: View) -> list[CheckResult]:
    return [result for check in checks for result in check(view)]


def exit_code(results: Iterable[CheckResult]) -> int:
    """0: nothing wrong; 1: warnings; 2: failures. Skipped checks do not count."""
    statuses = {result.status for result in results}
    return 2 if CheckStatus.FAIL in statuses else 1 if CheckStatus.WARN in statuses else 0


COLORS = {
    CheckStatus.OK: "32",
    CheckStatus.WARN: "33",
    CheckStatus.FAIL: "31",
    CheckStatus.SKIP: "2",
}


def render_text(results: Sequence[CheckResult], *, is_colored: bool) -> str:
    """Returns a line per result, each remedy on a line of its own, and the counts."""
    width = max((len(result.name) for result in results), default=0)
    lines = []
    for result in results:
        word = f"{result.status.value:<4}"
        if is_colored:
            word = f"\x1b[{COLORS[result.status]}m{word}\x1b[0m"
        lines.append(f"{word}  {result.name:<{width}}  {result.sentence}")
        if result.remedy:
            lines.append(f"{'':<{width + 6}}  -> {result.remedy}")
    return "\n".join([*lines, "", summarize_results(results)])


def summarize_results(results: Iterable[CheckResult]) -> str:
    count = Counter(result.status.value for result in results)
    warnings = counted(count["warn"], "warning")
    failures = counted(count["fail"], "failure")
    return f"{count['ok']} ok, {warnings}, {failures}, {count['skip']} skipped"


def render_json(results: Sequence[CheckResult]) -> str:
    return json.dumps(
        {"exit_code": exit_code(results), "checks": [asdict(result) for result in results]},
        indent=1,
    )
