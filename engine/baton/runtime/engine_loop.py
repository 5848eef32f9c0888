"""Engine of one rank: scheduler, device and (on P and D) the transfer driver, in one thread.

Life of a step: (1) `step` takes in transfer events and deadlines, (2) plans, (3) carries out the
events (final pages leave, reserved pages are granted), (4) hands the plan to the device thread,
(5) waits for the oldest step if `depth` are in flight or there was nothing to plan, commits it and
collects the outputs for requests.

With overlap (`depth` 2) step n+1 is planned and queued while n computes; results, finishes and
streaming of step n happen while n+1 computes. Output is the same with and without. A device that
computes by itself (a GPU) is given n+1 before n has ended: its thread launches, and the thread of
the loop waits.

Invariants: plans execute and commit in order; every event is carried out before the next plan is
made.

Nothing here knows torch: the device is a model with its pool (runtime.build), or the times of one
(runtime.simulated.engine).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from baton.cache.group_pages import GroupRule
from baton.cache.ledger import LedgerError
from baton.cache.pages import PageError
from baton.config import EngineConfig
from baton.errors import Aborted, EngineDead, EngineError
from baton.runtime import priority_hook
from baton.runtime.grammar.waiting import GrammarQueue
from baton.runtime.priority_hook import PriorityHook
from baton.sched import recording
from baton.sched.planner.draft_lengths import NO_DRAFTING_COSTS, DraftingCosts
from baton.sched.scheduler import Scheduler
from baton.sched.setup import from_config
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.events import EmittedTokens, Event, RowError
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN, INVALID_TOKEN, StepPlan, StepResult
from baton.sched.types.request import FinishReason, ValidatedRequest
from baton.sched.types.request_timeline import RequestTimeline

if TYPE_CHECKING:
    from baton.disagg.transfer_driver import TransferDriver
    from baton.runtime.model_limits import ModelLimits
    from baton.runtime.speculation.speculator import Speculator
    from baton.sched.state.report import SchedulerReport

log = logging.getLogger("baton.engine")


class Device(Protocol):
    """Executor of plans, on the device thread, in plan order."""

    def execute(self, plan: StepPlan) -> StepResult | LaunchedStep:
        """Run one step, to its end or until all its work is queued. An exception ends the rank."""


class LaunchedStep(Protocol):
    """A step in progress on the device, behind those launched before it."""

    def wait(self) -> Done:
        """Wait until it has ended. Called once, on the thread of the loop.

        The next step may have been launched before.
        """


Done = tuple[StepResult, float]
"""A step's result and how long it computed [s]."""
Outcome: TypeAlias = StepResult | LaunchedStep
Answer: TypeAlias = "queue.SimpleQueue[tuple[Outcome, float] | BaseException]"
"""Gets the outcome of one job, and how long the job took [s]."""
Returned = TypeVar("Returned")


class JobThread(Protocol):
    """Runs a device's jobs, in order."""

    def submit_job(self, job: Callable[[], Outcome]) -> Answer: ...
    def close(self) -> None: ...


class DeviceThread:
    """Runs jobs in order on one thread, so that the caller can plan meanwhile.

    The thread is a daemon: it ends with the process. `prepare` is called first on it.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run_jobs, name="device", daemon=True)
        self._thread.start()

    def submit_job(self, job: Callable[[], Outcome]) -> Answer:
        answer: Answer = queue.SimpleQueue()
        self._jobs.put((job, answer))
        return answer

    def call(self, job: Callable[[], Returned]) -> Returned:
        """Run a job behind those that were submitted, and wait for it. Raises what it raises."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((job, answer))
        outcome = answer.get()
        if isinstance(outcome, BaseException):
            raise outcome
        returned: Returned = outcome[0]
        return returned

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run_jobs(self) -> None:
        self._prepare()
        while (item := self._jobs.get()) is not None:
            job, answer = item
            started = time.monotonic()
            try:
                result = job()
                answer.put((result, time.monotonic() - started))
            # Handed to the thread of the loop, which raises it: here it would end this thread
            # alone, and the loop would wait for ever.
            except BaseException as err:  # noqa: BLE001
                answer.put(err)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    plan: StepPlan
    answer: Answer

    def wait(self) -> Done:
        """Wait for the result. Raises RuntimeError with the error of the device."""
        result = self.answer.get()
        try:
            if isinstance(result, BaseException):
                raise result
            outcome, seconds = result
            return (outcome, seconds) if isinstance(outcome, StepResult) else outcome.wait()
        except BaseException as err:
            raise RuntimeError(
                f"step {self.plan.step} failed on the device: {type(err).__name__}: {err}"
            ) from err


