"""A drafter of known acceptance: it has seen the answers before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence

from baton.runtime.engine_loop import EngineLoop
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.speculation.drafter import Drafter
from baton.runtime.speculation.speculator import Speculator
from baton.sched.types.sequence import Seq

Prompt = tuple[int, ...]
Answers = Mapping[tuple[Prompt, int], Sequence[int]]
"""By prompt and seed."""


class ScriptedDrafter:
    def __init__(
        self, answers: Answers, right: float, vocab: int, seed: int = 0, wrong: int | None = None
    ) -> None:
        """
        Args:
            right: share of the drafts that are the token that comes.
            wrong: the others; None: any token.
        """
        self._wrong = wrong
        self._answers = answers
        self._right = right
        self._vocab = vocab
        self._rng = random.Random(seed)
        self._seqs: dict[int, Seq] = {}

    def start(self, seq: Seq) -> None:
        self._seqs[seq.handle] = seq

    def append(self, handle: int, tokens: array[int]) -> None:
        assert handle in self._seqs

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[array[int]]:
        return [self._propose(self._seqs[h], n) for h, n in zip(handles, most, strict=True)]

    def finish(self, handle: int) -> None:
        del self._seqs[handle]

    def _propose(self, seq: Seq, most: int) -> array[int]:
        answer = self._answers[tuple(seq.req.prompt), seq.req.params.seed]
        come = answer[len(seq.tokens) - seq.prompt_len :][:most]
        return array("i", [self._distort(token) for token in come])

    def _distort(self, token: int) -> int:
        if self._rng.random() < self._right:
            return token
        return self._rng.randrange(self._vocab) if self._wrong is None else self._wrong


def speculate(engine: EngineLoop, drafter: Drafter, most: int = 5) -> EngineLoop:
    """Let an engine draft in every step that may have drafts."""
    assert isinstance(engine.runner, ModelRunner)
    engine.speculator = Speculator(drafter, most, engine.runner)
    # Without measured times each draft counts as free.
    engine.sched.observe = lambda *_: None  # type: ignore[method-assign]
    return engine
