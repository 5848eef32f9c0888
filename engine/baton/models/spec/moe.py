"""The mixture of experts of a layer: its router, its sizes and its tensors. No torch here.

Checkpoints store an expert's matrices one by one (`mlp.experts.7.gate_proj.weight`), or those of
all experts in one tensor (`mlp.experts.gate_up_proj` [experts, 2 * inner, hidden],
`mlp.experts.down_proj` [experts, hidden, inner]), as transformers 5 holds them. Which form a file
has is seen from its tensors; files of some families have the second one alone, in a layout of its
own (`JointLayout`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from baton.layers.shard import Shard
from baton.layers.spec import PLAIN_EXPERTS, ExpertForm, ExpertShapes
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.tensors import Param, Part, TensorAxis, make_param, whole_axis

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparsemixer"]
"""Where an expert's score comes from: all logits of a token, or those of the chosen experts."""
GroupRank = Literal["two_best", "best"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts and their weights follow from the router's logits
    (`blocks.router.route`)."""

    num_experts: int
    experts_per_token: int
    scoring: Scoring = "softmax"
    normalizes: bool = False
    """The weights of the chosen experts are divided by their sum."""
    rounds_weights: bool = True
    """The weights are rounded to the type that the model computes in; else they stay float32."""
    has_logit_bias: bool = False
    """A bias per expert is added to the logits."""
    has_bias: bool = False
    """A bias per expert counts for the choice, and not for the weights."""
    is_float32: bool = False
    """The router computes in float32, whatever the model computes in; with a bias it always
    does."""
    num_groups: int = 1
    kept_groups: int = 1
    """Experts come from this many groups, those that `group_rank` ranks first."""
    group_rank: GroupRank = "two_best"
    """two_best: by the sum of a group's two best scores; best: by the best one, and the scores of
    other groups are 0."""
    scaling_factor: float = 1.0
    jitter: float = 0.0
    """With sparsemixer: scores count that lie within twice this share of the best one."""

    @property
    def computes_float32(self) -> bool:
        return self.is_float32 or self.has_bias


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of a mixture's modules within a layer; {} is an expert's number."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    all_gate_up: str = "mlp.experts.gate_up_proj"
    all_down: str = "mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class JointLayout:
    """Order of the numbers in the tensors that have the matrices of all experts."""

    is_transposed: bool = False
    """[experts, inputs, outputs]."""
    is_interleaved: bool = False
    """An output of the gate, then one of up, in turn; else all gates first."""

    def halves(self, inner: slice, inner_size: int) -> tuple[slice, slice]:
        """Outputs of the gate and of up that belong to these of `inner_size`."""
        if self.is_interleaved:
            stop = 2 * inner.stop
            return slice(2 * inner.start, stop, 2), slice(2 * inner.start + 1, stop, 2)
        return inner, slice(inner.start + inner_size, inner.stop + inner_size)

    def part(self, source: str, entry: TensorAxis, rows: TensorAxis, columns: TensorAxis) -> Part:
        """An expert's share of a joint tensor. Args: `rows`, `columns`: outputs and inputs."""
        axes = (entry, columns, rows) if self.is_transposed else (entry, rows, columns)
        whole = tuple(axis.size for axis in axes)
        return Part(source, whole, tuple(axis.share for axis in axes), self.is_transposed)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Experts, each a gated MLP of `inner_size`, of which each token passes some; their weighted
    sum is the result."""

    router: RouterSpec
    inner_size: int
    size_field: str = "moe_intermediate_size"
    """Field of config.json that states `inner_size`."""
    names: ExpertNames = ExpertNames()
    layout: JointLayout = JointLayout()
    is_always_joint: bool = False
    """Files never store an expert's matrices one by one."""
    has_biases: bool = False
    """Both products of an expert have one."""
    form: ExpertForm = PLAIN_EXPERTS
    shared: MlpSpec | None = None
    """An MLP that every token passes; its result is added."""
    has_shared_gate: bool = False
    """The shared MLP's result is multiplied by the sigmoid of a projection to one value."""
    held: tuple[int, int] | None = None
    """First and end of the experts that this rank has; None: all."""

    @property
    def held_experts(self) -> range:
        """Numbers of the experts that this rank has."""
        return range(*(self.held or (0, self.router.num_experts)))

    def params(
        self, prefix: str, hidden_size: int, shard: Shard, stored: Container[str] = ()
    ) -> Iterator[Param]:
        """Tensors that a rank holds of the whole block; their checkpoint names start with `prefix`.

        Args: `stored`: names of tensors in the checkpoint's files.
        """
        hidden = whole_axis(hidden_size)
        experts = whole_axis(self.router.num_experts)
        gate = f"{prefix}{self.names.router}"
        in_float32 = self.router.computes_float32
        yield make_param("router", {f"{gate}.weight": experts}, hidden, is_float32=in_float32)
        if self.router.has_bias:
            bias = f"{gate}.e_score_correction_bias"
            yield make_param("router_bias", {bias: experts}, is_float32=True)
        if self.router.has_logit_bias:
            yield make_param("logit_bias", {f"{gate}.bias": experts})
        if self.is_always_joint or f"{prefix}{self.names.all_gate_up}" in stored:
            yield from self._joint_params(prefix, hidden_size, shard)
        else:
            yield from self._single_params(prefix, hidden_size, shard)
        if self.shared is not None:
            for param in self.shared.params(prefix, hidden_size, shard):
                yield param._replace(name=f"shared.{param.name}")
            if self.has_shared_gate:
                source = f"{prefix}{self.shared.module}_gate.weight"
                yield make_param("shared_gate", {source: whole_axis(1)}, hidden)

    def _own_experts(self, shard: Shard) -> range:
        experts = self.router.num_experts
        own = shard.slice_of(experts) if shard.divides_experts else slice(0, experts)
        return range(own.start, own.stop)

    def _own_inner(self, shard: Shard) -> slice:
        whole = slice(0, self.inner_size)
        return whole if shard.divides_experts else shard.slice_of(self.inner_size)

    def _single_params(self, prefix: str, hidden_size: int, shard: Shard) -> Iterator[Param]:
        hidden = whole_axis(hidden_size)
        inner = TensorAxis(self.inner_size, self._own_inner(shard))
        for expert in self._own_experts(shard):
            gate, up, down = (
                f"{prefix}{name.format(expert)}.weight"
                for name in (self.names.gate, self.names.up, self.names.down)
            )
            yield make_param(f"experts.{expert}.gate_up", {gate: inner, up: inner}, hidden)
            yield make_param(f"experts.{expert}.down", {down: hidden}, inner)

    def _joint_params(self, prefix: str, hidden_size: int, shard: Shard) -> Iterator[Param]:
        inner = self._own_inner(shard)
        halves = [
            TensorAxis(2 * self.inner_size, half)
            for half in self.layout.halves(inner, self.inner_size)
        ]
        hidden = whole_axis(hidden_size)
        columns = TensorAxis(self.inner_size, inner)
        gate_up = f"{prefix}{self.names.all_gate_up}"
        down = f"{prefix}{self.names.all_down}"
        for expert in self._own_experts(shard):
            entry = TensorAxis(self.router.num_experts, expert)
            parts = tuple(self.layout.part(gate_up, entry, half, hidden) for half in halves)
            yield Param(f"experts.{expert}.gate_up", parts)
            down_part = self.layout.part(down, entry, hidden, columns)
            yield Param(f"experts.{expert}.down", (down_part,))
            if not self.has_biases:
                continue
            biases = [make_param("", {f"{gate_up}_bias": entry}, half).parts[0] for half in halves]
            yield Param(f"experts.{expert}.gate_up_bias", tuple(biases))
            # Parts of an expert's result are added, so its bias may come once.
            if shard.rank == 0 or shard.divides_experts:
                name = f"experts.{expert}.down_bias"
                yield make_param(name, {f"{down}_bias": entry}, hidden)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights that are multiplied, for one token or another."""
        experts = self.router.num_experts * (3 * self.inner_size + 1) * hidden_size
        shared = 0 if self.shared is None else self.shared.num_parameters(hidden_size)
        return experts + shared + (hidden_size if self.has_shared_gate else 0)

    @property
    def shapes(self) -> ExpertShapes:
        """Sizes that the kernels need."""
        return ExpertShapes(self.inner_size, self.router.experts_per_token)

    @property
    def inner_sizes(self) -> dict[str, int]:
        """Width behind each activation, by its field in config.json."""
        shared = {} if self.shared is None else self.shared.inner_sizes
        return {self.size_field: self.inner_size} | shared

    def share(self, shard: Shard) -> MoeSpec:
        """The block as one rank computes it: a part of every expert, or some whole ones."""
        shared = None if self.shared is None else self.shared.share(shard)
        if shard.divides_experts:
            own = shard.slice_of(self.router.num_experts)
            return replace(self, held=(own.start, own.stop), shared=shared)
        return replace(self, inner_size=self.inner_size // shard.size, shared=shared)

    def find_obstacle(self, shard: Shard) -> str | None:
        """Reason that keeps the block from being divided so; None: nothing."""
        experts = self.router.num_experts
        if shard.divides_experts:
            if experts < shard.size:
                return f"the model has {experts} experts, fewer than ranks"
        elif self.inner_size % shard.size:
            return f"the model's {self.size_field} = {self.inner_size} is no multiple of it"
        return None if self.shared is None else self.shared.find_obstacle(shard)
