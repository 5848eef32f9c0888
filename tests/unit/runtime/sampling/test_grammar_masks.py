"""Masks: the tokens that a matcher accepts, and draws among them as a plain sampler with the others
at -inf.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from baton.runtime.grammar import token_masks
from baton.runtime.grammar.sequence_grammar import SequenceGrammar
from baton.runtime.grammar.token_constraint import GrammarState
from baton.runtime.grammar.token_masks import MaskFiller, allowed_ids, count_allowed, is_allowed
from baton.runtime.sampling import grammar_masks
from baton.runtime.sampling.grammar_masks import apply_packed_masks
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import sample_tokens
from baton.sched.types.plan import GRAMMAR_FAILED_TOKEN, INVALID_TOKEN
from baton.sched.types.request import SamplingParams
from tests.support.effort import examples
from tests.support.models.checkpoints import EOS, VOCAB, write_tokenizer

EOS_IDS = frozenset((EOS,))
GRAMMARS = (
    "start: /[a-y]{1,9}/",
    'start: "yes" | "no" | "yesterday"',
    'start: %json {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}',
    "start: r\nr: /a/ r /b/ | /c/",
    "start: /(?s:.){0,20}/",
)


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return LLTokenizer((path / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=[EOS])


def matcher(trie: LLTokenizer, text: str) -> LLMatcher:
    made = LLMatcher(trie, text, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def grammar(trie: LLTokenizer, text: str, output: list[int] | None = None) -> SequenceGrammar:
    return SequenceGrammar(matcher(trie, text), EOS_IDS, output or ())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("text", GRAMMARS)
def test_mask_holds_exactly_the_tokens_that_are_accepted(
    trie: LLTokenizer, text: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_masks, "PARALLEL_SECS", 0.0)
    filler = MaskFiller(trie.vocab_size, VOCAB, threads)
    rng = random.Random(text)
    rows = [grammar(trie, text) for _ in range(3)]
    for _ in range(12):
        masks, usable = filler.fill_masks(rows)
        assert usable == [True] * 3
        for row, mask in zip(rows, masks, strict=True):
            assert row.matcher is not None
            accepted = [t for t in range(VOCAB) if row.matcher.validate_tokens([t]) == 1]
            if row.state is GrammarState.OPEN:
                expected = sorted({*accepted, *([EOS] if row.matcher.is_accepting() else [])})
                assert allowed_ids(mask).tolist() == expected
                assert count_allowed(mask) == len(expected)
                assert [t for t in range(VOCAB) if is_allowed(mask, t)] == expected
            choices = [t for t in allowed_ids(mask).tolist() if t != EOS]
            if choices and row.state is GrammarState.OPEN:
                row.advance(rng.choice(choices))


@pytest.mark.parametrize("threads", [2, 3, 4, 8])
def test_masks_are_the_same_whatever_threads_and_lexers_fill_them(
    trie: LLTokenizer, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of few lexers, in any order, beside rows without a matcher and rows without a grammar."""
    monkeypatch.setattr(token_masks, "PARALLEL_SECS", 0.0)
    rng = random.Random(threads)
    bases = [matcher(trie, text) for text in GRAMMARS]
    kinds = [rng.randrange(len(bases)) for _ in range(40)]
    several = MaskFiller(trie.vocab_size, VOCAB, threads)

    def rows() -> list[tuple[int, SequenceGrammar]]:
        made = [
            SequenceGrammar(bases[kind].deep_copy(), EOS_IDS, (), lexer=bases[kind])
            for kind in kinds
        ]
        made[7] = SequenceGrammar(None, EOS_IDS)
        return [(2 * i, row) for i, row in enumerate(made)]

    expected = np.full((80, -(-VOCAB // 32)), -1, np.int32)
    found = expected.copy()
    failed = MaskFiller(trie.vocab_size, VOCAB, 1).fill_rows(rows(), expected)
    assert several.fill_rows(rows(), found) == failed == {14}
    np.testing.assert_array_equal(found, expected)
    assert not found[14].any()
    assert count_allowed(found[1]) == VOCAB


@given(
    vocab=st.integers(1, 100),
    count=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(60), deadline=None)
def test_packed_masks_set_forbidden_logits_alone(vocab: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(count + 3, vocab)).astype(np.float32))
    before = logits.clone()
    rows = rng.permutation(count + 3)[:count]
    words = -(-vocab // 32)
    masks = rng.integers(-(2**31), 2**31, size=(count, words), dtype=np.int32)
    apply_packed_masks(logits, torch.from_numpy(rows), torch.from_numpy(masks))
    for row in range(count + 3):
        found = np.flatnonzero(rows == row)
        for token in range(vocab):
            is_allowed = not len(found) or bool(masks[found[0], token // 32] >> (token % 32) & 1)
            expected = before[row, token] if is_allowed else -torch.inf
            assert logits[row, token] == expected


@pytest.mark.parametrize("few", [0, 4096])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.2, "top_k": 40},
    ],
    ids=str,
)
def test_draw_is_that_of_a_plain_row_with_forbidden_logits_at_minus_infinity(
    trie: LLTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, float],
    few: int,
) -> None:
    """Gathering a few allowed tokens and masking all others give the same draw."""
    monkeypatch.setattr(grammar_masks, "FEW_TOKENS", few)
    filler = MaskFiller(trie.vocab_size, VOCAB, 1)
    generator = torch.Generator().manual_seed(7)
    for seed in range(40):
        logits = torch.randn((3, VOCAB), generator=generator) * 3
        text = GRAMMARS[seed % len(GRAMMARS)]
        sampling = SamplingParams(seed=seed, grammar=text, **params)  # type: ignore[arg-type]
        masked = logits.clone()
        (mask,), _ = filler.fill_masks([grammar(trie, text)])
        forbidden = np.setdiff1d(np.arange(VOCAB), allowed_ids(mask))
        masked[1, torch.from_numpy(forbidden)] = -torch.inf
        plain = SampleRow(sampling, 3, [0] * 3)
        rows = [
            SampleRow(sampling, 3, [0] * 3),
            SampleRow(sampling, 3, [0] * 3, grammar(trie, text)),
            SampleRow(sampling, 3, [0] * 3),
        ]
        expected = sample_tokens(masked, [plain, plain, plain]).tokens
        assert sample_tokens(logits, rows, filler).tokens == expected


def test_logprobs_are_those_of_the_raw_logits(trie: LLTokenizer) -> None:
    filler = MaskFiller(trie.vocab_size, VOCAB, 1)
    logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(1))
    raw = logits.log_softmax(-1)[0]
    params = SamplingParams(temperature=0.0, logprobs=3)
    row = SampleRow(params, 1, [0], grammar(trie, 'start: "no"'))
    result = sample_tokens(logits, [row], filler)
    (token,) = result.tokens
    assert result.logprobs[0].chosen == pytest.approx(float(raw[token]))
    assert list(result.logprobs[0].top_ids) == raw.topk(3).indices.tolist()


