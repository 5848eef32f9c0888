"""Victims of preemption and retraction: choices only; the planner carries them out.

Retraction is for memory that the estimate did not foresee, preemption for a waiting request of
clearly higher priority. Both take sequences that are cheap to compute again, and never a prompt
with pages promised to a decode node: it was admitted with room for all of it. Neither repeats
without end: the oldest running sequence (of the most important ones) is never retracted for
another, only a strictly higher base priority preempts, and a sequence that was preempted
`max_preemptions_per_request` times is immune.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from baton.sched.memory.min_cost_cover import cheap_cover
from baton.sched.setup.limits import Limits
from baton.sched.types.priority import PriorityRule
from baton.sched.types.sequence import Seq, SortKey


def retraction_victim(running: Collection[Seq], keep: Seq, rule: PriorityRule) -> Seq | None:
    """The running sequence to send back so that `keep` can grow: `keep` itself when it is the last
    but the first.

    Less important ones go before more important ones, then the cheapest to compute again, then the
    newest. None: only the first in (importance, age) is left, which stays, and prompts of which D
    is reading pages.
    """
    base: Callable[[Seq], int] = rule.base if rule.enabled else lambda _: 0
    first = min(
        running, key=lambda s: (not s.has_announced_pages, -base(s), s.req.arrival, s.handle)
    )
    victims = [
        s
        for s in running
        if s is not first and s is not keep and s.pages and not s.has_announced_pages
    ]
    if not victims:
        return None if keep is first or keep.has_announced_pages else keep
    return min(victims, key=lambda s: (base(s), s.computed, -s.req.arrival, -s.handle))


def may_preempt(seq: Seq, limits: Limits) -> bool:
    if seq.is_lease or seq.preemptions >= limits.max_preemptions_per_request:
        return False
    remaining = seq.max_new_tokens - seq.generated
    return remaining >= limits.preemption_min_remaining_tokens or not seq.is_decoding


def priority_victims(
    head: Seq,
    short: int,
    running: Iterable[Seq],
    limits: Limits,
    freed: Callable[[Seq], tuple[int, int]],
    sort_key: SortKey,
) -> list[Seq]:
    """Running sequences to suspend so that `head` gets a slot and `short` more pages; none if that
    cannot be had.

    All or nothing, and with few tokens to compute again (`cheap_cover`: at most twice the fewest);
    among equals the least important, then the newest. A victim's base priority is lower by more
    than the threshold, so that an aged request never evicts, and it is behind `head` in the order,
    so that it is not admitted again before it: no two can evict each other in turn.

    Args:
        sort_key: of `head` among the running (PriorityRule.sort_key).
        freed: (pages that become available, tokens to compute again) when this sequence alone is
            suspended. What two only victims share is not counted for either: the set frees at least
            what it promises.
    """
    rule = limits.priority
    priority_limit = rule.base(head) - rule.preemption_threshold
    candidates = sorted(
        (
            s
            for s in running
            if rule.base(s) < priority_limit and s.sort_key > sort_key and may_preempt(s, limits)
        ),
        key=lambda s: (rule.base(s), -s.req.arrival, -s.handle),
    )
    gains = [freed(seq) for seq in candidates]
    lost_tokens = [tokens for _, tokens in gains]
    freed_pages = [pages for pages, _ in gains]
    chosen = cheap_cover(lost_tokens, freed_pages, short)
    return [] if chosen is None else [candidates[index] for index in chosen]
