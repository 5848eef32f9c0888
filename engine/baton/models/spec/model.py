"""Description of a checkpoint's model, layer by layer, as far as computing it goes. No torch here.

`models.spec_reader` makes it of config.json. It sizes the KV pool (`kv`), says which tensors a
checkpoint must hold and where each goes (`plan_weights`), how the model is divided among ranks
(`share_of`), and builds the decoder.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.errors import ConfigError
from baton.layers.kv_spec import FP8, KvScales, KVSpec, describe_attention
from baton.layers.shard import MAX_SIZE, WHOLE, Shard
from baton.layers.spec import (
    DTYPE_BYTES,
    DeltaSpec,
    KernelShapes,
    LayerAttention,
    common_heads,
    common_latents,
)
from baton.models.quantized.forms import OnLoadForm
from baton.models.quantized.scheme import QuantizationScheme
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.head import HeadSpec
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.moe import MoeSpec
from baton.models.spec.norm import LayerNormsSpec, NormSpec
from baton.models.spec.tensors import Param, TensorAxis, make_param, whole_axis

OUTSIDE = -1
"""In place of a layer's number, for tensors outside the layers."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention, then MLP or mixture of experts, each added to the residual stream, with norms
    around them."""

    attention: AttentionBlockSpec | MlaBlockSpec | DeltaBlockSpec
    """Or what takes its place: a block that keeps a state per sequence."""
    mlp: MlpSpec | MoeSpec
    norms: LayerNormsSpec

    def params(
        self, prefix: str, hidden_size: int, shard: Shard, stored: Container[str]
    ) -> Iterator[Param]:
        """Tensors that a rank holds of the layer; their checkpoint names start with `prefix`."""
        hidden = whole_axis(hidden_size)
        yield from self.norms.params(prefix, hidden)
        yield from self.attention.params(prefix, hidden_size, shard)
        yield from self.mlp.params(prefix, hidden_size, shard, stored)

    def share(self, shard: Shard) -> LayerSpec:
        """The layer as one rank computes it."""
        return replace(self, attention=self.attention.share(shard), mlp=self.mlp.share(shard))


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Arithmetic of the residual stream outside the blocks of layers."""

    embedding_factor: float = 1.0
    """Multiplies the embedding of each token."""
    rounds_embedding_factor: bool = False
    """The factor is rounded to the type that the model computes in."""
    block_factor: float = 1.0
    """Multiplies each block's result before it is added."""
    logits_divisor: float = 1.0
    logits_soft_cap: float = 0.0
    """c > 0 makes c * tanh(x / c) of a logit x; 0 leaves it."""
    has_head_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder, as far as computing it goes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_context: int
    """Longest prompt + answer the model was made for [tokens]."""
    norm: NormSpec
    """The norm behind the last layer."""
    stream: StreamSpec
    tied: bool
    """The output head is the embedding matrix: config.json says so, and the files hold no other
    head."""
    dtype: str
    """Compute type: float32 | bfloat16 | float16."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    model_hash: str
    """Equal on nodes that may exchange KV pages: config, tokenizer and (sampled) weights, see `hash_model` of
    `models.spec_reader`."""
    has_draft_layers: bool = False
    """Files may hold layers behind the last one, which predict further tokens; they are not
    read."""
    has_other_parts: bool = False
    """The checkpoint has parts for images, too."""
    quantization: QuantizationScheme | None = None
    """How the matrices of the checkpoint are stored; None: as plain numbers."""
    form_on_load: OnLoadForm | None = None
    """What the plain matrices of layers are made at load (--quantization)."""
    kv_scales: tuple[KvScales, ...] = ()
    """By layer, for a KV cache of FP8 codes; empty: it is kept in the compute type."""
    head: HeadSpec | None = None
    """Of a head that drafts for another model, from its hidden states."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """Attention of each layer that has pages, for a backend."""
        blocks = (layer.attention for layer in self.layers)
        return tuple(block.heads for block in blocks if not isinstance(block, DeltaBlockSpec))

    @property
    def paged_layers(self) -> list[int]:
        """Numbers of the layers that have pages."""
        return [
            number
            for number, layer in enumerate(self.layers)
            if not isinstance(layer.attention, DeltaBlockSpec)
        ]

    @property
    def states(self) -> dict[int, DeltaSpec]:
        """Of each layer that keeps a state per sequence, by its number."""
        return {
            number: layer.attention.delta
            for number, layer in enumerate(self.layers)
            if isinstance(layer.attention, DeltaBlockSpec)
        }

    def kv_spec(self, page_size: int) -> KVSpec:
        """The page groups of a pool with `page_size` tokens a page."""
        dtype = FP8 if self.kv_scales else self.dtype
        group = describe_attention(
            self.attention, dtype, page_size, self.kv_scales, self.paged_layers
        )
        return KVSpec((group,), self.dtype)

    @property
    def kernel_shapes(self) -> KernelShapes:
        inner_sizes: dict[str, int] = {}
        for layer in self.layers:
            inner_sizes |= layer.mlp.inner_sizes
        mlps = (layer.mlp for layer in self.layers)
        mixtures = [mlp.shapes for mlp in mlps if isinstance(mlp, MoeSpec)]
        return KernelShapes(
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            inner_sizes=inner_sizes,
            heads=None if common_latents(self.attention) else common_heads(self.attention),
            experts=tuple(dict.fromkeys(mixtures)),
            is_quantized=self.quantization is not None or self.form_on_load is not None,
            state=next(iter(self.states.values()), None),
        )

    @property
    def num_parameters(self) -> int:
        """Weights that are multiplied or looked up, biases and norms left out."""
        if self.head is not None:
            return sum(param.size for _, param in plan_weights(self) if len(param.shape) > 1)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + sum(
            block.num_parameters(self.hidden_size)
            for layer in self.layers
            for block in (layer.attention, layer.mlp)
        )

    def dtype_of(self, param: Param) -> str:
        """Type in which a tensor is kept."""
        return "float32" if param.is_float32 else self.dtype


class PlacedParam(NamedTuple):
    """A tensor of the model and the layer that it belongs to, or OUTSIDE."""

    layer: int
    param: Param


def plan_weights(
    spec: ModelSpec, shard: Shard = WHOLE, stored: Container[str] = ()
) -> Iterator[PlacedParam]:
    """Every tensor that a rank holds of the model, in file order of a typical checkpoint.

    Args: `spec`: the whole model's. `stored`: names of tensors, and of modules with a dot
    behind, in the checkpoint's files, where there is more than one form.
    """
    if spec.head is not None:
        yield from _plan_head(spec, spec.head, stored)
        return
    vocab = TensorAxis(spec.vocab_size, shard.slice_of(spec.vocab_size))
    hidden = whole_axis(spec.hidden_size)
    embed = make_param("embed", {"model.embed_tokens.weight": vocab}, hidden)
    yield PlacedParam(OUTSIDE, embed)
    for number, layer in enumerate(spec.layers):
        for param in layer.params(f"model.layers.{number}.", spec.hidden_size, shard, stored):
            yield PlacedParam(number, param)
    for param in spec.norm.params("norm", "model.norm", hidden):
        yield PlacedParam(OUTSIDE, param)
    if not spec.tied:
        yield PlacedParam(OUTSIDE, make_param("lm_head", {"lm_head.weight": vocab}, hidden))
    if spec.stream.has_head_bias:
        yield PlacedParam(OUTSIDE, make_param("lm_head_bias", {"lm_head.bias": vocab}))


def _plan_head(spec: ModelSpec, head: HeadSpec, stored: Container[str]) -> Iterator[PlacedParam]:
    """Every tensor of a head that drafts."""
    (layer,) = spec.layers
    for param in layer.params(head.layer_prefix, spec.hidden_size, WHOLE, stored):
        yield PlacedParam(0, param)
    for param in head.params(spec.norm, spec.vocab_size, spec.hidden_size):
        yield PlacedParam(OUTSIDE, param)


def weight_bytes(spec: ModelSpec, shard: Shard = WHOLE) -> int:
    """Size of a rank's weights."""
    return sum(
        DTYPE_BYTES[spec.dtype_of(param)] * param.size for _, param in plan_weights(spec, shard)
    )


