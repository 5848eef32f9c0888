"""The sampler: right distribution, right edits, and tokens that depend on logits, params, seed and position only."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runtime.sampling import sampler
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import sample_tokens
from baton.sched.types.hashing import uniform
from baton.sched.types.plan import INVALID_TOKEN
from baton.sched.types.request import SamplingParams
from tests.support.effort import examples
from tests.support.models.plain_sampler import edit


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def row(
    seed: int = 0, prompt: tuple[int, ...] = (1, 2, 3), out: tuple[int, ...] = (), **params: object
) -> SampleRow:
    return SampleRow(SamplingParams(seed=seed, **params), len(prompt), [*prompt, *out])  # type: ignore[arg-type]


def noise(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations above the mean of the chi-square statistic, cells of expectation < 5 taken together."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def naive_distribution(logits: torch.Tensor, p: SamplingParams) -> np.ndarray:
    """Temperature, top_k, top_p, min_p with one full sort and no cleverness."""
    probs = (logits.double() / p.temperature).softmax(-1).numpy()
    order = np.argsort(-probs, kind="stable")
    if p.top_k:
        probs[order[p.top_k :]] = 0
        probs /= probs.sum()
    if p.top_p < 1:
        before = probs[order].cumsum() - probs[order]
        probs[order[before >= p.top_p]] = 0
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}]
)
def test_row_with_nonfinite_logits_gets_no_token_and_others_keep_theirs(
    value: float, params: dict[str, float]
) -> None:
    logits = noise(3, 300)
    rows = [row(seed=i, **params) for i in range(3)]
    alone = [sample_tokens(logits[i : i + 1].clone(), [rows[i]]) for i in range(3)]
    logits[1] = value
    result = sample_tokens(logits, rows)
    assert list(result.tokens) == [alone[0].tokens[0], INVALID_TOKEN, alone[2].tokens[0]]
    assert set(result.logprobs) == ({0, 2} if "logprobs" in params else set())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_ban_of_a_nonfinite_logit_gives_its_row_no_other_token(value: float) -> None:
    logits = noise(3, 300)
    logits[1, 5] = value
    rows = [row(temperature=0.0), row(temperature=0.0, bad_words=((5,),)), row(temperature=0.0)]
    expected = [int(logits[0].argmax()), INVALID_TOKEN, int(logits[2].argmax())]
    assert sample_tokens(logits.clone(), rows).tokens == expected
    assert sample_tokens(logits[1:2].clone(), rows[1:2]).tokens == [INVALID_TOKEN]


def test_one_nan_among_the_logits_is_enough() -> None:
    logits = noise(1, 300)
    logits[0, 299] = math.nan
    assert list(sample_tokens(logits, [row(temperature=0.0)]).tokens) == [INVALID_TOKEN]


GOLDEN = [
    0.6524484863740322,
    0.7012121095215252,
    0.36818951565166946,
    0.5268763636163535,
    0.7238582745899125,
]


class TestUniform:
    def test_values_are_frozen_because_two_nodes_of_different_versions_must_agree(self):
        assert [
            uniform(0, 0),
            uniform(0, 1),
            uniform(1, 0),
            uniform(2**63 - 1, 4095),
            uniform(-1, 7),
        ] == GOLDEN

    @pytest.mark.parametrize("along", ["positions", "seeds"])
    def test_is_uniform_and_uncorrelated(self, along):
        n = 50_000
        u = np.array([uniform(7, i) if along == "positions" else uniform(i, 7) for i in range(n)])
        counts, _ = np.histogram(u, 100, (0, 1))
        assert chi_square(counts, np.full(100, n / 100)) < 4
        pairs, _, _ = np.histogram2d(u[:-1], u[1:], 10, ((0, 1), (0, 1)))
        assert abs(chi_square(pairs.ravel(), np.full(100, (n - 1) / 100))) < 4
        assert 0 <= u.min() < u.max() < 1


class TestGreedy:
    def test_takes_the_largest_and_the_lowest_id_among_equals(self):
        logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, -1.0, 2.0]])
        assert sample_tokens(logits, [row(temperature=0.0)] * 2).tokens == [1, 0]

    @pytest.mark.parametrize(
        "params", [{"temperature": 0.0}, {"temperature": 1e-6}, {"temperature": 5.0, "top_k": 1}]
    )
    def test_zero_temperature_and_top_k_1_are_greedy(self, params):
        logits = noise(20, 50)
        assert (
            sample_tokens(logits.clone(), [row(seed=i, **params) for i in range(20)]).tokens
            == logits.argmax(-1).tolist()
        )

    def test_stays_greedy_beside_sampled_and_edited_rows(self):
        logits = noise(3, 50)
        rows = [
            row(temperature=0.0),
            row(temperature=3.0),
            row(temperature=0.0, logit_bias=((7, 100.0),)),
        ]
        tokens = sample_tokens(logits.clone(), rows).tokens
        assert (tokens[0], tokens[2]) == (int(logits[0].argmax()), 7)


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


class TestDistribution:
    @pytest.mark.parametrize("params", FILTERS)
    @pytest.mark.parametrize("vocab", [40, 700])
    def test_draws_follow_the_filtered_distribution(self, params, vocab):
        n = 6000
        logits = noise(1, vocab, scale=1.5)
        rows = [row(seed=i, **params) for i in range(n)]
        tokens = sample_tokens(logits.expand(n, -1), rows).tokens
        expected = naive_distribution(logits[0], rows[0].params)
        counts = np.bincount(tokens, minlength=vocab)
        assert counts[expected == 0].sum() == 0
        assert chi_square(counts, expected * n) < 4

    def test_draws_of_one_seed_along_positions_follow_it_too(self):
        n = 6000
        logits = noise(1, 30)
        rows = [
            SampleRow(SamplingParams(seed=99), position, range(position)) for position in range(n)
        ]
        counts = np.bincount(sample_tokens(logits.expand(n, -1), rows).tokens, minlength=30)
        assert chi_square(counts, naive_distribution(logits[0], rows[0].params) * n) < 4

    @settings(max_examples=examples(150), deadline=None)
    @given(
        st.integers(0, 2**32), st.sampled_from([0.3, 1.0, 4.0]), st.sampled_from([0, 2, 17, 64, 200, 1000]),
        st.sampled_from([0.05, 0.5, 0.95, 0.999, 1.0]), st.sampled_from([0.0, 0.001, 0.3]),
    )  # fmt: skip
    def test_head_alone_decides_as_the_whole_sort_does(self, seed, scale, top_k, top_p, min_p):
        logits = noise(2, 600, seed % 1000, scale)
        rows = [row(seed=seed + i, top_k=top_k, top_p=top_p, min_p=min_p) for i in range(2)]
        tokens = []
        for head in (16, 256, 600):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sampler, "HEAD", head)
                tokens.append(sample_tokens(logits.clone(), rows).tokens)
        assert tokens[0] == tokens[1] == tokens[2]
        for i, token in enumerate(tokens[0]):
            assert naive_distribution(logits[i], rows[i].params)[token] > 0

    def test_equal_logits_are_ordered_by_id(self):
        for vocab in (100, 300):
            kept = {
                sample_tokens(torch.zeros(1, vocab), [row(seed=i, top_k=5)]).tokens[0]
                for i in range(200)
            }
            assert kept == {0, 1, 2, 3, 4}

    @pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.95}, {"min_p": 0.1}])
    def test_u_is_inverted_in_order_of_id_among_the_kept(self, params, monkeypatch):
        logits = torch.tensor([[0.1, 0.4, 1e-9, 0.2, 0.3]]).log()
        for u, token in ((0.0, 0), (0.35, 1), (0.6, 3), (0.99, 4)):
            monkeypatch.setattr(sampler, "uniform", lambda seed, position, u=u: u)
            expected = 1 if token == 0 and params.get("top_k") else token
            assert sample_tokens(logits.clone(), [row(**params)]).tokens == [expected]

    def test_banned_tokens_are_never_drawn_even_at_the_end_of_the_range(self, monkeypatch):
        monkeypatch.setattr(sampler, "uniform", lambda seed, position: 1 - 2.0**-53)
        for vocab in (10, 600):
            logits = torch.full((1, vocab), -torch.inf)
            logits[0, 3] = logits[0, 5] = 0.0
            for params in ({}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 8}):
                assert sample_tokens(logits.clone(), [row(**params)]).tokens == [5]


MIX = (
    {"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}, {"top_k": 3, "logprobs": 2}, {"min_p": 0.2},
    {"temperature": 3.0}, {"frequency_penalty": 1.0, "out": (5, 5, 6)}, {"temperature": 0.0, "logprobs": 0},
    {"repetition_penalty": 1.5}, {"logit_bias": ((4, 2.0),)}, {"min_new_tokens": 4, "stop_token_ids": (1,)},
)  # fmt: skip


class TestIndependence:
    def test_row_draws_the_same_alone_and_in_any_batch(self):
        n = 44
        logits = noise(n, 500)
        rows = [row(seed=i, **MIX[i % len(MIX)]) for i in range(n)]
        alone = [sample_tokens(logits[i : i + 1].clone(), [rows[i]]) for i in range(n)]
        for seed in range(3):
            order = random.Random(seed).sample(range(n), n)
            together = sample_tokens(logits[order], [rows[i] for i in order])
            for at, i in enumerate(order):
                assert together.tokens[at] == alone[i].tokens[0]
                assert together.logprobs.get(at) == alone[i].logprobs.get(0)

    def test_same_seed_same_tokens_and_another_seed_others(self):
        logits = noise(1, 500)

        def answer(seed: int) -> list[int]:
            r, out = row(seed=seed), []
            for _ in range(20):
                out.append(sample_tokens(logits.clone(), [r]).tokens[0])
                r.append(out[-1])
            return out

        assert answer(5) == answer(5) != answer(6)
        assert len(set(answer(5))) > 5

    def test_row_rebuilt_from_history_continues_as_the_one_that_never_left(self):
        params = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_new_tokens": 6,
                  "stop_token_ids": (3,)}  # fmt: skip
        kept, out = row(seed=1, **params), []
        for step in range(12):
            logits = noise(1, 20, step)
            token = sample_tokens(logits.clone(), [kept]).tokens[0]
            assert sample_tokens(
                logits.clone(), [row(seed=1, out=tuple(out), **params)]
            ).tokens == [token]
            kept.append(token)
            out.append(token)


class TestEdits:
    def test_frequency_and_presence_count_the_output_only(self):
        logits = torch.zeros(10)
        edit(row(prompt=(1, 2), out=(2, 3, 3), frequency_penalty=0.5, presence_penalty=1.0), logits)
        assert logits.tolist() == [0, 0, -1.5, -2.0, 0, 0, 0, 0, 0, 0]

    def test_repetition_counts_prompt_and_output_once_each(self):
        logits = torch.tensor([2.0, 2.0, -2.0, 4.0, 1.0])
        edit(row(prompt=(1, 2), out=(3, 3), repetition_penalty=2.0), logits)
        assert logits.tolist() == [2.0, 1.0, -4.0, 2.0, 1.0]

    def test_bias_adds_and_can_force_or_ban(self):
        logits = noise(2, 50)
        best = int(logits[1].argmax())
        rows = [
            row(logit_bias=((7, 100.0),), seed=3),
            row(temperature=0.0, logit_bias=((best, -100.0),)),
        ]
        tokens = sample_tokens(logits.clone(), rows).tokens
        assert tokens[0] == 7
        assert tokens[1] == int(logits[1].topk(2).indices[1])

    def test_stop_tokens_cannot_come_before_min_new_tokens(self):
        logits = torch.tensor([[0.0, 9.0, 5.0, 1.0]])
        r = row(temperature=0.0, min_new_tokens=2, stop_token_ids=(1, 2))
        out = []
        for _ in range(3):
            out += sample_tokens(logits.clone(), [r]).tokens
            r.append(out[-1])
        assert out == [3, 3, 1]

    def test_ids_the_model_does_not_have_are_ignored(self):
        logits = torch.zeros(4)
        edit(row(logit_bias=((9, 5.0), (1, 2.0)), min_new_tokens=1, stop_token_ids=(7, 2)), logits)
        assert logits.tolist() == [0.0, 2.0, -math.inf, 0.0]
        edit(row(logit_bias=((9, 5.0),), min_new_tokens=1, stop_token_ids=(7,)), logits)

    def test_greedy_row_without_wishes_is_plain_again_after_min_new_tokens(self):
        r = row(temperature=0.0, min_new_tokens=1, stop_token_ids=(1,))
        assert not r.is_plain
        r.append(5)
        assert r.is_plain


class TestLogprobs:
    def test_come_from_the_raw_logits_whatever_the_sampling(self):
        logits = noise(4, 100)
        rows = [
            row(temperature=0.0, logprobs=0),
            row(temperature=9.0, logprobs=3, seed=1),
            row(temperature=0.0, logprobs=3, logit_bias=((7, 100.0),)),
            row(temperature=0.0),
        ]
        result = sample_tokens(logits.clone(), rows)
        reference = logits.log_softmax(-1)
        assert set(result.logprobs) == {0, 1, 2}
        for i, found in result.logprobs.items():
            k = rows[i].params.logprobs
            top = reference[i].topk(k)
            assert found.chosen == pytest.approx(float(reference[i, result.tokens[i]]))
            assert (found.top_ids, found.top_logprobs) == (
                top.indices.tolist(),
                pytest.approx(top.values.tolist()),
            )
        assert result.tokens[2] == 7


TINY = 5e-324
EXTREMES: dict[str, tuple[float, ...]] = {
    "repetition_penalty": (1e-300, 1e-38, 1.0, 2.0),
    "top_p": (0.0, TINY, 1e-30, 0.9, 1.0),
    "top_k": (0, 5, 2**63 - 1),
    "min_p": (0.0, TINY, 1.0, 2.0),
    "temperature": (0.0, sampler.GREEDY_BELOW, 1.0, 1e30),
}


@pytest.mark.parametrize("repetition_penalty", EXTREMES["repetition_penalty"])
def test_extreme_parameters_draw_a_token_and_leave_other_rows_theirs(
    repetition_penalty: float,
) -> None:
    logits = noise(2, 300)
    plain = row(temperature=0.0)
    alone = sample_tokens(logits[1:].clone(), [plain]).tokens[0]
    for values in itertools.product(*(EXTREMES[k] for k in list(EXTREMES)[1:])):
        params = dict(zip(list(EXTREMES)[1:], values, strict=True))
        extreme = row(repetition_penalty=repetition_penalty, **params)
        token, other = sample_tokens(logits.clone(), [extreme, plain]).tokens
        assert 0 <= token < 300, params
        assert other == alone


@pytest.mark.parametrize("filters", [{"top_p": 0.0}, {"top_p": TINY, "top_k": 5}, {"min_p": 2.0}])
def test_most_likely_token_passes_every_filter(filters: dict[str, float]) -> None:
    logits = noise(4, 300)
    drawn = sample_tokens(logits.clone(), [row(seed=i, **filters) for i in range(4)]).tokens
    assert drawn == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_row_whose_tokens_are_all_banned_gets_none(params: dict[str, float]) -> None:
    banned = row(stop_token_ids=tuple(range(30)), min_new_tokens=1, **params)
    free = row(temperature=0.0)
    logits = noise(2, 30)
    assert sample_tokens(logits.clone(), [banned, free]).tokens == [
        INVALID_TOKEN,
        int(logits[1].argmax()),
    ]


def test_top_k_of_one_is_greedy_and_of_two_draws() -> None:
    logits = torch.zeros((1, 300))
    logits[0, [7, 9]] = 5.0
    drawn = {
        top_k: {
            sample_tokens(logits.clone(), [row(seed=i, top_k=top_k)]).tokens[0] for i in range(30)
        }
        for top_k in (1, 2)
    }
    assert drawn == {1: {7}, 2: {7, 9}}


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_logits_that_a_temperature_overflows_give_no_token(params: dict[str, float]) -> None:
    logits = noise(2, 300)
    logits[0] *= 1e37
    hot = row(temperature=sampler.GREEDY_BELOW, **params)
    tokens = sample_tokens(logits.clone(), [hot, row(temperature=0.0)]).tokens
    assert tokens == [INVALID_TOKEN, int(logits[1].argmax())]
