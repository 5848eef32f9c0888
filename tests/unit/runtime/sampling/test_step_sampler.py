"""The device sampler without a device: what it reads from rows, and that it looks at nothing. The kernel itself is
tested in tests/unit/layers/kernels/test_draw.py; on CPU tensors the host's sampler draws."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from baton.layers.kernels.draw_columns import DrawColumns
from baton.runtime.sampling import sampler, step_sampler
from baton.runtime.sampling.sampler import SampleRow
from baton.runtime.sampling.step_sampler import SamplingLaunch
from baton.sched.types.plan import INVALID_TOKEN, StepResult
from baton.sched.types.request import SamplingParams
from tests.support.models.plain_sampler import sample
from tests.unit.runtime.sampling.test_sampler import FILTERS, MIX, noise, row


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def draw(logits: Tensor, rows: list[SampleRow]) -> StepResult:
    made = SamplingLaunch(rows, logits.shape[1], torch.from_numpy)
    with torch.inference_mode():
        return made.read_result(made.queue_draw(logits))


def same(logits: Tensor, rows: list[SampleRow]) -> None:
    """Both samplers choose alike."""
    host, device = sample(logits.clone(), rows), draw(logits.clone(), rows)
    assert host.tokens == device.tokens
    assert host.logprobs.keys() == device.logprobs.keys()
    for i, expected in host.logprobs.items():
        found = device.logprobs[i]
        assert found.chosen == pytest.approx(expected.chosen, abs=1e-6)
        assert list(found.top_logprobs) == pytest.approx(list(expected.top_logprobs), abs=1e-6)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 2.0, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 17, 255, 256, 257, 400, 5000]),
        "top_p": st.sampled_from([1e-6, 0.05, 0.5, 0.95, 0.999999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.001, 0.3, 1.0]),
        "logprobs": st.sampled_from([-1, -1, 0, 3]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.5, -2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.5]),
        "logit_bias": st.sampled_from(
            [(), (), ((7, 100.0),), ((3, -100.0), (4, 2.5), (90_000, 1.0))]
        ),
        "min_new_tokens": st.sampled_from([0, 0, 5]),
    }
)


class TestSameTokens:
    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 2**63), st.sampled_from([5, 256, 257, 700, 3000]),
        st.sampled_from([0.01, 1.0, 4.0, 30.0]), st.sampled_from(["noise", "rounded", "few", "banned"]),
    )  # fmt: skip
    def test_as_on_the_host(self, params, seed, vocab, scale, kind):
        logits = noise(len(params), vocab, seed % 10_000, scale)
        if kind == "rounded":  # as bfloat16 models give them: many equals
            logits = logits.bfloat16().float()
        if kind == "few":
            logits = logits.round()
        if kind == "banned":
            logits[:, 1::2] = -torch.inf
        rows = [
            row(seed=seed + i, out=(1, 2, 2, 4), stop_token_ids=(0, 99_999), **p)
            for i, p in enumerate(params)
        ]
        same(logits, rows)

    def test_ends_of_the_range_never_give_a_token_without_probability(self, monkeypatch):
        for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
            monkeypatch.setattr(sampler, "uniform", lambda seed, position, u=u: u)
            for vocab in (10, 600):
                logits = torch.full((1, vocab), -torch.inf)
                logits[0, 3] = logits[0, 5] = 0.0
                for params in ({}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 8}, {"top_k": 300}):
                    assert draw(logits.clone(), [row(**params)]).tokens == [3 if u < 0.5 else 5]
                    same(logits, [row(**params)])

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"top_p": 0.9},
            {"logprobs": 2},
            {"logit_bias": ((7, 1.0),), "logprobs": 0},
        ],
    )
    def test_rows_with_nonfinite_logits_get_no_token(self, value, params):
        logits = noise(4, 300)
        logits[1] = logits[2, 7] = value
        rows = [row(seed=i, **params) for i in range(4)]
        same(logits, rows)
        assert [token == INVALID_TOKEN for token in draw(logits, rows).tokens[:2]] == [False, True]

    def test_greedy_takes_the_lowest_id_among_equals(self):
        logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, -1.0, 2.0]])
        assert draw(logits, [row(temperature=0.0)] * 2).tokens == [1, 0]


class TestIndependent:
    def test_row_draws_the_same_alone_and_in_any_batch(self):
        n = 44
        mix = [*MIX, {"top_k": 300, "temperature": 1.5}, {"top_p": 0.999, "temperature": 3.0}]
        logits = noise(n, 500)
        rows = [row(seed=i, **mix[i % len(mix)]) for i in range(n)]
        alone = [draw(logits[i : i + 1].clone(), [rows[i]]) for i in range(n)]
        for seed in range(3):
            order = random.Random(seed).sample(range(n), n)
            together = draw(logits[order], [rows[i] for i in order])
            for at, i in enumerate(order):
                assert together.tokens[at] == alone[i].tokens[0]
                assert (at in together.logprobs) == (0 in alone[i].logprobs)

    def test_draw_is_fixed_when_it_is_made(self):
        """The rows go on to the next step while the device still works on this one."""
        logits, r = noise(1, 500), row(seed=4, temperature=2.0, frequency_penalty=1.0, out=(5, 6))
        made = SamplingLaunch([r], 500, torch.from_numpy)
        want = sample(logits.clone(), [r]).tokens
        for token in (5, 5, 5):
            r.append(token)
        assert made.read_result(made.queue_draw(logits.clone())).tokens == want


def test_nothing_is_read_from_the_device_and_no_devices_are_mixed(monkeypatch):
    """torch's fake CUDA tensors have no data: reading a value, or making a size of values, raises an error."""
    launches = []

    def launch(logits: Tensor, at: Tensor, columns: Tensor, tokens: Tensor) -> None:
        assert all(x.device.type == "cuda" for x in (logits, at, columns, tokens))
        assert (at.dtype, columns.dtype, tokens.dtype) == (torch.int64, torch.float64, torch.int64)
        assert columns.shape == (len(DrawColumns._fields), len(at))
        assert columns.is_contiguous()
        launches.append(len(at))

    monkeypatch.setattr(step_sampler, "launch_draw", launch)
    rows = [row(seed=i, **p) for i, p in enumerate([*MIX, {"top_k": 300}, *FILTERS])]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        made = SamplingLaunch(
            rows,
            600,
            lambda x: torch.empty(x.shape, dtype=torch.from_numpy(x).dtype, device="cuda"),
        )
        drawn = made.queue_draw(torch.empty(len(rows), 600, device="cuda"))
        parts = (drawn.tokens, drawn.chosen, drawn.top_ids, drawn.top_logprobs)
        assert all(x is not None and x.device.type == "cuda" for x in parts)
        assert launches == [sum(not r.is_greedy for r in rows)], (
            "one for all rows, whatever they ask"
        )
        for look in (lambda x: x[0].item(), lambda x: x.nonzero(), lambda x: x[x > 0]):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                look(torch.ones(3, device="cuda"))


def test_filters_have_no_say_over_greedy_rows():
    p = SamplingParams(temperature=0.0, top_k=400, top_p=0.1, min_p=0.9)
    same(noise(1, 900), [SampleRow(p, 0, ())])