@dataclass(eq=False)
class EngineLoop:
    """All methods are called from one thread."""

    sched: Scheduler
    runner: Device
    driver: TransferDriver | None
    _: KW_ONLY
    overlap: bool
    limits: ModelLimits | None = None
    """Checked for every request; None where no model computes (--simulate)."""
    hook: PriorityHook | None = None
    grammars: GrammarQueue = field(default_factory=lambda: GrammarQueue(None))
    device: JobThread = field(default_factory=DeviceThread)
    clock: Callable[[], float] = time.monotonic
    page_bytes: int = 0
    model_gauges: Callable[[], dict[str, float]] = dict
    """Gauges of the model, for `gauges`; none by default."""
    speculator: Speculator | None = None
    """Offers drafted tokens; None: there is no speculative decoding."""

    def __post_init__(self) -> None:
        self._depth = 2 if self.overlap else 1
        self._flight: deque[InFlightStep] = deque()
        self.not_accepting_reason: str | None = None
        """Reason to take and compute no more requests: the page ledger does not balance."""
        self._collected_at: float | None = None
        """When the last step was collected, while none is in flight and the next follows."""
        self._outputs: list[EmittedTokens] = []
        self._timelines: list[RequestTimeline] = []
        self.counters: dict[str, float] = {
            "engine_steps_total": 0,
            "engine_step_seconds_total": 0,
            "prompt_tokens_computed_total": 0,
            "generated_tokens_total": 0,
            "nonfinite_logits_total": 0,
            "grammar_failures_total": 0,
            **{f'kv_host_copies_total{{direction="{to}"}}': 0 for to in ("out", "in")},
            **{f'kv_host_copy_bytes_total{{direction="{to}"}}': 0 for to in ("out", "in")},
            "kv_host_copy_seconds_total": 0,
            "kv_host_checksum_failures_total": 0,
        }

    # ------------------------------------------------------------------ requests

    def submit(self, req: ValidatedRequest) -> None:
        """Queue a request. Raises EngineError when it is refused; nothing is held for it then."""
        driver = None if req.rendezvous is None else self.driver
        # First of all, so that a refusal below reaches D, which would wait for its timeout.
        if driver is not None:
            driver.accept(req)
        try:
            # A page may belong to two requests: an answer could be computed from a stranger's
            # prompt.
            if self.not_accepting_reason is not None:
                raise EngineDead(
                    f"this rank takes no new requests: {self.not_accepting_reason}",
                    retry_after_secs=5,
                )
            if self.limits is not None:
                self.limits.check_request(req)
            # It is queued when its grammar is compiled (`_queue_settled`).
            if self.grammars.hold_request(req):
                return
            self.sched.add(req)
        except EngineError as err:
            if driver is not None:
                driver.refuse(req, err)
            raise
        self._watch_priority(req)

    def _watch_priority(self, req: ValidatedRequest) -> None:
        if self.hook is not None:
            self.hook.watch_request(req.handle, req.arrival)

    def _queue_settled(self, now: float) -> None:
        """Queue requests whose grammar is compiled; end those whose grammar failed."""
        for req, error in self.grammars.take_settled(now):
            if error is not None:
                self._refuse_waiting(req, error)
                continue
            # The queue may have filled up while the grammar was compiled. `submit` has returned:
            # the error reaches the client as an output.
            try:
                self.sched.add(req)
            except EngineError as err:
                self._refuse_waiting(req, err)
                continue
            self._watch_priority(req)
        store = self.grammars.store
        if store is not None:
            store.release_ended(self.is_alive)

    def _refuse_waiting(self, req: ValidatedRequest, error: EngineError) -> None:
        """End a request that the scheduler does not have."""
        # The other node of the pair would wait for its timeout.
        if req.rendezvous is not None and self.driver is not None:
            self.driver.refuse(req, error)
        self._outputs.append(refused_output(req.handle, error))

    def is_alive(self, handle: int) -> bool:
        """True if the request is not answered yet."""
        return handle in self.grammars or self.sched.is_alive(handle)

    def abort(self, handle: int) -> None:
        """Stop a request and free what it holds; unknown handles are ignored. No output follows."""
        waiting = self.grammars.remove(handle)
        if waiting is None:
            self.sched.abort(handle)
        elif waiting.rendezvous is not None and self.driver is not None:
            self.driver.refuse(waiting, Aborted("the client is gone"))

    def abort_where(self, rooms: Collection[int], rid: str | None, *, all_leases: bool) -> int:
        """POST /abort_request: end requests of these bootstrap rooms, and prompts leased to D.

        Leases end by rid or altogether. Requests that are still answered get an error; the front
        itself ends those that it knows by rid.

        Returns:
            How many requests ended.
        """
        handles = set(self.sched.in_rooms(rooms))
        if rid is not None or all_leases:
            handles.update(self.sched.leased(rid))
        error = Aborted("the request was aborted with /abort_request")
        for handle in handles:
            self.sched.fail(handle, error, "CLIENT_GONE")
        waiting = self.grammars.find_in_rooms(rooms)
        self._end_waiting(waiting, error)
        return len(handles) + len(waiting)

    def _end_waiting(self, handles: Collection[int], error: EngineError) -> None:
        """End requests that wait for their grammar."""
        for handle in handles:
            req = self.grammars.remove(handle)
            if req is not None:
                self._refuse_waiting(req, error)

    # ------------------------------------------------------------------ the loop

    def step(self, now: float) -> tuple[list[EmittedTokens], bool]:
        """Do one turn. Returns outputs, and whether to call again without waiting for messages."""
        self.set_time(now)
        if self.driver is not None:
            self.driver.poll(self.sched)
        self._queue_settled(now)
        self.sched.expire(now)
        if self.hook is not None:
            self.hook.run_due(self.sched, now)
        steps_before = self.counters["engine_steps_total"]
        if self.speculator is not None:
            self._offer_drafts(self.speculator)
        # With a broken ledger nothing is computed: it could write into another request's pages.
        plan = self.sched.plan(now) if self.not_accepting_reason is None else None
        # Before the device gets the plan: a final page must leave before its next owner writes to
        # it.
        self._carry_out()
        if plan is not None:
            if self.speculator is not None:
                self._note_planned(self.speculator, plan)
            self._flight.append(
                InFlightStep(plan, self.device.submit_job(lambda: self.runner.execute(plan)))
            )
        busy = plan is not None or self.counters["engine_steps_total"] > steps_before
        # Without a plan there is nothing to overlap with, and only a commit can make progress.
        # Behind drafts nothing can be planned before their step has committed.
        is_full = plan is None or len(self._flight) >= self._depth or bool(plan.drafted)
        if self._flight and is_full:
            self._collect_step()
            self._carry_out()
            busy = True
        return self.take_outputs(), busy

    def _offer_drafts(self, speculator: Speculator) -> None:
        """Offer drafts for the next plan, if it is expected to take some."""
        sched = self.sched
        # Without overlap the device waits for each plan, with drafts or without.
        wait = speculator.wait_secs if self.overlap else 0.0

        def choose_lengths(
            offers: Sequence[DraftOffer], drafting: DraftingCosts = NO_DRAFTING_COSTS
        ) -> dict[int, int]:
            return sched.draft_lengths(offers, wait, drafting)

        if not speculator.is_drafting:
            if not speculator.is_look_due:
                return
            if not speculator.would_draft(sched.report.answering(), choose_lengths):
                return
        while self._flight:
            self._collect_step()
            self._carry_out()
        answering = sched.report.answering()
        made_in = speculator.draft(answering, choose_lengths)
        sched.offer_drafts(speculator.make_offers(answering), wait, made_in)

    def _note_planned(self, speculator: Speculator, plan: StepPlan) -> None:
        if speculator.is_drafting and self._collected_at is not None:
            speculator.on_waited(self.clock() - self._collected_at)
        self._collected_at = None
        speculator.on_planned(plan)

    def set_time(self, now: float) -> None:
        """Set the time for timelines of requests that end before the next plan."""
        self.sched.stats.now = now

    def take_outputs(self) -> list[EmittedTokens]:
        """Outputs since the last call, for the requests to hear."""
        outputs = self._outputs
        self._outputs = []
        return outputs

    def take_timelines(self) -> list[RequestTimeline]:
        """Timelines of the traced requests that have ended since the last call."""
        timelines = self._timelines
        self._timelines = []
        return timelines

    def _collect_step(self) -> None:
        flight = self._flight.popleft()
        result, seconds = flight.wait()
        self._collected_at = None if self._flight else self.clock()
        self.sched.commit(flight.plan, result, self.clock())
        self.sched.observe(flight.plan, seconds, result.copy_seconds)
        for run in flight.plan.copies:
            label = f'{{direction="{"out" if run.to_host else "in"}"}}'
            self.counters["kv_host_copies_total" + label] += len(run.pages)
            self.counters["kv_host_copy_bytes_total" + label] += len(run.pages) * self.page_bytes
        self.counters["kv_host_copy_seconds_total"] += result.copy_seconds
        if result.damaged_pages:
            num_damaged = len(result.damaged_pages)
            self.counters["kv_host_checksum_failures_total"] += num_damaged
            log.error(
                "step %d: %d KV pages came back from host memory with another checksum than they "
                "left with; requests that read them are computed again; if it repeats, check the "
                "machine's memory",
                flight.plan.step, num_damaged,
            )  # fmt: skip
        self.counters["engine_steps_total"] += 1
        self.counters["engine_step_seconds_total"] += seconds
        self.counters["prompt_tokens_computed_total"] += flight.plan.num_prompt_tokens
        invalid = sum(token == INVALID_TOKEN for token in result.tokens)
        failed = sum(token == GRAMMAR_FAILED_TOKEN for token in result.tokens)
        self.counters["generated_tokens_total"] += len(result.tokens) - invalid - failed
        self.counters["nonfinite_logits_total"] += invalid
        self.counters["grammar_failures_total"] += failed

    def _carry_out(self) -> None:
        # A call that fails ends its request, which is an event again: left for the next turn, it
        # would be carried out after the next plan.
        while events := self.sched.drain_events():
            for event in events:
                self._carry_out_one(event)

    def _carry_out_one(self, event: Event) -> None:
        if isinstance(event, EmittedTokens):
            self._outputs.append(event)
        elif isinstance(event, RequestTimeline):
            self._timelines.append(event)
        elif self.driver is not None:
            self.driver.apply_event(event, self.sched)

    def close(self) -> None:
        self.device.close()

    # ------------------------------------------------------------------ views

    @property
    def is_idle(self) -> bool:
        """True if no request is known here."""
        return self.sched.is_idle and self.grammars.count == 0

    def next_deadline(self) -> float | None:
        """Earliest deadline of a request here."""
        deadlines = (self.sched.next_deadline(), self.grammars.next_deadline())
        return min((time for time in deadlines if time is not None), default=None)

    def request_counts(self) -> dict[str, int]:
        """Requests by state."""
        return {**self.sched.report.counts(), "grammar": self.grammars.count}

    def oldest_arrival(self) -> float | None:
        """Arrival of the oldest unanswered request. None: every request is answered."""
        arrivals = (self.sched.report.oldest_arrival(), self.grammars.oldest_arrival())
        return min((time for time in arrivals if time is not None), default=None)

    def page_gauges(self) -> dict[str, float]:
        """Pages by state. Empty if the ledger does not balance: then the rank takes no requests."""
        sched = self.sched
        try:
            ledger = sched.ledger()
            host = sched.host_ledger()
            # Without requests every page must be free or cached: any other one is leaked.
            if sched.is_idle:
                ledger.check_idle(sched.limits.num_pages)
                if host is not None:
                    host.check_idle(sched.limits.host_pages)
        except LedgerError as err:
            # Once: the requests have ended, and the log has the state of the first error.
            if self.not_accepting_reason is None:
                self._stop_accepting(f"its page ledger is broken: {err}")
            return {}
        total = sched.limits.num_pages
        host_gauges = {} if host is None else host.gauges()
        return (
            ledger.gauges()
            | host_gauges
            | {"kv_usage_ratio": (total - ledger.free - ledger.cached) / total}
        )

    def _stop_accepting(self, reason: str) -> None:
        """Take no new requests and end all others with an error: a page may belong to two of them.

        The state is logged first. The process stays, so that /health reports the reason and routers
        choose other workers.
        """
        self.not_accepting_reason = reason
        log.error(
            "%s; all requests end, no new ones are taken; %s",
            reason,
            json.dumps(self.sched.report.dump()),
        )
        error = EngineDead(
            f"the request ended because this rank has failed: {reason}", retry_after_secs=5
        )
        for handle in self.sched.handles():
            # Its pages are part of the broken ledger; the requests behind it still need their
            # error.
            try:
                self.sched.fail(handle, error, "NO_CAPACITY")
            except PageError as err:
                log.error("pages of request %d are not freed: %s", handle, err)
        self._end_waiting(self.grammars.handles(), error)

    def gauges(self) -> dict[str, float]:
        """Gauges for messages.StatsMessage. Checks the page ledger on the way."""
        pages = self.page_gauges()
        is_healthy = self.not_accepting_reason is None
        waiting = {'requests{state="grammar"}': float(self.grammars.count)}
        health = {"page_ledger_healthy": float(is_healthy)}
        model = self.model_gauges()
        return {**pages, **self.sched.report.gauges(), **waiting, **health, **model}


