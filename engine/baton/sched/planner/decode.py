"""Rows of decoding sequences: one token each. Pages that may be short are found by retraction."""

from __future__ import annotations

from array import array

from baton.sched.memory.preemption import retraction_victim
from baton.sched.planner.draft import PlanDraft
from baton.sched.state.tables import SchedulerState
from baton.sched.types.plan import UNKNOWN_TOKEN, new_row
from baton.sched.types.sequence import Seq, SeqState, is_ready_to_decode

UNKNOWN = array("i", (UNKNOWN_TOKEN,))
NO_PAGES = array("i")
"""Shared by all rows that decode: rows are read only."""


def plan_decode_rows(state: SchedulerState, draft: PlanDraft) -> list[Seq]:
    """Plan one token for every decoding sequence. Returns the running sequences that do not decode now.

    Pages that may be short are found before any row is made: one with pages may still fall victim.
    The hot loop of the planner: 256 rows in 0.1 ms, hence no property and no call per row.
    """
    memory, page_size = state.memory, state.limits.page_size
    running, rows = state.running, draft.rows
    starved = _find_pages(state) if memory.available < len(running) else ()
    others: list[Seq] = []
    for seq in running.values():
        known, inflight, start = seq.tokens, seq.inflight, seq.computed
        total = len(known) + inflight
        if total - start != 1 or not seq.prompt_len < total < seq.max_total_tokens:
            others.append(seq)
            continue
        if total > len(seq.pages) * page_size and (
            seq.handle in starved or not memory.extend(seq, total)
        ):
            continue
        sent = seq.pages_sent_to_runner
        if sent == 0:
            draft.add(seq, 1)
            continue
        pages, held = NO_PAGES, len(seq.pages)
        if sent < held:
            pages = seq.pages[sent:]
            seq.pages_sent_to_runner = held
        tokens = UNKNOWN if inflight else known[start:]
        rows.append(new_row((seq.handle, seq.slot, start, 1, True, tokens, sent, pages)))
        seq.computed = total
        seq.inflight = inflight + 1
        seq.inflight_steps += 1
    return others


def _find_pages(state: SchedulerState) -> set[int]:
    """Pages for the next tokens where there may be too few, by retraction if need be. Returns who gets none."""
    page_size = state.limits.page_size
    running = state.running.values()
    short = [
        seq
        for seq in running
        if is_ready_to_decode(seq) and seq.total_len > len(seq.pages) * page_size
    ]
    return {seq.handle for seq in short if seq.state is SeqState.RUNNING and not _grow(state, seq)}


def _grow(state: SchedulerState, seq: Seq) -> bool:
    """Make room for the next token of a decoding sequence, retracting others if need be. False: not this step."""
    while not state.memory.extend(seq, seq.total_len):
        if not retract_for(state, seq):
            return False
    return True


def retract_for(state: SchedulerState, keep: Seq) -> bool:
    """Send one running sequence back to the queue. False: `keep` gets no page by it."""
    victim = retraction_victim(state.running.values(), keep, state.limits.priority)
    if victim is not None:
        state.retract(victim, keep)
    return victim is not None and victim is not keep
