"""The n-gram drafter as an engine calls it, against transformers' prompt lookup.

The Rust tests compare it with a naive model: engine/drafts/src/tests.rs.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import pytest
import torch
from baton._native import NgramDrafter
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from tests.support.effort import examples

MOST = 5
REPEATED_TEXTS = st.lists(st.integers(0, 5), min_size=2, max_size=40)


def packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpacked(draft: bytes) -> list[int]:
    return array("i", draft).tolist()


def start(
    drafter: NgramDrafter,
    handle: int,
    tokens: Sequence[int],
    *,
    prompt_len: int = 0,
    group: bytes = b"",
) -> None:
    drafter.start(handle, group, packed(tokens), prompt_len)


def looked_up(tokens: list[int]) -> list[int]:
    """The candidates of transformers: behind the first place of the longest n-gram."""
    lookup = PromptLookupCandidateGenerator(
        num_output_tokens=MOST, max_matching_ngram_size=len(tokens), max_length=10**6
    )
    candidates, _ = lookup.get_candidates(torch.tensor([tokens]))
    return candidates[0, len(tokens) :].tolist()


def earlier_places(tokens: list[int]) -> list[int]:
    """Places behind the longest n-gram at the end of the text."""
    for size in range(len(tokens) - 1, 0, -1):
        ends = range(size, len(tokens))
        places = [end for end in ends if tokens[end - size : end] == tokens[-size:]]
        if places:
            return places
    return []


@settings(max_examples=examples(600))
@given(tokens=REPEATED_TEXTS)
def test_draft_is_that_of_prompt_lookup_where_longest_ngram_stands_once(tokens: list[int]) -> None:
    drafter = NgramDrafter(min_match=1, store_tokens=0)
    start(drafter, 1, tokens)
    draft = unpacked(drafter.propose(1, MOST))
    theirs = looked_up(tokens)
    assert bool(draft) == bool(theirs)
    if len(earlier_places(tokens)) == 1:
        # They end at the end of the text, where we repeat what the draft began.
        assert draft[: len(theirs)] == theirs


@settings(max_examples=examples(240))
@given(tokens=REPEATED_TEXTS, cut=st.integers(0, 40), size=st.integers(1, 7))
def test_tokens_that_are_appended_in_pieces_give_the_draft_of_the_whole(
    tokens: list[int], cut: int, size: int
) -> None:
    whole = NgramDrafter(min_match=2, store_tokens=0)
    start(whole, 1, tokens)
    pieces = NgramDrafter(min_match=2, store_tokens=0)
    start(pieces, 1, tokens[:cut])
    for begin in range(cut, len(tokens), size):
        pieces.propose(1, MOST)
        pieces.append(1, packed(tokens[begin : begin + size]))
    assert pieces.propose(1, MOST) == whole.propose(1, MOST)


def test_draft_has_at_most_the_tokens_that_are_asked_for() -> None:
    drafter = NgramDrafter(min_match=2, store_tokens=0)
    start(drafter, 1, [1, 2, 3, 4, 5, 1, 2])
    assert drafter.propose(1, 0) == b""
    assert unpacked(drafter.propose(1, 2)) == [3, 4]
    assert unpacked(drafter.propose(1, 7)) == [3, 4, 5, 1, 2, 3, 4]


def test_draft_of_each_request_stands_in_its_place() -> None:
    drafter = NgramDrafter(min_match=2, store_tokens=0)
    start(drafter, 7, [1, 2, 3, 1, 2])
    start(drafter, 8, [1, 2, 4, 1, 2])
    drafts = drafter.propose_all([8, 99, 7], [1, 1, 1])
    assert [unpacked(draft) for draft in drafts] == [[4], [], [3]]
    with pytest.raises(ValueError, match="2 handles, but 1 limits"):
        drafter.propose_all([7, 8], [1])


def test_answer_of_finished_request_is_proposed_in_its_group_alone() -> None:
    drafter = NgramDrafter(min_match=2, store_tokens=1000)
    start(drafter, 1, [9, 9, 1, 2, 3, 4], prompt_len=2, group=b"tenant\0salt")
    assert drafter.stored_tokens == 0
    drafter.finish(1)
    assert drafter.requests == 0
    assert drafter.stored_tokens == 4 + 32
    for group, draft in {b"tenant\0salt": [3, 4], b"tenant\0": [], b"": []}.items():
        start(drafter, 2, [1, 2], group=group)
        assert unpacked(drafter.propose(2, MOST)) == draft


def test_prediction_is_proposed_from_first_token() -> None:
    drafter = NgramDrafter(min_match=2, store_tokens=0)
    drafter.start(1, b"", packed([1, 2]), 2, packed([3, 4, 5, 6, 7, 8]))
    assert unpacked(drafter.propose(1, 3)) == [3, 4, 5]
    drafter.append(1, packed([3, 4]))
    assert unpacked(drafter.propose(1, 3)) == [5, 6, 7]


def test_handles_that_were_never_started_are_ignored() -> None:
    drafter = NgramDrafter(min_match=1, store_tokens=1000)
    drafter.append(5, packed([1, 1]))
    assert drafter.propose(5, 3) == b""
    drafter.finish(5)
    assert drafter.stored_tokens == 0


def test_wrong_arguments_are_refused() -> None:
    for min_match in (0, 65):
        with pytest.raises(ValueError, match=f"min_match is {min_match} tokens"):
            NgramDrafter(min_match=min_match, store_tokens=0)
    drafter = NgramDrafter(min_match=1, store_tokens=0)
    with pytest.raises(ValueError, match="the prompt has 3 tokens, but prompt and answer have 2"):
        start(drafter, 1, [1, 2], prompt_len=3)
    with pytest.raises(ValueError, match="5 bytes are no int32 token ids"):
        drafter.append(1, b"12345")


def test_threads_share_a_drafter() -> None:
    drafter = NgramDrafter(min_match=2, store_tokens=100)
    text = packed([1, 2, 3, 4] * 500)

    def draft(first: int) -> None:
        for handle in range(first, first + 50):
            drafter.start(handle, b"", text, 0)
            drafter.append(handle, packed([1, 2]))
            drafts.append(drafter.propose(handle, 2))
            drafter.finish(handle)

    drafts: list[bytes] = []
    threads = [threading.Thread(target=draft, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(drafts) == {packed([3, 4])}
    assert len(drafts) == 150
    assert drafter.requests == 0
