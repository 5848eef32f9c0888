"""Latencies of a simulation's requests: numbers per policy, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from baton_ops.sim.node import RequestOutcome, RequestRecord, SimNode


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear between the nearest ranks of a sorted, non-empty sequence."""
    position = (len(ordered) - 1) * q
    low = int(position)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (
        position - low
    )


@dataclass(frozen=True, slots=True)
class SummaryStat:
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> SummaryStat | None:
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, q) for q in (0.5, 0.95, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """The requests of one class or tenant of the trace."""

    name: str
    requests: int
    completed: int
    refused: int
    ttft: SummaryStat | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Outcome of a policy.

    Seconds on the virtual clock, but for `wall_seconds`; counts of requests and steps.
    """

    policy: str
    requests: int
    completed: int
    refused: int
    timed_out: int
    ttft: SummaryStat | None
    wait: SummaryStat | None
    """From arrival to the launch of the step with the first chunk."""
    tpot: SummaryStat | None
    in_time: float
    """Share of all requests whose TTFT was at most --default-deadline-ms."""
    hit_rate: float
    """Share of prompt tokens found in the cache when the request started."""
    utilization: float
    """Share of the simulated time in which the device computed."""
    retractions: int
    preemptions: int
    starved: int
    """Requests that waited longer than --starvation-threshold-ms while later ones were admitted."""
    steps: int
    simulated_seconds: float
    decisions: str
    """Digest of all plans: equal digests mean equal decisions."""
    wall_seconds: float
    groups: tuple[RecordGroup, ...] = ()
    is_partial: bool = False

    @property
    def label(self) -> str:
        return self.policy + (" (stopped)" if self.is_partial else "")


def summarize_run(
    policy: str,
    node: SimNode,
    deadline_secs: float,
    wall_seconds: float,
    *,
    is_partial: bool = False,
) -> RunSummary:
    records = node.records
    counters = node.sched.report.counters()
    begun = [r for r in records if r.first_token is not None]
    prompts = sum(r.prompt_tokens for r in begun)
    span = node.now - (records[0].arrival if records else 0.0)
    return RunSummary(
        policy=policy,
        requests=len(records),
        completed=_count_outcome(records, RequestOutcome.COMPLETED),
        refused=_count_outcome(records, RequestOutcome.REFUSED),
        timed_out=_count_outcome(records, RequestOutcome.TIMED_OUT),
        ttft=SummaryStat.of(ttft_values(records)),
        wait=SummaryStat.of([r.wait for r in records if r.wait is not None]),
        tpot=SummaryStat.of([r.tpot for r in records if r.tpot is not None]),
        in_time=sum(ttft <= deadline_secs for ttft in ttft_values(records)) / max(len(records), 1),
        hit_rate=sum(r.cached_tokens for r in begun) / prompts if prompts else 0.0,
        utilization=node.busy_seconds / span if span > 0 else 0.0,
        retractions=int(counters["retractions_total"]),
        preemptions=int(counters["preemptions_total"]),
        starved=node.sched.stats.starved.total(),
        steps=node.steps,
        simulated_seconds=span,
        decisions=node.decisions,
        wall_seconds=wall_seconds,
        groups=_group_records(node),
        is_partial=is_partial,
    )


def _group_records(node: SimNode) -> tuple[RecordGroup, ...]:
    records_of: dict[str, list[RequestRecord]] = {}
    for record, request in zip(node.records, node.setting.trace, strict=True):
        for kind, name in (("class", request.priority_class), ("tenant", request.tenant)):
            if name is not None:
                records_of.setdefault(f"{kind} {name}", []).append(record)
    return tuple(_make_group(name, records) for name, records in sorted(records_of.items()))


def _make_group(name: str, records: Sequence[RequestRecord]) -> RecordGroup:
    completed, refused = (
        _count_outcome(records, outcome)
        for outcome in (RequestOutcome.COMPLETED, RequestOutcome.REFUSED)
    )
    return RecordGroup(name, len(records), completed, refused, SummaryStat.of(ttft_values(records)))


def ttft_values(records: Sequence[RequestRecord]) -> list[float]:
    return [r.ttft for r in records if r.ttft is not None]


def _count_outcome(records: Sequence[RequestRecord], outcome: RequestOutcome) -> int:
    return sum(r.outcome is outcome for r in records)


HEADER = (
    "policy", "requests", "completed", "TTFT s", "p50", "p95", "p99", "vs first", "in time",
    "TPOT ms", "p50", "p95", "p99", "wait s", "p50", "p95", "p99", "max", "hits", "busy", "steps",
    "sim s", "wall s",
)  # fmt: skip


COLUMN_GROUPS = (2, 6, 4, 5, 4)
"""Columns of HEADER after the first that stay together: counts, TTFT, TPOT, wait, device."""


def fit_table(
    rows: Sequence[Sequence[str]], columns: int | None = None, groups: Sequence[int] = ()
) -> list[str]:
    """Lines of a table, the first column aligned to the left.

    A table wider than `columns` is shown in parts below each other.

    Args:
        rows: the header first. columns: width of the terminal; None: any. groups: numbers of
        columns after the first that stay in one part; empty: each may be in another.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    parts: list[list[int]] = [[]]
    used = widths[0]
    first = 1
    for size in groups or [1] * (len(widths) - 1):
        group = range(first, first + size)
        first += size
        needed = sum(widths[i] + 2 for i in group)
        if columns is not None and parts[-1] and used + needed > columns:
            parts.append([])
            used = widths[0]
        parts[-1] += group
        used += needed
    lines: list[str] = []
    for part in parts:
        lines += [""] if lines else []
        for row in rows:
            cells = (row[i].rjust(widths[i]) for i in part)
            lines.append("  ".join((row[0].ljust(widths[0]), *cells)).rstrip())
    return lines


def format_table(summaries: Sequence[RunSummary], columns: int | None = None) -> str:
    """Format a row per policy; a p50 … belongs to the name before it.

    `vs first`: mean TTFT over the first row's.
    """
    first = summaries[0].ttft.mean if summaries and summaries[0].ttft else 0.0
    rows = [HEADER, *(_summary_cells(summary, first) for summary in summaries)]
    lines = fit_table(rows, columns, COLUMN_GROUPS)
    lines += [line for s in summaries if (line := _format_endings(s))]
    lines += [_group_line(s, group) for s in summaries for group in s.groups]
    return "\n".join(lines)


def _group_line(s: RunSummary, group: RecordGroup) -> str:
    mean, p50, p95, p99, longest = _format_stat(group.ttft)
    refused = f", {group.refused} refused" if group.refused else ""
    counts = f"{group.completed} of {group.requests} completed{refused}"
    return (
        f"{s.policy}, {group.name}: {counts}; TTFT s {mean}, p50 {p50}, p95 {p95}, p99 {p99}, "
        f"max {longest}"
    )


def _summary_cells(s: RunSummary, first_mean: float) -> tuple[str, ...]:
    ratio = f"{s.ttft.mean / first_mean:.2f}" if s.ttft and first_mean else "-"
    counts = (s.label, str(s.requests), str(s.completed))
    latencies = (
        *_format_stat(s.ttft)[:4],
        ratio,
        f"{s.in_time:.3f}",
        *_format_stat(s.tpot, 1e3)[:4],
        *_format_stat(s.wait),
    )
    device = (f"{s.hit_rate:.3f}", f"{s.utilization:.2f}", str(s.steps))
    return (*counts, *latencies, *device, f"{s.simulated_seconds:.0f}", f"{s.wall_seconds:.1f}")


def _format_stat(stat: SummaryStat | None, unit: float = 1.0) -> list[str]:
    """Mean, p50, p95, p99 and maximum."""
    return ["-"] * 5 if stat is None else [f"{value * unit:.2f}" for value in astuple(stat)]


def _format_endings(s: RunSummary) -> str:
    """Counts that are not 0; empty when all are."""
    counts = {
        "refused": s.refused,
        "timed out": s.timed_out,
        "retractions": s.retractions,
        "preemptions": s.preemptions,
        "starved": s.starved,
    }
    endings = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    left_out = (
        " (no TTFT above without a first token: see `in time`)" if s.refused or s.timed_out else ""
    )
    return f"{s.policy}: {endings}{left_out}" if endings else ""
