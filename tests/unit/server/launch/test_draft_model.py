"""Draft models that are refused before anything is loaded, with a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import baton.models
from baton.config import EngineConfig, build_config
from baton.errors import ConfigError
from baton.models import checkpoint
from baton.server.launch.draft_model import resolve_draft_model
from tests.support.models.truncated import truncate_checkpoint

DEMO = Path(baton.models.__file__).parent / "demo"


def flags(path: Path | str, **more: object) -> EngineConfig:
    return build_config(
        {
            "model_path": str(DEMO),
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(path),
            **more,
        }
    )


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return truncate_checkpoint(DEMO, tmp_path / "draft", 1)


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def check(config: EngineConfig) -> None:
    checkpoint.check_checkpoint(resolve_draft_model(config), DEMO)


def test_a_smaller_model_of_the_same_tokenizer_may_draft(draft: Path) -> None:
    check(flags(draft))
    resolved = resolve_draft_model(flags(draft / ".." / "draft"))
    assert resolved.speculative_draft_model_path == str(draft.resolve())
    assert resolve_draft_model(build_config({})) == build_config({})


def change_tokenizer(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    vocab = json.loads(text)
    vocab["model"]["merges"].reverse()
    (path / "tokenizer.json").write_text(json.dumps(vocab))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (change_tokenizer, r"its tokenizer \(tokenizer.json\) is not that of .*demo; give a model"),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer to compare with"),
        (lambda path: shutil.rmtree(path), "is not a directory"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (
            lambda path: edit_config(path, architectures=["OPTForCausalLM"], model_type="opt"),
            "models that transformers' modules compute do not draft",
        ),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
    ],
)
def test_what_cannot_draft_is_refused(
    draft: Path, change: Callable[[Path], None], sentence: str
) -> None:
    change(draft)
    with pytest.raises(ConfigError, match=sentence):
        check(flags(draft))


def test_another_vocabulary_is_refused(draft: Path) -> None:
    edit_config(draft, vocab_size=3100)
    with pytest.raises(ConfigError, match="has 3100 token ids, the one it drafts for 3076"):
        check(flags(draft, load_format="dummy"))


def test_memory_of_a_draft_model_counts(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 1)

    def needed(config: EngineConfig) -> tuple[float, float]:
        with pytest.raises(ConfigError) as refused:
            check(config)
        words = refused.value.message.split()
        numbers = [float(word) for word, unit in pairwise(words) if unit == "GiB"]
        return numbers[0], numbers[1]

    size = {"max_total_tokens": 1 << 20}
    plain = build_config({"model_path": str(DEMO), **size})
    weights, pools = needed(plain)
    with_draft = needed(flags(DEMO, **size))
    assert with_draft[0] == pytest.approx(2 * weights, abs=0.02)
    assert 2 * pools <= with_draft[1] < 2.2 * pools