_DRAFT_PREFIX = "mtp."
"""Of layers that predict further tokens, where they do not follow the others."""


_OTHER_PARTS = (
    "mm_projector.", "model.mm_projector.", "model.multi_modal_projector.", "model.vision_", "model.visual.",
    "multi_modal_projector.", "vision_", "visual.",
)  # fmt: skip
"""Of tensors that belong to images, in checkpoints of several parts."""


def is_ignorable(spec: ModelSpec, source: str) -> bool:
    """Tell tensors that no rank reads although a checkpoint has them.

    Some are computed (old rotary tables, a head that equals the embedding), some belong to layers
    that only draft tokens, or to images.
    """
    if source.endswith("rotary_emb.inv_freq") or (spec.tied and source == "lm_head.weight"):
        return True
    if spec.has_other_parts and source.startswith(_OTHER_PARTS):
        return True
    if spec.head is not None:
        return spec.head.is_ignorable(source)
    if not spec.has_draft_layers:
        return False
    return source.startswith(_DRAFT_PREFIX) or _layer_number(source) >= spec.num_layers


def _layer_number(source: str) -> int:
    """The number in a checkpoint name that begins with model.layers; OUTSIDE for others."""
    if not source.startswith("model.layers."):
        return OUTSIDE
    number = source.split(".")[2]
    return int(number) if number.isdecimal() else OUTSIDE


def share_of(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model as one rank computes it: its heads and inner sizes; the vocabulary and the rest
    stay whole.

    Raises ConfigError when the model cannot be divided so.
    """
    if shard.divides_experts and not any(isinstance(x.mlp, MoeSpec) for x in spec.layers):
        raise ConfigError(f"--ep-size {shard.size}: the model has no experts; leave it out")
    if problem := _find_obstacle(spec, shard):
        sizes = [replace(shard, rank=0, size=size) for size in range(1, MAX_SIZE + 1)]
        fitting = [str(s.size) for s in sizes if _find_obstacle(spec, s) is None]
        raise ConfigError(
            f"--tp-size {shard.size}: {problem}; this model takes {', '.join(fitting)}"
        )
    return replace(spec, layers=tuple(layer.share(shard) for layer in spec.layers))


def _find_obstacle(spec: ModelSpec, shard: Shard) -> str | None:
    for layer in dict.fromkeys(spec.layers):
        problem = layer.attention.find_obstacle(shard) or layer.mlp.find_obstacle(shard)
        if problem:
            return problem
    if spec.vocab_size < shard.size:
        return f"the model's vocab_size = {spec.vocab_size} is smaller"
    return None
