"""Drafts of a simulation: a drafter whose tokens are right with a given probability each.

Which rows get drafts and how many is decided by the engine's own speculator and planner. Drafting
itself takes no virtual time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.runtime.speculation.speculator import Speculator
from baton.sched.types.hashing import uniform
from baton.sched.types.plan import StepPlan, StepResult
from baton.sched.types.sequence import Seq
from baton_ops.sim.trace import answer_token

WRONG_TOKEN = 0
"""Is no token of an answer."""
TOKENS_PER_ANSWER = 1 << 32
"""Keeps the random numbers of answers apart."""


class ScriptedDrafter:
    """Drafter of runtime.speculation: whether a draft is right depends on its answer and place
    alone, so that every policy meets the same luck.
    """

    def __init__(self, acceptance: float, seed: int) -> None:
        self._acceptance = acceptance
        self._seed = seed
        self._lengths: dict[int, int] = {}

    def start(self, seq: Seq) -> None:
        self._lengths[seq.handle] = len(seq.tokens)

    def append(self, handle: int, tokens: array[int]) -> None:
        self._lengths[handle] += len(tokens)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        return [self._draft(handle, n) for handle, n in zip(handles, most, strict=True)]

    def _draft(self, handle: int, n: int) -> array[int]:
        right = answer_token(handle)
        first = handle * TOKENS_PER_ANSWER + self._lengths[handle]
        lucky = (uniform(self._seed, first + i) < self._acceptance for i in range(n))
        return array("i", (right if is_right else WRONG_TOKEN for is_right in lucky))

    def finish(self, handle: int) -> None:
        del self._lengths[handle]


class NoGrammars:
    """Constraints of runtime.speculation: answers of a trace have none."""

    def forced_tokens(self, slot: int) -> list[int]:
        return []

    def count_admitted(self, slot: int, tokens: Sequence[int]) -> int:
        return len(tokens)


def make_speculator(acceptance: float, most: int, seed: int) -> Speculator:
    """Args: `most`: drafted tokens of a row and step."""
    return Speculator(ScriptedDrafter(acceptance, seed), most, NoGrammars())


def draw_tokens(plan: StepPlan, copy_seconds: float) -> StepResult:
    """What a step's rows draw: of drafts as many tokens as are right, and one more."""
    tokens: list[int] = []
    runs: list[int] = []
    drafts = [0] * plan.num_decode + [*plan.drafted] + [0] * len(plan.prompt_rows)
    for row, num_drafts in zip(plan.rows, drafts, strict=True):
        if not row.sample:
            continue
        right = answer_token(row.handle)
        run = 1
        for token in row.tokens[row.n - num_drafts :]:
            if token != right:
                break
            run += 1
        tokens += [right] * run
        runs.append(run)
    return StepResult(tokens, copy_seconds=copy_seconds, runs=tuple(runs) if plan.drafted else ())
