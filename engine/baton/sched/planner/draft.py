"""A plan under construction: its rows, tokens and pages so far."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from baton.sched.types.plan import UNKNOWN_TOKEN, AdmittedSeq, FurtherGrowth, Row, StateCopy
from baton.sched.types.sequence import Seq

NO_DRAFTS = array("i")


@dataclass(slots=True)
class PlanDraft:
    rows: list[Row] = field(default_factory=list)
    admitted: list[AdmittedSeq] = field(default_factory=list)
    further: list[FurtherGrowth] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    """How many drafted tokens the last rows have."""
    states: list[StateCopy] = field(default_factory=list)
    pulled: list[Seq] = field(default_factory=list)
    """D: sequences whose rows load the state that came from P."""
    preemptor: Seq | None = None
    """The waiting request that others were preempted for in this plan, until it is tried."""
    seconds_budget: float | None = None
    """Time the prompts are allowed to take."""

    @property
    def answer_tokens(self) -> int:
        """Tokens of the rows that extend answers, before prompts are planned."""
        return len(self.rows) + sum(self.drafted)

    def add_row(self, seq: Seq, n: int, drafts: array[int] = NO_DRAFTS) -> None:
        """Plan the next `n` tokens of a sequence.

        Args:
            drafts: tokens that may follow the last known one, if that is one of the `n`.
        """
        start = seq.computed
        sent = seq.pages_sent_to_runner
        end = seq.computed + n
        # The runner learns of a sequence by its first row.
        if sent == 0:
            history = array("i", seq.tokens)
            is_missing_logprobs = seq.logprob_position < seq.prompt_len
            admitted = AdmittedSeq(
                seq.handle,
                seq.slot,
                seq.req.params,
                seq.prompt_len,
                history,
                seq.logprob_position if is_missing_logprobs else None,
            )
            self.admitted.append(admitted)
        tokens = seq.tokens[start:end]
        if len(tokens) < n:
            # The step in flight samples it: the runner reads it from its own table.
            tokens.append(UNKNOWN_TOKEN)
        samples = end == seq.total_len
        if drafts:
            tokens.extend(drafts)
            self.drafted.append(len(drafts))
            seq.drafts_in_flight = len(drafts)
            # The first draft stands where the next token will: until the step has committed no
            # other row may compute it.
            end += 1
        self.rows.append(
            Row(seq.handle, seq.slot, start, len(tokens), samples, tokens, sent, seq.pages[sent:])
        )
        self.add_further(seq)
        if seq.state_pages:
            self._add_states(seq, start, end)
        seq.pages_sent_to_runner = len(seq.pages)
        seq.computed = end
        seq.inflight_steps += 1
        seq.has_started = True
        # The newest unknown token is now the one that this row samples.
        seq.inflight += samples

    def _add_states(self, seq: Seq, start: int, end: int) -> None:
        """Copy a sequence's state from its pages where the row [start, end) begins with it, and to
        them where the row ends the prompt that D waits for."""
        # A slot that has computed rows of it has the state.
        if seq.pages_sent_to_runner == 0 and seq.state_tokens == start:
            self.states.append(StateCopy("load", seq.slot, start, seq.state_pages))
            seq.state_tokens = -1
            if not seq.is_lease:
                self.pulled.append(seq)
        if seq.is_lease and end == seq.prompt_len:
            self.states.append(StateCopy("save", seq.slot, end, seq.state_pages))
            seq.state_tokens = end

    def add_further(self, seq: Seq) -> None:
        """Tell the runner of a sequence's new pages in further page groups, before those of group 0
        count as sent.
        """
        sent = seq.pages_sent_to_runner
        for group, held in enumerate(seq.further):
            base = max(sent, held.first) * held.width
            # A pulled prompt whose window ends with it has no page here: an empty growth would
            # travel to every rank.
            if base < len(held.pages):
                self.further.append(FurtherGrowth(seq.slot, group, base, held.pages[base:]))
