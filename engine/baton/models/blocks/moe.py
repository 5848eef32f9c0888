"""The mixture of experts: each token passes the experts that the router chooses, and their weighted
sum is the result.

1. The router's logits, and from them each token's experts and weights (`blocks.router`).
2. The weighted sum of the experts' results, which reads the matrices of chosen experts only: by
   one kernel for all of a layer's (`ops.pack_experts`), or, where there is none for them, by
   products of one after the other (`ops.pass_experts`). On the CPU a token's result depends on
   nothing but the token.
3. The shared expert's result is added, if the model has one.

Source: arXiv 2101.03961 (routing), arXiv 2401.06066 (shared experts), and transformers' classes of
the families.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.ops import NO_EXPERT
from baton.models.blocks.mlp import MlpBlock
from baton.models.blocks.router import Routing, route
from baton.models.blocks.tensors import move_tensors, take_prefixed
from baton.models.spec.moe import MoeSpec


@dataclass(slots=True)
class MoeBlock:
    """Weights in compute dtype, contiguous; the router's in float32 where its spec says so."""

    spec: MoeSpec
    """This rank's share."""
    router: ops.Matrix
    """[experts, hidden]"""
    gate_up: list[ops.Matrix]
    """[2 * inner, hidden] of each expert that the rank has: gate rows, then up rows."""
    down: list[ops.Matrix]
    """[hidden, inner] of each expert that the rank has."""
    router_bias: Tensor | None = None
    logit_bias: Tensor | None = None
    gate_up_bias: list[Tensor] = field(default_factory=list)
    """[2 * inner] of each expert that the rank has, where they have one."""
    down_bias: list[Tensor] = field(default_factory=list)
    """[hidden] of each expert that the rank has, where this rank adds it."""
    shared: MlpBlock | None = None
    shared_gate: ops.Matrix | None = None
    """[1, hidden]"""
    token_counts: Tensor = field(init=False)
    """How many tokens chose each expert, in all steps so far: int64 [experts]."""
    kernel: ops.ExpertKernel | None = field(init=False, default=None)
    """Of packed experts; None: plain products, one expert after the other."""

    def __post_init__(self) -> None:
        self.token_counts = torch.zeros(self.spec.router.num_experts, dtype=torch.int64)

    @staticmethod
    def make(spec: MoeSpec, tensors: dict[str, Tensor]) -> MoeBlock:
        """Args: `tensors`: by the names of `spec.moe.MoeSpec.params`."""
        names = [f"experts.{number}." for number in spec.held_experts]
        shared = take_prefixed(tensors, "shared.")
        return MoeBlock(
            spec,
            tensors["router"],
            [tensors[f"{name}gate_up"] for name in names],
            [tensors[f"{name}down"] for name in names],
            tensors.get("router_bias"),
            tensors.get("logit_bias"),
            [tensors[f"{name}gate_up_bias"] for name in names if f"{name}gate_up_bias" in tensors],
            [tensors[f"{name}down_bias"] for name in names if f"{name}down_bias" in tensors],
            None if spec.shared is None else MlpBlock.make(spec.shared, shared),
            tensors.get("shared_gate"),
        )

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)
        if self.shared is not None:
            self.shared.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the kernels, one after the other."""
        self.router = ops.pack_weight(self.router)
        for matrices in (self.gate_up, self.down):
            for number, matrix in enumerate(matrices):
                matrices[number] = ops.pack_weight(matrix)
        self.kernel = ops.pack_experts(
            self.gate_up,
            self.down,
            self.spec.held_experts.start,
            form=self.spec.form,
            gate_up_biases=self.gate_up_bias,
            down_biases=self.down_bias,
        )
        if self.shared is not None:
            self.shared.pack()
        # A plain product has other bits in another batch.
        if self.shared_gate is not None:
            self.shared_gate = ops.pack_weight(self.shared_gate)

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> Tensor:
        """x [T, hidden]: this rank's part of the result [T, hidden]; parts of all ranks are to be
        summed.

        Args: `is_padding`: bool [T], rows that choose no expert; None: there are none. For the
        kernel of GPUs.
        """
        routed = x.float() if self.spec.router.computes_float32 else x
        logits = ops.linear(routed, self.router, self.logit_bias)
        routing = route(logits, self.spec.router, self.router_bias)
        if is_padding is not None:
            experts = routing.experts.masked_fill(is_padding[:, None], NO_EXPERT)
            routing = routing._replace(experts=experts)
        result = self._sum_experts(x, routing)
        if self.shared is None:
            return result
        shared = self.shared.forward(x)
        if self.shared_gate is not None:
            shared = ops.sigmoid(ops.linear(x, self.shared_gate)) * shared
        return result + shared

    def _sum_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """Weighted sum of each token's experts that the rank has: [T, hidden] in x's type."""
        if self.kernel is not None:
            return self.kernel.pass_tokens(x, *routing, self.token_counts)
        self.token_counts += routing.experts.flatten().bincount(minlength=len(self.token_counts))
        return ops.pass_experts(
            x,
            *routing,
            held=self.spec.held_experts,
            pass_expert=self._pass_expert,
            weighs_inputs=self.spec.form.weighs_inputs,
        )

    def _pass_expert(self, own: int, x: Tensor) -> Tensor:
        """Results [n, hidden] of one of this rank's experts."""
        gate_up_bias = self.gate_up_bias[own] if self.gate_up_bias else None
        down_bias = self.down_bias[own] if self.down_bias else None
        gate_up = ops.linear(x, self.gate_up[own], gate_up_bias)
        clamped = self.spec.form.clamped
        if clamped is None:
            inner = ops.silu_mul(gate_up)
        else:
            inner = ops.clamped_silu_mul(gate_up, clamped.gain, clamped.limit)
        return ops.linear(inner, self.down[own], down_bias)
