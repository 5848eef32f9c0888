"""The scheduler's own cost: planning a step, ordering a queue, the radix cache, and the host's share of a decode step.

    python -m tests.perf.bench_sched [--seconds 1] [plan|order|radix|host …]

Each line: median, 99th percentile and n of one operation, its budget, and where there is one the ratio to a plain arm
that does the least a computer could do for the same job (compare the bytes, build the rows, sort ready keys). Arms
take turns within one run, so that a neighbor's load falls on both. Results are checked before they are timed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cache.group_pages import GroupRule
from baton.cache.pages import PageAllocator
from baton.cache.radix import RadixCache
from baton.sched.fairness.sharing import SharingStrategy
from baton.sched.policies import POLICIES, PolicyContext, PolicyParams
from baton.sched.queue.waiting_queue import WaitingQueue
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.plan import Row, StepPlan, StepResult, StopReason
from baton.sched.types.priority import PriorityRule
from baton.sched.types.request import Rendezvous, SamplingParams, ValidatedRequest
from baton.sched.types.sequence import Seq
from tests.support.probes import RunnerProbe
from tests.support.sched.sched_sim import duplicates, ordered

MIN_ROUNDS = 20


@dataclass
class Times:
    """Seconds that each call of one arm took."""

    spent: list[float] = field(default_factory=list)

    def call(self, work: Callable[[], object]) -> object:
        begin = time.perf_counter()
        result = work()
        self.spent.append(time.perf_counter() - begin)
        return result

    @property
    def median(self) -> float:
        return statistics.median(self.spent)

    @property
    def p99(self) -> float:
        return sorted(self.spent)[len(self.spent) * 99 // 100]


def report(
    name: str,
    times: Times,
    *,
    budget: float | None = None,
    plain: Times | None = None,
    per: int = 1,
) -> None:
    """One line; `per`: operations in one call, `budget` and the printed times are those of one operation [s]."""
    scale = 1e6 / per
    line = f"{name:58} {times.median * scale:10.2f} us  p99 {times.p99 * scale:10.2f}  n={len(times.spent):<6}"
    if budget is not None:
        line += f" budget {budget * 1e6:8.1f} us ({times.median / per / budget:5.2f} of it)"
    if plain is not None:
        ratios = sorted(a / b for a, b in zip(times.spent, plain.spent, strict=True))
        tenth = len(ratios) // 10
        line += f" plain {plain.median * scale:9.2f} us"
        line += (
            f"  x{statistics.median(ratios):6.2f} [{ratios[tenth]:.2f} … {ratios[-1 - tenth]:.2f}]"
        )
    print(line, flush=True)


def race(
    name: str, work: Callable[[], object], plain: Callable[[], object] | None, seconds: float, *,
    budget: float | None = None, per: int = 1, prepare: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Time two arms in turn for about `seconds`, each call of the first after an untimed `prepare`."""
    mine, theirs = Times(), Times()
    gc.collect()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(mine.spent) < MIN_ROUNDS:
        prepare()
        mine.call(work)
        if plain is not None:
            theirs.call(plain)
    report(name, mine, budget=budget, plain=theirs if plain is not None else None, per=per)


def tokens_of(rng: random.Random, length: int) -> array[int]:
    """Random ids; negative ones are as good as any here."""
    return array("i", rng.randbytes(4 * length))


def request(
    handle: int, prompt: array[int], max_new: int, room: int | None = None
) -> ValidatedRequest:
    meet = None if room is None else Rendezvous("p", 1, room)
    params = SamplingParams(max_new_tokens=max_new)
    return ValidatedRequest(
        handle, f"r{handle}", prompt, params, arrival=float(handle), rendezvous=meet
    )


# ---------------------------------------------------------------------- planning

ROWS = 256


