"""`baton simulate`: what would each queue order have done to a recorded day? Flags in, table out.

1. Flags: SimConfig (the simulation), StepModel (the device), and every engine flag that the planner
   reads.
2. Arrivals: as recorded, or rescaled by --speedup or to a target --load.
3. One policy after the other over the same arrivals; progress on stderr; Ctrl-C prints what there
   is and exits 130.

With --replay nothing is simulated: recorded decisions are repeated and compared (sched.recording).
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton import config as engine_config
from baton.config import EngineConfig
from baton.config.files import refuse_other_kinds
from baton.config.flags import FlagParser, add_flags, exit_with_mistakes, opt
from baton.config.simulated import BLOCK_TOKENS, NODE, PRESETS, StepModel, scale_tokens
from baton.config.tenants import TenantRule, TenantRules
from baton.errors import ConfigError
from baton.sched.policies import POLICIES
from baton.sched.recording import ReplayError, digest, replay
from baton.sched.setup.from_config import fairness, limits
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import StepPlan
from baton_ops.sim import trace as traces
from baton_ops.sim.chart import cdf_svg
from baton_ops.sim.node import NodeSetting, SimNode
from baton_ops.sim.report import RunSummary, format_table, summarize_run, ttft_values
from baton_ops.sim.trace import TraceRequest

PROG = "baton simulate"
INTERRUPTED = 130
PROGRESS_SECS = 2.0

NOT_SIMULATED = frozenset(
    field.name for field in dataclasses.fields(EngineConfig) if not field.metadata["simulated"]
)
"""Engine flags without a meaning here: refused, not swallowed.

