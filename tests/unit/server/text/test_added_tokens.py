"""Tokens that files beside tokenizer.json declare: the plan, and the tokenizer that follows it, are AutoTokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from baton._native import TokenizerFiles
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from baton.config import build_config
from baton.errors import ConfigError
from baton.server.observability.fingerprint import tokenizer_hash
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from tests.support.goldens import added_token_cases
from tests.support.models import checkpoints

GOLDEN = json.loads(added_token_cases.CASES.read_text())
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TEXT = "x<|im_end|> a<tool> b <image><video>[PAD] <|eos|>y <a><b><c>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a byte-level tokenizer and a config.json, without weights."""
    checkpoints.write_tokenizer(tmp_path)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def write_files(folder: Path, case: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | case["tokenizer"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **case["config"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("special_tokens_map", "added_tokens"):
        if case[name]:
            (folder / f"{name}.json").write_text(json.dumps(case[name]))


def planned_tokenizer(folder: Path) -> HFTokenizer:
    """tokenizer.json in the tokenizers wheel, with the tokens of the plan."""
    plan = TokenizerFiles(folder)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    for content, digits in plan.added_tokens:
        flags = {flag: digit == "1" for flag, digit in zip(FLAGS, digits, strict=True)}
        tokenizer.add_tokens([AddedToken(content, **flags)])
    return tokenizer


def test_golden_cases_are_what_the_engine_plans() -> None:
    assert json.loads(json.dumps(added_token_cases.cases())) == GOLDEN, (
        "run python -m tests.support.goldens.added_token_cases"
    )


@pytest.mark.parametrize("name", [name for name, case in GOLDEN.items() if case["error"] is None])
def test_tokenizer_has_the_tokens_of_auto_tokenizer(folder: Path, name: str) -> None:
    from transformers import AutoTokenizer

    case = GOLDEN[name]
    write_files(folder, case)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder)
    planned = planned_tokenizer(folder).get_added_tokens_decoder()
    assert {i: str(token.__getstate__()) for i, token in planned.items()} == {
        i: str(token.__getstate__()) for i, token in theirs.added_tokens_decoder.items()
    }
    ids = theirs(TEXT).input_ids
    assert ours.encode(TEXT) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )
    facts = model_info.load(build_config({"model_path": str(folder)}))
    assert facts.special_tokens == theirs.special_tokens_map == case["plan"]["special_tokens"]


@pytest.mark.parametrize("name", [name for name, case in GOLDEN.items() if case["error"]])
def test_values_that_are_no_tokens_are_refused(folder: Path, name: str) -> None:
    from transformers import AutoTokenizer

    write_files(folder, GOLDEN[name])
    if (
        name != "declared without a content"
    ):  # an empty token to transformers, which finds it nowhere
        with pytest.raises((TypeError, ValueError, AttributeError)):
            AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"json: .* is not supported; .* is needed"):
        model_info.load(build_config({"model_path": str(folder)}))
    with pytest.raises(ConfigError, match="is not supported"):
        Tokenizer(folder)


def test_fingerprints_differ_with_added_tokens(folder: Path) -> None:
    def prints(**config: Any) -> tuple[str, str]:
        write_files(folder, added_token_cases.case_of({"config": config}))
        facts = model_info.load(build_config({"model_path": str(folder)}))
        return facts.tokenizer_fingerprint, tokenizer_hash(folder)

    plain = prints()
    assert prints(added_tokens_decoder={"257": added_token_cases.OWN[1]}) == plain
    mark = {"content": "<m>"}
    found = [
        plain,
        prints(extra_special_tokens=["<m>"]),
        prints(added_tokens_decoder={"258": mark}),
        prints(added_tokens_decoder={"258": mark | {"lstrip": True}}),
        prints(split_special_tokens=True),
    ]
    for aspect in zip(*found, strict=True):
        assert len(set(aspect)) == len(found)
