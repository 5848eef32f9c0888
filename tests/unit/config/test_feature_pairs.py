"""Pairs of features that an engine refuses at its start: tests/fault/promises/feature_pairs.py lists them."""

from __future__ import annotations

import pytest

from baton.config import build_config
from baton.errors import ConfigError

BASE = {"model_path": "/nowhere"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({**BASE, "tp_size": 2, "device": "cuda", "cuda_graph_max_bs": 8}, "--cuda-graph-max-bs 8"),
        ({**BASE, "tp_size": 2, "dp_size": 2, "disaggregation_mode": "prefill"}, "--dp-size 2"),
        ({"simulate": "reference", "tp_size": 2}, "--tp-size 2"),
        ({"simulate": "reference", "cuda_graph_max_bs": 8}, "--cuda-graph-max-bs 8"),
        ({"simulate": "reference", "host_kv_gib": 1.0}, "--host-kv-gib 1.0"),
    ],
    ids=str,
)
def test_refused_pair_of_flags(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(flags)
    assert says in caught.value.message
