"""Latent attention: transformers' tokens whatever interrupts a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import storm
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model

pytest.importorskip("baton._native", reason="the native module is not built")
pair_module = pytest.importorskip("tests.support.engines.pair", exc_type=ImportError)

STEPS = 20
LENGTHS = [1, 15, 16, 17, 64, 70]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_suspended_and_resumed_the_tokens_are_transformers(
    reference: Callable[[str], Reference], page_size: int
) -> None:
    ref = reference("deepseek-v3")
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = make_engine(ref.path, page_size=page_size, chunked_prefill_size=64)
    disturb = storm(engine, random.Random(page_size))
    assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == want
    assert engine.sched.report.counters()["suspensions_total"] > 5
    assert answer(engine, prompts[::-1], greedy(STEPS), stagger=2) == want[::-1], "with prefix hits"
    assert sum(engine.sched.hit_tokens.values()) > 0
    engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
    engine.close()


def test_retracted_and_through_the_host_pool_the_tokens_are_transformers(
    reference: Callable[[str], Reference],
) -> None:
    ref = reference("deepseek-v2-lite")
    prompts = prompts_of(random.Random(3), LENGTHS)
    want = ref.answers(prompts, STEPS)
    engine = make_engine(
        ref.path, page_size=16, chunked_prefill_size=64, max_total_tokens=192, host_kv_gib=0.001,
        preemption_mode="offload", schedule_conservativeness=0.05,
    )  # fmt: skip
    for repeat in range(2):
        disturb = storm(engine, random.Random(repeat))
        assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == want, f"round {repeat}"
    assert engine.counters['kv_host_copies_total{direction="out"}'] > 0
    assert engine.counters['kv_host_copies_total{direction="in"}'] > 0
    engine.close()


@pytest.mark.parametrize(("page_size", "transport"), [(1, "shm"), (16, "tcp"), (64, "shm")])
def test_suspended_on_either_node_of_a_pair_the_tokens_are_transformers(
    reference: Callable[[str], Reference], page_size: int, transport: str
) -> None:
    ref = reference("deepseek-v3")
    prompts = prompts_of(random.Random(4), LENGTHS)
    want = ref.answers(prompts, STEPS)
    rng = random.Random(page_size)
    chunk = max(16, page_size)
    pair = pair_module.Pair(ref.path, transport, page_size=page_size, chunked_prefill_size=chunk)

    def disturb(half: Any, handles: list[int]) -> None:
        storm(half.engine, rng)(handles)

    try:
        assert pair.answer(prompts, greedy(STEPS), disturb) == want
        assert pair.d.engine.sched.report.counters()["suspensions_total"] > 0
    finally:
        pair.close()


def test_draft_layers_of_the_files_are_left_unread(tmp_path: Path) -> None:
    """DeepSeek V3's files hold a layer behind the last one, with experts and projections of its own."""
    from safetensors.torch import load_file, save_file

    path = make_checkpoint("deepseek-v3", tmp_path / "m")
    before = ModelLoop(load_model(path), "cpu", 16).prompt_logits([1, 2, 3], 2)
    tensors = load_file(path / "model.safetensors")
    drafts = {
        name.replace("layers.1.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    drafts["model.layers.2.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | drafts, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(ModelLoop(load_model(path), "cpu", 16).prompt_logits([1, 2, 3], 2), before)
