"""Expert load: ratios over the tokens since the last report, and the counts of a real mixture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.runtime.expert_load import ExpertLoad
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models import checkpoints


def test_ratios_are_of_the_tokens_since_the_last_call() -> None:
    layers: list[Tensor] = [torch.tensor([4, 0, 0, 0]), torch.tensor([1, 1, 1, 1])]
    load = ExpertLoad(lambda: layers, ranks=2)
    # Layer 0: 4 against a mean of 1, and 4 against 2 by ranks; layer 1 is even.
    assert load.gauges() == {
        "expert_load_peak_ratio": pytest.approx(2.5),
        "expert_load_rank_peak_ratio": pytest.approx(1.5),
    }
    layers = [torch.tensor([4, 2, 2, 0]), torch.tensor([1, 1, 1, 1])]
    assert load.gauges() == {
        "expert_load_peak_ratio": pytest.approx(2.0),
        "expert_load_rank_peak_ratio": pytest.approx(1.0),
    }
    assert load.gauges() == {}, "no tokens since"


def test_model_without_experts_has_no_gauges() -> None:
    assert ExpertLoad(list, ranks=1).gauges() == {}


def test_engine_reports_the_load_of_its_experts(tmp_path: Path) -> None:
    engine = make_engine(checkpoints.make_checkpoint("qwen3-moe", tmp_path / "model"))
    assert "expert_load_peak_ratio" not in engine.gauges(), "nothing was computed"
    answer(engine, [list(range(2, 40))], greedy(4))
    experts = engine.runner.expert_counts()  # type: ignore[attr-defined]
    # Two experts for each of 38 prompt tokens and 3 further ones, in every layer but the last,
    # behind whose attention only the 4 tokens that sample go on.
    assert [int(counts.sum()) for counts in experts] == [2 * 41] * (len(experts) - 1) + [2 * 4]
