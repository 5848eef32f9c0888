"""What D holds while P computes: pages that are set aside early are taken back when a prompt that is ready needs them.

D sets pages aside when a request arrives, so that they can be filled while P still computes. When its pool is full, it
takes back those of prompts for which P has nothing yet, for prompts that P has finished. The script measures
page-seconds: what was set aside, how much of that while P computed, and what grants at the end of P's work would take.

    python -m tests.fault.promises.late_grants [--short]

A simulated P and D in one process, with real transfers; a pool of D for all prompts, then one for a few of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.disagg.calls import FinishCall, GrantCall, RevokeCall, TransferCall
from tests.fault.promises.show import Show, run_script
from tests.support.engines.engine_run import greedy
from tests.support.engines.retried_pair import RetriedPair

SEED = 27622
PAGE_SIZE = 16
ANSWER_TOKENS = 4
LONG_PROMPTS = [400 + 150 * (i % 7) for i in range(48)]
SHORT_PROMPTS = [200 + 60 * (i % 5) for i in range(12)]
DEVICE = "reference,speed={}"


@dataclass
class Grants:
    """Times of each room on D and P [s]."""

    granted: dict[int, tuple[float, int]] = field(default_factory=dict)
    """When, and how many pages. A grant that was taken back is not in it."""
    computed: dict[int, float] = field(default_factory=dict)
    committed: dict[int, float] = field(default_factory=dict)
    revoked: int = 0
    revoked_page_secs: float = 0.0

    def watch(self, pair: RetriedPair) -> None:
        """Note every call of the two engines to their transfer runtimes."""
        for node in (pair.d.node, pair.p.node):
            # The drivers look the call up each time.
            vars(node).update(call=self._noting(node.call))

    def _noting(self, make_call: Callable[[TransferCall], None]) -> Callable[[TransferCall], None]:
        def note(call: TransferCall) -> None:
            now = time.monotonic()
            match call:
                case GrantCall():
                    pages = sum(len(grant.dst_pages) // 4 for grant in call.groups)
                    self.granted[call.room] = (now, pages)
                case RevokeCall():
                    since, pages = self.granted.pop(call.room)
                    self.revoked += 1
                    self.revoked_page_secs += pages * (now - since)
                case FinishCall():
                    self.computed[call.room] = now
            make_call(call)

        return note

    def note_commits(self, pair: RetriedPair) -> None:
        for room in pair.d.got.keys() - self.committed.keys():
            self.committed[room] = time.monotonic()

    def page_secs(self) -> tuple[float, float]:
        """(from grant to commit, from the end of P's work to commit)."""
        held = needed = 0.0
        for room, (since, pages) in self.granted.items():
            end = self.committed[room]
            held += pages * (end - since)
            needed += pages * max(0.0, end - max(since, self.computed[room]))
        return held + self.revoked_page_secs, needed


def short(show: Show) -> None:
    _compare(show, SHORT_PROMPTS, speed=40)


def long(show: Show) -> None:
    _compare(show, LONG_PROMPTS, speed=2)


def _compare(show: Show, lengths: Sequence[int], speed: int) -> None:
    pages = sum(-(-(length + ANSWER_TOKENS) // PAGE_SIZE) for length in lengths)
    for name, share in (("room for all prompts", 1.2), ("room for a quarter", 0.25)):
        _measure(show, name, lengths, int(share * pages), speed)


def _measure(show: Show, name: str, lengths: Sequence[int], pool_pages: int, speed: int) -> None:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(1000) for _ in range(length)] for length in lengths]
    p_tokens = 2 * sum(lengths)
    device = DEVICE.format(speed)
    pair = RetriedPair(
        "", "tcp", {"max_total_tokens": p_tokens, "schedule_policy": "lpm"},
        {"max_total_tokens": pool_pages * PAGE_SIZE}, simulate=device, page_size=PAGE_SIZE,
        chunked_prefill_size=512, num_reserved_decode_tokens=0,
    )  # fmt: skip
    grants = Grants()
    grants.watch(pair)
    try:
        started = time.monotonic()
        rooms = pair.submit(prompts, greedy(ANSWER_TOKENS))

        def all_ended() -> bool:
            grants.note_commits(pair)
            return pair.d.finished.issuperset(rooms)

        pair.until(all_ended)
        took = time.monotonic() - started
        pair.wait_idle()
        held = pair.holdings()
        errors = {room: pair.d.errors[room] for room in rooms if room in pair.d.errors}
    finally:
        pair.close()
    set_aside, needed = grants.page_secs()
    whole = pool_pages * took
    show.tell(
        f"{name}: {len(lengths)} prompts in {took:.1f} s, D has {pool_pages} pages; set aside "
        f"{set_aside / whole:.0%} of its page-seconds, {1 - needed / set_aside:.0%} of them while P computed; "
        f"grants at the end of P's work would take {needed / whole:.1%}; {grants.revoked} grants were taken back"
    )
    show.keep(
        f"{name}: every request is answered, nothing is held",
        not held and not errors and len(grants.committed) == len(lengths),
        errors or held or f"{len(lengths)} answers",
    )


if __name__ == "__main__":
    run_script(__doc__, long, short)
