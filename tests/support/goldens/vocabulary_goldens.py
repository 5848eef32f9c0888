"""Golden files of vocabularies that are no tokenizer.json: ids and texts of their own libraries.

`python -m tests.support.goldens.vocabulary_goldens` writes `cases.json` into
tests/contract/golden/vocabularies; Python tests hold it to those libraries (sentencepiece,
mistral-common, tiktoken) and to the engine, Rust tests to text layer and router. `--train` makes
the vocabularies again: small ones, of the texts of `odd_texts` and of docs/.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.goldens.odd_texts import CODE, ODD, PROSE, odd_texts

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests/contract/golden/vocabularies"
CASES = FOLDER / "cases.json"
NAMES = ("unigram", "bpe", "tekken", "kimi")
GOLDEN_TEXTS = 100
SPECIAL_TOKENS = 40
"""Of the small tekken.json, most of them without a name."""

KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""`pat_str` of tokenization_kimi.py, in moonshotai/Kimi-K2-Instruct."""
KIMI_NAMES = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "[PAD]")


@dataclass(frozen=True, slots=True)
class Reference:
    """The library for which a vocabulary was written."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    """Control tokens have no text."""
    size: int
    """Ids below it are tokens."""


def sentencepiece_reference(file: Path) -> Reference:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return Reference(model.encode, lambda ids: model.decode(list(ids)), model.get_piece_size())


def tekken_reference(file: Path) -> Reference:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    model = Tekkenizer.from_file(file)
    return Reference(
        lambda text: model.encode(text, bos=False, eos=False),
        # Bytes of a character may stand on both sides of a token without text.
        lambda ids: model.decode(
            [token_id for token_id in ids if token_id >= model.num_special_tokens],
            SpecialTokenPolicy.IGNORE,
        ),
        model.n_words,
    )


def kimi_reference(folder: Path) -> Reference:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
    declared = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    special_ids = range(len(ranks), len(ranks) + 256)
    texts = {
        token_id: declared.get(str(token_id), {}).get("content", f"<|reserved_token_{token_id}|>")
        for token_id in special_ids
    }
    model = tiktoken.Encoding(
        "kimi",
        pat_str=KIMI_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={text: token_id for token_id, text in texts.items()},
    )
    hidden = {int(token_id) for token_id in declared if declared[token_id]["special"]}
    return Reference(
        lambda text: model.encode(text, allowed_special="all"),
        lambda ids: model.decode([token_id for token_id in ids if token_id not in hidden]),
        len(ranks) + 256,
    )


def reference_of(name: str) -> Reference:
    folder = FOLDER / name
    if name == "tekken":
        return tekken_reference(folder / "tekken.json")
    if name == "kimi":
        return kimi_reference(folder)
    return sentencepiece_reference(folder / "tokenizer.model")


def cases() -> dict[str, Any]:
    made = {}
    for name in NAMES:
        reference = reference_of(name)
        texts = odd_texts(GOLDEN_TEXTS, seed=1)
        rows = [(text, reference.encode(text)) for text in texts]
        made[name] = [
            {"text": text, "ids": ids, "decoded": reference.decode(ids)} for text, ids in rows
        ]
    return made


def train_sentencepiece(**options: Any) -> bytes:
    """Content of a tokenizer.model of some hundred pieces."""
    import sentencepiece

    files = [ROOT / "docs/architecture.md", ROOT / "docs/checkpoints.md"]
    lines = [line for file in files for line in file.read_text().splitlines()]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *PROSE, *CODE, *ODD[:2]]),
        model_writer=made,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return made.getvalue()


def write_rules(file: Path) -> None:
    """Replacements by longest match: characters in hexadecimal, the replaced ones first."""
    rules = (
        "A\u030a Å",
        "A B",
        "ﬁ fi",
        "① 1",
        "㍿ 株式会社",
        "\u00a0 \u0020",
        "\u3000 \u0020",
        "\u200b ",
    )
    codes = (
        "\t".join(" ".join(f"{ord(char):X}" for char in side) for side in rule.split(" ", 1))
        for rule in rules
    )
    file.write_text("\n".join(codes) + "\n")


def train() -> None:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    rules = FOLDER / "unigram/rules.tsv"
    write_rules(rules)
    unigram = train_sentencepiece(
        normalization_rule_tsv=str(rules),
        model_type="unigram",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        user_defined_symbols=["<sep>", "==", "▁the"],
        control_symbols=["[INST]", "[/INST]"],
    )
    bpe = train_sentencepiece(
        model_type="bpe",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>", "\n\n"],
        control_symbols=["[INST]", "[/INST]"],
    )
    rules.unlink()
    (FOLDER / "unigram/tokenizer.model").write_bytes(unigram)
    (FOLDER / "bpe/tokenizer.model").write_bytes(bpe)
    tekken = MistralTokenizer.v3(is_tekken=True).instruct_tokenizer.tokenizer
    whole = json.loads(tekken.file_path.read_text())
    vocab = whole["vocab"][:1500]
    config = {
        **whole["config"],
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + SPECIAL_TOKENS - 100,
        "default_num_special_tokens": SPECIAL_TOKENS,
    }
    cut = {"config": config, "vocab": vocab}
    (FOLDER / "tekken/tekken.json").write_text(json.dumps(cut, separators=(",", ":")) + "\n")
    lines = [f"{token['token_bytes']} {token['rank']}\n" for token in vocab]
    (FOLDER / "kimi/tiktoken.model").write_text("".join(lines))
    names = enumerate(KIMI_NAMES, len(vocab))
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(token_id): {"content": text, "special": text.startswith("[")}
            for token_id, text in names
        },
    }
    (FOLDER / "kimi/tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    if "--train" in sys.argv[1:]:
        train()
    CASES.write_text(json.dumps(cases(), ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
