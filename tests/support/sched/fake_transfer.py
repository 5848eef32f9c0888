"""Two production schedulers, a prefill and a decode node, with a pretend transfer between their pretend devices."""

from __future__ import annotations

import math
import random

from baton.errors import KvTransferFailed
from tests.support.sched.sched_sim import Node


class FakeTransfer:
    """Copies granted pages from P's memory to D's one by one; a room may break at any point before its commit.

    When one side gives up (a client, a deadline, the wire), the other is notified, as through kv_transfer. P gives
    up a lease after `lease_ticks`: two full nodes may hold pages for each other's next prompt, which nothing else ends.
    """

    def __init__(
        self, p: Node, d: Node, rng: random.Random, break_rate: float, lease_ticks: float = math.inf
    ) -> None:
        self.p = p
        self.d = d
        self.rng = rng
        self.break_rate = break_rate
        self.lease_ticks = lease_ticks
        self.ticks = 0
        self.leased_at: dict[int, int] = {}
        self.expired = 0
        self.copied: dict[int, int] = {}
        self.announced: set[int] = set()
        self.revoked = 0
        self.broken: set[int] = set()
        self.ended: set[int] = set()
        self.unknown_to_p: set[int] = set()
        """Rooms that ended before P had their request: P's runtime gets no event for their end."""

    def tick(self) -> None:
        self.ticks += 1
        for room in self.p.done.keys() - self.ended:
            if self.ticks - self.leased_at.setdefault(room, self.ticks) > self.lease_ticks:
                self.expired += 1
                self._break(room, "the lease expired")
        for room in self.unknown_to_p & self.p.done.keys():
            self.p.sched.release(room)  # D was gone before P had the request: the lease expires
        for abort in self.p.aborts:
            assert abort.req.rendezvous
            if abort.req.rendezvous.room not in self.ended:
                self._break(abort.req.rendezvous.room, "the prefill node gave up")
        self.p.aborts.clear()
        for abort in self.d.aborts:
            assert abort.req.rendezvous
            self.close(abort.req.rendezvous.room)
        self.d.aborts.clear()
        for room in self.ended & self.d.opened.keys():
            # D may have set pages aside in the turn in which it asked.
            if self.d.sched.report.counts()["opening"] or room in self.d.grants:
                self._break(room, "the prefill node gave up before the decode node asked")
            del self.d.opened[room]
        for room in self.p.final_pages.keys() - self.announced - self.ended - self.d.grants.keys():
            self._announce(room)
        for revoke in self.d.revokes:
            assert revoke.req.rendezvous
            self._revoke(revoke.req.rendezvous.room)
        self.d.revokes.clear()
        for room in list(self.d.grants):
            if self.rng.random() < self.break_rate:
                self._break(room, "the wire was cut")
            else:
                self._copy(room)

    def _announce(self, room: int) -> None:
        if room in self.d.opened:
            self.announced.add(room)
            self.d.sched.transfer_announced(room)

    def _revoke(self, room: int) -> None:
        if room in self.ended:
            return
        if room in self.p.final_pages:
            self._announce(room)
            return
        assert not self.copied.get(room)
        del self.d.grants[room]
        self.revoked += 1
        self.d.sched.grant_revoked(room)

    def _break(self, room: int, why: str) -> None:
        self.broken.add(room)
        self.d.sched.transfer_failed(room, KvTransferFailed(why))
        self.close(room, notify_d=False, code=self.rng.choice(["PEER_DEAD", "CHECKSUM"]))

    def _copy(self, room: int) -> None:
        grant = self.d.grants[room]
        ready = self.p.final_pages.get(room, {})
        at = self.copied.get(room, 0)
        while at < len(grant.pages) and grant.start_page + at in ready and self.rng.random() < 0.7:
            page, content = ready[grant.start_page + at]
            if self.p.device.memory[page][: len(content)] != content:
                assert self._was_released(room), "P changed a page it had announced"
                self._break(room, "STALE_PAGE")
                return
            self.d.device.memory[grant.pages[at]] = list(content)
            at += 1
        self.copied[room] = at
        done = self.p.done.get(room)
        if at == len(grant.pages) and done is not None:
            assert done.total_pages == grant.start_page + len(grant.pages)
            for group, (start, pages) in enumerate(grant.further):
                first, end = done.further[group]
                assert first <= start, "P has not announced what D asks for"
                assert end == start + len(pages)
                book = self.p.final_further.get((room, group), {})
                assert book.keys() == set(range(first, end))
                for place, page in enumerate(pages, start):
                    source, content = book[place]
                    is_same = self.p.device.memory[source][: len(content)] == content
                    assert is_same or self._was_released(room), "P changed an announced page"
                    self.d.device.memory[page] = list(content)
            self.d.sched.transfer_committed(room, done.token, done.cached_tokens, None)
            self.close(room, notify_d=False)

    def _was_released(self, room: int) -> bool:
        """A suspended prompt releases announced pages when P is stuck without them (State.release_retained)."""
        (handle,) = self.p.sched.in_rooms([room])
        return self.p.probe.seqs[handle].pages_were_released

    def close(self, room: int, notify_d: bool = True, code: str = "DONE") -> None:
        self.ended.add(room)
        if not self.p.sched.in_rooms([room]):
            self.unknown_to_p.add(room)
        self.d.grants.pop(room, None)
        self.p.sched.release(room, code)
        if notify_d:
            self.d.sched.transfer_closed(room)
