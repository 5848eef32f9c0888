"""Every input of a scheduler as lines, and the same decisions again from them.

1. `RecordingScheduler` writes each call that changes a scheduler as one JSON line: first a header
   with the flags, then [name, arguments...]. After a plan comes ["=", digest of the plan].
2. `replay` makes a scheduler from the header, repeats the calls and compares the digests.

The scheduler is deterministic, so equal inputs give equal plans, byte for byte; a difference is a
bug (a hidden clock, an order that depends on memory addresses) or another version of the code.
Lines hold prompts as token ids: treat the file like prompts. Log-probabilities decide nothing and
are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from baton.cache.group_pages import GroupRule
from baton.config import SECRETS, EngineConfig, tenants
from baton.errors import EngineError, by_code
from baton.sched.scheduler import Scheduler
from baton.sched.setup import from_config
from baton.sched.setup.limits import Limits
from baton.sched.types import request
from baton.sched.types.plan import StepPlan, StepResult

VERSION = 1
MAX_SIZE = 2**27
"""Above the number of pages and the bytes of a page that a header may state."""
REMOVED_FLAGS = frozenset({"adaptive_window_secs", "adaptive_tail_weight"})
"""Flags of a removed queue order. A header names all flags, so files that were recorded with
another order name these too; they decide nothing there.
"""
INPUTS = (
    "add",
    "abort",
    "suspend",
    "resume",
    "expire",
    "fail",
    "transfer_announced",
    "transfer_committed",
    "transfer_failed",
    "transfer_closed",
    "grant_revoked",
    "release",
    "adjust_priorities",
    "offer_drafts",
    "plan",
    "observe",
    "commit",
    "flush_cache",
)
"""Methods of Scheduler that change what it decides.

