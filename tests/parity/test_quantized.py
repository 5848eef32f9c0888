"""Quantized checkpoints on a pair of engines give transformers' tokens on dequantized weights.

`test_matrix` has every family in every format.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.parity.test_engine import prompts_of
from tests.support.engines.engine_run import greedy
from tests.support.models.checkpoints import make_checkpoint, reference_greedy, reference_model
from tests.support.models.quantized_checkpoints import quantize

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)

STEPS = 28
QUICK = [
    ("llama", "fp8-block"),
    ("llama", "packed-int4-zeros"),
    ("qwen3-moe", "fp8-ragged"),
    ("phi3", "awq"),
    ("glm4-moe", "gptq-order"),
    ("deepseek-v3", "fp8-ragged"),
    ("gpt-oss", "mxfp4"),
]


@pytest.mark.parametrize(("variant", "name"), QUICK)
def test_pair_equals_transformers_on_dequantized_weights(
    tmp_path: Path, variant: str, name: str
) -> None:
    source = make_checkpoint(variant, tmp_path / "m")
    quantized, plain = quantize(source, name, tmp_path)
    model = reference_model(plain)
    prompts = prompts_of(random.Random(5), [1, 9, 70])
    want = [reference_greedy(model, prompt, STEPS) for prompt in prompts]
    pair = pair_module.Pair(quantized, "shm")
    try:
        assert pair.answer(prompts, greedy(STEPS)) == want
    finally:
        pair.close()
