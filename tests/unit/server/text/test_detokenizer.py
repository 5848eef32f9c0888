"""Streamed text equals one decode of everything, however tokens are grouped; stop strings cut where a reader would."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from baton.server.text.detokenizer import (
    CONTEXT_TOKENS,
    MAX_CONTEXT_TOKENS,
    MAX_HELD_TOKENS,
    REPLACEMENT,
    Detokenizer,
    StopMatcher,
)
from baton.server.text.tokenizer import Tokenizer
from tests.support.models import tiny_model

Decode = Callable[[Sequence[int]], str]

UNICODE = st.text(
    st.one_of(
        st.characters(blacklist_categories=("Cs",)),
        st.sampled_from("👩‍👩‍👧‍👦é́世界ñ한글 \n\t🏳️‍🌈 the hello"),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_model.make(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def byte_fallback() -> HFTokenizer:
    """Like Llama 2's: words with ▁, bytes as <0xNN>, the first space of a text stripped."""
    words = ["<unk>", "<s>", "▁", "▁the", "▁baton", "a", "b", "▁a", "é", "世"]
    vocab = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = HFTokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def groups(ids: list[int], seed: int) -> list[list[int]]:
    rng, out = random.Random(seed), []
    while ids:
        n = rng.randint(1, 4)
        out.append(ids[:n])
        ids = ids[n:]
    return out


def word_ids(tokenizer: HFTokenizer, word: str) -> list[int]:
    """The word's token, or those of its bytes."""
    vocab = tokenizer.get_vocab()
    return [vocab[word]] if word in vocab else [vocab[f"<0x{b:02X}>"] for b in word.encode()]


def stream(
    decode: Decode, parts: list[list[int]], prompt: Sequence[int] = ()
) -> tuple[list[str], str]:
    """The pieces, and all text."""
    detok = Detokenizer(decode, prompt)
    pieces = [detok.feed(part) for part in parts]
    pieces.append(detok.flush())
    return pieces, "".join(pieces)


@given(text=UNICODE, seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_streamed_text_equals_full_decode(byte_level: Tokenizer, text: str, seed: int) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    pieces, streamed = stream(byte_level.decode, groups(ids, seed))
    assert streamed == byte_level.decode(ids) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces), "half a character was shown"


