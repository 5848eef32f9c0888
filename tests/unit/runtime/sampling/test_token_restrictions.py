"""allowed_token_ids and bad_words: draws as from a plain row whose other logits are -inf."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runtime.sampling import grammar_masks, step_sampler
from baton.runtime.sampling.bad_words import BadWords
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import sample_tokens
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN
from baton.sched.types.request import SamplingParams
from tests.support.effort import examples
from tests.support.models.allowed_ids import pack_ids
from tests.support.models.plain_sampler import sample

VOCAB = 70
SMALL_IDS = st.integers(0, 5)
WORDS = st.lists(st.lists(SMALL_IDS, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)


def naive_bans(words: tuple[tuple[int, ...], ...], output: list[int]) -> set[int]:
    """vLLM 0.33, `_apply_bad_words_single_batch`."""
    banned = set()
    for word in words:
        if len(word) > len(output) + 1:
            continue
        prefix_length = len(word) - 1
        actual_prefix = output[-prefix_length:] if prefix_length > 0 else []
        if actual_prefix == list(word[:prefix_length]):
            banned.add(word[-1])
    return banned


@given(words=WORDS, output=st.lists(SMALL_IDS, max_size=8))
def test_banned_tokens_are_vllms(words: tuple[tuple[int, ...], ...], output: list[int]) -> None:
    bad_words = BadWords(words)
    for token in output:
        bad_words.append(token)
    assert set(bad_words.banned_tokens()) == naive_bans(words, output)
    if not bad_words.need_tokens:
        assert naive_bans(words, output) == naive_bans(words, [])


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {9}),
        ([4], {9, 5, 6}),
        ([1, 2], {9, 3}),
        ([2, 1], {9}),
        ([4, 1, 2], {9, 3}),
        ([1, 2, 4], {9, 5, 6}),
        ([7, 7, 8, 4], {9, 5, 6, 1}),
        ([7, 8, 4], {9, 5, 6}),
    ],
)
def test_words_with_beginnings_of_several_lengths_ban_their_last_tokens(
    output: list[int], banned: set[int]
) -> None:
    words = ((9,), (4, 5), (4, 6), (1, 2, 3), (7, 7, 8, 4, 1))
    bad_words = BadWords(words)
    bad_words.extend(output[:1])
    for token in output[1:]:
        bad_words.append(token)
    assert set(bad_words.banned_tokens()) == banned == naive_bans(words, output)


@pytest.mark.parametrize(
    ("few", "is_on_host"), [(0, True), (4096, True), (0, False)], ids=["mask", "few", "device"]
)
@given(
    seed=st.integers(0, 1000),
    allowed=st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1),
    words=WORDS,
    output=st.lists(SMALL_IDS, max_size=6),
    filters=st.sampled_from(
        ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "logprobs": 2})
    ),
    min_new_tokens=st.integers(0, 8),
    bias=st.sampled_from(((), ((3, 20.0), (60, -20.0)))),
)
@settings(max_examples=examples(150), deadline=None)
def test_draw_is_that_of_a_plain_row_with_forbidden_logits_at_minus_infinity(
    few: int,
    is_on_host: bool,
    seed: int,
    allowed: set[int] | None,
    words: tuple[tuple[int, ...], ...],
    output: list[int],
    filters: dict[str, float],
    min_new_tokens: int,
    bias: tuple[tuple[int, float], ...],
) -> None:
    """Between two free rows, which draw what they draw alone. The prompt ends with a bad word's beginning, which counts
    for nothing.
    """
    plain_params = SamplingParams(seed=seed, logit_bias=bias, **filters)  # type: ignore[arg-type]
    params = SamplingParams(
        seed=seed,
        logit_bias=bias,
        allowed_tokens=b"" if allowed is None else pack_ids(allowed),
        bad_words=words,
        min_new_tokens=min_new_tokens,
        stop_token_ids=(2, 69),
        **filters,  # type: ignore[arg-type]
    )
    prompt = [0, 1, 2, 3, 4, 5]
    history = [*prompt, *output]
    row = SampleRow(params, len(prompt), history)
    plain = SampleRow(plain_params, len(prompt), history)
    forbidden = naive_bans(words, output)
    if len(output) < min_new_tokens:
        forbidden |= {2, 69}
    if allowed is not None:
        forbidden |= set(range(VOCAB)) - allowed
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3
    expected = logits.clone()
    expected[1, torch.tensor(sorted(forbidden), dtype=torch.int64)] = -torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_masks, "FEW_TOKENS", few)
        patch.setattr(step_sampler, "is_on_host", lambda _: is_on_host)
        result = sample_tokens(logits.clone(), [plain, row, plain])
    if len(forbidden) == VOCAB:
        assert result.tokens[1] == GRAMMAR_FAILED_TOKEN
        return
    assert result.tokens == sample(expected, [plain, plain, plain]).tokens
    raw = sample(logits.clone(), [plain] * 3).logprobs
    for i, logprobs in result.logprobs.items():
        assert logprobs.top_ids == raw[i].top_ids, "logprobs are those of the raw logits"


def test_row_without_restrictions_is_plain_and_needs_no_tokens() -> None:
    greedy = {"temperature": 0.0}
    assert SampleRow(SamplingParams(**greedy), 1, [0]).is_always_plain  # type: ignore[arg-type]
    for more in ({"bad_words": ((1,),)}, {"allowed_tokens": pack_ids([1])}):
        row = SampleRow(SamplingParams(**greedy, **more), 1, [0])  # type: ignore[arg-type]
        assert (row.is_plain, row.needs_tokens) == (False, False)
    row = SampleRow(SamplingParams(bad_words=((1, 2),)), 1, [0])
    assert row.needs_tokens


def test_resumed_answer_ends_with_the_tokens_of_the_first_engine() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((7, 8, 9),), resumed=2)
    logits = torch.zeros((1, VOCAB))
    logits[0, 9] = 1.0
    assert sample_tokens(logits.clone(), [SampleRow(params, 4, [7, 8, 7, 8])]).tokens == [0]
    prompt_only = SamplingParams(temperature=0.0, bad_words=((7, 8, 9),), resumed=1)
    assert sample_tokens(logits, [SampleRow(prompt_only, 4, [7, 8, 7, 8])]).tokens == [9]


def test_nothing_left_beside_free_rows_fails_that_row_alone() -> None:
    left = {"allowed_tokens": pack_ids([5, 6])}
    rows = [
        SampleRow(SamplingParams(temperature=t, bad_words=((5,), (6,)), **left), 1, [0])  # type: ignore[arg-type]
        for t in (0.0, 1.0)
    ]
    free = SampleRow(SamplingParams(temperature=0.0), 1, [0])
    result = sample_tokens(torch.zeros((3, VOCAB)), [*rows, free])
    assert result.tokens == [GRAMMAR_FAILED_TOKEN, GRAMMAR_FAILED_TOKEN, 0]