def refused_output(handle: int, error: EngineError) -> EmittedTokens:
    """Output of a request that ends before the scheduler has it."""
    return EmittedTokens(
        handle,
        (),
        FinishReason.ERROR,
        0,
        error=RowError.of(error),
        retry_after_secs=error.retry_after_secs,
    )


class PoolSizes(NamedTuple):
    num_pages: int
    host_pages: int
    page_bytes: int
    page_groups: tuple[GroupRule, ...] = ()
    """Those beside group 0."""


MakeSpeculator: TypeAlias = "Callable[[SchedulerReport, DeviceThread], Speculator]"


def make_engine(
    config: EngineConfig,
    sizes: PoolSizes,
    runner: Device,
    driver: TransferDriver | None,
    trace: Callable[[str], None] | None,
    device: DeviceThread | None = None,
    model_limits: ModelLimits | None = None,
    grammars: GrammarQueue | None = None,
    model_gauges: Callable[[], dict[str, float]] = dict,
    make_speculator: MakeSpeculator | None = None,
) -> EngineLoop:
    """Make the loop of a rank from its flags.

    `trace` gets each input of the scheduler as a line (sched.recording).
    """
    limits = from_config.limits(config, *sizes)
    if trace is None:
        scheduler = Scheduler(limits)
    else:
        trace(recording.header(config, *sizes))
        scheduler = recording.RecordingScheduler(limits, trace)
    hook = None
    if config.priority_adjustment_function is not None:
        adjust = priority_hook.load_function(config.priority_adjustment_function)
        hook = PriorityHook(adjust, config.priority_adjust_interval_ms / 1000)
    overlap = not config.disable_overlap_schedule
    if grammars is None:
        grammars = GrammarQueue(None)
    device = device or DeviceThread()
    page_bytes = sizes.page_bytes
    return EngineLoop(
        scheduler, runner, driver, overlap=overlap, limits=model_limits, hook=hook, device=device,
        page_bytes=page_bytes, grammars=grammars, model_gauges=model_gauges,
        speculator=None if make_speculator is None else make_speculator(scheduler.report, device),
    )  # fmt: skip
