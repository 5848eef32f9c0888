"""Checkpoints and their references, made once per session; one compute thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.checkpoints import (
    VOCAB,
    make_checkpoint,
    reference_greedy,
    reference_model,
)

STEPS = 64


@dataclass
class Reference:
    """A checkpoint and what transformers makes of it."""

    path: Path
    model: Any
    prompts: list[list[int]]
    logits: list[torch.Tensor]
    """Per prompt, [len, vocab]."""
    greedy: list[list[int]]
    """Per prompt, STEPS tokens."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """reference(variant): made on first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def make(variant: str) -> Reference:
        model = reference_model(make_checkpoint(variant, root / variant))
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (33, 1, 50)]
        with torch.inference_mode():
            logits = [model(torch.tensor([p])).logits[0] for p in prompts]
        return Reference(
            root / variant,
            model,
            prompts,
            logits,
            [reference_greedy(model, p, STEPS) for p in prompts],
        )

    return make
