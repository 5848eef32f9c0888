"""Directories in all their variants: as transformers loads and tokenizes them, or refused by a rule with a name."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from baton.config import build_config
from baton.errors import ConfigError
from baton.models.spec_reader import read_spec
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support.models.checkpoint_variants import RULES, write_variant
from tests.support.models.checkpoints import reference_greedy
from tests.support.models.model_loop import ModelLoop
from tests.support.models.streamed_text import stream_text
from tests.support.models.whole_model import load_model

REPLACEMENT = "\ufffd"
FAST = 40
ALL = 200
STEPS = 6
TEXTS = (
    "the capital is",
    "<s> the <|im_end|> Paris<tool>né  x",
    "é" * 9 + " [PAD]and. the capital <|eos|>",
)
LOAD_ERRORS = (
    ValueError, TypeError, KeyError, OSError, RuntimeError, AttributeError, ImportError
)  # fmt: skip
"""Errors of transformers, each part of which has its own."""
BOOK = Path(__file__).parents[2] / "docs/checkpoints.md"


def load_reference(folder: Path) -> tuple[Any, Any] | Exception:
    """Model and tokenizer of transformers, or the reason why it has none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        # For Qwen2, AutoTokenizer makes a tokenizer of its own of the vocabulary, whatever the files say.
        chosen = PreTrainedTokenizerFast if model.config.model_type == "qwen2" else AutoTokenizer
        return model, chosen.from_pretrained(folder)
    except LOAD_ERRORS as err:
        return err


def readable_ids(reference: Any) -> list[int]:
    """Tokens that are text alone: those of half a character change the text before them in some decoders."""
    return [i for i in range(len(reference)) if REPLACEMENT not in reference.decode([i])]


def compare(seed: int, folder: Path) -> str:
    """The verdict on a variant: equal, refused by which rule, or refused by transformers, too."""
    name = f"variant {seed}: {write_variant(seed, folder)}"
    try:
        decoder = load_model(folder, "float32")
        facts = model_info.load(build_config({"model_path": str(folder)}))
        tokenizer = Tokenizer(folder)
        refusal = None
    except ConfigError as err:
        refusal = err.message
    loaded = load_reference(folder)
    if isinstance(loaded, Exception):
        assert refusal is not None, f"{name}: loaded, but transformers: {loaded!r}"
        return "refused by both"
    model, reference = loaded
    if refusal is not None:
        rules = [rule for rule, words in RULES.items() if re.search(words, refusal)]
        assert rules, f"{name}: refused by no rule: {refusal}"
        return rules[0]
    assert read_spec(folder, on_cpu=False).dtype == str(model.dtype).removeprefix("torch."), name
    assert facts.special_tokens == reference.special_tokens_map, name
    model.float()
    loop = ModelLoop(decoder, "torch", 4)
    words = readable_ids(reference)
    rng = random.Random(seed)
    for text in TEXTS:
        ids = reference(text).input_ids
        assert tokenizer.encode(text) == ids, f"{name}: ids of {text!r}"
        (answer,) = loop.greedy([ids], STEPS, 5)
        assert answer == reference_greedy(model, ids, STEPS), f"{name}: tokens behind {text!r}"
        spoken = rng.choices(words, k=STEPS)
        streamed = stream_text(tokenizer, ids, spoken)
        before = reference.decode(ids, skip_special_tokens=True)
        whole = reference.decode([*ids, *spoken], skip_special_tokens=True)
        assert before + streamed == whole, f"{name}: text of {spoken} behind {text!r}"
    return "equal"


def test_directories_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    verdicts = Counter(compare(seed, tmp_path / str(seed)) for seed in range(FAST))
    assert verdicts["equal"] > FAST // 3, verdicts


@pytest.mark.slow
def test_more_directories_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    verdicts = Counter(compare(seed, tmp_path / str(seed)) for seed in range(FAST, ALL))
    assert verdicts["equal"] > (ALL - FAST) // 3, verdicts
    unused = RULES.keys() - verdicts.keys()
    assert not unused, f"no variant meets these rules: {unused}"


def test_rules_are_documented() -> None:
    page = BOOK.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE)
    assert listed == list(RULES)
