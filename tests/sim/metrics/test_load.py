"""Load reports of ranks to routers: numbers of scripted states, tokens ahead of a key, and a router's use of them."""

from __future__ import annotations

import dataclasses
import heapq
import json
import random
from collections.abc import Callable

import pytest

from baton.sched.queue.priority_buckets import BANDS, DEFAULT, EDGES, band
from baton.sched.setup.limits import Limits
from baton.sched.state.load_report import LoadReport, WaitingLoad
from baton.sched.types.priority import LOWEST_PRIORITY, PriorityRule
from baton.sched.types.request import Rendezvous
from tests.sim.metrics.test_stats import Clocked
from tests.support.effort import seeds

LIMITS = Limits(100, 4, 2, 1000, 16)
RULE = PriorityRule(enabled=True, preemption_threshold=1000)


def test_bands_cover_all_integers_in_order() -> None:
    values = [LOWEST_PRIORITY, -5000, *sorted(edge + d for edge in EDGES for d in (-1, 0))]
    names = [band(value) for value in values]
    assert names == sorted(names, key=BANDS.index, reverse=True)
    assert set(names) == set(BANDS)
    assert (band(0), band(3), band(4), band(-1), band(10**9)) == ("0", "1", "4", "-4", "1024")


def test_numbers_of_a_scripted_state() -> None:
    node = Clocked(LIMITS)
    node.add(0, 0.0, 8, max_new=4)
    node.step(0.0)
    node.add(1, 0.5, 40)
    node.step(1.0)
    node.add(2, 1.5, 12)
    node.add(3, 1.5, 9)
    load = node.sched.report.load()
    assert (load.running_requests, load.slots_free) == (2, 0)
    assert load.running_tokens == (8 + 2) + 40
    assert load.started_tokens == 40 - 12, "15 after the decode row, cut to whole pages"
    assert (load.queued_requests, load.queued_prompt_tokens, load.queued_tokens) == (2, 21, 21)
    assert load.bands == {DEFAULT: WaitingLoad(2, 21)}
    assert load.pages_free + load.pages_evictable + 3 + 3 == load.pages == 100
    assert json.loads(json.dumps(dataclasses.asdict(load)))["bands"] == {
        DEFAULT: {"requests": 2, "tokens": 21}
    }


def test_cached_prefixes_are_no_work() -> None:
    node = Clocked(dataclasses.replace(LIMITS, max_running_requests=1))
    node.add(5, 0.0, 12, max_new=1)
    node.step(0.0)
    node.add(0, 1.0, 4, max_new=9)
    node.step(1.0)
    node.add(5, 2.0, 12)
    assert node.sched.report.load().queued_tokens == 12 - 8, (
        "two whole pages and the token to be computed anyway"
    )


def test_rates_and_other_states() -> None:
    node = Clocked(dataclasses.replace(LIMITS, role="decode"))
    node.add(0, 0.0, 8, rendezvous=Rendezvous("p", 1, 0))
    assert node.sched.report.load().queued_requests == 1
    node.step(0.0)
    load = node.sched.report.load()
    assert (load.queued_requests, load.transfer_requests, load.decode_tokens_per_s) == (0, 1, 0.0)
    node.sched.transfer_committed(0, 1, 0, None)
    plan = node.step(1.0)
    assert plan is not None
    node.sched.observe(plan, 0.01)
    assert node.sched.report.load().decode_tokens_per_s == pytest.approx(100.0)


def tokens_ahead(load: LoadReport, priority: float | None = None) -> int:
    """What a router counts before a new request: what runs, and what waits in its band or a more important one.

    Args:
        priority: normalized (larger is better), plus what aging gave it since its t0; None: it has none.
    """
    mine = BANDS.index(DEFAULT if priority is None else band(priority))
    return load.started_tokens + sum(
        entry.tokens for name, entry in load.bands.items() if BANDS.index(name) <= mine
    )


@pytest.mark.parametrize("seed", seeds(20))
def test_tokens_ahead_bound_the_work_before_a_new_request(seed: int) -> None:
    rng = random.Random(seed)
    rule = dataclasses.replace(RULE, aging_rate=rng.choice((0.0, 0.5)))
    node = Clocked(dataclasses.replace(LIMITS, priority=rule))
    now = 10.0
    for handle in range(30):
        node.add(
            handle,
            rng.uniform(0, now),
            rng.randint(1, 30),
            max_new=1,
            priority=rng.choice((None, -9, 0, 2, 50)),
        )
    node.step(now)
    load = node.sched.report.load()
    for priority in (None, -20, -9, 0, 3, 50, 5000):
        mine = LOWEST_PRIORITY if priority is None else priority
        ahead = behind = load.started_tokens
        for seq in node.probe.state.waiting:
            value = -rule.key(seq, node.probe.state.now)
            tokens = seq.total_len - (seq.probe.num_tokens if seq.probe else 0)
            ahead += tokens * (value >= mine)
            behind += tokens * (BANDS.index(band(value)) <= BANDS.index(band(mine)))
        assert ahead <= tokens_ahead(load, priority) == behind
    assert tokens_ahead(load) == load.started_tokens + load.queued_tokens


