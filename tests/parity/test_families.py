"""Every family computes what transformers computes, in one piece, in chunks, token by token, and in mixed batches."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from baton.layers import ops
from tests.parity.conftest import STEPS, Reference
from tests.parity.test_engine import prompts_of
from tests.support.models.checkpoints import VARIANTS, WITH_STATES
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model

SAME_BITS = ("llama", "gemma3", "gpt-oss", "llama4", "deepseek-v3")
"""Heads, windows, sinks, chunks and latents."""
ops_as_loaded = ops._native


def _have_cpu_backend() -> bool:
    try:
        import baton.layers.attention.cpu  # noqa: F401
    except ImportError:
        return False
    return True


BACKENDS = [
    "torch",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            not _have_cpu_backend(), reason="native CPU kernels are not built"
        ),
    ),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention backend, with the tensor functions that belong to it: `torch` runs without any native code."""
    monkeypatch.setattr(ops, "_native", ops_as_loaded if request.param == "cpu" else None)
    return request.param


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "chunk", [7, 1000, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 16))]
)
def test_prompt_logits_equal_transformers(reference, variant, backend, chunk):
    ref = reference(variant)
    loop = ModelLoop(load_model(ref.path), backend, page_size=4)
    for prompt, expected in zip(ref.prompts, ref.logits, strict=True):
        torch.testing.assert_close(
            loop.prompt_logits(prompt, chunk), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [(16, 16), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 5), (4, 1000)))],
)
def test_greedy_tokens_equal_transformers(reference, variant, backend, page_size, chunk):
    ref = reference(variant)
    loop = ModelLoop(load_model(ref.path), backend, page_size)
    assert loop.greedy(ref.prompts, STEPS, chunk) == ref.greedy


DENSE = ["llama", "qwen3", "mistral-window", "deepseek-v3-halves"]
"""Without experts: rounding makes a router choose others."""


@pytest.mark.parametrize("variant", DENSE)
def test_bfloat16_picks_transformers_token_unless_the_choice_is_close(reference, variant, backend):
    ref = reference(variant)
    loop = ModelLoop(load_model(ref.path, dtype="bfloat16"), backend, page_size=16)
    assert loop.kv.data.dtype == torch.bfloat16
    for prompt, expected in zip(ref.prompts, ref.logits, strict=True):
        logits = loop.prompt_logits(prompt, 16)
        # bfloat16 carries 8 bits, and two layers of sums spread its rounding: a few percent of the largest logit.
        tolerance = 0.05 * expected.abs().max()
        assert (logits - expected).abs().max() < tolerance
        chosen = expected.gather(1, logits.argmax(-1, keepdim=True))[:, 0]
        assert (expected.max(-1).values - chosen < 2 * tolerance).all()
        assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.7


@pytest.mark.parametrize("variant", DENSE)
def test_float16_is_closer_to_transformers_than_bfloat16(reference, variant, backend):
    """11 bits instead of 8: an eighth of the tolerance. The native kernels leave it to torch, weight by weight."""
    ref = reference(variant)
    model = load_model(ref.path, dtype="float16")
    model.pack()
    loop = ModelLoop(model, "auto" if backend == "cpu" else backend, page_size=16)
    assert loop.kv.data.dtype == torch.float16
    for prompt, expected in zip(ref.prompts, ref.logits, strict=True):
        logits = loop.prompt_logits(prompt, 16)
        tolerance = 0.05 / 8 * expected.abs().max()
        assert (logits - expected).abs().max() < tolerance
        chosen = expected.gather(1, logits.argmax(-1, keepdim=True))[:, 0]
        assert (expected.max(-1).values - chosen < 2 * tolerance).all()


def test_rows_that_do_not_sample_cost_no_logits_but_leave_their_kv(reference, backend):
    ref = reference("llama")
    loop = ModelLoop(load_model(ref.path), backend, page_size=4)
    seq = loop.start(ref.prompts[0], 1)
    assert loop.decoder.forward(loop.batch([(seq, 20)]), loop.attn).shape == (
        0,
        loop.decoder.spec.vocab_size,
    )
    seq.computed = 20
    logits = loop.decoder.forward(loop.batch([(seq, 13)]), loop.attn)
    torch.testing.assert_close(logits, ref.logits[0][-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "variant",
    [
        name if name in SAME_BITS else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
        if name not in WITH_STATES
    ],
)
def test_logits_have_the_same_bits_token_by_token_and_in_any_chunks_and_pages(
    reference: Callable[[str], Reference], variant: str, dtype: str
) -> None:
    """Decode is a chunk of one token: an answer that is resumed from its tokens goes on as it would have.

    (Families with states: test_states.py.)"""
    pytest.importorskip("baton._native", reason="the native module is not built")
    model = load_model(reference(variant).path, dtype=dtype)
    model.pack()
    prompt = prompts_of(random.Random(1), [90])[0]
    whole = ModelLoop(model, "cpu", 16).prompt_logits(prompt, 1000)
    for page_size, chunk in ((1, 7), (4, 1), (64, 33)):
        logits = ModelLoop(model, "cpu", page_size).prompt_logits(prompt, chunk)
        assert torch.equal(logits, whole), (page_size, chunk)
