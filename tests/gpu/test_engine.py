"""The whole engine on one GPU gives transformers' greedy tokens, with both attention backends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from baton.layers.attention.flashinfer import FlashInferAttention
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import (
    VOCAB,
    WITH_STATES,
    make_checkpoint,
    reference_greedy,
    reference_model,
)
from tests.support.probes import RunnerProbe

STEPS = 24


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    return [
        shared[: n // 2] + [rng.randrange(VOCAB) for _ in range(n - n // 2)]
        for n in (1, 3, 16, 17, 33, 70)
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags", [{}, {"page_size": 1, "chunked_prefill_size": 7}, {"disable_overlap_schedule": True}]
)
def test_float32_with_the_reference_equals_transformers(
    tmp_path: Path, flags: dict[str, object]
) -> None:
    path = make_checkpoint("llama", tmp_path)
    model = reference_model(path)
    want = [reference_greedy(model, p, STEPS) for p in prompts()]
    engine = make_engine(path, device="cuda", attention_backend="torch", **flags)
    assert answer(engine, prompts(), greedy(STEPS)) == want
    assert answer(engine, prompts()[::-1], greedy(STEPS), stagger=2) == want[::-1], (
        "second round, with prefix hits"
    )
    engine.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "variant",
    [
        "gemma2",
        "olmo2",
        "phi3-partial",
        "smollm3",
        "phimoe",
        "glm4-moe",
        "gpt-oss",
        "llama4",
        "deepseek-v3",
        "glm4-moe-lite",
    ],
)
def test_blocks_without_a_kernel_of_heads_equal_transformers(tmp_path: Path, variant: str) -> None:
    path = make_checkpoint(variant, tmp_path)
    model = reference_model(path)
    want = [reference_greedy(model, p, STEPS) for p in prompts()]
    engine = make_engine(path, device="cuda", attention_backend="torch")
    assert answer(engine, prompts(), greedy(STEPS)) == want
    engine.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", WITH_STATES)
def test_states_of_sequences_equal_transformers(tmp_path: Path, variant: str) -> None:
    """Prompts in chunks, and prefixes that end with a snapshot."""
    path = make_checkpoint(variant, tmp_path)
    model = reference_model(path)
    want = [reference_greedy(model, p, STEPS) for p in prompts()]
    engine = make_engine(
        path,
        device="cuda",
        attention_backend="torch",
        chunked_prefill_size=24,
        state_snapshot_tokens=16,
    )
    assert answer(engine, prompts(), greedy(STEPS)) == want
    assert answer(engine, prompts()[::-1], greedy(STEPS), stagger=2) == want[::-1]
    assert engine.sched.hit_tokens["device"] > 0
    engine.close()


@pytest.mark.timeout(600)
def test_demo_model_answers_alike_on_cpu_and_gpu() -> None:
    """bfloat16 rounds differently on the two, so a few near ties may fall the other way; half the tokens may not."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    from baton.server.text.model_info import resolve

    path = resolve("demo")
    ask = [[int(t) for t in torch.arange(5, 5 + n)] for n in (3, 20, 150)]  # 150 are three chunks
    flags = {"dtype": "bfloat16", "page_size": 16}
    cpu = make_engine(path, **flags)
    gpu = make_engine(path, device="cuda", attention_backend="auto", **flags)
    assert isinstance(RunnerProbe(gpu.runner).attention, FlashInferAttention)
    a, b = (answer(e, ask[-1:], greedy(STEPS)) + answer(e, ask, greedy(STEPS)) for e in (cpu, gpu))
    pairs = [
        (x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=False)
    ]
    assert sum(x == y for x, y in pairs) >= 0.5 * len(pairs)
    for engine in (cpu, gpu):
        engine.close()
