"""A whole decoder on the native kernels: logits do not depend on how a prompt was cut, nor on the company it had."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("baton._native", reason="the native module is not built")

from baton.layers.attention.cpu import CpuAttention
from baton.layers.kv_pool import make_pool
from baton.models.decoder import Decoder
from tests.support.kernels.attention_batch import AttentionRow, build_batch
from tests.support.models.whole_model import load_model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
PAGE_SIZE = 16


def decoder(path: Path, dtype: str, *, packed: bool, **changes: Any) -> Decoder:
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    model = load_model(path, dtype, "dummy", seed=3)
    if packed:
        model.pack()
    return model


def last_logits(
    model: Decoder, prompt: list[int], cuts: list[int], company: list[int]
) -> torch.Tensor:
    """Logits after the prompt, computed in pieces that end at `cuts`; each piece shares its step with a stranger."""
    kv = make_pool(model.spec.kv_spec(PAGE_SIZE), 64, native=False)
    attn = CpuAttention(model.spec.attention, kv)
    pages = list(range(64))
    random.Random(len(cuts)).shuffle(pages)
    mine, theirs = pages[:20], pages[20:40]
    start, logits = 0, torch.empty(0)
    for end in [*cuts, len(prompt)]:
        rows = [AttentionRow(prompt[start:end], start, mine)]
        if company:
            rows.append(AttentionRow(company, 0, theirs))
        logits = model.forward(build_batch(rows, PAGE_SIZE), attn)[0]
        start = end
    return logits


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_decode_steps_and_company_leave_the_logits_as_they_are(
    tmp_path: Path, dtype: str, changes: dict[str, Any]
) -> None:
    model = decoder(tmp_path, dtype, packed=True, **changes)
    rng = random.Random(5)
    prompt = [rng.randrange(300) for _ in range(130)]
    whole = last_logits(model, prompt, [], [])
    for cuts in ([64], [1, 2, 3, 77, 129], list(range(100, 130)), list(range(1, 130))):
        assert torch.equal(last_logits(model, prompt, cuts, []), whole), cuts
        assert torch.equal(last_logits(model, prompt, cuts, prompt[::-1][:50]), whole), cuts


def test_packing_changes_logits_by_rounding_only(tmp_path: Path) -> None:
    prompt = list(range(40))
    packed, plain = (
        last_logits(decoder(tmp_path, "float32", packed=p), prompt, [], []) for p in (True, False)
    )
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_leave_those_of_drawing_rows_as_they_are(
    tmp_path: Path, dtype: str, changes: dict[str, Any]
) -> None:
    model = decoder(tmp_path, dtype, packed=True, **changes)
    rows = [AttentionRow(list(range(20)), 0, [0, 1]), AttentionRow([7, 8, 9], 0, [2])]
    batch = build_batch(rows, PAGE_SIZE)
    kv = make_pool(model.spec.kv_spec(PAGE_SIZE), 3, native=False)
    attn = CpuAttention(model.spec.attention, kv)
    model.prepare(batch, attn)
    plain = model.compute_hidden(batch, attn)
    size = model.spec.hidden_size
    hidden, states = model.compute_states(batch, attn, (1, 2))
    assert torch.equal(hidden, plain)
    assert states.shape == (23, 2 * size)
    hidden, last = model.compute_states(batch, attn, (3,))
    assert torch.equal(hidden, plain)
    assert last.shape == (23, size)
    assert torch.equal(last[[19, 22]], plain)