def decoding(queued: int, *, policy: str = "fcfs", groups: tuple[GroupRule, ...] = ()) -> Scheduler:
    """256 answers under way on as many slots, page boundaries spread evenly, and `queued` prompts behind them."""
    rng = random.Random(1)
    limits = Limits(1 << 18, 16, ROWS, 10_000, step_tokens=8192, policy=policy, page_groups=groups)
    sched = Scheduler(limits)
    for handle in range(ROWS):
        sched.add(request(handle, tokens_of(rng, 64 + handle % 16), 100_000))
    for handle in range(ROWS, ROWS + queued):
        sched.add(request(handle, tokens_of(rng, 512), 400))
    while _turn(sched).num_decode < ROWS:
        pass
    return sched


def short_of_memory(policy: str) -> Scheduler:
    """256 answers under way, slots to spare, and 1000 prompts behind them for which pages are lacking.

    The other pages are leased to a peer; pages kept back for the running answers last some 400 steps.
    """
    rng = random.Random(1)
    sched = Scheduler(
        Limits(1 << 16, 16, 8 * ROWS, 10_000, step_tokens=8192, policy=policy, role="prefill")
    )
    for handle in range(ROWS):
        sched.add(request(handle, tokens_of(rng, 64 + handle % 16), 100_000))
    for _ in range(
        700
    ):  # more than the 600 steps after which the estimate of answers has sunk to its floor
        _turn(sched)
    for handle in range(ROWS, 4 * ROWS):
        sched.add(request(handle, tokens_of(rng, 2048), 1, room=handle))
    while _turn(sched).stopped_by is not StopReason.NO_PAGES:
        pass
    for handle in range(4 * ROWS, 4 * ROWS + 1000 - sched.report.counts()["waiting"]):
        sched.add(request(handle, tokens_of(rng, 2048), 1, room=handle))
    return sched


def _turn(sched: Scheduler) -> StepPlan:
    plan = sched.plan(0.0)
    assert plan is not None
    sched.commit(plan, StepResult([7] * sum(row.sample for row in plan.rows)))
    sched.drain_events()
    return plan


def _rows_alone() -> list[Row]:
    """The least a planner must do: 256 rows of one token."""
    return [Row(i, i, 100, 1, True, array("i", [-1]), 7, array("i")) for i in range(ROWS)]


def _commit(sched: Scheduler, plan: StepPlan, result: StepResult) -> None:
    sched.commit(plan, result)
    sched.drain_events()


def time_steps(
    name: str,
    sched: Scheduler,
    seconds: float,
    stop: StopReason,
    steps: int = 8000,
    budget: float = 300e-6,
) -> None:
    planning, committing, plain = Times(), Times(), Times()
    gc.collect()
    end = time.perf_counter() + seconds
    while len(planning.spent) < steps and (
        time.perf_counter() < end or len(planning.spent) < MIN_ROUNDS
    ):
        plan = planning.call(lambda: sched.plan(0.0))
        assert isinstance(plan, StepPlan)
        assert plan.num_decode == len(plan.rows) == ROWS
        assert plan.stopped_by is stop
        result = StepResult([7] * ROWS)
        committing.call(functools.partial(_commit, sched, plan, result))
        plain.call(_rows_alone)
    report(f"plan, {name}", planning, budget=budget, plain=plain)
    report(f"commit + events, {name}", committing)


def bench_plan(seconds: float) -> None:
    time_steps(f"{ROWS} decoding rows", decoding(0), seconds, StopReason.QUEUE_EMPTY)
    groups = (GroupRule("window", 128, 1), GroupRule("window", 1024, 5))
    name = f"{ROWS} decoding rows, three page groups"
    several = decoding(0, groups=groups)
    time_steps(name, several, seconds, StopReason.QUEUE_EMPTY, budget=800e-6)
    for policy in ("fcfs", "lpm", "srpt-aging"):
        name = f"{ROWS} rows, 1000 queued, no slot, {policy}"
        time_steps(name, decoding(1000, policy=policy), seconds, StopReason.NO_SLOT)
    for policy in ("fcfs", "lpm", "srpt-aging"):
        name = f"{ROWS} rows, 1000 queued, no pages, {policy}"
        time_steps(name, short_of_memory(policy), seconds, StopReason.NO_PAGES, steps=200)
    for policy in ("fcfs", "srpt-aging"):
        _time_admission(
            Limits(1 << 16, 16, 64, 100_000, step_tokens=8192, role="prefill", policy=policy),
            seconds,
        )