Every other one is taken from EngineConfig.
"""

DEFAULTS: dict[str, Any] = {**NODE, "max_queued_requests": 1_000_000}
"""Differ from the engine's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    trace: str = opt("", f"trace file (.jsonl or .jsonl.gz), or {traces.SHIPPED_HELP}")
    role: str = opt(
        "prefill",
        "prefill: prompts only, leased until D has pulled; null: both phases",
        choices=("prefill", "null"),
    )
    schedule_policy: str = opt(
        "fcfs,lpm,srpt-aging", "queue orders to compare, with commas between; all: every one"
    )
    model: str = opt(
        "reference",
        "device that is simulated; single numbers can be replaced",
        choices=tuple(PRESETS),
    )
    limit: int | None = opt(None, "use only the first so many requests of the trace")
    speedup: float | None = opt(None, "let requests arrive this many times faster than recorded")
    load: float | None = opt(
        None, "rescale arrivals so that the device is busy for about this share of the time"
    )
    length_scale: int = opt(
        1, "let one simulated token stand for this many (a divisor of 512): coarser and faster"
    )
    jitter: float = opt(
        0.0, "steps take up to this share more or less than the model says, at random"
    )
    host_kv_tokens: int = opt(0, "size of the host tier behind the KV pool; 0: none [tokens]")
    draft_acceptance: float = opt(
        0.0,
        "draft tokens of answers of which each is right with this probability; how many is the "
        "engine's decision (with --role null); 0: none",
    )
    draft_tokens: int = opt(16, "most drafted tokens of a row and step [tokens]")
    seed: int = opt(0, "seed of --jitter and --draft-acceptance")
    replay: str | None = opt(
        None,
        "instead of --trace: repeat the decisions in this file of an "
        "engine's --scheduler-trace and compare",
    )
    json: str | None = opt(None, "write settings and results to this file")
    plot: str | None = opt(None, "write the distribution of TTFT per policy to this .svg file")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Checked flags."""

    sim: SimConfig
    model: StepModel
    engine: EngineConfig
    policies: tuple[str, ...]

    def make_limits(self, policy: str) -> Limits:
        """The planner's budgets, in simulated tokens."""
        values = dataclasses.asdict(self.engine) | {"schedule_policy": policy}
        if self.sim.length_scale > 1:
            values |= {
                name: _shrink_value(values[name], name, self)
                for name in _token_fields()
                if values[name]
            }
        config = EngineConfig(**values)
        host_pages = self.sim.host_kv_tokens // self.sim.length_scale // config.page_size
        rate = 1 / max(self.model.copy_seconds(config.page_size * self.sim.length_scale), 1e-9)
        node_limits = limits(config, config.max_total_tokens // config.page_size)
        node_limits = dataclasses.replace(node_limits, host_pages=host_pages, host_pages_per_s=rate)
        tenants = node_limits.fairness.tenants
        if tenants is None or self.sim.length_scale == 1:
            return node_limits
        return dataclasses.replace(
            node_limits,
            fairness=dataclasses.replace(
                node_limits.fairness, tenants=_coarsen_rules(tenants, self)
            ),
        )


def _token_fields() -> list[str]:
    """Engine flags counted in tokens, which a coarser token changes; a page stays a page."""
    units = ("[tokens]", "[tokens/s]")
    fields = (
        f for f in dataclasses.fields(EngineConfig) if f.name not in NOT_SIMULATED | {"page_size"}
    )
    return [f.name for f in fields if f.metadata["help"].endswith(units)]


def _shrink_value(value: float, name: str, run: SimulatedRun) -> float:
    """`value` real tokens in simulated ones; whole pages where the engine wants whole pages."""
    scale = run.sim.length_scale
    page = run.engine.page_size
    if isinstance(value, float):
        return value / scale
    if value < 0:
        return value
    small = scale_tokens(value, scale)
    in_pages = name in ("chunked_prefill_size", "long_prefill_token_threshold")
    return max(small - small % page, page) if in_pages else small


def _coarsen_rules(rules: TenantRules, run: SimulatedRun) -> TenantRules:
    """KV limits in simulated tokens; tokens_per_minute is compared with real ones (SimNode)."""

    def coarsen_rule(rule: TenantRule) -> TenantRule:
        most = rule.max_kv_tokens
        return dataclasses.replace(
            rule, max_kv_tokens=None if most is None else scale_tokens(most, run.sim.length_scale)
        )

    return TenantRules(
        coarsen_rule(rules.default),
        {name: coarsen_rule(rule) for name, rule in rules.named.items()},
    )


def check_classes(run: SimulatedRun, trace: Sequence[TraceRequest]) -> None:
    """Raises ConfigError for a class of the trace that --priority-classes does not have.

    Without that flag classes only group requests.
    """
    names = fairness(run.engine).classes.names
    unknown = {r.priority_class for r in trace if r.priority_class is not None} - set(names)
    if names and unknown:
        there = ", ".join(sorted(map(str, unknown)))
        raise ConfigError(
            f"--priority-classes {run.engine.priority_classes}: the trace has requests of class "
            f"{there}"
        )


ESSENTIALS = (
    "trace", "limit", "schedule_policy", "role", "model", "load", "speedup", "length_scale", "json",
    "plot",
)  # fmt: skip
"""Fields whose flags --help shows."""


def make_parser() -> FlagParser:
    parser = FlagParser(
        PROG,
        "Replay a trace through the engine's own scheduler in virtual time.",
        essentials=ESSENTIALS,
        word_remedy="give the trace as --trace {word}",
    )
    add_flags(parser.add_argument_group("the simulation"), SimConfig)
    add_flags(
        parser.add_argument_group("the step-time model (defaults: --model reference)"), StepModel
    )
    add_flags(parser.add_argument_group("the engine"), EngineConfig, skip=NOT_SIMULATED)
    changed = ", ".join(
        f"{engine_config.flag_name(name)} {value}" for name, value in DEFAULTS.items()
    )
    parser.epilog = f"Engine flags whose default differs here: {changed}."
    return parser


def parse_flags(argv: Sequence[str]) -> SimulatedRun:
    """Flags → checked settings; prints every mistake and exits with 2.

    Reads no file but --tenant-config's.
    """
    values, bad = make_parser().read(argv)
    sim = SimConfig(**_select_fields(SimConfig, values))
    model = dataclasses.replace(PRESETS[sim.model], **_select_fields(StepModel, values))
    policies = (
        tuple(POLICIES) if sim.schedule_policy == "all" else tuple(sim.schedule_policy.split(","))
    )
    bad += _find_violations(sim, model, policies)
    if sim.replay is not None and (others := sorted(set(values) - {"replay", "json"})):
        names = ", ".join(map(engine_config.flag_name, others))
        bad.append(f"--replay {sim.replay}: the recorded flags count; leave out {names}")
    engine_values = (
        DEFAULTS
        | _select_fields(EngineConfig, values)
        | {"disaggregation_mode": sim.role, "schedule_policy": "auto"}
    )
    engine_values["host_kv_gib"] = float(sim.host_kv_tokens > 0)
    engine = EngineConfig()
    try:
        engine = engine_config.build_config(engine_values)
        if not engine.max_total_tokens:
            bad.append(
                "--max-total-tokens 0: there is no model here to size the pool from; give "
                "a number of tokens"
            )
    except ConfigError as err:
        # Its size is counted in tokens here.
        bad.append(
            err.message.replace("--host-kv-gib 1:", "--host-kv-tokens:").replace("-gib", "-tokens")
        )
    if bad:
        exit_with_mistakes(PROG, bad)
    return SimulatedRun(sim, model, engine, policies)


def _select_fields(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The part of parsed flags that belongs to `cls`; schedule_policy is the simulation's."""
    names = {f.name for f in dataclasses.fields(cls)} - (
        NOT_SIMULATED if cls is EngineConfig else set()
    )
    return {name: value for name, value in values.items() if name in names}


def _find_violations(sim: SimConfig, model: StepModel, policies: Sequence[str]) -> Iterator[str]:
    if not sim.trace and sim.replay is None:
        yield "--trace is missing; give a file or the name of a trace that comes with Baton"
    for name in policies:
        if name not in POLICIES:
            yield (
                f"--schedule-policy {name}: there is no such order; there are {', '.join(POLICIES)}"
            )
    if len(set(policies)) < len(policies):
        yield f"--schedule-policy {sim.schedule_policy}: names an order twice"
    if sim.speedup is not None and sim.load is not None:
        yield "--speedup and --load both rescale arrivals; give one"
    for flag, number in (("--speedup", sim.speedup), ("--load", sim.load)):
        if number is not None and not 0 < number < math.inf:
            yield f"{flag} {number}: must be above 0"
    if sim.limit is not None and sim.limit < 1:
        yield f"--limit {sim.limit}: must be at least 1"
    if sim.length_scale < 1 or BLOCK_TOKENS % sim.length_scale:
        yield f"--length-scale {sim.length_scale}: use a divisor of {BLOCK_TOKENS}"
    if sim.host_kv_tokens < 0:
        yield f"--host-kv-tokens {sim.host_kv_tokens}: must not be negative"
    yield from _find_draft_violations(sim)
    if not 0 <= sim.jitter < 1:
        yield f"--jitter {sim.jitter}: use 0 up to below 1"
    if sim.plot is not None and not sim.plot.endswith(".svg"):
        yield f"--plot {sim.plot}: only .svg can be written"
    for f in dataclasses.fields(model):
        if not 0 <= getattr(model, f.name) < math.inf:
            yield (
                f"{engine_config.flag_name(f.name)} {getattr(model, f.name)}: must not be negative"
            )
    if not (model.step_ms or (model.token_us and model.weights_ms)):
        yield "--step-ms 0: a step must take time, or the clock would stand still"


def _find_draft_violations(sim: SimConfig) -> Iterator[str]:
    if not 0 <= sim.draft_acceptance <= 1:
        yield f"--draft-acceptance {sim.draft_acceptance}: use 0 up to 1"
    if sim.draft_tokens < 1:
        yield f"--draft-tokens {sim.draft_tokens}: must be at least 1"
    if sim.draft_acceptance and sim.role != "null":
        yield "--draft-acceptance: a prefill node drafts nothing; add --role null"
    if sim.draft_acceptance and sim.length_scale > 1:
        yield (
            f"--draft-acceptance with --length-scale {sim.length_scale}: a token that stands for "
            "several is right or wrong as a whole; use --length-scale 1"
        )


def make_setting(run: SimulatedRun, trace: Sequence[TraceRequest]) -> NodeSetting:
    """Arrivals rescaled as asked. Raises ConfigError when --load cannot be met."""
    times = traces.arrival_times(trace)
    factor = 1.0
    if run.sim.speedup is not None:
        factor = 1 / run.sim.speedup
    elif run.sim.load is not None:
        if times[-1] <= 0:
            raise ConfigError(
                "--load: all requests of the trace arrive at once; there is nothing to rescale"
            )
        factor = offered_seconds(run, trace) / times[-1] / run.sim.load
    return NodeSetting(
        trace=trace,
        arrivals=[arrival * factor for arrival in times],
        model=run.model,
        scale=run.sim.length_scale,
        overlap=not run.engine.disable_overlap_schedule,
        timeout_secs=run.engine.request_timeout_secs,
        jitter=run.sim.jitter,
        seed=run.sim.seed,
        draft_acceptance=run.sim.draft_acceptance,
        draft_tokens=run.sim.draft_tokens,
    )


def offered_seconds(run: SimulatedRun, trace: Sequence[TraceRequest]) -> float:
    """Device time that the trace asks for: what --load divides by the time in which it arrives.

    Prompts: full steps, and the hits of an LRU cache of the pool's size in order of arrival.
    Answers: decoded in batches as large as slots and pool allow.
    """
    model = run.model
    engine = run.engine
    capacity = 0 if engine.disable_radix_cache else engine.max_total_tokens
    total = 0.0
    for request, cached in zip(trace, traces.cached_in_arrival_order(trace, capacity), strict=True):
        new = request.input_length - cached
        total += (
            model.prefill_seconds(new, cached) + new / engine.step_tokens * model.step_ms * 1e-3
        )
    if run.sim.role == "prefill":
        return total
    contexts = [request.input_length + request.output_length / 2 for request in trace]
    batch = max(
        min(engine.max_running_requests, engine.max_total_tokens / (sum(contexts) / len(contexts))),
        1.0,
    )
    per_step = (model.step_ms + max(model.weights_ms, model.token_us * 1e-3 * batch)) * 1e-3
    for request, context in zip(trace, contexts, strict=True):
        total += request.output_length * (per_step / batch + context * model.kv_read_ns * 1e-9)
    return total


class ProgressLine:
    """A line on stderr every two seconds: how far, and how long it may still take."""

    def __init__(self, policy: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._started = clock()
        self._next = self._started + PROGRESS_SECS

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    def __call__(self, node: SimNode) -> None:
        if self._clock() < self._next:
            return
        self._next = self._clock() + PROGRESS_SECS
        total = len(node.records)
        eta = (
            f"{self.elapsed * (total - node.done) / node.done:.0f} s left"
            if node.done
            else "no end in sight yet"
        )
        counts = node.sched.report.counts()
        where = f"{node.done}/{total} requests, {counts['waiting']} waiting, at {node.now:.0f} s"
        print(f"{self.policy}: {where}, about {eta}", file=sys.stderr, flush=True)


def simulate_policies(
    run: SimulatedRun, node_setting: NodeSetting
) -> tuple[list[RunSummary], dict[str, list[float]], bool]:
    """Run one policy after the other. Returns (summaries, TTFTs by label, was it interrupted)."""
    summaries: list[RunSummary] = []
    curves: dict[str, list[float]] = {}
    interrupted = False
    for policy in run.policies:
        node = SimNode(node_setting, run.make_limits(policy))
        progress = ProgressLine(policy)
        try:
            node.run(progress)
        except KeyboardInterrupt:
            interrupted = True
        in_time = run.engine.default_deadline_ms / 1e3
        summaries.append(
            summarize_run(policy, node, in_time, progress.elapsed, is_partial=interrupted)
        )
        curves[summaries[-1].label] = ttft_values(node.records)
        if interrupted:
            break
    return summaries, curves, interrupted


def replay_main(sim: SimConfig) -> int:
    """Compare this program's decisions with the recorded ones.

    The exit code is 1 if they differ. --json writes every decision.
    """
    assert sim.replay is not None
    path = Path(sim.replay)
    try:
        refuse_other_kinds(path)
    except OSError as err:
        raise ConfigError(f"--replay {sim.replay}: {err.strerror}; give a recorded file") from err
    decisions: list[dict[str, Any]] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        outcome = replay(lines, lambda sched, _plan: decisions.extend(sched.decisions.recent(1)))
    print(f"{outcome.inputs} inputs, {outcome.requests} requests, {outcome.plans} plans")
    if sim.json is not None:
        Path(sim.json).write_text(
            "".join(json.dumps(decision) + "\n" for decision in decisions), encoding="utf-8"
        )
    if outcome.difference is None:
        print("every plan equals the recorded one")
        return 0
    differs = outcome.difference
    plan_here = _summarize_plan(differs.got)
    print(
        f"line {differs.line}, at {differs.now:.6f} s: recorded plan {differs.expected}, here "
        f"{plan_here}"
    )
    return 1


def _summarize_plan(plan: StepPlan | None) -> str:
    if plan is None:
        return "nothing"
    rows = ", ".join(
        f"request {row.handle} [{row.start}, {row.start + row.n})" for row in plan.rows
    )
    return f"{digest(plan)}: step {plan.step}, stopped by {plan.stopped_by.value}: {rows}"


def main(argv: Sequence[str]) -> int:
    run = parse_flags(argv)
    try:
        if run.sim.replay is not None:
            return replay_main(run.sim)
        trace = traces.read_trace(traces.locate_trace(run.sim.trace), run.sim.limit)
        check_classes(run, trace)
        node_setting = make_setting(run, trace)
        offered = offered_seconds(run, trace)
        span = node_setting.arrivals[-1]
        about = f"{len(trace)} requests in {span:.0f} s"
        about += f", load {offered / span:.2f}" if span > 0 else ""
        print(
            f"{run.sim.trace}: {about}, role {run.sim.role}, model {run.sim.model}", file=sys.stderr
        )
        if run.sim.length_scale > 1 and run.sim.role == "null":
            print(
                "note: --length-scale flatters TPOT where prompts and answers share steps",
                file=sys.stderr,
            )
        summaries, curves, interrupted = simulate_policies(run, node_setting)
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(format_table(summaries, columns))
        if run.sim.json is not None:
            values = dataclasses.asdict(run.engine)
            document = {
                "simulation": dataclasses.asdict(run.sim),
                "model": dataclasses.asdict(run.model),
                "engine": {
                    name: value for name, value in values.items() if name not in NOT_SIMULATED
                },
                "offered_load": offered / span if span > 0 else None,
                "policies": [dataclasses.asdict(summary) for summary in summaries],
            }
            Path(run.sim.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if run.sim.plot is not None:
            title = f"TTFT, {Path(run.sim.trace).name}, {about}"
            Path(run.sim.plot).write_text(cdf_svg(title, "TTFT [s]", curves), encoding="utf-8")
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigError as err:
        print(f"{PROG}: {err.message}", file=sys.stderr)
        return 2
    except ReplayError as err:
        print(f"{PROG}: --replay {run.sim.replay}: {err}", file=sys.stderr)
        return 2
    except OSError as err:
        print(f"{PROG}: {err.filename or 'output'}: {err.strerror}", file=sys.stderr)
        return 1
    return INTERRUPTED if interrupted else 0
