"""Engine rank on a virtual clock: the production loop (runtime.engine_loop) with a step-time model
as its device.

Before a turn of the loop, take in what has arrived. When the loop waits for a step, the clock runs
to the step's end; when it has nothing to do, the clock jumps to the next arrival, release or
deadline. Planning takes no virtual time.

Invariants: the clock never goes back; every request of the trace ends in exactly one outcome; at
the end no page is held.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import queue
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from baton.config.simulated import StepModel, scale_tokens
from baton.config.tenants import DEFAULT_TENANT, TenantRules
from baton.errors import EngineError, QueueFull, RateLimited, by_code
from baton.runtime.engine_loop import Answer, Done, EngineLoop, Outcome
from baton.runtime.simulated.device import step_seconds
from baton.sched.fairness.tenants import RateLimits
from baton.sched.scheduler import Scheduler
from baton.sched.setup.limits import Limits
from baton.sched.types.events import EmittedTokens, Event, PrefillDone
from baton.sched.types.hashing import uniform
from baton.sched.types.plan import StepPlan, StepResult
from baton.sched.types.request import FinishReason, Rendezvous, SamplingParams, ValidatedRequest
from baton_ops.sim.drafts import draw_tokens, make_speculator
from baton_ops.sim.trace import TraceRequest, prompt_tokens


class RequestOutcome(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    REFUSED = "refused"
    TIMED_OUT = "timed out"


@dataclass(slots=True)
class RequestRecord:
    """Outcome of one request of the trace; times in seconds on the virtual clock."""

    arrival: float
    prompt_tokens: int
    scale: int
    outcome: RequestOutcome = RequestOutcome.PENDING
    started: float | None = None
    """When the step with its first chunk was launched."""
    first_token: float | None = None
    finished: float | None = None
    answer_tokens: int = 0
    cached_tokens: int = 0

    @property
    def wait(self) -> float | None:
        return None if self.started is None else self.started - self.arrival

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        if self.finished is None or self.first_token is None or self.answer_tokens <= self.scale:
            return None
        return (self.finished - self.first_token) / (self.answer_tokens - self.scale)


@dataclass(frozen=True, slots=True)
class NodeSetting:
    """Settings that all compared policies share."""

    trace: Sequence[TraceRequest]
    arrivals: Sequence[float]
    """Seconds, one per request, not decreasing."""
    model: StepModel
    scale: int = 1
    """Real tokens per simulated token; the limits are in simulated ones already."""
    overlap: bool = True
    """Two steps in flight instead of one."""
    timeout_secs: float = 1800.0
    jitter: float = 0.0
    """Steps take up to this fraction more or less than the model says."""
    seed: int = 0
    draft_acceptance: float = 0.0
    """How often a drafted token is right; 0: nothing is drafted."""
    draft_tokens: int = 0
    """Most of them in a row of a step."""


class StuckSimulation(RuntimeError):
    """The scheduler has requests and does nothing: a bug in the scheduler.

    The message has its state.
    """


class SameThread:
    """engine_loop.JobThread: a job runs where it is submitted."""

    def submit_job(self, job: Callable[[], Outcome]) -> Answer:
        answer: Answer = queue.SimpleQueue()
        answer.put((job(), 0.0))
        return answer

    def close(self) -> None:
        pass


class VirtualLink:
    """Transfer driver of a P node: a prompt's pages are released when a link of the modeled speed
    has carried them.
    """

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self.releases: list[tuple[float, int]] = []
        self.counters: dict[str, float] = {}

    def accept(self, req: ValidatedRequest) -> None:
        """Every prompt finds the link."""

    def refuse(self, req: ValidatedRequest, error: EngineError) -> None:
        """No room was opened."""

    def apply_event(self, event: Event, sched: Scheduler) -> None:
        if isinstance(event, PrefillDone):
            setting = self._node.setting
            handle = event.req.handle
            seconds = setting.model.transfer_seconds(setting.trace[handle].input_length)
            heapq.heappush(self.releases, (self._node.now + seconds, handle))

    def poll(self, sched: Scheduler) -> None:
        while self.releases and self.releases[0][0] <= self._node.now:
            sched.release(heapq.heappop(self.releases)[1])


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """engine_loop.LaunchedStep."""

    node: SimNode
    result: StepResult
    seconds: float
    ends: float

    def wait(self) -> Done:
        self.node.run_clock_to(self.ends)
        return self.result, self.seconds


class SimNode:
    """Build one per policy; `run` may be interrupted, `records` are valid at any time.

    It is its loop's device.
    """

    def __init__(self, setting: NodeSetting, limits: Limits) -> None:
        self.setting = setting
        self.sched = Scheduler(limits)
        timed = zip(setting.arrivals, setting.trace, strict=True)
        self.records = [
            RequestRecord(arrival, request.input_length, setting.scale)
            for arrival, request in timed
        ]
        self.now = setting.arrivals[0] if setting.arrivals else 0.0
        self.steps = 0
        self.busy_seconds = 0.0
        self.done = 0
        self._link = VirtualLink(self) if limits.role == "prefill" else None
        speculator = None
        if setting.draft_acceptance:
            speculator = make_speculator(
                setting.draft_acceptance, setting.draft_tokens, setting.seed
            )
        self._loop = EngineLoop(
            self.sched,
            self,
            self._link,
            overlap=setting.overlap,
            device=SameThread(),
            clock=lambda: self.now,
            speculator=speculator,
        )
        self._rates = RateLimits(
            limits.fairness.tenants or TenantRules(), limits.fairness.max_idle_tenants
        )
        self._next = 0
        self._step_ends = 0.0
        self._decisions = hashlib.sha256()

    @property
    def decisions(self) -> str:
        """A digest of every plan made so far: equal digests mean equal decisions."""
        return self._decisions.hexdigest()[:16]

    def run(self, progress: Callable[[SimNode], None] = lambda _: None) -> None:
        """Run until every request has ended.

        Raises Stuck, or LedgerError if the page books do not balance.
        """
        while self._run_turn():
            progress(self)
        self.sched.ledger().check_idle(self.sched.limits.num_pages)

    def _run_turn(self) -> bool:
        self._take_in()
        outputs, busy = self._loop.step(self.now)
        self._receive_outputs(outputs)
        return busy or self._jump_ahead()

    def _take_in(self) -> None:
        while self._next < len(self.records) and self.setting.arrivals[self._next] <= self.now:
            handle = self._next
            self._next += 1
            try:
                req = self._make_request(handle)
                # The tenant's tokens, as the front takes them before a request reaches the
                # scheduler.
                wait = self._rates.admit(req.tenant, self.records[handle].prompt_tokens, self.now)
                if wait > 0:
                    raise RateLimited(
                        f"tenant {req.tenant!r} has used up its minute",
                        retry_after_secs=math.ceil(wait),
                    )
                self._loop.submit(req)
            except EngineError:
                self.records[handle].outcome = RequestOutcome.REFUSED
                self.done += 1

    def _make_request(self, handle: int) -> ValidatedRequest:
        request = self.setting.trace[handle]
        arrival = self.setting.arrivals[handle]
        answer = scale_tokens(request.output_length, self.setting.scale)
        tenant = request.tenant or DEFAULT_TENANT
        rules = self.sched.limits.fairness
        priority, name = rules.place_request(tenant, request.priority_class, request.priority)
        return ValidatedRequest(
            handle,
            str(handle),
            prompt_tokens(request, self.setting.scale),
            SamplingParams(max_new_tokens=answer, ignore_eos=True),
            priority=priority,
            priority_class=name,
            tenant=tenant,
            arrival=arrival,
            rendezvous=Rendezvous("", 0, handle) if self._link is not None else None,
            deadline=arrival + self.setting.timeout_secs,
        )

    def execute(self, plan: StepPlan) -> SimulatedStep:
        """Launch a step: it begins when the one before it has ended."""
        seconds = step_seconds(self.setting.model, plan, self.setting.scale)
        if self.setting.jitter:
            seconds *= 1 + self.setting.jitter * (2 * uniform(self.setting.seed, plan.step) - 1)
        pages = sum(len(run.pages) for run in plan.copies)
        copying = self.setting.model.copy_seconds(
            pages * self.sched.limits.page_size * self.setting.scale
        )
        seconds += copying
        begins = max(self.now, self._step_ends)
        self._step_ends = begins + seconds
        self.steps += 1
        self.busy_seconds += seconds
        decided = array("q", (plan.step, plan.num_decode))
        for row in plan.rows:
            decided.extend((row.handle, row.start, row.n))
            record = self.records[row.handle]
            if record.started is None:
                record.started = begins
        self._decisions.update(decided.tobytes())
        return SimulatedStep(self, draw_tokens(plan, copying), seconds, self._step_ends)

    def run_clock_to(self, time: float) -> None:
        """A step ends; what requests got to hear until then, they heard before it."""
        self._receive_outputs(self._loop.take_outputs())
        self.now = max(self.now, time)

    def _receive_outputs(self, outputs: Sequence[EmittedTokens]) -> None:
        for event in outputs:
            record = self.records[event.handle]
            if event.tokens and record.first_token is None:
                record.first_token = self.now
                record.cached_tokens = min(
                    event.cached_tokens * self.setting.scale, record.prompt_tokens - 1
                )
            record.answer_tokens += len(event.tokens) * self.setting.scale
            tenant = self.setting.trace[event.handle].tenant or DEFAULT_TENANT
            self._rates.spend(tenant, len(event.tokens) * self.setting.scale, self.now)
            if event.finish is not None:
                record.finished = self.now
                record.outcome = _request_outcome(event)
                self.done += 1

    def _jump_ahead(self) -> bool:
        """Move the clock to the next event that needs no step.

        Returns False when none is left.
        """
        coming = [self.setting.arrivals[self._next]] if self._next < len(self.records) else []
        coming += [self._link.releases[0][0]] if self._link and self._link.releases else []
        deadline = self.sched.next_deadline()
        if deadline is not None and not self.sched.is_idle:
            coming.append(deadline)
        if coming:
            self.now = max(self.now, min(coming))
        elif not self.sched.is_idle:
            reason = f"at {self.now:.3f} s nothing is planned and nothing will happen"
            raise StuckSimulation(f"{reason}: {self.sched.report.counts()}")
        return bool(coming)


def _request_outcome(event: EmittedTokens) -> RequestOutcome:
    """Outcome by a request's last event.

    One that lost its place to a higher priority was refused, only later.
    """
    if event.finish is not FinishReason.ERROR or event.error is None:
        return RequestOutcome.COMPLETED
    return (
        RequestOutcome.REFUSED
        if issubclass(by_code(event.error[0]), QueueFull)
        else RequestOutcome.TIMED_OUT
    )
