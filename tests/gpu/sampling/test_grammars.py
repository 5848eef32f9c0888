"""Answers that follow grammars on the device: valid, equal to the host's, and no matter to plain rows beside them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from baton.layers import kernels
from baton.layers.attention.flashinfer import FlashInferAttention
from baton.layers.cuda.stream import CudaStream
from baton.runtime.grammar.sequence_grammar import SequenceGrammar
from baton.runtime.grammar.token_masks import MaskFiller
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.runtime.runner.cuda_runner import DeviceRunner
from baton.runtime.sampling import grammar_masks
from baton.runtime.sampling.grammar_masks import apply_packed_masks
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import SamplingLaunch, sample_tokens
from baton.sched.types.request import FinishReason, SamplingParams
from tests.perf.bench_front.made_tokenizer import make_tokenizer
from tests.support.engines.engine_run import make_engine
from tests.support.grammars.engines import (
    GrammarAnswer,
    follow_grammars,
    make_store,
    request,
    run_to_end,
    schema_text,
    text_of,
)
from tests.support.grammars.random_schemas import random_schema
from tests.support.models import shapes
from tests.support.models.checkpoints import VOCAB, make_checkpoint, write_tokenizer
from tests.support.probes import RunnerProbe

pytestmark = pytest.mark.timeout(300)
CUDA = torch.device("cuda")
PROMPT = [1, 2, 3, 4, 5]
END_TOKEN = 1
"""Id of `</s>` in the tokenizer with 150,000 tokens."""
WIDE_VOCAB = 151_936
"""Size of Qwen3's vocabulary."""


def mixed_params(schemas: list[dict[str, object]]) -> list[SamplingParams]:
    """Each schema drawn in its own way, and a plain request after every second one."""
    rng = random.Random(1)
    found = []
    for seed, schema in enumerate(schemas):
        params = SamplingParams(
            max_new_tokens=300,
            temperature=rng.choice((0.0, 0.7, 1.5)),
            top_p=rng.choice((1.0, 0.8)),
            seed=seed,
            grammar=schema_text(schema),
        )
        found.append(params)
        if seed % 2:
            found.append(replace(params, grammar="", max_new_tokens=40))
    return found


def check(answers: list[GrammarAnswer], schemas: list[dict[str, object]]) -> None:
    constrained = [answer for i, answer in enumerate(answers) if i % 3 != 2]
    assert len(constrained) == len(schemas)
    for schema, answer in zip(schemas, constrained, strict=True):
        assert answer.finish is FinishReason.STOP, (schema, answer.error, answer.tokens)
        jsonschema.validate(json.loads(text_of(answer.tokens)), schema)


def test_float32_answers_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Sums round differently: a draw that falls on the edge between two tokens may take the other one."""
    path = make_checkpoint("llama", tmp_path)
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(40)]
    found = []
    flags: dict[str, object]
    for flags in ({}, {"device": "cuda", "attention_backend": "torch"}):
        store = make_store(path, threads=2)
        engine = follow_grammars(make_engine(path, max_total_tokens=16384, **flags), store)
        answers = run_to_end(engine, [request(PROMPT, each) for each in mixed_params(schemas)])
        check(answers, schemas)
        found.append([answer.tokens for answer in answers])
        engine.close()
    same = sum(cpu == gpu for cpu, gpu in zip(*found, strict=True))
    assert same >= 0.95 * len(found[0])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
def test_answers_of_recorded_and_overlapped_steps_are_valid(
    tmp_path: Path, graphs: bool, overlap: bool
) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    path = shapes.make("tiny", tmp_path / "m", head_dim=128, vocab_size=VOCAB)
    write_tokenizer(path)
    engine = make_engine(
        path,
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        page_size=16,
        max_total_tokens=32768,
        max_running_requests=24,
        attention_backend="flashinfer",
        disable_cuda_graph=not graphs,
        disable_overlap_schedule=not overlap,
    )
    assert isinstance(engine.runner, DeviceRunner)
    assert isinstance(RunnerProbe(engine.runner).attention, FlashInferAttention)
    assert (RunnerProbe(engine.runner).graphs is not None) == graphs
    follow_grammars(engine, make_store(path, threads=2))
    rng = random.Random(6)
    schemas = [random_schema(rng) for _ in range(60)]
    answers = run_to_end(engine, [request(PROMPT, each) for each in mixed_params(schemas)])
    check(answers, schemas)
    engine.close()


@pytest.mark.parametrize("is_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("vocab", [70, 4096, WIDE_VOCAB])
def test_forbidden_logits_alone_are_set(
    vocab: int, is_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 rows in any order, among rows without a mask."""
    monkeypatch.setattr(kernels, "usable", is_kernel)
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(75, vocab)).astype(np.float32)
    rows = rng.permutation(75)[:70]
    masks = rng.integers(-(2**31), 2**31, size=(70, -(-vocab // 32))).astype(np.int32)
    masks[0] = 0
    masks[1] = -1
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab]
    expected = logits.copy()
    expected[rows] = np.where(bits == 1, logits[rows], -np.inf)
    stream = CudaStream(CUDA)
    on_device = stream.put(logits)
    apply_packed_masks(on_device, stream.put(rows), stream.put(masks))
    np.testing.assert_array_equal(on_device.cpu().numpy(), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_draws_are_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """64 rows over 151,936 tokens, one of two allows the whole text, and a plain row beside each."""
    make_tokenizer(tmp_path)
    source = TokenizerSource((tmp_path / "tokenizer.json").read_text(), [], [END_TOKEN])
    trie = build_trie(source, WIDE_VOCAB)
    filler = MaskFiller(trie.vocab_size, WIDE_VOCAB, 2)
    texts = ("start: /[a-z ]{1,90}/", 'start: %json {"type": "integer"}')
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((64, WIDE_VOCAB), generator=generator) * 3

    def rows() -> list[SampleRow]:
        made = []
        for i in range(64):
            params = SamplingParams(temperature=temperature, top_p=0.9, seed=i)
            matcher = LLMatcher(trie, texts[i % 4 // 2], log_level=0)
            grammar = SequenceGrammar(matcher, frozenset((END_TOKEN,))) if i % 2 else None
            made.append(SampleRow(params, 3, [0] * 3, grammar))
        return made

    monkeypatch.setattr(grammar_masks, "FEW_TOKENS", 0)
    host = sample_tokens(logits.clone(), rows(), filler).tokens
    launch = SamplingLaunch(rows(), WIDE_VOCAB, CudaStream(CUDA).put, filler)
    with torch.inference_mode():
        device = launch.read_result(launch.queue_draw(logits.to(CUDA, copy=True))).tokens
    assert sum(a == b for a, b in zip(host, device, strict=True)) >= (64 if not temperature else 62)
    for i, token in enumerate(device):
        if i % 2:
            matcher = LLMatcher(trie, texts[i % 4 // 2], log_level=0)
            assert matcher.validate_tokens([token]) == 1
    assert np.all(np.array(device) >= 0)
