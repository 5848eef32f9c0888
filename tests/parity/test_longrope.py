"""longrope: on each side of the border, the factors that the served context chooses are those of transformers there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import build_config
from baton.errors import ConfigError
from baton.models import checkpoint
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import (
    LONGROPE,
    VARIANTS,
    VOCAB,
    make_checkpoint,
    reference_greedy,
    reference_model,
)
from tests.support.models.model_loop import ModelLoop

BORDER = 24
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
HEADS_OF_96 = {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
HEADS_OF_72 = {"hidden_size": 144, "num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": (
        "Phi3",
        {
            **HEADS_OF_96,
            "pad_token_id": 0,
            "original_max_position_embeddings": BORDER,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-scale": (
        "Phi3",
        {
            **HEADS_OF_96,
            "pad_token_id": 0,
            "original_max_position_embeddings": BORDER,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "attention_factor": 1.5},
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            **HEADS_OF_72,
            "num_local_experts": 4,
            "rope_parameters": {
                **LONGROPE,
                **MSCALES,
                "original_max_position_embeddings": BORDER,
            },
        },
    ),
}
SHORT = [list(range(10, 10 + n)) for n in (1, 9, BORDER - 8)]
LONG = [[(7 * i) % VOCAB for i in range(n)] for n in (BORDER + 1, 40, 61)]


@pytest.fixture(scope="module", params=sorted(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, request.param, MODELS[request.param])
        return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize(
    ("context", "prompts"), [(BORDER, SHORT), (BORDER + 1, LONG[:1]), (512, LONG)]
)
def test_logits_equal_transformers(
    path: Path, context: int, prompts: list[list[int]], chunk: int
) -> None:
    model = reference_model(path)
    spec = read_spec(path, context_length=context)
    loop = ModelLoop(load_weights(spec, path), "auto", page_size=4)
    for prompt in prompts:
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(
            loop.prompt_logits(prompt, chunk), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(("context", "prompts"), [(BORDER, SHORT), (512, LONG)])
def test_engine_answers_as_transformers_on_its_side_of_the_border(
    path: Path, context: int, prompts: list[list[int]]
) -> None:
    model = reference_model(path)
    expected = [reference_greedy(model, prompt, 8) for prompt in prompts]
    engine = make_engine(path, context_length=context)
    assert answer(engine, prompts, greedy(8)) == expected
    assert answer(engine, prompts, greedy(8)) == expected, "second round, with prefix hits"
    engine.close()


def test_short_prompts_of_a_long_context_are_computed_otherwise(path: Path) -> None:
    """What docs/models.md says of the difference: the factors that a prompt meets are fixed at the start."""
    model = reference_model(path)
    prompt = SHORT[-1]
    loop = ModelLoop(load_weights(read_spec(path), path), "torch", page_size=4)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    assert (loop.prompt_logits(prompt, 1000) - expected).abs().max() > 0.1


def test_nodes_of_both_sides_are_different_models(path: Path) -> None:
    hashes = [read_spec(path, context_length=n).model_hash for n in (8, BORDER, BORDER + 1, 512)]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3] == read_spec(path).model_hash


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"long_factor": [1.0]}, ["long_factor", "a list of 36 positive numbers"]),
        ({"short_factor": None}, ["short_factor", "a list of 36 positive numbers"]),
        ({"short_factor": [0.0] * 36}, ["short_factor", "positive"]),
        ({"rope_type": "linear"}, ["rope_type", "linear", "longrope"]),
        ({"finetuned": True}, ["finetuned", "longrope takes"]),
    ],
)
def test_parameters_that_make_no_longrope_are_refused(
    path: Path, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as err:
        checkpoint.check_checkpoint(build_config({"model_path": str(tmp_path)}), tmp_path)
    for word in words:
        assert word in err.value.message
