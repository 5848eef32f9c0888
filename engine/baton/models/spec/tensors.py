"""Which tensors a checkpoint must hold, and where each goes: the name map of the dense families. No torch here.

The families we run (Llama, Mistral, Qwen2, Qwen3) name their tensors alike; they differ in which exist, and `ModelSpec`
knows that. Projections that read the same input are stacked into one matrix, in this order along dimension 0:

    qkv     = [q_proj; k_proj; v_proj]        gate_up = [gate_proj; up_proj]

A tensor-parallel rank takes its share (layers.shard) of each checkpoint tensor before it is stacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.layers.model_spec import ModelSpec
from baton.layers.shard import WHOLE, Shard


class TensorAxis(NamedTuple):
    """Dimension of a checkpoint tensor."""

    size: int
    share: slice
    """Taken by this rank."""


class Part(NamedTuple):
    """Share of one checkpoint tensor, which fills some rows of ours."""

    source: str
    whole: tuple[int, ...]
    """Shape in the checkpoint."""
    share: tuple[slice, ...]
    """Slice taken of it, per dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cut.stop - cut.start for cut in self.share)


class Param(NamedTuple):
    """Tensor of the model: layer -1 for those outside the layers."""

    layer: int
    name: str
    parts: tuple[Part, ...]
    """Stacked along dimension 0."""

    @property
    def part_rows(self) -> list[int]:
        """Rows that each part fills."""
        return [part.shape[0] for part in self.parts]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.part_rows), *self.parts[0].shape[1:])

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("norm")


def plan_weights(spec: ModelSpec, shard: Shard = WHOLE) -> Iterator[Param]:
    """Every tensor that a rank holds of the model, in file order of a typical checkpoint. `spec`: the whole model's."""
    vocab = TensorAxis(spec.vocab_size, shard.slice_of(spec.vocab_size))
    hidden = _whole_axis(spec.hidden_size)
    yield _make_param(-1, "embed", {"model.embed_tokens.weight": vocab}, hidden)
    for layer in range(spec.num_layers):
        yield from _plan_layer(spec, shard, layer)
    yield _make_param(-1, "norm", {"model.norm.weight": hidden})
    if not spec.tied:
        yield _make_param(-1, "lm_head", {"lm_head.weight": vocab}, hidden)


def is_ignorable(spec: ModelSpec, source: str, shard: Shard = WHOLE) -> bool:
    """Tensors some checkpoints carry although they are computed (old rotary tables, a head that equals the embedding),
    and those that other ranks hold."""
    if shard.rank and source.endswith(("o_proj.bias", "down_proj.bias")):
        return True
    return source.endswith("rotary_emb.inv_freq") or (spec.tied and source == "lm_head.weight")


def _plan_layer(spec: ModelSpec, shard: Shard, layer: int) -> Iterator[Param]:
    hidden = _whole_axis(spec.hidden_size)
    dim = _whole_axis(spec.head_dim)
    q = TensorAxis(spec.q_size, _scale_slice(shard.slice_of(spec.num_heads), spec.head_dim))
    kv = TensorAxis(spec.kv_size, _scale_slice(shard.kv_heads(spec.num_kv_heads), spec.head_dim))
    inner = TensorAxis(spec.intermediate_size, shard.slice_of(spec.intermediate_size))
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}

    def make_param(name: str, modules: Mapping[str, TensorAxis], *columns: TensorAxis) -> Param:
        kind = "bias" if name.endswith("_bias") else "weight"
        rows_of = {
            f"model.layers.{layer}.{module}.{kind}": rows for module, rows in modules.items()
        }
        return _make_param(layer, name, rows_of, *columns)

    yield make_param("input_norm", {"input_layernorm": hidden})
    yield make_param("qkv", qkv, hidden)
    if spec.qkv_bias:
        yield make_param("qkv_bias", qkv)
    if spec.qk_norm:
        yield make_param("q_norm", {"self_attn.q_norm": dim})
        yield make_param("k_norm", {"self_attn.k_norm": dim})
    yield make_param("o", {"self_attn.o_proj": hidden}, q)
    if spec.o_bias and shard.rank == 0:
        yield make_param("o_bias", {"self_attn.o_proj": hidden})
    yield make_param("post_norm", {"post_attention_layernorm": hidden})
    yield make_param("gate_up", gate_up, hidden)
    yield make_param("down", {"mlp.down_proj": hidden}, inner)
    if spec.mlp_bias:
        yield make_param("gate_up_bias", gate_up)
        if shard.rank == 0:
            yield make_param("down_bias", {"mlp.down_proj": hidden})


def _whole_axis(n: int) -> TensorAxis:
    return TensorAxis(n, slice(0, n))


def _scale_slice(cut: slice, n: int) -> slice:
    return slice(cut.start * n, cut.stop * n)


def _make_param(
    layer: int, name: str, rows_of: Mapping[str, TensorAxis], *columns: TensorAxis
) -> Param:
    """`rows_of`: the rows of each checkpoint tensor, in stacking order; `columns` are the same for all."""
    parts = (Part(source, *zip(rows, *columns, strict=True)) for source, rows in rows_of.items())
    return Param(layer, name, tuple(parts))
