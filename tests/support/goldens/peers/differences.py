"""Where our readers and those of peers differ.

`python -m tests.support.goldens.peers.differences` prints the figures of each format and every difference with its
reason. With `write` it renews `tests/unit/server/text/peers/differences.json`: a difference that is new has no reason
there, and the test beside the file fails until it has one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tests.support.goldens.peers.answer_reader import AnswerReader
from tests.support.goldens.peers.cases import PEERS, PeerCase, PeerFormat, Reading, load_cases

DIFFERENCES = PEERS / "differences.json"
GROUP_SIZE = 7
"""Tokens that come at once in a stream."""


class Verdict(Enum):
    """What an answer says of our reader."""

    AGREED = "all peers read the same, and so do we"
    OPPOSED = "all peers read the same, we do not"
    SIDED = "peers differ, and some read what we read"
    ALONE = "peers differ, and none reads what we read"
    SINGLE_AGREED = "one peer reads the format, and so do we"
    SINGLE_OPPOSED = "one peer reads the format, we read something else"

    @property
    def needs_reason(self) -> bool:
        return self in (Verdict.OPPOSED, Verdict.ALONE, Verdict.SINGLE_OPPOSED)


@dataclass(frozen=True)
class ReadCase:
    case: PeerCase
    ours: Reading
    streamed: Reading | None
    """Where the answer is read as a stream too."""

    @property
    def key(self) -> tuple[str, str]:
        return self.case.format.name, self.case.answer

    @property
    def allies(self) -> list[str]:
        """Peers that read what we read."""
        return [peer for peer, reading in self.case.readings.items() if reading == self.ours]

    @property
    def verdict(self) -> Verdict:
        readings = self.case.readings
        if len(readings) == 1:
            return Verdict.SINGLE_AGREED if self.allies else Verdict.SINGLE_OPPOSED
        if len(set(readings.values())) == 1:
            return Verdict.AGREED if self.allies else Verdict.OPPOSED
        return Verdict.SIDED if self.allies else Verdict.ALONE


@dataclass(frozen=True)
class Figures:
    """Answers that all peers read alike."""

    agreed: int
    on_purpose: int
    """We read something else, as a guide or another peer has it."""
    open: int
    """We read something else, without such a reason."""

    @property
    def agreement(self) -> float:
        return self.agreed / (self.agreed + self.open)


def read_cases(folder: Path) -> list[ReadCase]:
    """Our readings of all answers. `folder` gets a tokenizer per format."""
    readers: dict[PeerFormat, AnswerReader] = {}
    read = []
    for case in load_cases():
        if case.format not in readers:
            readers[case.format] = AnswerReader(folder / str(len(readers)), case.format)
        reader = readers[case.format]
        ids = reader.encode(case.answer)
        streamed = reader.read_stream(ids, GROUP_SIZE) if case.is_written else None
        read.append(ReadCase(case, reader.read_whole(ids), streamed))
    return read


def find_differences(read: Iterable[ReadCase]) -> dict[tuple[str, str], list[str]]:
    """Peers that read what we read, for each answer that some peer reads otherwise."""
    agreed = (Verdict.AGREED, Verdict.SINGLE_AGREED)
    return {case.key: case.allies for case in read if case.verdict not in agreed}


def load_differences() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(DIFFERENCES.read_text())
    return stored


def stored_reasons(stored: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Names of the reasons of the differences that have one."""
    return {
        (line["format"], line["answer"]): line["reason"]
        for line in stored["differences"]
        if "reason" in line
    }


def count_agreement(read: Iterable[ReadCase], stored: Mapping[str, Any]) -> Figures:
    reasons = stored_reasons(stored)
    counts: Counter[str] = Counter()
    for case in read:
        if case.verdict is Verdict.AGREED:
            counts["agreed"] += 1
        elif case.verdict is Verdict.OPPOSED:
            reason = stored["reasons"].get(reasons.get(case.key), {})
            counts["purpose" if reason.get("on_purpose") else "open"] += 1
    return Figures(counts["agreed"], counts["purpose"], counts["open"])


def write_differences(read: Iterable[ReadCase], stored: Mapping[str, Any]) -> None:
    reasons = stored_reasons(stored)
    lines = []
    for case in read:
        if case.verdict in (Verdict.AGREED, Verdict.SINGLE_AGREED):
            continue
        name, answer = case.key
        line: dict[str, Any] = {"format": name, "answer": answer}
        if case.verdict.needs_reason:
            line["reason"] = reasons.get(case.key, "")
        else:
            line["as"] = case.allies
        lines.append(json.dumps(line, ensure_ascii=False))
    head = json.dumps({"reasons": stored["reasons"]}, ensure_ascii=False, indent=1)
    text = head.removesuffix("\n}") + ',\n "differences": [\n' + ",\n".join(lines) + "\n]}\n"
    DIFFERENCES.write_text(text)


def print_table(read: list[ReadCase], stored: Mapping[str, Any]) -> None:
    counts: dict[str, Counter[Verdict]] = {}
    for case in read:
        counts.setdefault(case.case.format.name, Counter())[case.verdict] += 1
    for place, verdict in enumerate(Verdict, 1):
        print(f"({place}) {verdict.value}")
    print(f"{'':40}" + "".join(f"{f'({place})':>6}" for place in range(1, len(Verdict) + 1)))
    total = sum(counts.values(), Counter[Verdict]())
    for name, of_format in [*counts.items(), ("all", total)]:
        print(f"{name:40}" + "".join(f"{of_format[verdict]:>6}" for verdict in Verdict))
    figures = count_agreement(read, stored)
    print(
        f"\nwhere all peers agree: {figures.agreed} read alike, {figures.on_purpose} otherwise on purpose, "
        f"{figures.open} otherwise: {figures.agreement:.4f}"
    )
    reasons = stored_reasons(stored)
    used = Counter(reasons.values())
    for name, reason in stored["reasons"].items():
        mark = "on purpose" if reason["on_purpose"] else "open"
        print(f"\n{name} ({used[name]} answers, {mark}): {reason['text']}")
        for format_name, answer in (key for key, of_case in reasons.items() if of_case == name):
            print(f"  {format_name}: {answer!r}")
    allies = Counter(
        ", ".join(case.allies) for case in read if case.verdict in (Verdict.SIDED, Verdict.ALONE)
    )
    print("\nwhere peers differ, we read what these read:")
    for names, count in allies.most_common():
        print(f"  {names or 'none'}: {count}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=["print", "write"], default="print")
    command = parser.parse_args().command
    with tempfile.TemporaryDirectory() as folder:
        read = read_cases(Path(folder))
    stored = load_differences()
    if command == "write":
        write_differences(read, stored)
    else:
        print_table(read, stored)


if __name__ == "__main__":
    main()
