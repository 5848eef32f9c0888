"""Drafted tokens beside those that are drawn: a draft is kept if it is the token drawn.

A token is a function of its logits, its request's seed and its position, and logits, edits and mask
of a position depend on the tokens in front of it alone. So a row with drafts draws at each of its
positions, as if the drafts in front had been drawn; the draws are right up to the first one that is
not the draft that stands there, and that one is right too. What comes of a row is what its sequence
would have drawn step by step, sampled or greedy, with penalties, bans and grammars.

1. `DraftedRows` makes a `SampleRow` for each position of the rows that sample, by copies that are
   advanced along the drafts;
2. `keep_runs` takes from a result over all positions the tokens that count. The copy at the last
   position of a run stands where its sequence stands now, but for the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.runtime.sampling.sampler import SampleRow
from baton.sched.types.plan import Row, StepResult


class DraftedRows:
    """The rows of a step that sample, of which some have drafts."""

    def __init__(self, rows: Sequence[Row], drafted: Sequence[int], first_drafted: int) -> None:
        """
        Args:
            rows: those that sample.
            drafted: how many drafts the rows from `first_drafted` on have, the first of them.
        """
        self.drafts: list[Sequence[int]] = [()] * len(rows)
        """Of each row."""
        self._positions: list[SampleRow] = []
        for index, count in enumerate(drafted, first_drafted):
            self.drafts[index] = rows[index].tokens[-count:]

    def along_drafts(self, rows: Sequence[SampleRow]) -> list[SampleRow]:
        """The rows at each of their positions: the first is the row itself."""
        self._positions = positions = []
        for row, drafts in zip(rows, self.drafts, strict=True):
            positions.append(row)
            for draft in drafts:
                row = row.fork()
                row.append(draft)
                if row.grammar is not None:
                    row.grammar.advance(draft)
                positions.append(row)
        return positions

    def rows_at_ends(self, runs: Sequence[int]) -> list[SampleRow]:
        """The rows where the last token of each run was drawn, which is yet to be appended."""
        rows = []
        first = 0
        for drafts, count in zip(self.drafts, runs, strict=True):
            rows.append(self._positions[first + count - 1])
            first += len(drafts) + 1
        return rows

    def keep_runs(self, result: StepResult) -> StepResult:
        """The result without the draws behind the first of each row that is not its draft.

        Args:
            result: of all positions.
        """
        kept: list[int] = []
        runs: list[int] = []
        first = 0
        for drafts in self.drafts:
            count = 0
            # Behind the end of a grammar nothing is drawn.
            while (
                count < len(drafts)
                and result.tokens[first + count] == drafts[count]
                and first + count not in result.completed
            ):
                count += 1
            runs.append(count + 1)
            kept += range(first, first + count + 1)
            first += len(drafts) + 1
        return replace(
            result,
            tokens=[result.tokens[index] for index in kept],
            logprobs={
                place: result.logprobs[index]
                for place, index in enumerate(kept)
                if index in result.logprobs
            },
            completed=frozenset(
                place for place, index in enumerate(kept) if index in result.completed
            ),
            runs=tuple(runs),
        )
