"""Which tensors a checkpoint must hold, and where each goes: the name map of the dense families. No torch here.

The families we run (Llama, Mistral, Qwen2, Qwen3) name their tensors alike; they differ in which exist, and `ModelSpec`
knows that. Projections that read the same input are stacked into one matrix, in this order along dimension 0:

    qkv     = [q_proj; k_proj; v_proj]        gate_up = [gate_proj; up_proj]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.models.spec import ModelSpec

LAYER_TENSORS = (
    "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias",
    "post_norm", "gate_up", "gate_up_bias", "down", "down_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor and the rows of our tensor it fills."""

    source: str
    first_row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """One of our tensors: layer -1 for those outside the layers."""

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


def plan_weights(spec: ModelSpec) -> Iterator[Param]:
    """Every tensor of the model, in file order of a typical checkpoint."""
    yield _param(-1, "embed", ["model.embed_tokens.weight"], [(spec.vocab_size, spec.hidden_size)])
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer)
    yield _param(-1, "norm", ["model.norm.weight"], [(spec.hidden_size,)])
    if not spec.tied:
        yield _param(-1, "lm_head", ["lm_head.weight"], [(spec.vocab_size, spec.hidden_size)])


def is_ignorable(spec: ModelSpec, source: str) -> bool:
    """Tensors some checkpoints carry although they are computed: old rotary tables, the tied head."""
    return source.endswith("rotary_emb.inv_freq") or (spec.tied and source == "lm_head.weight")


def _layer(spec: ModelSpec, layer: int) -> Iterator[Param]:
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    prefix = f"model.layers.{layer}."
    attention = [f"{prefix}self_attn.{x}_proj" for x in "qkv"]
    mlp = [f"{prefix}mlp.{x}_proj" for x in ("gate", "up")]

    def one(name: str, source: str, *shape: int) -> Param:
        return _param(layer, name, [prefix + source], [shape])

    yield one("input_norm", "input_layernorm.weight", hidden)
    yield _param(layer, "qkv", [f"{n}.weight" for n in attention], [(rows, hidden) for rows in (q, kv, kv)])
    if spec.qkv_bias:
        yield _param(layer, "qkv_bias", [f"{n}.bias" for n in attention], [(q,), (kv,), (kv,)])
    if spec.qk_norm:
        yield one("q_norm", "self_attn.q_norm.weight", spec.head_dim)
        yield one("k_norm", "self_attn.k_norm.weight", spec.head_dim)
    yield one("o", "self_attn.o_proj.weight", hidden, q)
    if spec.o_bias:
        yield one("o_bias", "self_attn.o_proj.bias", hidden)
    yield one("post_norm", "post_attention_layernorm.weight", hidden)
    yield _param(layer, "gate_up", [f"{n}.weight" for n in mlp], [(inner, hidden)] * 2)
    yield one("down", "mlp.down_proj.weight", hidden, inner)
    if spec.mlp_bias:
        yield _param(layer, "gate_up_bias", [f"{n}.bias" for n in mlp], [(inner,)] * 2)
        yield one("down_bias", "mlp.down_proj.bias", hidden)


def _param(layer: int, name: str, sources: list[str], shapes: list[tuple[int, ...]]) -> Param:
    parts, row = [], 0
    for source, shape in zip(sources, shapes, strict=True):
        parts.append(Part(source, row, shape))
        row += shape[0]
    return Param(layer, name, tuple(parts))
