"""Drafts of the next plan: the offers that are left, and how many tokens of each are taken.

1. `Scheduler.offer_drafts` brings the offers for the next plan, made by runtime.speculation;
2. `DraftPlanner.choose` decides how many tokens each row gets (`draft_lengths`);
3. the planner of decode rows shortens a draft that finds no room (`fitting_draft`): drafts may
   evict cached pages, but never take a page that a running answer or an admission counts on.

Invariant: no plan is made while a step with drafts is in flight, because neither the length of its
sequences nor their last tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.sched.planner.draft_lengths import (
    NO_DRAFTING_COSTS,
    PROBE_INTERVAL,
    DraftCandidate,
    DraftingCosts,
    StepCosts,
    choose_draft_lengths,
)
from baton.sched.state.tables import SchedulerState
from baton.sched.types.draft_offer import DraftOffer
from baton.sched.types.sequence import Seq, is_ready_to_decode, partial_of


class DraftPlanner:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._drafted_step = 0
        """The last one with drafts."""

    def choose(self, offers: Sequence[DraftOffer], wait: float) -> dict[int, int]:
        """Drafts of the next plan by handle; sometimes a probe."""
        candidates = self._candidates([offer for offer in offers if self._is_current(offer)])
        lengths = self._choose(candidates, wait, NO_DRAFTING_COSTS) or self._probe(candidates)
        if lengths:
            self._drafted_step = self._state.planned_step
        return lengths

    def _probe(self, candidates: Sequence[DraftCandidate]) -> dict[int, int]:
        """A draft that is not worth its time, where none has been for long."""
        is_due = self._state.planned_step - self._drafted_step >= PROBE_INTERVAL
        if not is_due or not candidates or self._has_prompts():
            return {}
        best = max(candidates, key=lambda candidate: candidate.acceptance)
        return {best.handle: 1}

    def would_choose(
        self, offers: Sequence[DraftOffer], wait: float, drafting: DraftingCosts
    ) -> dict[int, int]:
        """Drafts by handle that a step would have, once the last tokens are known that they have
        to follow, if making them takes the time of `drafting`.
        """
        candidates = self._candidates(offers)
        lengths = self._choose(candidates, wait, drafting)
        # Who makes drafts that take time also decides when they are probed.
        if not lengths and drafting == NO_DRAFTING_COSTS:
            return self._probe(candidates)
        return lengths

    def _choose(
        self, candidates: Sequence[DraftCandidate], wait: float, drafting: DraftingCosts
    ) -> dict[int, int]:
        # Prompts take what a step has room for, and the drafts' tokens would delay them.
        if not candidates or self._has_prompts():
            return {}
        times = self._state.times
        rows = sum(map(is_ready_to_decode, self._state.running.values()))
        plain = times.decode_seconds(rows)
        # Before any step is measured a wait has nothing to be compared with.
        costs = StepCosts(
            plain,
            times.draft_seconds(1) + drafting.per_draft,
            wait if plain else 0.0,
            drafting.per_step,
        )
        room = self._state.limits.step_tokens - rows
        return choose_draft_lengths(candidates, rows, room, costs)

    def _has_prompts(self) -> bool:
        """True if the next step may compute prompt tokens."""
        state = self._state
        can_admit = bool(state.waiting and state.slots)
        return can_admit or bool(partial_of(state.running.values()))

    def _is_current(self, offer: DraftOffer) -> bool:
        """True if the offer follows the last token of its sequence, and that is known."""
        seq = self._state.running.get(offer.handle)
        return seq is not None and not seq.inflight and len(seq.tokens) == offer.known

    def _candidates(self, offers: Sequence[DraftOffer]) -> list[DraftCandidate]:
        """Those whose next row may have drafts."""
        candidates = []
        for handle, _, tokens, acceptance in offers:
            seq = self._state.running.get(handle)
            if seq is None or not is_ready_to_decode(seq):
                continue
            # Behind the drafts one more token is drawn, which may be the last one of the answer.
            most = min(len(tokens), seq.max_total_tokens - seq.total_len - 1)
            if most > 0:
                candidates.append(DraftCandidate(handle, most, acceptance))
        return candidates


def fitting_draft(state: SchedulerState, seq: Seq, drafts: int) -> int:
    """How many of its drafts a decoding sequence, which has room for its known tokens, has room
    for; takes their pages.
    """
    memory = state.memory
    known = seq.total_len
    page_size = state.limits.page_size
    need = memory.pages(known + drafts) - len(seq.pages)
    if need <= 0:
        return drafts
    # A page that the answer is expected to take anyway is taken early; each running sequence still
    # finds its next page.
    pages = need * memory.pages_per_block
    reserve = len(state.running) * memory.pages_per_block
    has_pages = pages <= memory.growth(seq) and memory.available - pages >= reserve
    if has_pages and memory.extend(seq, known + drafts):
        return drafts
    return len(seq.pages) * page_size - known