def _time_admission(limits: Limits, seconds: float) -> None:
    """A prefill node under load: every step admits what its budget holds from a queue kept at 1000 prompts."""
    rng = random.Random(2)
    sched = Scheduler(limits)
    planning = Times()
    handle = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(planning.spent) < MIN_ROUNDS:
        while sched.report.counts()["waiting"] < 1000:
            sched.add(request(handle, tokens_of(rng, 512), 1, room=handle))
            handle += 1
        plan = planning.call(lambda: sched.plan(0.0))
        assert isinstance(plan, StepPlan)
        assert plan.num_tokens == len(plan.rows) * 512
        sched.commit(plan, StepResult([7] * len(plan.rows)))
        sched.drain_events()
        for row in plan.rows:
            sched.release(row.handle)
    report(f"plan, 16 prompts of 512 admitted, 1000 queued, {limits.policy}", planning)


# ---------------------------------------------------------------------- orders

QUEUED, PROMPT = 4096, 4096


def waiting_line() -> tuple[list[Seq], RadixCache, PageAllocator]:
    """4096 prompts of 4096 tokens; three in four begin with one of 64 cached heads of 2048."""
    rng = random.Random(3)
    allocator = PageAllocator(1 << 17)
    cache = RadixCache(16, allocator)
    heads = [tokens_of(rng, 2048) for _ in range(64)]
    for head in heads:
        pages = allocator.alloc(128)
        assert pages is not None
        cache.insert(head.tobytes(), pages, b"")
    queue = []
    for handle in range(QUEUED):
        tail = tokens_of(rng, PROMPT)
        prompt = tail if handle % 4 == 0 else rng.choice(heads) + tail[: PROMPT - 2048]
        queue.append(Seq(request(handle, prompt, rng.randint(1, 500)), prompt[:], 500))
    rng.shuffle(queue)
    return queue, cache, allocator


def bench_order(seconds: float) -> None:
    queue, cache, allocator = waiting_line()
    view = PolicyContext(5000.0, 1, cache, 2000.0, 0, 0.5)
    rng = random.Random(7)

    def forget() -> None:
        """Drop the sequences' probes of the tree."""
        for seq in queue:
            seq.probe = None

    def publish() -> None:
        """Insert a page that is the prefix of no request."""
        page = allocator.alloc(1)
        assert page is not None
        cache.insert(tokens_of(rng, 16).tobytes(), page, b"")

    for name in POLICIES:
        policy = POLICIES[name](PolicyParams())
        keys = list(policy.sort_keys(queue, view, policy.cache_key(len(queue), view)))
        ready = [
            (0.0, key, seq.req.arrival, seq.handle) for key, seq in zip(keys, queue, strict=True)
        ]
        by_key = [handle for _, _, _, handle in sorted(ready)]
        waiting = WaitingQueue(policy, PriorityRule(), lambda: view, SharingStrategy())
        for seq in queue:
            waiting.add(seq)
        for _ in range(len(queue)):  # a long queue is brought up to date over several looks
            next(waiting.in_order())
        assert [s.handle for s in waiting.in_order()] == by_key
        race(
            f"order {QUEUED} prompts of {PROMPT}, {name}, from scratch | sorted()",
            lambda policy=policy: ordered(queue, policy, PriorityRule(), view),
            lambda ready=ready: sorted(ready),
            seconds / 2,
            budget=25e-3,
            prepare=forget,
        )
        race(
            f"order {QUEUED} prompts of {PROMPT}, {name}, tree changed | sorted()",
            lambda waiting=waiting: next(waiting.in_order()),
            lambda ready=ready: sorted(ready),
            seconds / 2,
            budget=25e-3,
            prepare=publish,
        )


# ---------------------------------------------------------------------- the radix cache


