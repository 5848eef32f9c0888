"""Candidates of one class in one step, tenants taking turns, and how the classes' queues are
filled.

    order of the policy ──pull──▶ ClassQueue of the request's class ──▶ queue of its tenant

`CandidatePool` reads the policy's order only as far as a tenant's next candidate is asked for.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from baton.sched.fairness.sharing import PrefillProgress
from baton.sched.fairness.tenant_usage import TenantUsage
from baton.sched.fairness.tenants import VirtualCounters
from baton.sched.types.sequence import Seq, SeqState


class StartVerdict(enum.Enum):
    """Answer to a waiting request that could be tried now."""

    STARTS = "starts"
    PASSED_OVER = "passed_over"
    """Too many unfinished prompts precede it; others of its class may start."""
    TENANT_STOPS = "tenant_stops"
    """No waiting request of its tenant may start."""


STARTS = StartVerdict.STARTS
PASSED_OVER = StartVerdict.PASSED_OVER
"""For the loop over candidates: an attribute of an enum takes a call."""


class StartRule:
    """Limits of one plan that waiting requests start under, as it hands out candidates."""

    def __init__(self, usage: TenantUsage, progress: PrefillProgress | None) -> None:
        self.num_ahead = 0
        """Unfinished prompts among the candidates of all classes."""
        self.is_open = True
        """Waiting requests may still be admitted."""
        self._usage = usage
        self._progress = progress

    def check_start(self, seq: Seq, class_queue: ClassQueue) -> StartVerdict:
        """Judge a waiting request."""
        progress = self._progress
        # A class without an unfinished prompt may start one: those of other classes must not keep
        # it from its share.
        if (
            progress is not None
            and class_queue.num_ahead
            and not progress.may_start(seq, self.num_ahead)
        ):
            return PASSED_OVER
        # A tenant at its limit stops altogether: a smaller request would pass its earlier ones.
        if self.is_open and self._usage.has_room_for(seq):
            return STARTS
        return StartVerdict.TENANT_STOPS


class ClassQueue:
    """Candidates of one class. `pull` fetches a tenant's next one; False when it has no more."""

    def __init__(
        self,
        counters: VirtualCounters,
        tenants: Iterable[str],
        pull: Callable[[str], bool],
        most_skipped: int,
    ) -> None:
        self.first: deque[Seq] = deque()
        """Prompts in progress that go before everything else."""
        self.tenants = dict.fromkeys(tenants)
        self.queues: dict[str, deque[Seq]] = defaultdict(deque)
        self.num_ahead = 0
        """Unfinished prompts among those handed out."""
        self.pending = 0
        """Prompts in progress in the queues, or still to be pulled into them."""
        self._pull = pull
        self._counters = counters
        self._stopped: set[str] = set()
        """Tenants whose limits keep their first waiting request from starting."""
        self._last: set[str] = set()
        """Tenants whose first waiting request could not start: the class's others go first."""
        self._skips_left = most_skipped
        self._heap: list[tuple[float, int, str]] | None = None

    def skip_tenant(self, tenant: str) -> None:
        """Put a tenant last: its waiting request was handed out and could not start."""
        self._skips_left -= 1
        self._last.add(tenant)

    def next_candidate(self, rule: StartRule) -> Seq | None:
        """The next prompt in progress, or request that may start now."""
        # Prompts in progress hold pages until they are computed.
        if self.first:
            return self.first.popleft()
        # Built at the first use: a class that gets no turn in this plan costs no look at its
        # tenants.
        if self._heap is None:
            self._heap = self._heap_of_tenants()
        while self._heap:
            rank, number, tenant = self._heap[0]
            current_rank = self._rank_of(tenant)
            # The last candidate was charged to its tenant, or refused: another one may have had
            # less.
            if rank != current_rank:
                heapq.heapreplace(self._heap, (current_rank, number, tenant))
                continue
            seq = self._next_of(tenant, rule)
            if seq is not None:
                return seq
            heapq.heappop(self._heap)
        return None

    def _heap_of_tenants(self) -> list[tuple[float, int, str]]:
        """Tenants by counter; of equal ones the one that waits for longer without a break."""
        counters = self._counters.counters_of(self.tenants)
        numbers = range(len(counters))
        heap = list(zip(counters, numbers, self.tenants, strict=True))
        heapq.heapify(heap)
        return heap

    def _rank_of(self, tenant: str) -> float:
        return math.inf if tenant in self._last else self._counters[tenant]

    def _next_of(self, tenant: str, rule: StartRule) -> Seq | None:
        queue = self.queues[tenant]
        while queue or self._pull(tenant):
            # Only prompts in progress may follow, which no limit stops.
            is_closed = tenant in self._stopped or self._skips_left < 0
            # Reading on would walk the whole order of the policy without yielding a candidate.
            if not self.pending and is_closed:
                break
            seq = queue.popleft()
            if seq.state is SeqState.RUNNING:
                self.pending -= 1
                return seq
            if is_closed:
                continue
            verdict = rule.check_start(seq, self)
            if verdict is STARTS:
                return seq
            if verdict is PASSED_OVER:
                self._skips_left -= 1
            else:
                self._stopped.add(tenant)
        return None


class CandidatePool:
    """Queues of all classes, filled from one policy order.

    Args:
        order: waiting requests in policy order, perhaps with prompts in progress among them.
        place: class number and tenant of a sequence.
    """

    def __init__(self, order: Iterable[Seq], place: Callable[[Seq], tuple[int, str]]) -> None:
        self.classes: list[ClassQueue] = []
        self._order: Iterator[Seq] = iter(order)
        self._place = place

    def add_class(
        self, counters: VirtualCounters, tenants: Iterable[str], most_skipped: int
    ) -> None:
        """Add the next class, with the tenants that have requests waiting."""
        number = len(self.classes)

        def pull(tenant: str) -> bool:
            return self._pull(number, tenant)

        self.classes.append(ClassQueue(counters, tenants, pull, most_skipped))

    def add_unfinished(self, seq: Seq, *, is_in_order: bool) -> None:
        """Add a prompt in progress: it goes first in its class, or comes where the order has it."""
        number, tenant = self._place(seq)
        class_queue = self.classes[number]
        if is_in_order:
            class_queue.tenants.setdefault(tenant)
            class_queue.pending += 1
        else:
            class_queue.first.append(seq)

    def _pull(self, number: int, tenant: str) -> bool:
        """Read the order up to the next candidate of a class and tenant. False: there is none."""
        for seq in self._order:
            home, owner = self._place(seq)
            self.classes[home].queues[owner].append(seq)
            if home == number and owner == tenant:
                return True
        return False

    def ready_classes(self) -> set[int]:
        """Numbers of the classes with something to compute."""
        return {
            number
            for number, class_queue in enumerate(self.classes)
            if class_queue.first or class_queue.tenants
        }
