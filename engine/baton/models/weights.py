"""Which tensors a checkpoint must hold, and where each goes: the name map of the dense families. No torch here.

The families we run (Llama, Mistral, Qwen2, Qwen3) name their tensors alike; they differ in which exist, and `ModelSpec`
knows that. Projections that read the same input are stacked into one matrix, in this order along dimension 0:

    qkv     = [q_proj; k_proj; v_proj]        gate_up = [gate_proj; up_proj]

A tensor-parallel rank takes its share (layers.shard) of each checkpoint tensor before it is stacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import TypeAlias

from baton.layers.model_spec import ModelSpec
from baton.layers.shard import WHOLE, Shard

LAYER_TENSORS = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias",
    "post_norm", "gate_up", "gate_up_bias", "down", "down_bias",
)  # fmt: skip


Cut: TypeAlias = "slice | EllipsisType"
Share: TypeAlias = "tuple[slice, ...]"
"""Slice taken of a tensor, per dimension."""


@dataclass(frozen=True, slots=True)
class Part:
    """Share of one checkpoint tensor, and the rows of our tensor it fills."""

    source: str
    first_row: int
    whole: tuple[int, ...]
    """Shape in the checkpoint."""
    share: Share

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cut.stop - cut.start for cut in self.share)


@dataclass(frozen=True, slots=True)
class Param:
    """Tensor of the model: layer -1 for those outside the layers."""

    layer: int
    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        last = self.parts[-1]
        return (last.first_row + last.shape[0], *last.shape[1:])

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm")


def plan_weights(spec: ModelSpec, shard: Shard = WHOLE) -> Iterator[Param]:
    """Every tensor that a rank holds of the model, in file order of a typical checkpoint. `spec`: the whole model's."""
    vocab, hidden = shard.of(spec.vocab_size), spec.hidden_size
    yield _param(-1, "embed", [("model.embed_tokens.weight", (spec.vocab_size, hidden), (vocab, ...))])
    for layer in range(spec.num_layers):
        yield from _layer(spec, shard, layer)
    yield _param(-1, "norm", [("model.norm.weight", (hidden,), (...,))])
    if not spec.tied:
        yield _param(-1, "lm_head", [("lm_head.weight", (spec.vocab_size, hidden), (vocab, ...))])


def is_ignorable(spec: ModelSpec, source: str, shard: Shard = WHOLE) -> bool:
    """Tensors some checkpoints carry although they are computed (old rotary tables, the tied head), and those that
    other ranks hold."""
    if shard.rank and source.endswith(("o_proj.bias", "down_proj.bias")):
        return True
    return source.endswith("rotary_emb.inv_freq") or (spec.tied and source == "lm_head.weight")


def _layer(spec: ModelSpec, shard: Shard, layer: int) -> Iterator[Param]:
    hidden, inner, q_size, kv_size, dim = (
        spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size, spec.head_dim
    )  # fmt: skip
    q, kv = _times(shard.of(spec.num_heads), dim), _times(shard.kv_heads(spec.num_kv_heads), dim)
    mlp = shard.of(inner)
    prefix = f"model.layers.{layer}."
    is_first = shard.rank == 0

    def one(name: str, source: str, whole: tuple[int, ...], *cuts: Cut) -> Param:
        return _param(layer, name, [(prefix + source, whole, cuts or (...,) * len(whole))])

    def qkv(name: str, kind: str, *columns: int) -> Param:
        rows = {"q": (q_size, q), "k": (kv_size, kv), "v": (kv_size, kv)}
        return _param(
            layer,
            name,
            [
                (f"{prefix}self_attn.{x}_proj.{kind}", (n, *columns), (cut, *(... for _ in columns)))
                for x, (n, cut) in rows.items()
            ],
        )

    def gate_up(name: str, kind: str, *columns: int) -> Param:
        return _param(
            layer,
            name,
            [
                (f"{prefix}mlp.{x}_proj.{kind}", (inner, *columns), (mlp, *(... for _ in columns)))
                for x in ("gate", "up")
            ],
        )

    yield one("input_norm", "input_layernorm.weight", (hidden,))
    yield qkv("qkv", "weight", hidden)
    if spec.qkv_bias:
        yield qkv("qkv_bias", "bias")
    if spec.qk_norm:
        yield one("q_norm", "self_attn.q_norm.weight", (dim,))
        yield one("k_norm", "self_attn.k_norm.weight", (dim,))
    yield one("o", "self_attn.o_proj.weight", (hidden, q_size), ..., q)
    if spec.o_bias and is_first:
        yield one("o_bias", "self_attn.o_proj.bias", (hidden,))
    yield one("post_norm", "post_attention_layernorm.weight", (hidden,))
    yield gate_up("gate_up", "weight", hidden)
    yield one("down", "mlp.down_proj.weight", (hidden, inner), ..., mlp)
    if spec.mlp_bias:
        yield gate_up("gate_up_bias", "bias")
        if is_first:
            yield one("down_bias", "mlp.down_proj.bias", (hidden,))


def _times(cut: slice, n: int) -> slice:
    return slice(cut.start * n, cut.stop * n)


def _param(layer: int, name: str, taken: list[tuple[str, tuple[int, ...], tuple[Cut, ...]]]) -> Param:
    """`taken`: name, shape and what is taken (all of a dimension: ...) of each checkpoint tensor, in stacking order."""
    parts: list[Part] = []
    row = 0
    for source, whole, cuts in taken:
        share = tuple(slice(0, n) if cut is ... else cut for cut, n in zip(cuts, whole, strict=True))
        parts.append(Part(source, row, whole, share))
        row += parts[-1].shape[0]
    return Param(layer, name, tuple(parts))
