"""lm-eval's `local-completions` through our router, a prefill and a decode node: transformers' loglikelihoods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import baton.models
from tests.clients.environments import run_script
from tests.support.processes.cluster import Cluster, count

DEMO = Path(baton.models.__file__).parent / "demo"
SCRIPT = Path(__file__).with_name("ask_lm_eval.py")
TOLERANCE = 1e-3
"""Largest difference between two sums of logprobs."""
DOCS: list[dict[str, Any]] = [
    {
        "question": "Baton is",
        "choices": ["a serving cluster", "an old violin", "a 😀"],
        "answer": 0,
    },
    {"question": "A prefill node computes", "choices": ["the prompt", "one token"], "answer": 0},
    {"question": "KV pages travel from", "choices": ["P to D", "D to P", "A to Z"], "answer": 0},
    {"question": "The router is written in", "choices": ["Rust", "naïve Python"], "answer": 0},
]


@pytest.fixture(scope="module")
def said(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    docs = tmp_path_factory.mktemp("lm-eval") / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    before = count(pair.url, "baton_router_local_answers_total")
    said: dict[str, Any] = run_script("lm-eval", SCRIPT, pair.url, str(DEMO), str(docs))
    assert count(pair.url, "baton_router_local_answers_total") > before
    return said


class Scorer:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO)
        self._model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Loglikelihood of a continuation, and whether each of its tokens is the likeliest."""
        ids = torch.tensor([context + continuation])
        with torch.inference_mode():
            rows = self._model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        targets = torch.tensor(continuation)
        total = rows.gather(1, targets[:, None]).sum()
        return float(total), bool((rows.argmax(-1) == targets).all())


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer()


def test_choices(said: dict[str, Any], scorer: Scorer) -> None:
    assert said["version"] == "0.4.13"
    encode = scorer.tokenizer.encode
    right = 0
    for doc, answers in zip(DOCS, said["choices"], strict=True):
        context = encode(doc["question"], add_special_tokens=False)
        scores = []
        for choice, (total, is_greedy) in zip(doc["choices"], answers, strict=True):
            whole = encode(f"{doc['question']} {choice}", add_special_tokens=False)
            expected, greedy = scorer.score(whole[: len(context)], whole[len(context) :])
            assert total == pytest.approx(expected, abs=TOLERANCE)
            assert is_greedy == greedy
            scores.append(total)
        right += scores.index(max(scores)) == doc["answer"]
    assert said["acc"] == pytest.approx(right / len(DOCS))


def test_rolling_texts(said: dict[str, Any], scorer: Scorer) -> None:
    """The first token's context is the one that lm-eval puts in front of it."""
    for doc, total in zip(DOCS, said["rolling"], strict=True):
        ids = scorer.tokenizer.encode(doc["question"], add_special_tokens=False)
        prefix = scorer.tokenizer.bos_token_id
        expected = [
            scorer.score([start], ids)[0] for start in (prefix, scorer.tokenizer.eos_token_id)
        ]
        assert min(abs(total - each) for each in expected) < TOLERANCE
