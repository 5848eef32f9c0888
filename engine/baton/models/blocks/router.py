"""Choice of a token's experts from a router's logits, as transformers' families compute it.

Of equal scores the expert with the lowest number wins: torch.topk leaves that open, and a token's
experts must not depend on the device or on the rows beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from baton.layers import ops
from baton.models.spec.moe import RouterSpec

if TYPE_CHECKING:
    from baton.layers.ops_cpu import ExpertRouter


class Routing(NamedTuple):
    """Experts of each token, the highest score first."""

    experts: Tensor
    """int64 [T, experts_per_token]"""
    weights: Tensor
    """[T, experts_per_token], in the logits' type, or in float32 with numbers of that type"""


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None = None) -> Routing:
    """Choose experts for logits [T, num_experts]. Args: `bias`: float32 [num_experts] if
    spec.has_bias.

    A row's choice depends on that row alone.
    """
    make_kernel = ops.choice_kernel(logits)
    # SparseMixer's second score leaves out the first expert: the kernel scores all at once.
    if make_kernel is not None and spec.scoring != "sparsemixer":
        return Routing(*_make_kernel(make_kernel, spec).choose(logits, bias))
    if spec.scoring == "sparsemixer":
        return _mix_two(logits, spec)
    if spec.scoring in ("softmax_of_chosen", "sigmoid_of_chosen"):
        return _score_chosen(logits, spec)
    wide = logits.float()
    scores = ops.sigmoid(wide) if spec.scoring == "sigmoid" else wide.softmax(-1)
    ranking = scores if bias is None else scores + bias
    if spec.kept_groups < spec.num_groups:
        if spec.group_rank == "best":
            # Where the kept groups have too few experts, others follow, which then weigh nothing.
            scores = _drop_groups(scores, spec, 0.0)
            ranking = scores
        else:
            ranking = _drop_groups(ranking, spec, -math.inf)
    experts = _highest(ranking, spec.experts_per_token)
    weights = scores.gather(1, experts)
    if spec.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + _least_sum(spec))
    if spec.scaling_factor != 1.0:
        weights = weights * spec.scaling_factor
    return Routing(experts, weights.to(logits.dtype) if spec.rounds_weights else weights)


@functools.cache
def _make_kernel(make: Callable[..., ExpertRouter], spec: RouterSpec) -> ExpertRouter:
    return make(
        spec.num_experts,
        spec.experts_per_token,
        scoring=spec.scoring,
        least_sum=_least_sum(spec) if spec.normalizes else None,
        factor=spec.scaling_factor,
        rounds_weights=spec.rounds_weights,
        groups=(spec.num_groups, spec.kept_groups, spec.group_rank == "best"),
    )


def _least_sum(spec: RouterSpec) -> float:
    """Added to the sum of weights before they are divided by it (transformers' `deepseek_v3` and
    `glm4_moe`)."""
    return 1e-20 if spec.scoring == "sigmoid" else 0.0


def _score_chosen(logits: Tensor, spec: RouterSpec) -> Routing:
    """The highest logits, scored without the others: by a softmax in their own type (gpt-oss), or
    by a sigmoid each in float32 (Llama 4, which multiplies an expert's input by it)."""
    experts = _highest(logits, spec.experts_per_token)
    chosen = logits.gather(1, experts)
    if spec.scoring == "softmax_of_chosen":
        return Routing(experts, chosen.softmax(-1))
    return Routing(experts, ops.sigmoid(chosen.float()).to(logits.dtype))


def _mix_two(logits: Tensor, spec: RouterSpec) -> Routing:
    """Two experts, each weighed by a softmax over the logits near its own: the second one's leaves
    out the first (SparseMixer, arXiv 2310.00811, as Phi-3.5-MoE uses it when it is not trained).

    The weights of a token may add up to more than 1.
    """
    left = logits
    choices = []
    weights = []
    for _ in range(spec.experts_per_token):
        expert = _highest(left, 1)
        best = left.gather(1, expert)
        distance = (best - logits) / logits.abs().clamp(min=best)
        near = left.masked_fill(distance > 2 * spec.jitter, -math.inf)
        choices.append(expert)
        weights.append(near.softmax(-1).gather(1, expert))
        left = left.scatter(1, expert, -math.inf)
    return Routing(torch.cat(choices, dim=1), torch.cat(weights, dim=1))


def _highest(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` highest entries of each row, in falling order, the lower column first
    of equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _drop_groups(scores: Tensor, spec: RouterSpec, fill: float) -> Tensor:
    """The scores with `fill` for experts outside the kept groups."""
    rows = len(scores)
    grouped = scores.view(rows, spec.num_groups, -1)
    counted = 2 if spec.group_rank == "two_best" else 1
    best_sums = grouped.sort(dim=-1, descending=True).values[..., :counted].sum(-1)
    kept = torch.zeros_like(best_sums, dtype=torch.bool)
    kept.scatter_(1, _highest(best_sums, spec.kept_groups), True)
    return grouped.masked_fill(~kept[..., None], fill).view(rows, -1)
