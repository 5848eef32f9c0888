"""A checkpoint with random weights, and its grammars."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.runtime.grammar.store import GrammarStore
from tests.support.grammars.engines import make_store
from tests.support.models.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("grammar") / "llama")


@pytest.fixture
def store(checkpoint: Path) -> GrammarStore:
    return make_store(checkpoint)
