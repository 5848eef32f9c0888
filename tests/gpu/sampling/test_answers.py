"""Reasoning that is gated, restricted tokens and logprobs of prompts on the device: as on the host."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest
import torch

from baton.runtime.runner.cuda_runner import DeviceRunner
from baton.sched.types.reasoning import ReasoningPhase
from baton.sched.types.request import FinishReason, SamplingParams
from tests.support.engines.engine_run import make_engine
from tests.support.engines.prompt_logprobs import (
    EVERYTHING,
    ask,
    check_logprobs,
    reference_logprobs,
)
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
from tests.support.grammars.reasoning import BEGIN, CALL, END, make_gate, make_thinking_checkpoint
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.checkpoints import EOS, VOCAB, make_checkpoint, reference_model

pytestmark = pytest.mark.timeout(300)
PROMPT = [1, 2, 3, 4, 5]
ON_CPU: dict[str, object] = {}
ON_GPU: dict[str, object] = {"device": "cuda", "attention_backend": "torch"}
TOWARDS_MARKERS = ((END, 4.0), (BEGIN, 4.0), (EOS, 8.0), (CALL, 4.0))


def run_on(
    path: Path, flags: dict[str, object], asked: list[SamplingParams]
) -> list[GrammarAnswer]:
    engine = make_engine(path, max_total_tokens=16384, **flags)
    assert isinstance(engine.runner, DeviceRunner) == bool(flags)
    follow_grammars(engine, make_store(path, threads=2))
    answers = run_to_end(engine, [request(PROMPT, params) for params in asked])
    engine.close()
    return answers


def share_of_equal(one: list[GrammarAnswer], other: list[GrammarAnswer]) -> float:
    pairs = list(zip(one, other, strict=True))
    return sum(a.tokens == b.tokens for a, b in pairs) / len(pairs)


def test_grammars_behind_reasoning(tmp_path: Path) -> None:
    """Valid behind the end marker, within the budget, and the host's tokens but for draws on an edge."""
    path = make_thinking_checkpoint(tmp_path / "llama")
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(40)]
    budgets = [rng.choice((0, 3, 40)) for _ in schemas]
    asked = [
        SamplingParams(
            max_new_tokens=400,
            temperature=rng.choice((0.0, 0.7, 1.5)),
            seed=seed,
            grammar=schema_text(schema),
            logit_bias=TOWARDS_MARKERS,
            reasoning=make_gate(ReasoningPhase.INSIDE, budget=budget),
        )
        for seed, (schema, budget) in enumerate(zip(schemas, budgets, strict=True))
    ]
    on_gpu = run_on(path, ON_GPU, asked)
    for schema, budget, answer in zip(schemas, budgets, on_gpu, strict=True):
        assert answer.finish is FinishReason.STOP, (schema, answer.error, answer.tokens)
        end = answer.tokens.index(END)
        assert end <= budget + 1, "a forced end has one token before its marker"
        jsonschema.validate(json.loads(text_of(answer.tokens[end + 1 :])), schema)
    assert share_of_equal(run_on(path, ON_CPU, asked), on_gpu) >= 0.9


def test_allowed_tokens_and_bad_words(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "llama")
    rng = random.Random(8)
    asked = []
    for seed in range(40):
        allowed = rng.sample(range(VOCAB), rng.choice((3, 20, VOCAB - 5)))
        words = tuple((rng.choice(allowed), rng.choice(allowed)) for _ in range(3))
        asked.append(
            SamplingParams(
                max_new_tokens=60,
                temperature=rng.choice((0.0, 1.0)),
                seed=seed,
                allowed_tokens=pack_ids(allowed) if seed % 4 else b"",
                bad_words=words,
            )
        )
    on_gpu = run_on(path, ON_GPU, asked)
    for params, answer in zip(asked, on_gpu, strict=True):
        assert answer.tokens
        allowed_bits = int.from_bytes(params.allowed_tokens, "little")
        for token in answer.tokens:
            assert not allowed_bits or token == EOS or allowed_bits >> token & 1
        pairs = set(zip(answer.tokens, answer.tokens[1:], strict=False))
        assert not pairs & set(params.bad_words)
    assert share_of_equal(run_on(path, ON_CPU, asked), on_gpu) >= 0.9


@pytest.mark.parametrize("flags", [{}, {"page_size": 1, "chunked_prefill_size": 7}], ids=str)
def test_logprobs_of_prompts_are_transformers(tmp_path: Path, flags: dict[str, object]) -> None:
    path = make_checkpoint("llama", tmp_path / "llama")
    model = reference_model(path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (33, 2, 300)]
    engine = make_engine(path, max_total_tokens=4096, **ON_GPU, **flags)
    for _ in range(2):
        for asked in ask(engine, prompts, [EVERYTHING] * len(prompts)):
            check_logprobs(asked, EVERYTHING, reference_logprobs(model, asked.prompt))
    engine.close()
