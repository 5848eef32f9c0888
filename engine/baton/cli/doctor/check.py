"""The result of one check: a stable name, a status, a sentence, and what to do."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace


class CheckStatus(str, enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    """Subject and property, such as `pair.cluster_key`; stable, for scripts."""
    status: CheckStatus
    sentence: str
    remedy: str = ""

    def under(self, subject: str) -> CheckResult:
        return replace(self, name=f"{subject}.{self.name}")


def ok(name: str, sentence: str) -> CheckResult:
    return CheckResult(name, CheckStatus.OK, sentence)


def warn(name: str, sentence: str, remedy: str) -> CheckResult:
    return CheckResult(name, CheckStatus.WARN, sentence, remedy)


def fail(name: str, sentence: str, remedy: str) -> CheckResult:
    return CheckResult(name, CheckStatus.FAIL, sentence, remedy)


def skip(name: str, reason: str) -> CheckResult:
    return CheckResult(name, CheckStatus.SKIP, reason)


def is_problem(result: CheckResult) -> bool:
    return result.status in (CheckStatus.WARN, CheckStatus.FAIL)


def problems_or_ok(name: str, problems: Sequence[CheckResult], sentence: str) -> list[CheckResult]:
    """The problems found; without any, one result that says what is well."""
    return list(problems) or [ok(name, sentence)]


def merge(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Results of one check for many subjects: each problem, but only the first of those that are well or skipped."""
    all_results = list(results)
    problems = [result for result in all_results if is_problem(result)]
    well = [result for result in all_results if result.status is CheckStatus.OK]
    return problems or well[:1] or all_results[:1]


def exit_code(results: Iterable[CheckResult]) -> int:
    """0: nothing wrong; 1: warnings; 2: failures. Skipped checks do not count."""
    statuses = {result.status for result in results}
    return 2 if CheckStatus.FAIL in statuses else 1 if CheckStatus.WARN in statuses else 0


COLORS = {CheckStatus.OK: "32", CheckStatus.WARN: "33", CheckStatus.FAIL: "31", CheckStatus.SKIP: "2"}


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
    return "\n".join([*lines, "", summary(results)])


def summary(results: Iterable[CheckResult]) -> str:
    counts = dict.fromkeys(CheckStatus, 0)
    for result in results:
        counts[result.status] += 1
    words = (("ok", CheckStatus.OK), ("warnings", CheckStatus.WARN), ("failures", CheckStatus.FAIL))
    return ", ".join(f"{counts[status]} {word}" for word, status in words) + f", {counts[CheckStatus.SKIP]} skipped"


def render_json(results: Sequence[CheckResult]) -> str:
    return json.dumps({"exit_code": exit_code(results), "checks": [asdict(result) for result in results]}, indent=1)
