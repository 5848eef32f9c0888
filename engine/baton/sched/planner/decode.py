"""Rows of decoding sequences: one token each, or one and its drafts. Pages that may be short are
found by retraction.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from baton.sched.memory.kv_manager import KvManager
from baton.sched.memory.preemption import retraction_victim
from baton.sched.planner.draft import PlanDraft
from baton.sched.planner.drafts import fitting_draft
from baton.sched.state.tables import SchedulerState
from baton.sched.types.plan import UNKNOWN_TOKEN, FurtherGrowth, new_row
from baton.sched.types.sequence import Seq, SeqState, is_ready_to_decode

UNKNOWN = array("i", (UNKNOWN_TOKEN,))
NO_PAGES = array("i")
"""Shared by all rows that decode: rows are read only."""


def plan_decode_rows(
    state: SchedulerState, draft: PlanDraft, draft_lengths: Mapping[int, int]
) -> list[Seq]:
    """Plan the next token of every decoding sequence. Returns the other running sequences.

    The hot loop of the planner: 256 rows in 0.1 ms, hence no property and no call per row.

    Args:
        draft_lengths: by handle, how many of the tokens offered for a sequence its row gets.
    """
    memory = state.memory
    page_size = state.limits.page_size
    running = state.running
    rolling = memory.rolling_tokens
    rows = draft.rows
    # A sequence takes at most one page of each group: only with fewer pages than that can one lack
    # its own. Found before any row is made, because a retraction may take a sequence whose row
    # exists.
    most_pages = len(running) * memory.pages_per_block
    starved = _find_starved(state) if memory.available < most_pages else ()
    prompts: list[Seq] = []
    with_drafts: list[tuple[Seq, int]] = []
    at_border: list[Seq] = []
    for seq in running.values():
        tokens_known = seq.tokens
        inflight = seq.inflight
        start = seq.computed
        total = len(tokens_known) + inflight
        # Its prompt is not computed, or its last token is in flight: one more row would be wasted.
        if total - start != 1 or not seq.prompt_len < total < seq.max_total_tokens:
            prompts.append(seq)
            continue
        # Without a page it skips this step: its token has no place, and none is lost.
        if total > len(seq.pages) * page_size and (
            seq.handle in starved or not memory.extend(seq, total)
        ):
            continue
        if draft_lengths and seq.handle in draft_lengths:
            num_drafts = fitting_draft(state, seq, draft_lengths[seq.handle])
            if num_drafts > 0:
                with_drafts.append((seq, num_drafts))
                continue
        sent = seq.pages_sent_to_runner
        # The runner does not know the sequence: its row brings tokens, parameters and all pages.
        if sent == 0:
            draft.add_row(seq, 1)
            if rolling and total % rolling == 0:
                at_border.append(seq)
            continue
        pages = NO_PAGES
        num_pages = len(seq.pages)
        if sent < num_pages:
            pages = seq.pages[sent:]
            if seq.further:
                draft.add_further(seq)
            seq.pages_sent_to_runner = num_pages
        if rolling and total % rolling == 0:
            at_border.append(seq)
        tokens = UNKNOWN if inflight else tokens_known[start:]
        rows.append(new_row((seq.handle, seq.slot, start, 1, True, tokens, sent, pages)))
        seq.computed = total
        seq.inflight = inflight + 1
        seq.inflight_steps += 1
    # Behind all rows, which need the pages more.
    for seq in at_border:
        _roll_snapshot(memory, draft, seq, seq.computed)
    # Attention takes rows of one token apart from longer ones.
    for seq, num_drafts in with_drafts:
        draft.add_row(seq, 1, state.draft_offers[seq.handle].tokens[:num_drafts])
        if rolling:
            # A row that its drafts do not bring to a border takes the snapshot in vain, and a later
            # one takes it again.
            total = len(seq.tokens)
            for border in range(-(-total // rolling) * rolling, total + num_drafts + 1, rolling):
                _roll_snapshot(memory, draft, seq, border)
    return prompts


def _roll_snapshot(memory: KvManager, draft: PlanDraft, seq: Seq, tokens: int) -> None:
    """Let the row of a sequence take its rolling snapshot behind so many tokens."""
    group, place, pages = memory.roll_snapshot(seq, tokens)
    # The table has a snapshot here that the tree gets anyway.
    if pages:
        draft.further.append(FurtherGrowth(seq.slot, group, place * len(pages), pages))


def _find_starved(state: SchedulerState) -> set[int]:
    """Find pages for the next tokens, by retraction if need be.

    Returns the handles of sequences that get none.
    """
    page_size = state.limits.page_size
    running = state.running.values()
    short = [
        seq
        for seq in running
        if is_ready_to_decode(seq) and seq.total_len > len(seq.pages) * page_size
    ]
    # One that a retraction has sent back meanwhile takes no page.
    return {
        seq.handle
        for seq in short
        if seq.state is SeqState.RUNNING and not _find_pages_for(state, seq)
    }


def _find_pages_for(state: SchedulerState, seq: Seq) -> bool:
    """Make room for the next token of a decoding sequence, retracting others if need be.

    Returns whether there is room.
    """
    memory = state.memory
    while not memory.extend(seq, seq.total_len):
        # Snapshots go before anything is retracted.
        if memory.leave_snapshots(state.running.values()):
            continue
        if not retract_for(state, seq):
            return False
    return True


def retract_for(state: SchedulerState, keep: Seq) -> bool:
    """Send one running sequence back to the queue.

    Returns whether `keep` may get its pages. False: it was `keep` itself, or none may go.
    """
    victim = retraction_victim(state.running.values(), keep, state.limits.priority)
    if victim is not None:
        state.retract(victim, keep)
    return victim is not None and victim is not keep