def test_rows_that_cannot_go_on_get_no_token(trie: LLTokenizer) -> None:
    filler = MaskFiller(trie.vocab_size, VOCAB, 2)
    letter = int(allowed_ids(filler.fill_masks([grammar(trie, 'start: "no"')])[0][0])[0])
    refused = grammar(trie, 'start: "no"', [letter + 1])
    assert refused.state is GrammarState.FAILED
    gone = SequenceGrammar(None, EOS_IDS)
    fine = grammar(trie, 'start: "no"')
    logits = torch.zeros((4, VOCAB))
    params = SamplingParams(temperature=0.0)
    rows = [SampleRow(params, 1, [0], each) for each in (refused, gone, fine)]
    result = sample_tokens(logits, [*rows, SampleRow(params, 1, [0])], filler)
    assert result.tokens == [GRAMMAR_FAILED_TOKEN, GRAMMAR_FAILED_TOKEN, letter, 0]
    assert result.completed == frozenset()


def test_row_with_nan_is_not_the_grammars_failure(trie: LLTokenizer) -> None:
    filler = MaskFiller(trie.vocab_size, VOCAB, 1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
        logits = torch.zeros((1, VOCAB))
        logits[0, 5] = torch.nan
        row = SampleRow(params, 1, [0], grammar(trie, 'start: "no"'))
        assert sample_tokens(logits, [row], filler).tokens == [INVALID_TOKEN]


def test_last_token_completes(trie: LLTokenizer) -> None:
    filler = MaskFiller(trie.vocab_size, VOCAB, 1)
    row = SampleRow(SamplingParams(temperature=0.0), 1, [0], grammar(trie, 'start: "no"'))
    outcomes = [sample_tokens(torch.zeros((1, VOCAB)), [row], filler).completed for _ in range(2)]
    assert outcomes == [frozenset(), frozenset((0,))]
    again = sample_tokens(torch.zeros((1, VOCAB)), [row], filler)
    assert again.tokens == [EOS], "a step that was planned before the end was known"
    assert again.completed == frozenset((0,))


def test_bans_do_not_fail_an_answer_that_is_complete(trie: LLTokenizer) -> None:
    filler = MaskFiller(trie.vocab_size, VOCAB, 1)
    params = SamplingParams(temperature=0.0, bad_words=((EOS,),))
    row = SampleRow(params, 1, [0], grammar(trie, 'start: "no"'))
    outcomes = [sample_tokens(torch.zeros((1, VOCAB)), [row], filler) for _ in range(3)]
    assert [outcome.completed for outcome in outcomes[1:]] == [frozenset((0,))] * 2
    assert GRAMMAR_FAILED_TOKEN not in outcomes[2].tokens


def test_trie_wider_than_the_model_allows_none_of_the_ids_beyond(trie: LLTokenizer) -> None:
    filler = MaskFiller(trie.vocab_size, 70, 1)
    (mask,), usable = filler.fill_masks([grammar(trie, "start: /(?s:.)*/")])
    assert usable == [True]
    assert max(allowed_ids(mask)) < 70
    (mask,), usable = filler.fill_masks([grammar(trie, 'start: "a" <[300]>', [64])])
    assert not mask.any() or usable == [True]
