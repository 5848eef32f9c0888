"""Who has to give way: choices only; the planner carries them out.

Retraction is for memory that the estimate did not foresee, preemption for a waiting request of clearly higher priority.
Both take what is cheapest to compute again, and neither can go on for ever: the oldest running sequence is never
retracted for another, and only a strictly higher base priority preempts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from baton.sched.limits import Limits
from baton.sched.seq import Seq


def retraction_victim(running: Collection[Seq], keep: Seq) -> Seq | None:
    """The running sequence to send back so that `keep` can grow: `keep` itself when it is the last but the oldest.

    None: only the oldest is left, which stays.
    """
    oldest = min(running, key=lambda s: (s.req.arrival, s.handle))
    victims = [s for s in running if s is not oldest and s is not keep and s.pages]
    if not victims:
        return None if keep is oldest else keep
    return min(victims, key=lambda s: (s.computed, -s.req.arrival, -s.handle))


def may_preempt(seq: Seq, limits: Limits) -> bool:
    left = seq.max_new_tokens - seq.generated
    return (
        seq.preemptions < limits.max_preemptions_per_request
        and (left >= limits.preemption_min_remaining_tokens or not seq.is_decoding)
        and not seq.is_lease
    )


def priority_victims(
    head: Seq, short: int, running: Collection[Seq], limits: Limits, growth: Callable[[Seq], int]
) -> list[Seq]:
    """Running sequences to suspend so that `head` gets a slot and `short` more pages; none if that cannot be had.

    All or nothing; the cheapest to recompute among the least important go first. Only base priorities count, so that
    an aged request never evicts and no two can evict each other in turn.
    """
    rule = limits.priority
    below = rule.base(head) - rule.preemption_threshold
    victims: list[Seq] = []
    for seq in sorted(
        (s for s in running if rule.base(s) < below and may_preempt(s, limits)),
        key=lambda s: (rule.base(s), s.computed, -s.req.arrival, -s.handle),
    ):
        if victims and short <= 0:
            break
        victims.append(seq)
        short -= len(seq.pages) + growth(seq)
    return [] if short > 0 else victims
