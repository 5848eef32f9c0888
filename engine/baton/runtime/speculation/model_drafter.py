"""Drafts by a second, smaller model: what it would answer itself.

The draft model runs on a runner of its own, by plans that are made here. A call of `propose` is

1. a plan that computes a part of the tokens of sequences that it is far behind of (a prompt, most
   of all that which another node computed): at most so much that running answers wait
   CATCH_UP_SECS for it. Such a sequence gets no drafts yet;
2. a plan with the tokens of each other sequence that are new since the last call; it draws the
   first draft behind the last one;
3. plans of one token per row, the draft drawn before, until each row has its drafts.

K and V of drafts are not kept: the next call computes those tokens that were accepted together
with the one behind them, in the same step.

Pages: those of the sequence (draft_pages). A sequence that is ready to decode has pages for all
tokens but the last; that one and the drafts get theirs when they are planned. Where they have none
they are computed in scratch pages of the slot, and again later.

Invariant: of a page that several sequences share a plan writes each slot once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from baton.runtime.speculation.draft_pages import DraftPages
from baton.runtime.speculation.drafter import cut_failed
from baton.sched.metrics.step_time import StepTimeFit
from baton.sched.planner.draft_lengths import DraftingCosts
from baton.sched.types.plan import (
    UNKNOWN_TOKEN,
    AdmittedSeq,
    Row,
    StepPlan,
    StepResult,
    StopReason,
)
from baton.sched.types.request import SamplingParams
from baton.sched.types.sequence import Seq

CATCH_UP_SECS = 0.03
"""Longest that running answers wait in a step for tokens that the draft model is behind: about a
step of a small model on a CPU."""
FIRST_CATCH_UP_TOKENS = 64
"""As many until their time is known."""
MOST_CATCH_UP_TOKENS = 512
LONGEST_ROW = 32
"""Tokens that a sequence may be behind and still get drafts in the same call: several steps with
drafts, or a few more without. So many rows of a matrix take little longer than one."""
WARM_UPS = 3
"""The first one touches weights and tables for the first time, and is not measured."""

NO_PAGES = array("i")
NO_TOKENS = array("i")
UNKNOWN = array("i", (UNKNOWN_TOKEN,))

TimedResult: TypeAlias = tuple[StepResult, float]
RunPlans: TypeAlias = Callable[[Sequence[StepPlan]], list[TimedResult]]
"""Runs plans of the draft model in order, and says how long each took [s]."""


class DraftLimits(NamedTuple):
    page_size: int
    first_scratch_page: int
    scratch_pages: int
    """Of each slot."""
    max_context: int
    """Of the draft model [tokens]."""


@dataclass(slots=True)
class DraftedSeq:
    """A sequence that gets drafts in this call."""

    seq: Seq
    drafts: int
    start: int
    """First token to compute: those in front have their K and V."""
    pages: array[int]
    """Those of the sequence, and scratch pages behind."""
    tokens: array[int]
    """Drafts so far."""


def drafting_params(params: SamplingParams) -> SamplingParams:
    """How the draft model draws: its most likely token that the request's penalties and bans
    leave. It knows no grammar: what that refuses is cut off later.

    For sampled answers, too: of the tokens of the demo model at temperature 0.9 its first layers
    guessed 67 to 83 % so, and 57 to 77 % where they drew by temperature with the same numbers.
    """
    return replace(
        params,
        temperature=0.0,
        grammar="",
        reasoning=None,
        logprobs=-1,
        logprob_token_ids=(),
        prompt_logprobs=-1,
    )


class ModelDrafter:
    def __init__(self, run_plans: RunPlans, pages: DraftPages, limits: DraftLimits) -> None:
        self._run_plans = run_plans
        self._pages = pages
        self._limits = limits
        self._seqs: dict[int, Seq] = {}
        self._params: dict[int, SamplingParams] = {}
        self._step_times = StepTimeFit()
        """Of a step with a token per row, by rows."""
        self._catch_up_times = StepTimeFit()
        """By tokens."""
        self._steps = 0
        self.is_catching_up = False
        """The last call left sequences behind."""
        self.seconds = 0.0
        """Time that the last call took on the device."""

    @property
    def costs(self) -> DraftingCosts:
        return DraftingCosts(self._step_times.a, self._step_times.b)

    def start(self, seq: Seq) -> None:
        self._seqs[seq.handle] = seq
        self._params[seq.handle] = drafting_params(seq.req.params)

    def append(self, handle: int, tokens: array[int]) -> None:
        """The sequence itself has its tokens."""

    def finish(self, handle: int) -> None:
        del self._seqs[handle]
        del self._params[handle]

    def on_planned(self, plan: StepPlan) -> None:
        """The model's steps are not those of the draft model."""

    def count_behind(self, seq: Seq) -> int:
        """Tokens of the sequence without K and V of the draft model."""
        return len(seq.tokens) - min(self._pages.count_covered(seq.pages), len(seq.tokens))

    def has_room(self, seq: Seq, drafts: int) -> bool:
        """True if the draft model was made for as long texts."""
        return len(seq.tokens) + drafts <= self._limits.max_context

    def warm_up(self) -> None:
        """Compute a token a few times, in a scratch page, so that costs are known."""
        page = self._limits.first_scratch_page
        for number in range(WARM_UPS):
            row = Row(0, 0, 0, 1, False, array("i", (0,)), 0, array("i", (page,)))
            seconds = self._run([self._make_plan([row])])[0][1]
            if number > 0:
                self._step_times.observe(1.0, 1.0, seconds)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        """As many drafts as asked for; none for sequences that the draft model is far behind of."""
        ready: dict[int, DraftedSeq] = {}
        late: list[Seq] = []
        written: set[int] = set()
        for handle, drafts in zip(handles, most, strict=True):
            seq = self._seqs[handle]
            behind = self.count_behind(seq)
            if behind > LONGEST_ROW:
                late.append(seq)
                continue
            # The last token is computed even where its K and V are there: a draft follows from it.
            start = len(seq.tokens) - max(behind, 1)
            own = self._pages_from(seq, start)
            # Another row of the plan writes the same slots: this sequence is drafted for later.
            if not written.isdisjoint(own):
                continue
            written.update(own)
            ready[handle] = DraftedSeq(seq, drafts, start, self._pages_for(seq, drafts), array("i"))
        self.is_catching_up = bool(late)
        self.seconds = 0.0
        self._catch_up(late)
        if ready:
            self._draft(list(ready.values()))
        return [ready[handle].tokens if handle in ready else NO_TOKENS for handle in handles]

    def _pages_from(self, seq: Seq, start: int) -> array[int]:
        """The sequence's own pages that hold tokens from `start` on."""
        return seq.pages[start // self._limits.page_size :]

    def _pages_for(self, seq: Seq, drafts: int) -> array[int]:
        """Pages for the sequence's tokens and its drafts but the last, which is not computed."""
        limits = self._limits
        first = limits.first_scratch_page + seq.slot * limits.scratch_pages
        pages = seq.pages + array("i", range(first, first + limits.scratch_pages))
        return pages[: -(-(len(seq.tokens) + drafts - 1) // limits.page_size)]

    # ------------------------------------------------------------------ catching up

    def _catch_up(self, late: Sequence[Seq]) -> None:
        """Compute a part of the tokens that sequences are behind, the first ones first."""
        room = self._most_catch_up_tokens()
        rows = []
        ends: list[tuple[Seq, int, int]] = []
        written: set[int] = set()
        for seq in late:
            start = self._pages.count_covered(seq.pages)
            # Tokens without a page of their own are computed with the drafts.
            end = min(start + room, len(seq.tokens), len(seq.pages) * self._limits.page_size)
            own = self._pages_from(seq, start)
            # The same prompt twice: the pages that they share are computed once.
            if end <= start or not written.isdisjoint(own):
                continue
            written.update(own)
            tokens = seq.tokens[start:end]
            pages = seq.pages[: -(-end // self._limits.page_size)]
            rows.append(Row(seq.handle, seq.slot, start, end - start, False, tokens, 0, pages))
            ends.append((seq, start, end))
            room -= end - start
        if not rows:
            return
        ((_, seconds),) = self._run([self._make_plan(rows)])
        count = sum(end - start for _, start, end in ends)
        self._catch_up_times.observe(count, 0.0, seconds)
        for seq, start, end in ends:
            self._pages.fill(seq.pages, start, end)

    def _most_catch_up_tokens(self) -> int:
        per_token = self._catch_up_times.ratio
        if per_token is None:
            return FIRST_CATCH_UP_TOKENS
        if per_token * MOST_CATCH_UP_TOKENS <= CATCH_UP_SECS:
            return MOST_CATCH_UP_TOKENS
        return max(int(CATCH_UP_SECS / per_token), LONGEST_ROW)

    # ------------------------------------------------------------------ drafting

    def _draft(self, ready: list[DraftedSeq]) -> None:
        steps = max(drafted.drafts for drafted in ready)
        plans = [self._make_plan([self._first_row(drafted) for drafted in ready], ready)]
        for step in range(1, steps):
            longer = [drafted for drafted in ready if drafted.drafts > step]
            plans.append(self._make_plan([_next_row(drafted, step) for drafted in longer]))
        of_handle = {drafted.seq.handle: drafted for drafted in ready}
        for plan, (result, seconds) in zip(plans, self._run(plans), strict=True):
            self._step_times.observe(1.0, len(plan.rows), seconds)
            for row, token in zip(plan.rows, result.tokens, strict=True):
                of_handle[row.handle].tokens.append(token)
        for drafted in ready:
            self._pages.fill(drafted.seq.pages, drafted.start, len(drafted.seq.tokens))
            drafted.tokens = cut_failed(drafted.tokens)

    def _first_row(self, drafted: DraftedSeq) -> Row:
        seq = drafted.seq
        tokens = seq.tokens[drafted.start :]
        return Row(seq.handle, seq.slot, drafted.start, len(tokens), True, tokens, 0, drafted.pages)

    def _make_plan(self, rows: Sequence[Row], admitted: Sequence[DraftedSeq] = ()) -> StepPlan:
        """Args: `admitted`: sequences whose rows draw their first draft."""
        self._steps += 1
        return StepPlan(
            step=self._steps,
            # Attention takes rows of one token apart from longer ones.
            rows=tuple(sorted(rows, key=lambda row: row.n > 1)),
            num_decode=sum(row.n == 1 for row in rows),
            admitted=tuple(
                AdmittedSeq(
                    drafted.seq.handle,
                    drafted.seq.slot,
                    self._params[drafted.seq.handle],
                    drafted.seq.prompt_len,
                    drafted.seq.tokens,
                )
                for drafted in admitted
            ),
            new_pages=NO_PAGES,
            stopped_by=StopReason.DECODE_ONLY,
        )

    def _run(self, plans: Sequence[StepPlan]) -> list[TimedResult]:
        results = self._run_plans(plans)
        self.seconds += sum(seconds for _, seconds in results)
        return results


def _next_row(drafted: DraftedSeq, step: int) -> Row:
    """The row of a draft, which draws the next one."""
    seq = drafted.seq
    position = len(seq.tokens) + step - 1
    return Row(seq.handle, seq.slot, position, 1, True, UNKNOWN, 0, NO_PAGES)
