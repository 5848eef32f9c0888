"""Planner of the next forward pass: one token for every decoding sequence, then prompt chunks in policy order.

Works on sched.state.SchedulerState and advances `computed` there, so that the next plan can be made while it runs
(overlap scheduling). Rules:

* Between two tokens of a running sequence at most one step goes by without it.
* A prompt page joins the radix tree when its computation is *scheduled*: a later row, even one of the same step, may
  use it, because steps run in order and every layer writes its KV before it reads. Pages leave the engine only after
  commit.
* Decode rows stand in the order of importance, then age (PriorityRule.place): the first get pages first, and the events
  of a step follow its rows.
* Admission is by estimate, the truth comes at allocation; a request that is alone is always admitted.

Sources: token budget after vLLM v1, admission estimate after SGLang 0.5.7, both as specified in docs/architecture.md.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.cache.radix import PrefixMatch
from baton.sched.fairness.fair_queue import FairQueue
from baton.sched.memory.preemption import priority_victims, retraction_victim
from baton.sched.policies.base import cached_tokens
from baton.sched.state import SchedulerState
from baton.sched.types.plan import UNKNOWN_TOKEN, AdmittedSeq, Row, StepPlan, StopReason, new_row
from baton.sched.types.sequence import Seq, SeqState, is_partial, is_ready_to_decode, partial_of

UNKNOWN = array("i", (UNKNOWN_TOKEN,))
MAX_PREEMPTORS = 16
"""Waiting requests that a plan asks whether they may preempt."""
NO_PAGES = array("i")
"""Shared by all rows that decode: rows are read only."""


@dataclass(slots=True)
class PageReservation:
    """Pages kept for a waiting request that did not fit."""

    seq: Seq
    since: int
    """Step from which on admitted requests have passed it."""
    passed_pages: int = 0
    """Pages given to requests that passed it, expected growth included."""
    was_tried: bool = True
    """Set when the request did not fit in this plan either."""


class Planner:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._limits = state.limits
        self._memory = state.memory
        self.stopped_by = StopReason.QUEUE_EMPTY
        """Why the last plan took no further prompt tokens."""
        self.seconds_budget: float | None = None
        """Time the prompts of the last plan were allowed to take."""
        self._budget = 0
        """Prompt tokens that this plan may still take."""
        self._skipped = 0
        """Waiting requests that this plan tried and could not start."""
        self._reservation: PageReservation | None = None
        """For one of the waiting queue."""
        self._transfer_reservation: PageReservation | None = None
        """D: for one of the prompts on their way."""
        self._preemptor: Seq | None = None
        """The waiting request that others were preempted for in this plan."""
        self.times = state.times
        self._prefill_run_secs: float | None = None
        """Predicted time of the steps without decode rows since the last step with some; None: that was it."""
        self._reserved: int | None = None
        """Pages that running requests are expected to still take; None: not counted in this plan yet."""

    def plan(self, now: float) -> StepPlan | None:
        """Choose the next forward pass; None when there is nothing to compute."""
        state = self._state
        state.now = now
        state.stats.on_plan(now)
        for queue in (state.waiting, state.opening):
            if (reviewed := queue.review()) is not None:
                state.outbox.append(reviewed)
        state.settle()
        state.sort_running()
        self._admit_transfers()
        state.release_grants()
        self._reserved = None
        if self._limits.priority.enabled:
            self._preempt_for_priority()
        retractions = state.retractions
        rows: list[Row] = []
        admitted: list[AdmittedSeq] = []
        skip_decode = self._skips_decode()
        others = list(state.running.values()) if skip_decode else self._plan_decode(rows, admitted)
        num_decode = len(rows)
        self.seconds_budget = None
        stopped_by = StopReason.PREEMPTED
        if num_decode and self._limits.prefill_first and not self._limits.mixed_chunk:
            stopped_by = StopReason.DECODE_ONLY
        elif state.retractions == retractions:
            stopped_by = self._plan_prefill(rows, admitted, others)
        if skip_decode and not rows:
            self._plan_decode(rows, admitted)
            num_decode = len(rows)
        self.stopped_by = stopped_by
        if not rows:
            if state.retractions > retractions or self._reclaim(stopped_by):
                return self.plan(now)  # the pages just freed may let another sequence run; each round frees one's
            if not state.running:
                self._memory.ratio.on_idle()
            elif state.planned_step == state.committed_step:
                self._take_back(1)  # D: no answer finds a page, and transfers of which nothing has come hold some
            if not self._memory.has_copies:
                return None
        if num_decode:
            self._memory.ratio.on_decode_step()
            self._prefill_run_secs = None
        else:  # a step for copies alone adds nothing
            run = sum(self.times.chunk_seconds(row.start, row.n) for row in rows)
            self._prefill_run_secs = (self._prefill_run_secs or 0.0) + run
        return StepPlan(
            state.step_planned(),
            tuple(rows),
            num_decode,
            tuple(admitted),
            self._memory.take_new_pages(),
            stopped_by,
            state.retractions - retractions,
            self._memory.take_copies(),
        )

    @property
    def reserved_pages(self) -> int | None:
        """Expected growth of running requests, if the last plan had to ask."""
        return self._reserved

    def _reclaim(self, stopped_by: StopReason) -> bool:
        """P: prompts wait for pages and nothing runs: have a retained one release its pages.

        Leases come first: D takes them before anything that is still to be computed here (`_openings`).
        """
        state = self._state
        is_stuck = stopped_by is StopReason.NO_PAGES and state.planned_step == state.committed_step and not state.leased
        return is_stuck and state.release_retained()

    def _skips_decode(self) -> bool:
        """Under prefill_first: does this step leave decode rows out, because prompts wait and the gap allows it?"""
        limits = self._limits
        if not limits.prefill_first or limits.mixed_chunk:
            return False
        if self._prefill_run_secs is not None:
            next_secs = self.times.chunk_seconds(0, limits.step_tokens)
            most = limits.max_decode_gap_secs
            if not most or self._prefill_run_secs + next_secs > most:  # predictions may be 0
                return False
        return bool(self._state.waiting) or any(not seq.is_decoding for seq in self._state.running.values())

    # ------------------------------------------------------------------ arrivals on D

    def _admit_transfers(self) -> None:
        """D: reserve pages for prompts on their way, leaving room for running answers of the same importance.

        Pages are set aside before P has computed anything, so that they can be filled without asking here again. But P
        may be full of finished prompts that wait for room here, which the room set aside is not: it is taken back then.
        """
        state, memory, limits = self._state, self._memory, self._limits
        if not state.opening:
            return
        self._reserved = None
        self._skipped, announced_only = 0, False
        first_sent_back = min(map(self._place, self._sent_back()), default=None)
        for seq in self._transfer_candidates():
            if not state.slots and not limits.priority.enabled:
                return
            # One that ran here and was sent back comes first, as long as one runs whose end will make room for it:
            # transfers alone may be waiting for a P that is full of prompts for the very requests held up here.
            if state.running and first_sent_back and first_sent_back < self._place(seq):
                return
            if announced_only and not seq.is_announced:
                return
            match, short = self._transfer_needs(seq)
            if (short > 0 or not state.slots) and limits.priority.enabled and not self._skipped:
                victims = priority_victims(
                    seq, short, state.running.values(), limits, memory.freed_by, self._place(seq)
                )
                memory.cache.unlock(match.node)
                if not self._may_pass_transfer(seq, without=victims):
                    victims = []
                for victim in victims:
                    state.preempt(victim, seq)
                if victims:
                    self._reserved = None
                    first_sent_back = min(map(self._place, self._sent_back()), default=None)
                match, short = self._transfer_needs(seq)
            if short > 0 or not state.slots or not self._may_pass_transfer(seq):
                memory.cache.unlock(match.node)
                first_announced = seq.is_announced and not announced_only and self._may_pass()
                if first_announced and (short > 0 or not state.slots):
                    self._take_back(short)
                    # Pages granted to a prompt of which P holds nothing would be taken back in the next plan.
                    announced_only = True
                if short > 0:
                    self._transfer_reservation = self._reserve(self._transfer_reservation, seq)
                self._skipped += 1
                if not state.slots or memory.available <= memory.watermark + self._reserved_growth():
                    return
                continue
            self._transfer_reservation = self._admitted(self._transfer_reservation, seq)
            seq.admitted_step = state.planned_step
            state.dequeue(seq)
            seq.to(SeqState.TRANSFER)
            state.stats.on_admitted(seq, state.now)
            state.transfer[seq.handle] = seq
            seq.slot = state.slots.pop()
            memory.share(seq, match)
            memory.restore(seq, seq.prompt_len)
            start = len(seq.pages)
            fits = memory.extend(seq, seq.prompt_len)
            assert fits, "so many pages were available"
            self._reserved = None
            state.grant(seq, start, seq.pages[start:])
            if state.fair is not None:
                cached = start * memory.page_size
                state.fair.charge_prompt(seq, seq.prompt_len - cached, cached)

    def _transfer_candidates(self) -> Iterator[Seq]:
        """D: prompts on their way, in order, until too many lacked room; then the one with the reservation."""
        held = self._transfer_reservation
        if held is not None and held.seq.state is not SeqState.OPENING:
            held = self._transfer_reservation = None
        if held is not None:
            held.was_tried = False
        for seq in self._openings():
            if not self._may_skip:
                break
            yield seq
        held = self._transfer_reservation
        if held is not None and not held.was_tried:
            yield held.seq

    def _may_pass_transfer(self, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """D: as for waiting requests. What P has computed need not wait for what P may have no room to compute."""
        held = self._transfer_reservation
        if held is not None and seq.is_announced and not held.seq.is_announced and self._may_pass():
            return True
        return self._may_pass_reservation(held, seq, without)

    def _transfer_needs(self, seq: Seq) -> tuple[PrefixMatch, int]:
        """Return the cached prefix, locked, and how many pages are missing for the rest and for the answers."""
        state, memory = self._state, self._memory
        match = memory.match(seq, seq.prompt_len)
        need = memory.pages(seq.prompt_len) - len(match.pages)
        growth = min(self._limits.reserved_decode_tokens, memory.answer_tokens(seq))
        busy = state.running or state.transfer or state.waiting
        margin = memory.pages(growth) + self._reserved_growth() + memory.watermark if busy else 0
        return match, need + margin - memory.available

    def _openings(self) -> Iterable[Seq]:
        """Prompts on their way, in the order in which they get pages."""
        state = self._state
        order = state.opening.in_order()
        if state.fair is not None:
            skip_ahead = self._limits.admission_skip_ahead
            order = state.fair.merge((), order, state.holders(), most_skipped=skip_ahead)
        if not state.announced or not self._may_pass():
            return order
        announced = state.opening.sorted_of(state.announced.values())
        return itertools.chain(announced, (seq for seq in order if not seq.is_announced))

    def _may_pass(self) -> bool:
        """D: do prompts whose pages P holds go before all others?

        Where requests differ in importance only if nothing else here can end by itself; that they go first at least
        then is what keeps two full nodes from waiting for each other.
        """
        state = self._state
        if state.fair is None and not self._limits.priority.enabled:
            return True
        return not state.running and not any(seq.is_announced for seq in state.transfer.values())

    def _take_back(self, short: int) -> None:
        """D: revoke grants of which nothing has come, the newest first, for one that needs a slot and `short` pages."""
        state = self._state
        idle = [seq for seq in state.transfer.values() if not seq.is_announced]
        if any(seq.is_revoking for seq in idle):
            return
        chosen: list[Seq] = []
        for seq in reversed(idle):
            if short <= 0 and (chosen or state.slots):
                break
            chosen.append(seq)
            short -= self._memory.freed_by(seq)[0]
        if short <= 0 or not (state.running or len(idle) < len(state.transfer)):
            for seq in chosen:
                state.revoke(seq)

    def _sent_back(self) -> Iterable[Seq]:
        """Requests that ran here and wait for room again, less those that their tenant's limits hold back."""
        state = self._state
        return state.sent_back() if state.fair is None else state.fair.startable(state.sent_back(), state.holders())

    def _place(self, seq: Seq) -> tuple[float, float, int]:
        return self._limits.priority.place(seq, self._state.now)

    # ------------------------------------------------------------------ decode

    def _plan_decode(self, rows: list[Row], admitted: list[AdmittedSeq]) -> list[Seq]:
        """Plan one token for every decoding sequence. Returns the running sequences that do not decode now.

        Pages that may be short are found before any row is made: one with pages may still fall victim.
        The hot loop of the planner: 256 rows in 0.1 ms, hence no property and no call per row.
        """
        memory, page_size = self._memory, self._limits.page_size
        running = self._state.running
        starved = self._find_decode_pages() if memory.available < len(running) else ()
        others: list[Seq] = []
        for seq in running.values():
            known, inflight, start = seq.tokens, seq.inflight, seq.computed
            total = len(known) + inflight
            if total - start != 1 or not seq.prompt_len < total < seq.most_tokens:
                others.append(seq)
                continue
            if total > len(seq.pages) * page_size and (seq.handle in starved or not memory.extend(seq, total)):
                continue
            sent = seq.sent_pages
            if sent == 0:
                rows.append(self._row(seq, 1, admitted))
                continue
            pages, held = NO_PAGES, len(seq.pages)
            if sent < held:
                pages = seq.pages[sent:]
                seq.sent_pages = held
            tokens = UNKNOWN if inflight else known[start:]
            rows.append(new_row((seq.handle, seq.slot, start, 1, True, tokens, sent, pages)))
            seq.computed = total
            seq.inflight = inflight + 1
            seq.inflight_steps += 1
        return others

    def _find_decode_pages(self) -> set[int]:
        """Pages for the next tokens where there may be too few, by retraction if need be. Returns who gets none."""
        page_size = self._limits.page_size
        short = [
            seq
            for seq in self._state.running.values()
            if is_ready_to_decode(seq) and seq.total_len > len(seq.pages) * page_size
        ]
        return {seq.handle for seq in short if seq.state is SeqState.RUNNING and not self._grow(seq, seq.total_len)}

    def _grow(self, seq: Seq, tokens: int) -> bool:
        """Make room for `tokens` tokens of a decoding sequence, retracting others if need be. False: not this step."""
        while not self._memory.extend(seq, tokens):
            if not self._retract_for(seq):
                return False
        return True

    def _retract_for(self, keep: Seq) -> bool:
        """Send one running sequence back to the queue. False: `keep` gets no page by it."""
        victim = retraction_victim(self._state.running.values(), keep, self._limits.priority)
        if victim is not None:
            self._state.retract(victim, keep)
        return victim is not None and victim is not keep

    def _preempt_for_priority(self) -> None:
        """Make room for the first waiting request that may preempt, by suspending running ones behind it in the order.

        Triggered by slots and by pages, and only if the request has tokens to compute in this very step, leaves the
        reservation its pages, and would wait longer than it takes to compute again what the suspended ones lose.
        """
        state, rule = self._state, self._limits.priority
        self._preemptor = None
        if not state.waiting or not state.running:
            return
        least = min(map(rule.base, state.running.values()))
        self._check_reservation()
        for ahead, seq in enumerate(self._heads()):
            short = self._pages_for(seq, self._memory.cached_pages(seq)) - self._memory.available
            if state.slots and short <= 0:
                return
            if rule.base(seq) - least <= rule.preemption_threshold or not self._could_run(seq):
                continue
            if self._is_too_late(seq):
                continue  # it ends as soon as its turn comes
            victims = priority_victims(
                seq, short, state.running.values(), self._limits, self._memory.freed_by, self._place(seq)
            )
            if not self._may_pass_reservation(self._reservation, seq, without=victims):
                continue
            if not self._saves_time(victims, slots=ahead + 1, short=short):
                continue
            for victim in victims:
                state.preempt(victim, seq)
            if victims:
                self._preemptor = seq
                return

    def _saves_time(self, victims: Sequence[Seq], *, slots: int, short: int) -> bool:
        """True if what `victims` lose is computed again sooner than running requests end on their own.

        Compared is with the end that frees so many `slots` and `short` pages. Without this, preemption under overload
        makes even the important wait for the work that it repeats. An unconfirmed estimate holds no preemption back.
        """
        state, memory, times, limits = self._state, self._memory, self.times, self._limits
        mode = limits.preemption_mode if limits.radix_cache else "recompute"
        if mode == "offload" or (mode != "recompute" and short <= 0):
            return True  # their KV stays
        lost = sum(memory.freed_by(victim)[1] for victim in victims)
        step_secs = times.decode_seconds(len(state.running))
        if not lost or step_secs <= 0 or not times.confirms(lost, state.now):
            return True
        steps = sorted((memory.answer_tokens(s), s.handle) for s in state.running.values() if not s.is_lease)
        pages, limit = 0, lost / times.prefill_rate
        for ended, (left, handle) in enumerate(steps, start=1):
            if left * step_secs >= limit:
                return True
            pages += memory.freed_by(state.running[handle])[0]
            if ended >= slots and pages >= short:
                return False
        return True

    def _heads(self) -> Iterator[Seq]:
        """The first waiting sequences, in the order in which they would be tried."""
        waiting = (s for s in self._state.waiting.in_order() if not s.inflight_steps)
        fair = self._state.fair
        if fair is not None:
            return fair.heads(waiting, self._state.holders(), MAX_PREEMPTORS)
        return itertools.islice(waiting, MAX_PREEMPTORS)

    def _could_run(self, seq: Seq) -> bool:
        """Would a waiting sequence get tokens in this step, after decode rows and the prompts that precede it?"""
        limits, running = self._limits, self._state.running.values()
        decoding = sum(s.is_decoding for s in running)
        if decoding and limits.prefill_first and not limits.mixed_chunk and not self._skips_decode():
            return False
        key, is_first = self._place(seq)[0], not self._state.policy.redecides_chunks
        ahead = [s for s in partial_of(running) if s.place[0] < key or (is_first and s.place[0] == key)]
        self._budget = max(limits.step_tokens - decoding, limits.page_size) - sum(s.extend_tokens for s in ahead)
        if self._budget <= 0 or (limits.prefill_max_requests is not None and len(ahead) >= limits.prefill_max_requests):
            return False
        return self._completes(seq) or (len(ahead) < limits.max_partial_prefills and self._budget >= limits.page_size)

    # ------------------------------------------------------------------ prefill

    def _plan_prefill(self, rows: list[Row], admitted: list[AdmittedSeq], others: list[Seq]) -> StopReason:
        """Prompt chunks after the decode rows. `others`: running sequences without one, in the order of running."""
        self._reserved = None  # decode rows have changed it
        num_decode = len(rows)
        limit = self._limits.prefill_max_requests
        self._budget = max(self._limits.step_tokens - num_decode, self._limits.page_size)
        self.seconds_budget = seconds = self._prompt_seconds(num_decode)
        started = 0
        blocked: StopReason | None = None
        for seq in self._prefill_candidates(others):
            if self._budget <= 0:
                return StopReason.TOKEN_BUDGET
            if limit is not None and started >= limit:
                return StopReason.MAX_REQUESTS
            is_new = seq.state is SeqState.WAITING
            if is_new and self._is_too_late(seq):
                self._state.miss_deadline(seq)
                continue
            is_first = is_new and (seq.cached_tokens < 0 or not seq.has_started)
            before = self._memory.growth(seq) if not is_new or seq.handle in self._state.retained else 0
            if is_new:
                if not self._has_budget_for(seq, seconds, is_first=not started):
                    return StopReason.TOKEN_BUDGET
                # Prompts under way go on beside one that cannot be admitted; so may others (_may_pass_reservation).
                if (stop := self._admit(seq)) is not None:
                    blocked = blocked or stop
                    continue
            else:
                self._memory.adopt_prefix(seq)
            n = self._chunk(seq.computed, seq.extend_tokens, seconds, is_first=not started)
            if n and not self._memory.extend(seq, seq.computed + n):
                if is_new:
                    self._state.unadmit(seq)
                elif not rows and self._state.planned_step == self._state.committed_step:
                    # Nothing else runs that could free pages: let the youngest prompt give way.
                    self._retract_for(seq)
                return StopReason.NO_PAGES
            if n == 0:
                if is_new:  # the host tier had more of it than the tree
                    self._state.unadmit(seq)
                return StopReason.TOKEN_BUDGET
            if is_new:
                self._state.stats.on_admitted(seq, self._state.now)
            if seconds is not None:
                seconds -= self.times.chunk_seconds(seq.computed, n)
            if self._state.fair is not None:
                self._state.fair.charge_prompt(seq, n, seq.computed if is_first else 0)
            rows.append(self._row(seq, n, admitted))
            if self._reserved is not None:
                self._reserved += self._memory.growth(seq) - before
            self._memory.publish(seq)
            self._budget -= n
            started += 1
        if blocked is None and self._state.waiting and not self._state.slots:
            return StopReason.NO_SLOT
        return blocked or StopReason.QUEUE_EMPTY

    def _prefill_candidates(self, others: list[Seq]) -> Iterator[Seq]:
        """Prompts under way, which are among `others`, then the waiting queue in policy order; or both in policy order
        if it re-decides.

        More important requests come first in any case. The one with the reservation is tried at the latest when all
        others have been, except in a plan that preempted for another one.
        """
        state = self._state
        self._skipped = 0
        self._check_reservation()
        unfinished = partial_of(others)
        together = state.policy.redecides_chunks or self._limits.priority.enabled
        if state.fair is not None:
            yield from self._fair_candidates(state.fair, unfinished, together)
            for seq in self._untried():
                if not together or not self._is_capped(seq, self._ahead_in_class(state.fair, seq)):
                    yield seq
        else:
            yield from self._ordered_candidates(unfinished, together)

    def _untried(self) -> list[Seq]:
        """The one with the reservation, if it may start and has not been tried in this plan."""
        held = self._reservation
        if held is None or held.was_tried or not self._state.slots or not self._can_start(held.seq):
            return []
        return [held.seq]

    def _ordered_candidates(self, unfinished: list[Seq], together: bool) -> Iterator[Seq]:
        """All of `unfinished`, and those of the waiting queue that may start.

        Where both compete, a request starts only if this step completes it, or if fewer than max_partial_prefills
        unfinished prompts precede it: those behind it hold back nothing.
        """
        state = self._state
        if not together:
            yield from unfinished
            if not state.slots or not state.waiting:
                return
        given: set[int] = set()
        ahead = 0
        for seq in state.waiting.in_order(unfinished if together else ()):
            if seq.state is SeqState.WAITING:
                if not state.slots or not self._may_skip:
                    break
                if seq.inflight_steps:
                    continue  # retracted: its row in flight is committed first
                if self._preemptor is not None and seq is not self._preemptor:
                    continue  # the slot and the pages were taken for another
                if self._is_capped(seq, ahead):
                    self._skipped += 1
                    continue
            else:
                given.add(seq.handle)
            yield seq
            if seq is self._preemptor:
                self._preemptor = None
            ahead += together and seq.state is SeqState.RUNNING and is_partial(seq)
        rest: list[Seq] = []
        if together and len(given) < len(unfinished):
            rest = [seq for seq in state.waiting.sorted_alone(unfinished) if seq.handle not in given]
        rest += self._untried()
        rest.sort(key=lambda seq: self._place(seq)[0])  # stable: behind prompts under way as important
        for seq in rest:
            if seq.state is SeqState.WAITING and self._is_capped(seq, ahead):
                continue
            yield seq
            ahead += together and seq.state is SeqState.RUNNING and is_partial(seq)

    @property
    def _may_skip(self) -> bool:
        """May another waiting request be tried, after those that could not start?"""
        return self._skipped <= self._limits.admission_skip_ahead

    def _is_capped(self, seq: Seq, ahead: int) -> bool:
        """True if a waiting request may not start behind so many unfinished prompts."""
        return ahead >= self._limits.max_partial_prefills and not self._completes(seq)

    def _ahead_in_class(self, fair: FairQueue, seq: Seq) -> int:
        """Unfinished prompts ahead of one that is tried last; 0 if its class has none (as Fairness.merge counts)."""
        unfinished = partial_of(self._state.running.values())
        own = fair.class_of(seq)
        return len(unfinished) if any(fair.class_of(other) == own for other in unfinished) else 0

    def _completes(self, seq: Seq) -> bool:
        """Would what is left of the step's budget compute all of this waiting request?"""
        return seq.total_len - cached_tokens(seq, self._memory.cache) <= self._budget

    def _is_too_late(self, seq: Seq) -> bool:
        """Under --deadline-miss-action abort: no first token can come in time any more, so nothing is begun.

        An estimate that no comparable prompt has confirmed refuses nothing.
        """
        deadline = seq.req.ttft_deadline
        if deadline is None or seq.has_started or not self._limits.aborts_missed_deadlines:
            return False
        now, cached = self._state.now, cached_tokens(seq, self._memory.cache)
        tokens = seq.total_len - cached
        return self.times.confirms(tokens, now) and now + self.times.chunk_seconds(cached, tokens) > deadline

    def _prompt_seconds(self, num_decode: int) -> float | None:
        """Time that prompt chunks may add to this step; None: they are sized by tokens alone."""
        limits = self._limits
        if limits.step_target_secs:
            return max(limits.step_target_secs - self.times.decode_seconds(num_decode), 0.0)
        return self.times.chunk_seconds(0, limits.step_tokens) if limits.dynamic_chunking else None

    def _fair_candidates(self, fair: FairQueue, unfinished: list[Seq], together: bool) -> Iterator[Seq]:
        """The same with classes and tenants: the policy orders the requests of each."""
        state = self._state

        def has_slot() -> bool:
            return bool(state.slots) and self._skipped < sys.maxsize

        if self._preemptor is not None:
            yield self._preemptor
            self._preemptor = None

        def order() -> Iterator[Seq]:
            for seq in state.waiting.in_order(unfinished if together else ()):
                if seq.state is not SeqState.WAITING or not seq.inflight_steps:
                    yield seq

        yield from fair.merge(
            unfinished,
            order(),
            state.holders(),
            together=together,
            has_slot=has_slot,
            completes=self._completes,
            most=self._limits.max_partial_prefills if together else sys.maxsize,
            most_skipped=self._limits.admission_skip_ahead,
        )

    def _has_budget_for(self, seq: Seq, seconds: float | None, *, is_first: bool) -> bool:
        """Is there anything of a waiting request that this step could compute?"""
        if seconds is None and self._budget >= self._limits.page_size and self._limits.is_chunked:
            return True
        cached = cached_tokens(seq, self._memory.cache)
        return self._chunk(cached, seq.total_len - cached, seconds, is_first=is_first) > 0

    def _chunk(self, start: int, left: int, seconds: float | None, *, is_first: bool) -> int:
        """How many of a prompt's `left` tokens to compute now: all, or whole pages so that chunks end at page ends.

        By time alone it may be nothing, but the first prompt of a step gets a page: every prompt moves on. Without
        chunking it is all or nothing, and the first prompt of a step gets all.
        """
        page_size, most = self._limits.page_size, self._budget
        if not self._limits.is_chunked:
            return left if left <= most or is_first else 0
        if self._limits.long_prefill_tokens:
            most = min(most, self._limits.long_prefill_tokens)
        if seconds is not None:
            timed = self.times.chunk_tokens(start, seconds)
            most = min(most, max(timed, page_size) if is_first else timed)
        if left <= most:
            return left
        end = start + most
        return max(end - end % page_size - start, 0)

    def _admit(self, seq: Seq) -> StopReason | None:
        """Give a waiting sequence a slot and its cached prefix, if it is expected to fit."""
        state, memory = self._state, self._memory
        if not state.slots:
            return StopReason.NO_SLOT
        match = memory.match(seq, len(seq.tokens) - 1)
        need = self._pages_for(seq, max(len(match.pages), len(seq.pages)))
        if need > memory.available or not self._may_pass_reservation(self._reservation, seq):
            memory.cache.unlock(match.node)
            self._skipped += 1
            if need > memory.available:
                self._reservation = self._reserve(self._reservation, seq)
                if memory.available <= memory.watermark + self._reserved_growth():
                    self._skipped = sys.maxsize  # no request would fit
            return StopReason.NO_PAGES
        self._reservation = self._admitted(self._reservation, seq)
        state.dequeue(seq)
        state.run(seq)
        seq.slot = state.slots.pop()
        seq.admitted_step = state.planned_step
        if seq.pages:  # retained: it resumes where it was
            memory.cache.unlock(match.node)
            return None
        memory.share(seq, match)
        memory.restore(seq, len(seq.tokens) - 1)
        seq.computed = seq.published * memory.page_size
        return None

    def _pages_for(self, seq: Seq, cached_pages: int) -> int:
        """Pages that should be available before a waiting sequence is admitted."""
        memory, state = self._memory, self._state
        work = memory.pages(len(seq.tokens)) - cached_pages
        if not state.running and not state.transfer and not state.leased:
            return work  # alone: it must run, and it fits (see Scheduler.add)
        need = work + memory.pages(memory.answer_tokens(seq)) + memory.watermark
        growth = self._reserved_growth()
        if need + growth > memory.available >= need and any(s.ends_by_length for s in state.running.values()):
            growth = min(growth, memory.peak_growth(list(self._growing())))
        if seq.handle in state.retained:
            growth -= memory.growth(seq)
        return need + growth

    # ------------------------------------------------------------------ reservation

    def _reserve(self, held: PageReservation | None, seq: Seq) -> PageReservation | None:
        """There were no pages for this request: others that pass it leave it room from now on."""
        if held is not None and held.seq is seq:
            held.was_tried = True
        elif held is None or self._is_more_important(seq, held.seq):
            return PageReservation(seq, since=self._state.planned_step)
        return held

    def _may_pass_reservation(self, held: PageReservation | None, seq: Seq, without: Sequence[Seq] = ()) -> bool:
        """May a request be admitted, once those of `without` are preempted, although another one waits for pages?

        Each page given to one that passes is set aside for the one that waits, until all of its pages are. So those
        that pass hold at most the rest of the pool, and it starts as soon as what ran before it has ended.
        """
        state, memory = self._state, self._memory
        if held is None or held.seq is seq or self._is_more_important(seq, held.seq):
            return True
        holders = [s for s in itertools.chain(state.running.values(), state.transfer.values()) if s not in without]
        if not holders and not state.leased:
            return True
        passed = sum(len(s.pages) + memory.growth(s) for s in holders if s.admitted_step >= held.since)
        set_aside = min(held.passed_pages, memory.pages_at_end(held.seq)) + memory.watermark
        return passed + memory.pages_at_end(seq) <= self._limits.num_pages - set_aside

    def _admitted(self, held: PageReservation | None, seq: Seq) -> PageReservation | None:
        if held is not None and held.seq is seq:
            return None
        if held is not None:
            held.passed_pages += self._memory.pages_at_end(seq)
        return held

    def _check_reservation(self) -> None:
        """Drop the reservation of a request that does not wait any more, or that its tenant's limits hold back."""
        held = self._reservation
        if held is not None and not self._can_start(held.seq):
            held = self._reservation = None
        if held is not None:
            held.was_tried = self._preemptor is not None  # else it might come behind a less important one

    def _can_start(self, seq: Seq) -> bool:
        """Does it wait, within its tenant's limits?"""
        fair = self._state.fair
        return seq.state is SeqState.WAITING and (fair is None or any(fair.startable([seq], self._state.holders())))

    def _is_more_important(self, seq: Seq, other: Seq) -> bool:
        rule, now = self._limits.priority, self._state.now
        return rule.key(seq, now) < rule.key(other, now)

    def _reserved_growth(self) -> int:
        if self._reserved is None:
            self._reserved = self._memory.total_growth(self._growing())
        return self._reserved

    def _growing(self) -> Iterator[Seq]:
        """Sequences for whose growth room is kept: a retained one could not be finished later without."""
        state = self._state
        return itertools.chain(state.running.values(), state.transfer.values(), state.retained.values())

    # ------------------------------------------------------------------ rows

    def _row(self, seq: Seq, n: int, admitted: list[AdmittedSeq]) -> Row:
        start = seq.computed
        if seq.sent_pages == 0:
            admitted.append(AdmittedSeq(seq.handle, seq.slot, seq.req.params, seq.prompt_len, array("i", seq.tokens)))
        tokens = seq.tokens[start : start + n]
        if len(tokens) < n:
            tokens.append(UNKNOWN_TOKEN)
        row = Row(
            seq.handle,
            seq.slot,
            start,
            n,
            start + n == seq.total_len,
            tokens,
            seq.sent_pages,
            seq.pages[seq.sent_pages :],
        )
        seq.sent_pages = len(seq.pages)
        seq.computed = start + n
        seq.inflight_steps += 1
        seq.has_started = True
        if row.sample:
            # The token before this one is known or in flight; from now on the newest unknown one is this row's.
            seq.inflight += 1
        return row