# ---------------------------------------------------------------------- three workers and a router without coordinator

WORKERS, STEP_TOKENS, INTERVAL, BACKLOG, LONGEST = 3, 64, 4, 256, 200
"""A step takes one tick; loads are published every INTERVAL ticks; a worker with BACKLOG tokens to do gets no more."""


@dataclasses.dataclass(frozen=True)
class Job:
    handle: int
    arrival: float
    tokens: int
    priority: int

    def key(self, rate: float) -> float:
        """Smaller goes first, everywhere and at all times."""
        return -(self.priority - rate * self.arrival)


class Cluster:
    """Ticks; `choose` names the worker of a job, or None to hold it."""

    def __init__(self, rate: float, choose: Callable[[Cluster, Job], int | None]) -> None:
        rule = dataclasses.replace(RULE, aging_rate=rate)
        limits = Limits(10_000, 4, 64, 10_000, STEP_TOKENS, priority=rule, radix_cache=False)
        self.rate = rate
        self.choose = choose
        self.nodes = [Clocked(limits) for _ in range(WORKERS)]
        self.published: list[LoadReport] = [node.sched.report.load() for node in self.nodes]
        self.sent: list[list[Job]] = [[] for _ in self.nodes]
        """Since the last publication."""
        self.held: list[tuple[float, int, Job]] = []
        self.jobs: dict[int, Job] = {}
        self.started: dict[int, int] = {}
        self.now = 0

    def arrive(self, job: Job) -> None:
        self.jobs[job.handle] = job
        heapq.heappush(self.held, (job.key(self.rate), job.handle, job))

    def tick(self) -> None:
        if self.now % INTERVAL == 0:
            self.published = [node.sched.report.load() for node in self.nodes]
            self.sent = [[] for _ in self.nodes]
        while self.held:
            job = self.held[0][2]
            worker = self.choose(self, job)
            if worker is None:
                break
            heapq.heappop(self.held)
            self.sent[worker].append(job)
            self.nodes[worker].add(
                job.handle, job.arrival, job.tokens, max_new=1, priority=job.priority
            )
        for node in self.nodes:
            plan = node.step(float(self.now), takes=1.0)
            for row in plan.rows if plan else ():
                self.started.setdefault(row.handle, self.now)
        self.now += 1

    def backlog(self, worker: int) -> int:
        load = self.published[worker]
        return (
            load.started_tokens + load.queued_tokens + sum(job.tokens for job in self.sent[worker])
        )

    def ahead(self, worker: int, job: Job) -> int:
        load = self.published[worker]
        value = job.priority + self.rate * (self.now - job.arrival)
        mine = sum(
            other.tokens
            for other in self.sent[worker]
            if other.key(self.rate) <= job.key(self.rate)
        )
        return tokens_ahead(load, value) + mine

    def inverted_tokens(self) -> int:
        """Most tokens of less important requests that were started anywhere while one request waited."""
        worst = 0
        for job in self.jobs.values():
            worse = [j for j in self.jobs.values() if j.key(self.rate) > job.key(self.rate)]
            began = self.started[job.handle]
            worst = max(
                worst, sum(j.tokens for j in worse if job.arrival < self.started[j.handle] < began)
            )
        return worst


def least_ahead(cluster: Cluster, job: Job) -> int | None:
    """The rule that the reports are made for: hold while all are busy, then fewest tokens ahead of this key."""
    free = [w for w in range(WORKERS) if cluster.backlog(w) < BACKLOG]
    return min(free, key=lambda w: (cluster.ahead(w, job), cluster.backlog(w)), default=None)


def in_turn(cluster: Cluster, job: Job) -> int:
    return job.handle % WORKERS


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_three_workers_invert_the_global_order_by_no_more_than_what_is_in_flight_and_an_interval(
    rate: float,
) -> None:
    in_flight, interval = WORKERS * BACKLOG, INTERVAL * STEP_TOKENS
    bound = in_flight + interval
    blind = []
    for seed in range(5):
        clusters = [Cluster(rate, least_ahead), Cluster(rate, in_turn)]
        for cluster in clusters:
            rng = random.Random(seed)
            while cluster.now < 200 or len(cluster.started) < len(cluster.jobs):
                # Overload for 200 ticks: three steps' tokens arrive in two.
                for _ in range(rng.choice((0, 1, 5)) if cluster.now < 200 else 0):
                    job = Job(
                        len(cluster.jobs),
                        cluster.now,
                        rng.randint(8, LONGEST),
                        rng.choice((0, 2, 5, 20, 70)),
                    )
                    cluster.arrive(job)
                cluster.tick()
        assert clusters[0].inverted_tokens() <= bound, f"seed {seed}"
        blind.append(clusters[1].inverted_tokens())
    assert max(blind) > bound, "the bound says something: a router that knows nothing breaks it"