All its other public members only look (a test compares).
"""

_CLASSES: dict[str, Any] = {
    name: cls for name, cls in vars(request).items() if dataclasses.is_dataclass(cls)
}

Write = Callable[[str], None]


class ReplayError(ValueError):
    """A line that no recorder wrote; the message has its number."""


def _default_of(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def to_plain(value: Any) -> Any:
    """Anything that a plan or an argument is made of as JSON values that say what they were."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, array):
        return {"array": value.tolist()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, EngineError):
        return {"error": [value.code, value.message]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        fields = {
            f.name: to_plain(values[f.name])
            for f in dataclasses.fields(value)
            if values[f.name] != _default_of(f)
        }
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [to_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be recorded")


def from_plain(plain: Any) -> Any:
    """The inverse for arguments: of dataclasses it knows those of baton.sched.types.request."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = [(k, v) for k, v in plain.items() if k != "fields"]
    if kind == "array":
        return array("i", content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "error":
        return by_code(content[0])(content[1])
    if kind == "class":
        fields = {name: from_plain(value) for name, value in plain["fields"].items()}
        return _CLASSES[content](**fields)
    if kind == "dict":
        return {from_plain(key): from_plain(value) for key, value in content}
    items = [from_plain(item) for item in content]
    return tuple(items) if kind == "tuple" else items


def plan_bytes(plan: StepPlan) -> bytes:
    """A plan as bytes: equal plans, equal bytes, on any machine."""
    return json.dumps(to_plain(plan), separators=(",", ":")).encode()


def digest(plan: StepPlan) -> str:
    return hashlib.sha256(plan_bytes(plan)).hexdigest()[:16]


def header(
    config: EngineConfig,
    num_pages: int,
    host_pages: int = 0,
    page_bytes: int = from_config.ASSUMED_PAGE_BYTES,
    page_groups: tuple[GroupRule, ...] = (),
) -> str:
    """The first line: all that the limits are made from, without secrets."""
    flags = {k: v for k, v in dataclasses.asdict(config).items() if k not in SECRETS}
    if config.tenant_config is not None:
        # The text, because the file may be another one when this is replayed.
        flags["tenant_config"] = tenants.text_of(config.tenant_config)
    sizes = {"num_pages": num_pages, "host_pages": host_pages, "page_bytes": page_bytes}
    first: dict[str, Any] = {"version": VERSION, "sizes": sizes, "flags": flags}
    if page_groups:
        first["page_groups"] = [dataclasses.astuple(rule) for rule in page_groups]
    return json.dumps(first)


# ---------------------------------------------------------------------- recording


def _recording_method(name: str) -> Callable[..., Any]:
    original = getattr(Scheduler, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: RecordingScheduler, *args: Any, **kwargs: Any) -> Any:
        if self._is_nested:  # one of the scheduler's methods calls another
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *arguments = bound.arguments.values()  # without self
        self._write(json.dumps([name, *map(_plain_argument, arguments)]))
        self._is_nested = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            self._is_nested = False
        if isinstance(result, StepPlan):
            self._write(json.dumps(["=", digest(result)]))
        return result

    return method


def _plain_argument(value: Any) -> Any:
    if isinstance(value, StepPlan):
        return value.step
    if isinstance(value, StepResult):
        tokens = list(value.tokens)
        # Without these, as files were written before rows had drafts and pages checksums.
        if not value.completed and not value.runs and not value.damaged_pages:
            return tokens
        more = {"runs": list(value.runs)} if value.runs else {}
        if value.damaged_pages:
            more["damaged_pages"] = list(value.damaged_pages)
        return {"tokens": tokens, "completed": sorted(value.completed), **more}
    if dataclasses.is_dataclass(value) and type(value).__name__ not in _CLASSES:
        return None  # log-probabilities
    return to_plain(value)


class RecordingScheduler(Scheduler):
    """A scheduler that writes its inputs.

    `write` gets one line at a time, before the call takes effect.
    """

    def __init__(self, limits: Limits, write: Write) -> None:
        self._is_nested = False
        self._write = write
        super().__init__(limits)


for _name in INPUTS:
    setattr(RecordingScheduler, _name, _recording_method(_name))


# ---------------------------------------------------------------------- replaying


@dataclasses.dataclass(frozen=True, slots=True)
class PlanDifference:
    """The first plan that came out differently. `got` is None where nothing was planned."""

    line: int
    now: float
    expected: str | None
    got: StepPlan | None


@dataclasses.dataclass(slots=True)
class ReplayResult:
    inputs: int = 0
    plans: int = 0
    requests: int = 0
    difference: PlanDifference | None = None


def replay(
    lines: Iterable[str], on_plan: Callable[[Scheduler, StepPlan], None] = lambda _s, _p: None
) -> ReplayResult:
    """Repeat what a RecordingScheduler wrote; stops at the first difference. Raises ReplayError."""
    numbered = iter(enumerate(lines, 1))
    _, first_line = next(numbered, (1, ""))
    sched = _make_scheduler(first_line)
    outcome = ReplayResult()
    flight: dict[int, StepPlan] = {}
    pending: tuple[int, float, StepPlan | None] | None = None
    for number, line in numbered:
        try:
            name, *args = json.loads(line)
            if name != "=" and name not in INPUTS:
                raise ReplayError(f"line {number}: {name!r} is no input of a scheduler")
            expected = args[0] if name == "=" else None
        except (ValueError, TypeError, IndexError, RecursionError) as err:
            raise ReplayError(f"line {number}: not a line of a scheduler trace ({err})") from err
        if pending is not None:
            plan_line, now, plan = pending
            pending = None
            actual = None if plan is None else digest(plan)
            if actual != expected:
                outcome.difference = PlanDifference(plan_line, now, expected, plan)
                return outcome
        if name == "=":
            continue
        outcome.inputs += 1
        outcome.requests += name == "add"
        try:
            result = _repeat_call(sched, name, args, flight)
        except Exception as err:
            raise ReplayError(
                f"line {number}: {name} cannot be repeated ({type(err).__name__}: {err}); "
                "the file is damaged or was recorded by another version"
            ) from err
        sched.drain_events()
        if name == "plan":
            pending = (number, args[0], result)
            if result is not None:
                outcome.plans += 1
                flight[result.step] = result
                on_plan(sched, result)
    # A trace that ends right after a plan line was cut there: nothing to compare with.
    return outcome


def _make_scheduler(line: str) -> Scheduler:
    try:
        first = json.loads(line)
        version = first["version"]
        flags = first["flags"]
        sizes = first["sizes"]
    except (ValueError, TypeError, KeyError) as err:
        raise ReplayError("line 1: not the header of a scheduler trace") from err
    if version != VERSION:
        raise ReplayError(f"line 1: version {version}, this program reads {VERSION}")
    if not isinstance(flags, dict) or not isinstance(sizes, dict):
        raise ReplayError("line 1: not the header of a scheduler trace")
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    flags = {name: value for name, value in flags.items() if name not in REMOVED_FLAGS}
    unknown = sorted(set(flags) - known)
    if unknown:
        raise ReplayError(
            f"line 1: flags {unknown} are unknown here; use the version that recorded this file"
        )
    try:
        are_sizes = (type(size) is int and 0 <= size <= MAX_SIZE for size in sizes.values())
        if not all(are_sizes):
            raise ValueError(f"sizes are {sizes}")
        groups = tuple(GroupRule(*rule) for rule in first.get("page_groups", ()))
        return Scheduler(from_config.limits(EngineConfig(**flags), **sizes, page_groups=groups))
    except Exception as err:
        raise ReplayError(
            "line 1: no scheduler can be made of the recorded flags "
            f"({type(err).__name__}: {err}); "
            "the file is damaged or was recorded by another version"
        ) from err


def _step_result(recorded: list[int] | dict[str, list[int]]) -> StepResult:
    """A result as `_plain_argument` writes it: its tokens, those that complete a grammar, how many
    each row has, and pages that came back damaged.
    """
    if isinstance(recorded, list):
        return StepResult(recorded)
    return StepResult(
        recorded["tokens"],
        completed=frozenset(recorded["completed"]),
        runs=tuple(recorded.get("runs", ())),
        damaged_pages=tuple(recorded.get("damaged_pages", ())),
    )


def _repeat_call(sched: Scheduler, name: str, args: list[Any], flight: dict[int, StepPlan]) -> Any:
    if name == "commit":
        step, result, now = args
        return sched.commit(flight[step], _step_result(result), now)
    if name == "observe":
        step, seconds, copy_seconds = args
        return sched.observe(flight.pop(step), seconds, copy_seconds)
    try:
        return getattr(sched, name)(*map(from_plain, args))
    except EngineError:
        return None  # it was refused then, too, or the next plan differs