@given(ids=st.lists(st.integers(0, 383), max_size=60), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_any_tokens_stream_to_what_they_decode_to(
    byte_level: Tokenizer, ids: list[int], seed: int
) -> None:
    """Models emit byte sequences that are no text, and special tokens; every prefix shown is a prefix of the whole."""
    pieces, streamed = stream(byte_level.decode, groups(ids, seed))
    whole = byte_level.decode(ids)
    assert streamed == whole
    assert all(whole.startswith("".join(pieces[:i])) for i in range(len(pieces)))


@given(
    text=st.lists(
        st.sampled_from(["▁the", "▁baton", "▁a", "a", "▁", "世", "é", "😀", "界"]), max_size=20
    ),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_byte_fallback_tokens_stream_to_what_they_decode_to(
    byte_fallback: HFTokenizer, text: list[str], data: st.DataObject
) -> None:
    ids = [i for word in text for i in word_ids(byte_fallback, word)]

    def decode(part: Sequence[int]) -> str:
        return str(byte_fallback.decode(list(part), skip_special_tokens=True))

    _, streamed = stream(decode, groups(ids, data.draw(st.integers(0, 2**32))))
    assert streamed == decode(ids)


@given(
    prompt=st.lists(
        st.sampled_from(["<s>", "▁the", "▁baton", "▁a", "a", "▁", "世", "é", "<unk>"]),
        max_size=20,
    ),
    answer=st.lists(st.sampled_from(["▁the", "▁a", "a", "▁", "世", "é", "😀", "<s>"]), max_size=8),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_answer_continues_the_text_of_its_prompt(
    byte_fallback: HFTokenizer, prompt: list[str], answer: list[str], data: st.DataObject
) -> None:
    """Right value: one decode of prompt and answer together."""

    def ids_of(words: list[str]) -> list[int]:
        return [i for word in words for i in word_ids(byte_fallback, word)]

    def decode(part: Sequence[int]) -> str:
        return str(byte_fallback.decode(list(part), skip_special_tokens=True))

    before = ids_of(prompt)
    ids = ids_of(answer)
    _, streamed = stream(decode, groups(ids, data.draw(st.integers(0, 2**32))), before)
    assert decode(before) + streamed == decode(before + ids)


@given(prompt=UNICODE, answer=UNICODE, seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_prompt_changes_nothing_for_byte_level_tokenizers(
    byte_level: Tokenizer, prompt: str, answer: str, seed: int
) -> None:
    ids = byte_level.encode(answer, add_special_tokens=False)
    _, streamed = stream(byte_level.decode, groups(ids, seed), byte_level.encode(prompt))
    assert streamed == answer


def test_half_a_character_at_the_end_of_a_prompt_is_no_context(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀b", add_special_tokens=False)
    detok = Detokenizer(byte_level.decode, ids[:3])
    assert detok.feed(ids[3:]) + detok.flush() == byte_level.decode(ids[3:])


def test_context_of_a_long_prompt_is_short(byte_level: Tokenizer) -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return byte_level.decode(ids)

    Detokenizer(decode, byte_level.encode("hello world " * 300))
    assert seen == [CONTEXT_TOKENS]
    Detokenizer(decode, [0] * 10_000)
    assert max(seen) == MAX_CONTEXT_TOKENS


def test_text_before_half_a_character_is_not_held_back(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀", add_special_tokens=False)
    detok = Detokenizer(byte_level.decode)
    assert detok.feed(ids[:2]) == "a"
    assert detok.feed(ids[2:]) == "😀"


def test_bytes_that_never_become_a_character_come_out_at_last(byte_level: Tokenizer) -> None:
    broken = byte_level.encode("é", add_special_tokens=False)[1]
    detok = Detokenizer(byte_level.decode)
    shown = "".join(detok.feed([broken]) for _ in range(2 * MAX_HELD_TOKENS))
    assert shown.count(REPLACEMENT) == 2 * MAX_HELD_TOKENS - 1
    assert shown + detok.flush() == byte_level.decode([broken] * 2 * MAX_HELD_TOKENS)


def test_long_streams_keep_a_short_window(byte_level: Tokenizer) -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return byte_level.decode(ids)

    ids = byte_level.encode("hello world " * 300, add_special_tokens=False)
    _, streamed = stream(decode, [[i] for i in ids])
    assert streamed == "hello world " * 300
    assert max(seen) <= 3


# ---- stop strings ------------------------------------------------------------------------------------------------


def naive_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Character by character; of several that end together the longest."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text("ab<", max_size=24),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_cut_where_a_character_reader_would(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    edges = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    shown = "".join(matcher.feed(text[a:b]) for a, b in pairwise(edges))
    shown += matcher.flush()
    kept, stop = naive_stop(text, stops)
    assert matcher.matched == stop
    assert shown == kept + (stop if include and stop else "")


def test_possible_beginning_is_held_until_it_is_decided() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("a</e") == "a"
    assert matcher.feed("x</") == "</ex"
    assert matcher.feed("end>rest") == ""
    assert matcher.matched == "</end>"


def test_stop_strings_are_not_searched_before_min_tokens() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.feed("ab", search=False) == "ab"
    assert matcher.feed("ab") == "a"
    assert matcher.matched == "b"


def test_token_bytes_are_exact(byte_level: Tokenizer) -> None:
    for text in ("héllo 😀", " the baton\n", "世界"):
        ids = byte_level.encode(text, add_special_tokens=False)
        assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()
    assert byte_level.token_bytes(1) == b"</s>"
    assert byte_level.token_bytes(10**6) == b""


def test_llama_style_token_bytes(byte_fallback: HFTokenizer, tmp_path: Path) -> None:
    byte_fallback.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    vocab = byte_fallback.get_vocab()
    assert tokenizer.token_bytes(vocab["▁the"]) == b" the"
    assert tokenizer.token_bytes(vocab["<0xE4>"]) == b"\xe4"
