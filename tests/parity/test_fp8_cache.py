"""A KV cache of FP8 codes: transformers' logits with rounded K and V, and the same tokens however
they are computed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.layers.kv_spec import FP8
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from tests.parity.conftest import Reference
from tests.parity.test_engine import prompts_of
from tests.parity.test_preempted_tokens import storm
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import reference_model
from tests.support.models.model_loop import ModelLoop

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)

STEPS = 24
LENGTHS = [1, 3, 4, 5, 15, 16, 17, 33, 64, 70]
CACHE_SCHEME = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}
"""What llm-compressor writes for a checkpoint whose cache alone is quantized."""
SCALES = {"k": 0.004, "v": 0.05}
"""Of layer 0; those of layer 1 are three times as large. Some keys exceed the largest code."""


@pytest.fixture(scope="module")
def checkpoint(
    reference: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny Llama with scales of its cache."""
    path = tmp_path_factory.mktemp("fp8") / "m"
    shutil.copytree(reference("llama").path, path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        for kind, scale in SCALES.items():
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            tensors[name] = torch.tensor([scale * (1 + 2 * layer)])
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": CACHE_SCHEME}))
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(random.Random(3), LENGTHS)


@pytest.fixture(scope="module")
def answers(checkpoint: Path, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Those of one process."""
    engine = make_engine(checkpoint, kv_cache_dtype=FP8)
    yield answer(engine, prompts, greedy(STEPS))
    engine.close()


def round_to_codes(x: Tensor, scale: float) -> Tensor:
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale


@pytest.fixture
def rounding_model(reference: Callable[[str], Reference]) -> Any:
    """transformers' model, whose attention sees K and V as the cache keeps them."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
        factor = 1 + 2 * module.layer_idx
        k = round_to_codes(k, SCALES["k"] * factor)
        v = round_to_codes(v, SCALES["v"] * factor)
        return sdpa_attention_forward(module, q, k, v, *args, **more)

    ALL_ATTENTION_FUNCTIONS.register("fp8_cache", attend)
    model = reference_model(reference("llama").path)
    model.set_attn_implementation("fp8_cache")
    return model


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (4, 1000), (16, 16)])
def test_logits_are_transformers_with_rounded_keys_and_values(
    checkpoint: Path,
    reference: Callable[[str], Reference],
    rounding_model: Any,
    backend: str,
    page_size: int,
    chunk: int,
) -> None:
    spec = read_spec(checkpoint, "float32", kv_cache_dtype=FP8)
    loop = ModelLoop(load_weights(spec, checkpoint), backend, page_size)
    assert loop.kv.data.dtype == torch.float8_e4m3fn
    plain = reference("llama")
    for prompt, unrounded in zip(plain.prompts, plain.logits, strict=True):
        with torch.inference_mode():
            want = rounding_model(torch.tensor([prompt])).logits[0]
        got = loop.prompt_logits(prompt, chunk)
        rounding = (want - unrounded).abs().max()
        # Keys that differ in their last bit may fall on two sides of a tie.
        assert (got - want).abs().max() < 0.02 * rounding
        assert (got - want).abs().median() < 1e-5


@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 1, "chunked_prefill_size": 7},
        {"page_size": 64, "chunked_prefill_size": 64, "disable_overlap_schedule": True},
        {"max_total_tokens": 120, "schedule_conservativeness": 0.05},
        {
            "page_size": 16, "max_total_tokens": 192, "host_kv_gib": 0.002,
            "preemption_mode": "offload", "schedule_conservativeness": 0.05,
        },
    ],
    ids=str,
)  # fmt: skip
def test_chunks_hits_and_preemption_change_no_token(
    checkpoint: Path,
    prompts: list[list[int]],
    answers: list[list[int]],
    flags: dict[str, object],
) -> None:
    engine = make_engine(checkpoint, kv_cache_dtype=FP8, **flags)
    assert answer(engine, prompts, greedy(STEPS)) == answers
    disturb = storm(engine, random.Random(1))
    assert answer(engine, prompts, greedy(STEPS), disturb=disturb) == answers, "with prefix hits"
    assert engine.sched.report.counters()["suspensions_total"] > 0
    if "host_kv_gib" in flags:
        assert engine.counters['kv_host_copies_total{direction="in"}'] > 0
    engine.close()


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_pair_equals_one_process(
    checkpoint: Path, prompts: list[list[int]], answers: list[list[int]], transport: str
) -> None:
    pair = pair_module.Pair(checkpoint, transport, kv_cache_dtype=FP8)
    try:
        assert pair.answer(prompts, greedy(STEPS)) == answers
        assert pair.answer(prompts[::-1], greedy(STEPS)) == answers[::-1], "with prefix hits"
        pulled = pair.pulled()[f'kv_pull_bytes_total{{transport="{transport}"}}']
        page_bytes = pair.p.native.page_bytes
        assert pulled > 0
        assert pulled % page_bytes == 0
    finally:
        pair.close()


def other_scales(checkpoint: Path, path: Path) -> Path:
    """A copy of the checkpoint with one scale that differs in its last bits."""
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] *= 1.0001
    save_file(tensors, path / "model.safetensors")
    return path


def test_nodes_with_other_types_of_pages_refuse_each_other_by_name(checkpoint: Path) -> None:
    p_more = {"kv_cache_dtype": FP8}
    problem = refusal(pair_module.Pair(checkpoint, "shm", p_more, {"kv_cache_dtype": "auto"}))
    assert "dtype float32 against fp8_e4m3" in problem
    assert "--kv-cache-dtype" in problem


def test_nodes_with_other_scales_refuse_each_other_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    pair = pair_module.Pair(checkpoint, "shm", kv_cache_dtype=FP8)
    other = pair_module.Half(
        other_scales(checkpoint, tmp_path / "m"), "decode", "shm", kv_cache_dtype=FP8
    )
    pair.d.close()
    pair.d = other
    assert "page group 0: scales " in refusal(pair)


def refusal(pair: Any) -> str:
    """The error with which the decode half ends a request."""
    try:
        for half in (pair.p, pair.d):
            half.takes_errors = True
        (room,) = pair.submit([[1, 2, 3, 4, 5]], greedy(2))
        pair.until(lambda: room in pair.d.errors)
        return str(pair.d.errors[room])
    finally:
        pair.close()
