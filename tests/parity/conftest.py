"""Checkpoints and their references, made once per session; one compute thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.checkpoints import (
    VOCAB,
    WITH_STATES,
    make_checkpoint,
    reference_greedy,
    reference_model,
)

STEPS = 64


class Reference:
    """A checkpoint and what transformers makes of it, each part computed when a test first asks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        generator = torch.Generator().manual_seed(1)
        self.prompts: list[list[int]] = [
            torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (33, 1, 50)
        ]
        self._answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt, the longest one that a test has asked for."""

    @cached_property
    def model(self) -> Any:
        return reference_model(self.path)

    @cached_property
    def logits(self) -> list[torch.Tensor]:
        """Per prompt, [len, vocab]."""
        # Made outside, because tensors of a model loaded in inference mode cannot be changed.
        model = self.model
        with torch.inference_mode():
            return [model(torch.tensor([prompt])).logits[0] for prompt in self.prompts]

    @property
    def greedy(self) -> list[list[int]]:
        """Per prompt, STEPS tokens."""
        return self.answers(self.prompts, STEPS)

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy tokens behind each prompt: the beginning of those that a longer answer had."""
        for prompt in prompts:
            if len(self._answers.get(tuple(prompt), ())) < tokens:
                self._answers[tuple(prompt)] = reference_greedy(self.model, list(prompt), tokens)
        return [self._answers[tuple(prompt)][:tokens] for prompt in prompts]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """reference(variant): made on first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(variant: str) -> Reference:
        return Reference(make_checkpoint(variant, root / variant))

    return make


@pytest.fixture(
    params=[
        WITH_STATES[0],
        # The layers with states of qwen3.5 are those of qwen3.5-moe.
        *(pytest.param(v, marks=pytest.mark.slow) for v in WITH_STATES[1:] if v != "qwen3.5"),
    ]
)
def stateful(request: pytest.FixtureRequest) -> str:
    """A variant with a state per sequence: each of them, as their caches and transfers are the same,
    and the first alone among the fast tests."""
    variant: str = request.param
    return variant
