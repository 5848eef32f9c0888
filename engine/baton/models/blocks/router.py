"""Choice of a token's experts from a router's logits, as transformers' families compute it.

Of equal scores the expert with the lowest number wins: torch.topk leaves that open, and a token's
experts must not depend on the device or on the rows beside it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from baton.models.spec.moe import RouterSpec

_LEAST_SUM = 1e-20
"""Added to the sum of sigmoid scores before they are divided by it (transformers' `deepseek_v3` and
`glm4_moe`)."""


class Routing(NamedTuple):
    """Experts of each token, the highest score first."""

    experts: Tensor
    """int64 [T, experts_per_token]"""
    weights: Tensor
    """[T, experts_per_token], in the logits' type or float32"""


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None = None) -> Routing:
    """Choose experts for logits [T, num_experts]. Args: `bias`: float32 [num_experts] if
    spec.has_bias.

    A row's choice depends on that row alone.
    """
    wide = logits.float()
    scores = wide.sigmoid() if spec.scoring == "sigmoid" else wide.softmax(-1)
    ranking = scores if bias is None else scores + bias
    if spec.kept_groups < spec.num_groups:
        ranking = _drop_groups(ranking, spec)
    experts = _highest(ranking, spec.experts_per_token)
    weights = scores.gather(1, experts)
    if spec.normalizes:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + _LEAST_SUM if spec.scoring == "sigmoid" else total)
    if spec.scaling_factor != 1.0:
        weights = weights * spec.scaling_factor
    return Routing(experts, weights.to(logits.dtype) if spec.rounds_weights else weights)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` highest entries of each row, in falling order, the lower column first
    of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _drop_groups(ranking: Tensor, spec: RouterSpec) -> Tensor:
    """Minus infinity for experts outside the kept groups; a group counts by the sum of its two
    best."""
    rows = len(ranking)
    grouped = ranking.view(rows, spec.num_groups, -1)
    best_sums = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    kept = torch.zeros_like(best_sums, dtype=torch.bool)
    kept.scatter_(1, _highest(best_sums, spec.kept_groups), True)
    return grouped.masked_fill(~kept[..., None], -math.inf).view(rows, -1)
