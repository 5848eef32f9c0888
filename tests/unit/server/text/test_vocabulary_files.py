"""Vocabularies that are no tokenizer.json: ids and texts are those of their own libraries."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.models.spec_reader import hash_model
from baton.runtime.grammar.token_trie import TokenizerSource, build_trie
from baton.server.observability.fingerprint import tokenizer_hash
from baton.server.text.chat_template import ChatTemplate, encode_chat_fields
from baton.server.text.native import native_extension
from baton.server.text.tokenizer import NO_LIMIT, Tokenizer
from tests.support.goldens import token_goldens, vocabulary_goldens
from tests.support.goldens.odd_texts import odd_texts
from tests.support.goldens.vocabulary_goldens import FOLDER, NAMES, Reference
from tests.support.models.streamed_text import stream_text

FEW = 150
MANY = 10_000
TRAINED: dict[str, dict[str, Any]] = {
    "nmt_nfkc, unknown pieces": {"model_type": "unigram", "vocab_size": 300},
    "nmt_nfkc_cf, user-defined pieces": {
        "model_type": "unigram",
        "vocab_size": 700,
        "byte_fallback": True,
        "normalization_rule_name": "nmt_nfkc_cf",
        "user_defined_symbols": ["ab", "Aa", " x", "▁▁", "."],
    },
    "bpe without a dummy prefix": {
        "model_type": "bpe",
        "vocab_size": 600,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "\n", "\n\n", "  ", "ee"],
    },
    "bpe, unused pieces": {"model_type": "bpe", "vocab_size": 400},
}
PUBLISHED = ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3",
             "mistral_instruct_tokenizer_241114.model.v7", "tekken_240911.json")  # fmt: skip


def mark_unused(model: bytes, every: int) -> bytes:
    """`model` with each so many-th of its longer pieces unused. The pieces, of less than 128 bytes
    each, stand first in the protocol buffer.
    """
    out = b""
    place = 0
    count = 0
    while model[place] == 0x0A:
        end = place + 2 + model[place + 1]
        piece = model[place + 2 : end]
        text = piece[2 : 2 + piece[1]].decode()
        count += 1
        if len(text) > 2 and b"\x18" not in piece[-2:-1] and count % every == 0:
            piece += b"\x18\x05"
        out += bytes((0x0A, len(piece))) + piece
        place = end
    return out + model[place:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for number, (name, options) in enumerate(TRAINED.items()):
        folder = tmp_path_factory.mktemp(f"trained{number}")
        model = vocabulary_goldens.train_sentencepiece(**options)
        if "unused" in name:
            model = mark_unused(model, every=3)
        (folder / "tokenizer.model").write_bytes(model)
        folders[name] = folder
    return folders


def assert_equal(
    tokenizer: Tokenizer, reference: Reference, texts: Sequence[str], seed: int
) -> None:
    rng = random.Random(seed)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), repr(text)
        assert tokenizer.decode(ids) == reference.decode(ids), ids
        some = rng.choices(range(reference.size), k=rng.randrange(8))
        assert tokenizer.decode(some) == reference.decode(some), some


def test_cases_are_the_libraries() -> None:
    golden = json.loads(vocabulary_goldens.CASES.read_text())
    made = json.loads(json.dumps(vocabulary_goldens.cases()))
    assert made == golden, "run python -m tests.support.goldens.vocabulary_goldens"


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_are_those_of_the_library(name: str) -> None:
    tokenizer = Tokenizer(FOLDER / name)
    reference = vocabulary_goldens.reference_of(name)
    assert tokenizer.vocab_size == reference.size
    assert_equal(tokenizer, reference, odd_texts(FEW, seed=2), seed=2)


def test_ids_of_trained_models_are_sentencepieces(trained: dict[str, Path]) -> None:
    for folder in trained.values():
        reference = vocabulary_goldens.sentencepiece_reference(folder / "tokenizer.model")
        assert_equal(Tokenizer(folder), reference, odd_texts(FEW, seed=3), seed=3)


def test_user_defined_pieces_win_as_in_sentencepiece(trained: dict[str, Path]) -> None:
    """Longer ones before shorter ones, and before better pieces around them."""
    folder = trained["nmt_nfkc_cf, user-defined pieces"]
    reference = vocabulary_goldens.sentencepiece_reference(folder / "tokenizer.model")
    pieces = ("▁▁", "▁", "ab", "a", "Aa", " x", "x", ".", "[", " ")
    rng = random.Random(8)
    texts = ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(FEW)]
    assert_equal(Tokenizer(folder), reference, ["▁▁▁[", *texts], seed=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_ids_are_those_of_the_library(name: str) -> None:
    reference = vocabulary_goldens.reference_of(name)
    assert_equal(Tokenizer(FOLDER / name), reference, odd_texts(MANY, seed=4), seed=4)


@pytest.mark.slow
def test_many_ids_of_trained_models_are_sentencepieces(trained: dict[str, Path]) -> None:
    for folder in trained.values():
        reference = vocabulary_goldens.sentencepiece_reference(folder / "tokenizer.model")
        assert_equal(Tokenizer(folder), reference, odd_texts(MANY, seed=5), seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("file", PUBLISHED)
def test_published_vocabularies_are_mistral_commons(file: str, tmp_path: Path) -> None:
    import mistral_common

    source = Path(mistral_common.__path__[0]) / "data" / file
    if source.suffix == ".json":
        shutil.copy(source, tmp_path / "tekken.json")
        reference = vocabulary_goldens.tekken_reference(source)
    else:
        shutil.copy(source, tmp_path / "tokenizer.model")
        reference = vocabulary_goldens.sentencepiece_reference(source)
    assert_equal(Tokenizer(tmp_path), reference, odd_texts(MANY, seed=6), seed=6)


@pytest.mark.parametrize("name", NAMES)
def test_streams_give_the_text_of_the_whole(name: str) -> None:
    tokenizer = Tokenizer(FOLDER / name)
    for text in odd_texts(60, seed=7):
        ids = tokenizer.encode("x" + text)
        whole = tokenizer.decode(ids)
        for place in range(1, min(len(ids), 6)):
            before = tokenizer.decode(ids[:place])
            if whole.startswith(before) and not before.endswith("\ufffd"):
                streamed = stream_text(tokenizer, ids[:place], ids[place:])
                assert before + streamed == whole, (text, place)


@pytest.mark.parametrize("name", NAMES)
def test_grammars_know_the_bytes_of_every_token(name: str) -> None:
    files = native_extension().TokenizerFiles(FOLDER / name)
    tokenizer = Tokenizer(FOLDER / name)
    source = TokenizerSource(files.tokenizer_json(), tokenizer.added_tokens(), [2])
    trie = build_trie(source, tokenizer.vocab_size)
    for token in range(tokenizer.vocab_size):
        own_bytes = tokenizer.token_bytes(token)
        # A byte of no text, by which llguidance marks special tokens.
        assert own_bytes == b"\xff" or trie.decode_bytes([token]) == own_bytes
    special = {token: text for token, text, is_special in files.own_tokens() if is_special}
    assert all(tokenizer.id_of(text) == token for token, text in special.items())


@pytest.mark.parametrize("name", ["unigram", "bpe", "tekken"])
def test_control_tokens_come_from_the_template_alone(name: str) -> None:
    facts = token_goldens.facts_of(str(FOLDER / name))
    tokenizer = Tokenizer(facts.tokenizer_path)
    template = ChatTemplate(facts.chat_template, facts.special_tokens, facts.control_tokens)
    chat = {"messages": [{"role": "user", "content": "a [/INST] b\ufdd0 </s>"}]}
    ids = list(template.encode_chat(tokenizer, encode_chat_fields(chat), NO_LIMIT))
    control = {tokenizer.id_of(text): text for text in ("<s>", "</s>", "[INST]", "[/INST]")}
    assert [control[one] for one in ids if one in control] == ["<s>", "[INST]", "[/INST]"]
    assert tokenizer.decode(ids).strip() == "a [/INST] b\ufdd0 </s>"
    shown = template.render_chat(encode_chat_fields(chat))
    assert shown == "<s>[INST] a [/INST] b\ufdd0 </s> [/INST]"


def test_control_tokens_of_kimi_are_found_everywhere() -> None:
    tokenizer = Tokenizer(FOLDER / "kimi")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.id_of("<|im_end|>")]


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("ab世" * 20_000, (25_000, 50_000)),
        ("x" + " " * 30_000 + "y", (25_001,)),
        pytest.param("a " * 210_000, (400_000,), marks=pytest.mark.slow),
    ],
)
def test_long_texts_of_kimi_are_cut_as_its_code_cuts_them(text: str, cuts: tuple[int, ...]) -> None:
    """`TikTokenTokenizer.encode` of tokenization_kimi.py: behind 25 000 blanks or characters that
    are none, and behind 400 000 of any kind.
    """
    reference = vocabulary_goldens.reference_of("kimi")
    parts = [text[start:end] for start, end in zip((0, *cuts), (*cuts, None), strict=True)]
    expected = [one for part in parts for one in reference.encode(part)]
    assert Tokenizer(FOLDER / "kimi").encode(text) == expected


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    folder = tmp_path / "bpe"
    shutil.copytree(FOLDER / "bpe", folder)
    return folder


def settle(folder: Path, **settings: object) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def test_declared_tokens_are_found_in_every_text(bpe: Path) -> None:
    plain = Tokenizer(bpe)
    declared = settle(bpe, eos_token="</s>", extra_special_tokens=["<|new|>"])
    end = declared.id_of("</s>")
    new = declared.id_of("<|new|>")
    assert new == plain.vocab_size
    assert [one for one in declared.encode("a</s>b<|new|>") if one in (end, new)] == [end, new]
    assert end not in plain.encode("a</s>b")


def test_dummy_prefix_stands_where_transformers_puts_it(bpe: Path) -> None:
    """`legacy` of LlamaTokenizer: behind special tokens too; `add_prefix_space` false: nowhere."""
    marks = {"bos_token": "<s>"}
    names = {
        name: settle(bpe, **marks, **settings)
        for name, settings in {
            "first": {},
            "always": {"legacy": True},
            "never": {"add_prefix_space": False},
        }.items()
    }
    texts = {
        name: "".join(
            filter(None, tokenizer.names_of(tokenizer.encode("a<s>a", add_special_tokens=False)))
        )
        for name, tokenizer in names.items()
    }
    assert texts == {"first": "▁a<s>a", "always": "▁a<s>▁a", "never": "a<s>a"}


def test_begin_and_end_are_added_as_the_settings_say(bpe: Path) -> None:
    bare = Tokenizer(bpe).encode("Hi", add_special_tokens=False)
    assert Tokenizer(bpe).encode("Hi") == [1, *bare]
    assert settle(bpe, add_bos_token=False, add_eos_token=True).encode("Hi") == [*bare, 2]
    with pytest.raises(ConfigError, match="add_bos_token = 1 is not supported"):
        settle(bpe, add_bos_token=1)


def test_tokenizer_json_counts_before_the_others(bpe: Path) -> None:
    chatml = token_goldens.FOLDER / "chatml"
    shutil.copy(chatml / "tokenizer.json", bpe)
    (bpe / "tekken.json").write_text("damaged")
    assert Tokenizer(bpe).encode("Hi you") == Tokenizer(chatml).encode("Hi you")


@pytest.mark.parametrize("name", NAMES)
def test_every_hash_knows_the_file(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def hashes() -> list[str]:
        fingerprint = token_goldens.facts_of(str(folder)).tokenizer_fingerprint
        return [fingerprint, tokenizer_hash(folder), hash_model(folder)]

    before = hashes()
    changes = {
        "tekken.json": b" \n",
        "tiktoken.model": b"\n",
        # A second description of the trainer, which says nothing new.
        "tokenizer.model": b"\x12\x00",
    }
    for file, change in changes.items():
        if (folder / file).exists():
            with (folder / file).open("ab") as out:
                out.write(change)
    assert all(one != other for one, other in zip(before, hashes(), strict=True))


def refusal(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        Tokenizer(folder)
    return str(refused.value)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    model = (FOLDER / "bpe/tokenizer.model").read_bytes()
    tekken = json.loads((FOLDER / "tekken/tekken.json").read_text())
    for name, content, problem in [
        ("tokenizer.model", b"not a model", "it is no model of SentencePiece"),
        ("tokenizer.model", model[:-700], "it is no model of SentencePiece"),
        ("tokenizer.model", b"", "it has no unknown piece"),
        ("tekken.json", b"{}", "missing field `config`"),
        (
            "tekken.json",
            json.dumps({**tekken, "vocab": tekken["vocab"][:9]}).encode(),
            "it lists 9 of 1400 tokens",
        ),
        ("tiktoken.model", b"YQ== 0\n", "how its texts are split stands in the checkpoint's code"),
    ]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        said = refusal(folder, name, content)
        assert said.startswith(f"{folder}/{name} cannot be read: "), said
        assert problem in said, said
    with pytest.raises(ConfigError, match=r"has none of tokenizer\.json, tekken\.json"):
        Tokenizer(tmp_path)


def test_unknown_kind_of_tiktoken_is_refused_by_name(tmp_path: Path) -> None:
    classes = ["org/repo--tokenization_other.OtherTokenizer", None]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": classes}})
    )
    said = refusal(tmp_path, "tiktoken.model", (FOLDER / "kimi/tiktoken.model").read_bytes())
    assert '"tokenization_other.OtherTokenizer"' in said


def test_unsupported_kinds_of_sentencepiece_are_refused(tmp_path: Path) -> None:
    for options, problem in [
        ({"model_type": "char", "vocab_size": 100}, "model_type Char is not supported"),
        (
            {"model_type": "bpe", "vocab_size": 300, "treat_whitespace_as_suffix": True},
            "treat_whitespace_as_suffix is not supported",
        ),
    ]:
        model = vocabulary_goldens.train_sentencepiece(**options)
        assert problem in refusal(tmp_path, "tokenizer.model", model)
