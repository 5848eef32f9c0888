"""Filters and penalties against transformers' logits processors."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.runtime.sampling.sampler import SampleRow, kept_ids
from baton.sched.types.request import SamplingParams
from tests.support.models.plain_sampler import edit

VOCAB = 500


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 10, 300])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.4])
def test_filters_keep_the_tokens_and_probabilities_that_the_warpers_keep(
    temperature, top_k, top_p, min_p
):
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(top_k)) * 2
    warped = TemperatureLogitsWarper(temperature)(None, logits)
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    warped = MinPLogitsWarper(min_p)(None, warped) if min_p else warped

    expected = warped.softmax(-1)
    scaled = logits / temperature
    probs = scaled.softmax(-1)
    for i in range(len(logits)):
        ids = kept_ids(scaled[i], probs[i], top_k, top_p, min_p)
        assert ids.tolist() == expected[i].nonzero()[:, 0].tolist()
        torch.testing.assert_close(
            probs[i, ids] / probs[i, ids].sum(), expected[i, ids], atol=1e-6, rtol=0
        )


def test_repetition_penalty_then_bias_order_and_min_new_tokens():
    prompt, out, stops = [3, 4, 5, 5], [7, 7, 8], (9, 10)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.tensor([prompt + out])
    expected = SequenceBiasLogitsProcessor([[[7], 2.5], [[11], -4.0]])(ids, logits)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, expected)
    expected = MinNewTokensLengthLogitsProcessor(len(prompt), 4, list(stops))(ids, expected)

    params = SamplingParams(
        repetition_penalty=1.3,
        logit_bias=((7, 2.5), (11, -4.0)),
        min_new_tokens=4,
        stop_token_ids=stops,
    )
    ours = logits[0].clone()
    edit(SampleRow(params, len(prompt), prompt + out), ours)
    torch.testing.assert_close(ours, expected[0])
