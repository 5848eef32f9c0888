"""The tokenizer's calls: on which thread they run, how many wait, and that they equal the tokenizers wheel's."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from baton.errors import QueueFull
from baton.server.text.tokenizer import (
    INLINE_CHARS,
    MAX_WAITING,
    NO_LIMIT,
    WORKERS,
    Tokenizer,
)
from tests.support.goldens import token_goldens

FOLDERS = [token_goldens.DEMO, *(token_goldens.FOLDER / style for style in token_goldens.STYLES)]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, HFTokenizer]:
    plain = HFTokenizer.from_file(str(request.param / "tokenizer.json"))
    plain.no_truncation()
    return Tokenizer(request.param), plain


@given(texts=st.lists(st.text(max_size=60), max_size=4), special=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_and_texts_are_the_wheels(
    pair: tuple[Tokenizer, HFTokenizer], texts: list[str], special: bool
) -> None:
    ours, plain = pair
    ids = [plain.encode(text, add_special_tokens=special).ids for text in texts]
    assert [ours.encode(text, add_special_tokens=special) for text in texts] == ids
    assert ours.decode_batch(ids, skip_special_tokens=special) == [
        plain.decode(row, skip_special_tokens=special) for row in ids
    ]


@given(text=st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_token_stands_for_more_characters_than_the_bound(
    pair: tuple[Tokenizer, HFTokenizer], text: str
) -> None:
    ours, _ = pair
    assert len(ours.encode(text, add_special_tokens=False)) * ours.max_chars_per_token >= len(text)


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread keeps the GIL until it releases it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("no_forced_switches")
def test_long_texts_are_encoded_on_the_pool_without_the_gil() -> None:
    tokenizer = Tokenizer(token_goldens.DEMO)
    turns = 0

    def encode() -> tuple[str, int]:
        before = turns
        tokenizer.encode_prompt("router " * 100_000, True, NO_LIMIT, param="prompt")
        return threading.current_thread().name, turns - before

    async def turn_the_loop() -> tuple[str, int]:
        nonlocal turns
        work = asyncio.ensure_future(tokenizer.offload(INLINE_CHARS + 1, encode))
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return await work

    thread, turns_meanwhile = asyncio.run(turn_the_loop())
    assert thread.startswith("tokenize")
    assert turns_meanwhile > 0
    tokenizer.close()


def test_texts_that_wait_for_a_thread_are_bounded() -> None:
    tokenizer = Tokenizer(token_goldens.DEMO)
    gate = threading.Event()

    async def fill() -> None:
        size = INLINE_CHARS + 1
        waiting = [
            asyncio.ensure_future(tokenizer.offload(size, gate.wait))
            for _ in range(WORKERS + MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await tokenizer.offload(size, gate.wait)
        assert await tokenizer.offload(1, lambda: "short") == "short"
        gate.set()
        assert all(await asyncio.gather(*waiting))
        assert await tokenizer.offload(size, lambda: "again") == "again"

    asyncio.run(fill())
    tokenizer.close()
