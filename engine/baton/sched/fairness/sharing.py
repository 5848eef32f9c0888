"""Which request is tried next: the strategies between which the planner does not distinguish.

`SharingStrategy` is for one class and one tenant: the order is the policy's own, and nothing is charged. `FairQueue`
(fair_queue.py), derived from it, shares between classes and tenants.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from baton.sched.types.request import ValidatedRequest
from baton.sched.types.sequence import Seq, SeqState, SortKey, is_partial


class PrefillView(Protocol):
    """The planner as a strategy sees it while it hands out candidates."""

    together: bool = False
    """Prompts under way compete with waiting ones in policy order; else they go first."""
    unfinished: Sequence[Seq] = ()
    """Prompts under way."""
    preemptor: Seq | None = None
    """The waiting request that others were preempted for in this plan, until it is handed out."""
    max_partial: int = 0
    """A request starts only behind fewer unfinished prompts, or if the step completes it."""
    skip_ahead: int
    """Waiting requests that may be passed over."""
    skipped: int = 0
    """Waiting requests that this plan passed over: tried, and could not start."""

    def order(self) -> Iterator[Seq]:
        """Candidates in the order of the policy, those under way among them if `together`."""

    def sorted_unfinished(self) -> list[Seq]:
        """Prompts under way, in the order of the policy."""

    def partial(self) -> Sequence[Seq]:
        """Unfinished prompts, those admitted in this plan included."""

    def holders(self) -> Iterable[Seq]:
        """Sequences that hold pages."""

    def has_slot(self) -> bool:
        """True while a waiting request may still be admitted in this plan."""

    def completes(self, seq: Seq) -> bool:
        """True if the rest of the step's budget computes all of a waiting request."""

    def untried(self) -> list[Seq]:
        """The request with a reservation, if it may start and has not been tried."""

    def sort_key(self, seq: Seq) -> SortKey:
        """Place in the order of importance."""


class SharingStrategy:
    """Order of candidates, and the accounts behind it. By itself for one class and one tenant: nothing to share out."""

    orders_requests = False
    """True if requests differ in importance by class or tenant."""

    def check(self, req: ValidatedRequest, retry_secs: int = 1) -> None:
        """Raises what keeps a request out of the queue."""

    def entered(self, seq: Seq) -> None:
        """A request begins to wait."""

    def left(self, seq: Seq) -> None:
        """A request waits no more."""

    def candidates(self, view: PrefillView) -> Iterator[Seq]:
        """Prompts to compute in this step, in the order in which they should be tried.

        Here all prompts under way, and those of the waiting queue that may start. Where both compete, a request starts
        only if this step completes it, or if fewer than `max_partial` unfinished prompts precede it: those behind it
        hold back nothing.
        """
        together = view.together
        if not together:
            yield from view.unfinished
            if not view.has_slot():
                return
        given: set[int] = set()
        ahead = 0
        for seq in view.order():
            if seq.state is SeqState.WAITING:
                if not view.has_slot() or view.skipped > view.skip_ahead:
                    break
                if seq.inflight_steps:
                    continue  # retracted: its row in flight is committed first
                if view.preemptor is not None and seq is not view.preemptor:
                    continue  # the slot and the pages were taken for another
                if ahead >= view.max_partial and not view.completes(seq):
                    view.skipped += 1
                    continue
            else:
                given.add(seq.handle)
            yield seq
            if seq is view.preemptor:
                view.preemptor = None
            ahead += together and seq.state is SeqState.RUNNING and is_partial(seq)
        rest: list[Seq] = []
        if together and len(given) < len(view.unfinished):
            rest = [seq for seq in view.sorted_unfinished() if seq.handle not in given]
        rest += view.untried()
        rest.sort(
            key=lambda seq: view.sort_key(seq)[0]
        )  # stable: behind prompts under way as important
        for seq in rest:
            if (
                seq.state is SeqState.WAITING
                and ahead >= view.max_partial
                and not view.completes(seq)
            ):
                continue
            yield seq
            ahead += together and seq.state is SeqState.RUNNING and is_partial(seq)

    def openings(
        self, order: Iterable[Seq], holders: Iterable[Seq], skip_ahead: int
    ) -> Iterable[Seq]:
        """D: prompts on their way, in the order in which they should get pages."""
        return order

    def heads(self, waiting: Iterable[Seq], holders: Iterable[Seq], count: int) -> Iterator[Seq]:
        """The waiting sequences that should be tried first. Changes nothing, once it is exhausted or closed."""
        return itertools.islice(waiting, count)

    def startable(self, seqs: Iterable[Seq], holders: Callable[[], Iterable[Seq]]) -> Iterable[Seq]:
        """Those whose tenants are below their limits."""
        return seqs

    def charge_prompt(self, seq: Seq, computed: int, cached: int) -> None:
        """`computed` prompt tokens were planned (D: will be fetched), `cached` were found when the request started."""

    def charge_generated(self, seq: Seq) -> None:
        """Charge one generated token."""

    def gauges(self) -> dict[str, float]:
        """Gauges by name."""
        return {}

    def counters(self) -> dict[str, float]:
        """Counters by name."""
        return {}
