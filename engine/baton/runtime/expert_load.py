"""How evenly the tokens of a mixture of experts spread over experts and ranks.

A step ends when its busiest expert has ended: with experts divided among ranks, when the busiest
rank has. Both are told as a ratio to the mean, so that 1 is even, averaged over the layers.

The model counts on the way, and a report reads what is counted so far, without a wait for the step
in progress.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.layers.shard import Shard


class ExpertLoad:
    """Args:
    read: how many tokens chose each expert so far, by layer: int64 [experts].
    ranks: the ranks that divide whole experts among them; 1: each has a part of all.
    """

    def __init__(self, read: Callable[[], list[Tensor]], ranks: int) -> None:
        self._read = read
        self._ranks = ranks
        self._before: Tensor | None = None

    def gauges(self) -> dict[str, float]:
        """Ratios of the tokens since the last call; empty when there were none."""
        layers = self._read()
        # A model without experts has no such gauges, not even with the value 0.
        if not layers:
            return {}
        counts = torch.stack(layers)
        recent = counts if self._before is None else counts - self._before
        self._before = counts
        # Layers behind the last attention see only the tokens that sample, which may be none.
        used = recent[recent.sum(1) > 0].double()
        if not len(used):
            return {}
        gauges = {"expert_load_peak_ratio": _peak_ratio(used)}
        if self._ranks > 1:
            experts = used.shape[1]
            shares = [
                used[:, Shard(rank, self._ranks).slice_of(experts)].sum(1)
                for rank in range(self._ranks)
            ]
            gauges["expert_load_rank_peak_ratio"] = _peak_ratio(torch.stack(shares, 1))
        return gauges


def _peak_ratio(counts: Tensor) -> float:
    """Mean over the layers of: largest count / mean count. counts: [layers, n]."""
    return (counts.amax(1) / counts.mean(1)).mean().item()
