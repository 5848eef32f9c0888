"""The committed demo model: an ordinary Hugging Face directory that answers what it was taught, word for word."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tools.demo_model import corpus, train
from tools.demo_model.corpus import OffTopic, Questions, Sampler, Turn, render

MAX_BYTES = 8_000_000


@pytest.fixture(scope="module")
def questions() -> Questions:
    return corpus.load_topics(train.QUESTIONS_FILE)


@pytest.fixture(scope="module")
def off_topic() -> OffTopic:
    return corpus.load_off_topic(train.OFF_TOPIC_FILE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(train.DEMO_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(train.DEMO_DIR)


def test_files_are_small_enough_to_commit() -> None:
    assert sum(path.stat().st_size for path in train.DEMO_DIR.iterdir()) <= MAX_BYTES


def test_weights_are_stored_as_bfloat16_and_loaded_as_float32(model: Any) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(train.DEMO_DIR / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
        assert {stored.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert names == {
        name for name, _ in model.named_parameters()
    }  # the tied head is not stored twice


def test_transformers_answers_ten_questions_word_for_word(
    model: Any, tokenizer: Any, questions: Questions
) -> None:
    import torch

    torch.set_num_threads(1)
    for topic in questions.all_topics[1::16]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": topic.questions[0]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**prompt, max_new_tokens=96)
        answer = out[0, prompt["input_ids"].shape[1] :]
        assert answer[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer, skip_special_tokens=True) == topic.answer


def test_unseen_question_gets_a_short_answer(
    model: Any, tokenizer: Any, questions: Questions
) -> None:
    for question in questions.unseen[:3]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**prompt, max_new_tokens=96)
        assert out[0, -1] == tokenizer.eos_token_id


def test_training_code_and_transformers_compute_the_same(model: Any, tokenizer: Any) -> None:
    import torch
    from safetensors.torch import load_file

    ours = train.Llama(train.Shape())
    ours.load_state_dict(
        {
            name: tensor.float()
            for name, tensor in load_file(train.DEMO_DIR / "model.safetensors").items()
        }
    )
    ids = torch.tensor(
        [tokenizer("Prefill computes the keys and values of the whole prompt at once.").input_ids]
    )
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ours(ids)), model(ids).logits, rtol=1e-4, atol=1e-4)


@given(st.text())
@settings(max_examples=examples(200), deadline=None)
def test_tokenizer_returns_any_text_unchanged(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    if not any(special in text for special in corpus.SPECIAL_TOKENS):
        assert tokenizer.decode(ids[1:]) == text


def test_chat_template_writes_what_training_saw(
    tokenizer: Any, questions: Questions, off_topic: OffTopic
) -> None:
    sampler = Sampler(questions, off_topic, [["a paragraph"]], seed=5)
    for turns in (sampler.conversation() for _ in range(50)):
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == render(turns)
        asked = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert asked == render(turns[:-1], ask=True)


def test_chat_template_takes_content_parts_and_other_roles(tokenizer: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    expected = render([Turn("system", "Be brief."), Turn("user", "Hello")], ask=True)
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == expected
    )


def test_question_list_is_large_and_rephrased(questions: Questions) -> None:
    assert len(questions.topics) >= 120
    assert [t.questions[0] for t in questions.topics if len(t.questions) < 5] == []


def test_question_with_two_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "qa.txt"
    path.write_text("Q: What is P?\nA: A node.\n\nQ: what is p?\nA: A letter.\n")
    with pytest.raises(ValueError, match="stands in line 1 too"):
        corpus.load_topics(path)


def test_flags_and_codes_in_the_answers_exist(questions: Questions) -> None:
    """An answer that names a flag or an error code which does not exist would teach the model to lie."""
    import re

    from baton import errors

    text = " ".join(topic.answer for topic in questions.all_topics)
    flags = (Path(__file__).parents[3] / "docs" / "flags.md").read_text(
        encoding="utf-8"
    )  # generated
    of_up = {"--smoke", "--log-dir", "--prefill", "--decode", "--help-all"}
    assert (
        set(re.findall(r"--[a-z][a-z-]+", text)) - set(re.findall(r"--[a-z][a-z-]+", flags)) - of_up
        == set()
    )
    for code in ("queue_full", "context_length_exceeded"):
        assert code in text
        assert errors.by_code(code).code == code


def test_same_seed_gives_the_same_samples(questions: Questions, off_topic: OffTopic) -> None:
    seed = random.randrange(2**32)
    first, second = (
        Sampler(questions, off_topic, [["one", "two"], ["three"]], seed) for _ in range(2)
    )
    for _ in range(100):
        assert first.conversation() == second.conversation(), f"seed {seed}"
        assert first.passage() == second.passage(), f"seed {seed}"


def test_no_question_is_varied_into_nothing(questions: Questions, off_topic: OffTopic) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for question in [q for topic in questions.all_topics for q in topic.questions] + ["???"] * 200:
        assert corpus.vary(question, rng).strip(), f"seed {seed}: {question}"
    sampler = Sampler(questions, off_topic, [["a paragraph"]], seed)
    assert all(turn.text.strip() for _ in range(2000) for turn in sampler.conversation()), (
        f"seed {seed}"
    )


def test_config_says_what_the_engine_needs() -> None:
    config = json.loads((train.DEMO_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["max_position_embeddings"] == 2048