def bench_radix(seconds: float) -> None:
    rng = random.Random(4)
    for page in (16, 64, 1):
        allocator = PageAllocator(4 * PROMPT)
        cache = RadixCache(page, allocator)
        tokens = tokens_of(rng, PROMPT)
        key = tokens.tobytes()
        pages = allocator.alloc(PROMPT // page)
        assert pages is not None
        cache.insert(key, pages, b"")
        equal = bytes(bytearray(key))
        assert cache.match(key, b"", PROMPT).num_tokens == PROMPT
        race(
            f"match {PROMPT} tokens, page {page} | compare the bytes",
            lambda cache=cache, key=key: cache.match(key, b"", PROMPT),
            lambda key=key, equal=equal: key == equal,
            seconds / 4,
            budget=10e-6,
        )
        other = tokens[: PROMPT - PROMPT // 16] + tokens_of(rng, PROMPT // 16)
        late = other.tobytes()
        assert (
            PROMPT * 15 // 16 - page
            < cache.probe(late, b"", PROMPT).num_tokens
            <= PROMPT * 15 // 16
        )
        race(
            f"probe, first difference at {PROMPT * 15 // 16}, page {page}",
            lambda cache=cache, late=late: cache.probe(late, b"", PROMPT).num_tokens,
            None,
            seconds / 4,
            budget=10e-6,
        )
        _split_path(page, seconds / 4)
        _fill_and_empty(page, seconds / 2)


def _split_path(page: int, seconds: float) -> None:
    """A path of 16 edges, as a conversation of 16 turns with side branches leaves it."""
    rng = random.Random(5)
    allocator = PageAllocator(8 * PROMPT)
    cache = RadixCache(page, allocator)
    tokens = tokens_of(rng, PROMPT)
    for turn in range(1, 17):
        side = tokens[: PROMPT * turn // 16] + tokens_of(rng, page)
        pages = allocator.alloc(len(side) // page)
        assert pages is not None
        allocator.free(duplicates(pages, cache.insert(side.tobytes(), pages, b"")))
    key = tokens.tobytes()
    assert cache.match(key, b"", PROMPT).num_tokens == PROMPT
    race(
        f"match {PROMPT} tokens over 16 edges, page {page}",
        lambda: cache.match(key, b"", PROMPT),
        None,
        seconds,
    )


def _fill_and_empty(page: int, seconds: float) -> None:
    """Publish 64 answers behind 8 heads, then evict all in bites of 4 pages, as a growing batch does."""
    rng = random.Random(6)
    allocator = PageAllocator(1 << 16)
    cache = RadixCache(page, allocator)
    heads = [tokens_of(rng, 16 * page) for _ in range(8)]
    keys = [(heads[i % 8] + tokens_of(rng, 48 * page)).tobytes() for i in range(64)]
    inserting, evicting, plain = Times(), Times(), Times()
    width = 4 * page
    stored = 8 * 16 + 64 * 48
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(inserting.spent) < MIN_ROUNDS:
        taken = [allocator.alloc(64) for _ in keys]

        def fill(taken: list[array[int] | None] = taken) -> None:
            for key, pages in zip(keys, taken, strict=True):
                assert pages is not None
                allocator.free(duplicates(pages, cache.insert(key, pages, b"")))

        def into_a_dictionary(taken: list[array[int] | None] = taken) -> None:
            book: dict[bytes, int] = {}
            for key, pages in zip(keys, taken, strict=True):
                assert pages is not None
                for i, number in enumerate(pages):
                    book[key[i * width : (i + 1) * width]] = number

        inserting.call(fill)
        plain.call(into_a_dictionary)
        assert cache.evictable_pages == stored

        def empty() -> None:
            while cache.evict(4):
                pass

        evicting.call(empty)
        assert cache.evictable_pages == 0
        assert allocator.free_count == 1 << 16
    report(
        f"insert per page, page {page} | one dict entry per page",
        inserting,
        plain=plain,
        per=64 * 64,
    )
    report(f"evict per page, in bites of 4, page {page}", evicting, per=stored)


# ---------------------------------------------------------------------- the host's share of a decode step

HOST_STEPS = 600


def bench_host(_seconds: float) -> None:
    """Batch 1 on the demo model: time of a step, less the time inside the model's forward pass."""
    import torch

    import baton.models
    from baton.runtime.engine_loop import EngineLoop
    from tests.support.engines.engine_run import make_engine

    torch.set_num_threads(1)
    demo = Path(baton.models.__file__).parent / "demo"
    budget = 400e-6

    def engine(**flags: Any) -> EngineLoop:
        return make_engine(demo, dtype="bfloat16", page_size=16, max_total_tokens=4096, **flags)

    arms = {"overlap on": engine(), "overlap off": engine(disable_overlap_schedule=True)}
    found: dict[str, tuple[Times, Times, Times]] = {
        name: (Times(), Times(), Times()) for name in arms
    }
    params = SamplingParams(max_new_tokens=201, temperature=0.0, ignore_eos=True)
    handle = 0
    answers: dict[str, list[list[int]]] = {name: [] for name in arms}
    for turn in range(2 + HOST_STEPS // 200):  # the first two rounds warm up
        for name, made in arms.items():
            handle += 1
            req = ValidatedRequest(
                handle,
                f"r{handle}",
                array("i", range(10 * turn, 10 * turn + 20)),
                params,
                arrival=0.0,
            )
            tokens, steps = _decode_alone(made, req)
            answers[name].append(tokens)
            if turn >= 2:
                for column, values in zip(found[name], zip(*steps, strict=True), strict=True):
                    column.spent.extend(values)
    assert answers["overlap on"] == answers["overlap off"]
    for name, (wall, outside, around) in found.items():
        report(f"decode step at batch 1, {name}", wall)
        report(f"  of it around the model's forward pass, {name}", outside, budget=budget)
        report(f"  of it around the whole device job, {name}", around)
        arms[name].close()


def _decode_alone(
    engine: object, req: ValidatedRequest
) -> tuple[list[int], list[tuple[float, float, float]]]:
    """Tokens, and per decode step (wall, wall - forward, wall - device job)."""
    from baton.runtime.engine_loop import EngineLoop

    assert isinstance(engine, EngineLoop)
    runner: Any = engine.runner
    model = RunnerProbe(runner).model
    execute = runner.execute
    in_parts, in_job = Times(), Times()
    tokens: list[int] = []
    ends: list[float] = []
    for name in PARTS_OF_FORWARD:
        part = getattr(model, name)
        timed = functools.partial(_call_timed, in_parts, part)
        setattr(model, name, timed)
    runner.execute = lambda plan: in_job.call(lambda: execute(plan))  # type: ignore
    try:
        engine.submit(req)
        busy = True
        while busy:
            outputs, busy = engine.step(time.monotonic())
            for out in outputs:
                tokens.extend(out.tokens)
                ends.append(time.perf_counter())
    finally:
        del runner.execute
        for name in PARTS_OF_FORWARD:
            delattr(model, name)
    walls = [b - a for a, b in itertools.pairwise(ends)]
    each = len(PARTS_OF_FORWARD)
    in_forward = [sum(in_parts.spent[i : i + each]) for i in range(0, len(in_parts.spent), each)]
    forward, job = in_forward[1 : 1 + len(walls)], in_job.spent[1 : 1 + len(walls)]
    return tokens, [(w, w - f, w - j) for w, f, j in zip(walls, forward, job, strict=True)]


PARTS_OF_FORWARD = ("prepare", "compute_hidden", "compute_logits")
"""Methods of the decoder that a step calls, each once."""


def _call_timed(times: Times, method: Callable[..., Any], *args: Any) -> Any:
    return times.call(lambda: method(*args))


GROUPS = {"plan": bench_plan, "order": bench_order, "radix": bench_radix, "host": bench_host}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", choices=[[], *GROUPS], help="what to time (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time per line [s]")
    args = parser.parse_args()
    for group in args.groups or GROUPS:
        GROUPS[group](args.seconds)


if __name__ == "__main__":
    main()
