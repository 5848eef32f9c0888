"""Deficit round robin in tokens between priority classes.

Each class owns a weight. While two classes want to compute, the tokens they get stand in the ratio
of their weights; a class alone gets everything (work conserving). The accounts:

1. the turn goes round and gives each class its share, `quantum * weight / largest weight` tokens;
2. it keeps the turn while its credit is above 0; every token planned for it is taken off, the last
   chunk may overdraw;
3. tokens of running answers are taken off too, in the turn of any class: a running answer is never
   held up;
4. a class with nothing to compute loses its remaining credit (idle time earns nothing); its debt is
   paid off round by round like any other. When no request waits, all accounts are settled: there
   was nothing to share.

Bounds, with M the largest single charge (a chunk, at most the step's budget) and q the quantum:
over any time in which classes i and j both want to compute prompts, |served_i / w_i - served_j /
w_j| <= 2 q / w_max + M (1/w_i + 1/w_j), which is at most (M + q) (1/w_i + 1/w_j); and a class that
comes back waits for at most the sum over the others of (share_j + M) tokens, since each of them has
one turn. Answers add to M the tokens that the class's running requests may still generate.

Source: Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (SIGCOMM 1995),
with debt instead of saved credit: a prompt's next chunk is cut by the planner, so its size is not
known before it is served.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class DeficitRoundRobin:
    """The accounts of the classes. `ready` is always a set of class numbers with something to
    compute.

    Amounts are whole multiples of 1 / largest weight tokens, so that nothing is rounded.
    """

    def __init__(self, weights: Sequence[int], quantum: int) -> None:
        self.unit = max(weights)
        """The amount that stands for one token."""
        self.shares = [quantum * weight for weight in weights]
        self.credit = [0] * len(weights)
        self._turn_of = len(weights) - 1

    def next_turn(self, ready: Collection[int]) -> int:
        """The class to serve next.

        Passes the turn on while the one that has it is out of credit or not ready.
        """
        if self._turn_of in ready and self.credit[self._turn_of] > 0:
            return self._turn_of
        self._skip_rounds(ready)
        while True:
            self._turn_of = (self._turn_of + 1) % len(self.shares)
            self.credit[self._turn_of] += self.shares[self._turn_of]
            if self._turn_of not in ready:
                self.credit[self._turn_of] = min(self.credit[self._turn_of], 0)
            elif self.credit[self._turn_of] > 0:
                return self._turn_of

    def _skip_rounds(self, ready: Collection[int]) -> None:
        """Rounds in which none of `ready` would get out of debt, all at once."""
        rounds = min(-self.credit[c] // self.shares[c] for c in ready)
        if rounds > 0:
            for c, share in enumerate(self.shares):
                self.credit[c] += rounds * share
                if c not in ready:
                    self.credit[c] = min(self.credit[c], 0)

    def least_served(self, ready: Collection[int]) -> int:
        """Like `next_turn`, but the turn stays where it is: for work that goes on while another's
        turn is blocked.
        """
        return max(ready, key=lambda c: (self.credit[c] / self.shares[c], -c))

    def charge(self, c: int, tokens: int) -> None:
        self.credit[c] -= tokens * self.unit

    def leave(self, c: int) -> None:
        """The class has nothing more to compute: what credit it has left is void."""
        self.credit[c] = min(self.credit[c], 0)

    def settle(self) -> None:
        """Settle all accounts, when no request waits."""
        self.credit = [0] * len(self.shares)

    def save(self) -> tuple[int, list[int]]:
        """The accounts as they are now, for `restore`."""
        return self._turn_of, list(self.credit)

    def restore(self, saved: tuple[int, list[int]]) -> None:
        turn_of, credit = saved
        self._turn_of = turn_of
        self.credit = list(credit)
