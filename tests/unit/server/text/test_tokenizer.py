"""The tokenizer's calls: on which thread they run, how many wait, and that they equal the wheel's plain ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from baton.errors import QueueFull
from baton.server.text import tokenizer as module
from baton.server.text.tokenizer import INLINE_CHARS, MAX_WAITING, WORKERS, Tokenizer
from tests.support.goldens import token_goldens

FOLDERS = [token_goldens.DEMO, *(token_goldens.FOLDER / style for style in token_goldens.STYLES)]


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, HFTokenizer]:
    plain = HFTokenizer.from_file(str(request.param / "tokenizer.json"))
    plain.no_truncation()
    return Tokenizer(request.param), plain


@given(texts=st.lists(st.text(max_size=60), max_size=4), special=st.booleans())
@settings(max_examples=60, deadline=None)
def test_batch_calls_equal_plain_ones(
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


class BatchOnly:
    """Has the calls that release the GIL and no others; remembers the threads they ran on."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self.threads: list[str] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return self._hf.encode_batch_fast(texts, **options)


def test_long_texts_are_encoded_on_the_pool_by_a_call_that_releases_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer(token_goldens.DEMO)
    watched = BatchOnly(tokenizer._hf)
    monkeypatch.setattr(tokenizer, "_hf", watched)
    text = "router " * INLINE_CHARS
    asyncio.run(tokenizer.offload(len(text), lambda: tokenizer.encode(text)))
    assert [name.startswith("tokenize") for name in watched.threads] == [True]
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


def test_wheel_may_not_start_threads_of_its_own() -> None:
    assert module.os.environ["TOKENIZERS_PARALLELISM"] == "false"
