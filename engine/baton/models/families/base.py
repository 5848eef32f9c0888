"""The part of config.json that every family reads alike. No torch here.

A family is one file that states how its class in transformers differs from this one: defaults of
absent fields, and which blocks its layers have. A field that is absent means what it means to that
class. So does null, but for the fields where the class takes null for a value of its own:
`ModelConfig.is_null` tells the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.layers.spec import AttentionSpec
from baton.models.config_file import MAX_LAYERS, ModelConfig
from baton.models.families.rope_config import read_rope, stretched_context
from baton.models.spec.attention import AttentionBlockSpec
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.mlp import MlpSpec
from baton.models.spec.model import LayerSpec, StreamSpec
from baton.models.spec.moe import MoeSpec
from baton.models.spec.norm import LayerNormsSpec, NormPlaces, NormSpec
from baton.models.spec.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections of an attention block have one."""

    qkv: bool = False
    o: bool = False


class ModelFamily:
    """Reader of one architecture's config.json; attributes are defaults of transformers' class."""

    architecture: str
    model_type: str
    other_model_types: tuple[str, ...] = ()
    """Names that published checkpoints of the same architecture give in `model_type`."""
    max_position: int
    vocab_size: int | None = None
    """Default vocab_size, where published files leave it out; None: it is needed."""
    heads: int | None = None
    """Default num_attention_heads; None: it is needed."""
    kv_heads: int | None = None
    """Default num_key_value_heads; None: num_attention_heads."""
    head_dim: int | None = None
    """Default head_dim; None: hidden_size / num_attention_heads."""
    rms_eps: float = 1e-6
    norm_places: NormPlaces = "before"
    tied: bool = False
    """Default tie_word_embeddings."""
    rope_theta: float = 10000.0
    partial_rotary: float | None = None
    """Default partial_rotary_factor; None: the class does not read the field, and all dimensions
    turn."""
    overflows_float16: bool = False
    """Activations of published checkpoints exceed the range of float16."""
    has_draft_layers: bool = False
    """Files may hold layers that only draft tokens."""
    draft_module: str = ""
    """Of their tensors, where they do not follow the other layers."""
    attention: str = "grouped queries"
    """For the table of families in the docs."""
    feed_forward: str = "gated MLP"

    def read_layers(self, config: ModelConfig) -> tuple[LayerSpec, ...]:
        """Blocks of every layer. Raises ConfigError for what they do not compute."""
        self.check_activation(config)
        count = config.read_integer("num_hidden_layers", most=MAX_LAYERS)
        windows = self.read_windows(config, count)
        ropes = self.read_ropes(config, windows)
        attention = self.read_attention_block(config)
        norms = LayerNormsSpec(self.read_norm(config), self.norm_places)
        chunks = self.read_chunks(config, count)
        blocks: dict[tuple[int, int, RopeSpec | None, MlpSpec | MoeSpec], LayerSpec] = {}
        layers = []
        for number, (window, chunk, rope) in enumerate(zip(windows, chunks, ropes, strict=True)):
            mlp = self.read_mlp(config, number)
            # Equal layers are one object, because a deep model has thousands of them.
            key = (window, chunk, rope, mlp)
            if key not in blocks:
                block = attention.of_layer(window, rope, chunk=chunk)
                blocks[key] = LayerSpec(block, mlp, norms)
            layers.append(blocks[key])
        return tuple(layers)

    def read_attention_block(self, config: ModelConfig) -> AttentionBlockSpec | MlaBlockSpec:
        """The attention block that all layers have, before windows and rotations of a layer."""
        return self.read_attention(config)

    def read_attention(self, config: ModelConfig) -> AttentionBlockSpec:
        """The block, in families whose pages hold K and V of heads."""
        biases = self.read_biases(config)
        qk_norm = self.read_norm(config) if self.has_qk_norm(config) else None
        return AttentionBlockSpec(
            self._read_heads(config), None, qkv_bias=biases.qkv, o_bias=biases.o, qk_norm=qk_norm
        )

    def read_ropes(
        self, config: ModelConfig, windows: tuple[int, ...]
    ) -> tuple[RopeSpec | None, ...]:
        """The rotary embedding of each layer; None where nothing turns."""
        return (self.read_rope(config),) * len(windows)

    def read_rope(self, config: ModelConfig) -> RopeSpec:
        """The rotary embedding of layers that turn."""
        return read_rope(
            config,
            self.read_max_position(config),
            self.partial_rotary,
            default_theta=self.rope_theta,
        )

    def read_norm(self, config: ModelConfig) -> NormSpec:
        """The norms of the residual stream, and of q and k where they are normed."""
        return NormSpec(config.read_number("rms_norm_eps", self.rms_eps))

    def read_stream(self, config: ModelConfig) -> StreamSpec:
        """Arithmetic of the residual stream outside the layers."""
        return StreamSpec()

    def check_activation(self, config: ModelConfig) -> None:
        """Raise ConfigError for an activation of gates that the blocks do not compute."""
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            config.refuse("hidden_act", config.get("hidden_act"), "supported: silu")

    def read_biases(self, config: ModelConfig) -> Biases:
        """`attention_bias` decides for q, k, v and o."""
        bias = config.read_flag("attention_bias", False)
        return Biases(qkv=bias, o=bias)

    def has_qk_norm(self, config: ModelConfig) -> bool:
        """Return whether each head of q and k is normed before it turns."""
        return False

    def read_windows(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        """The window of each layer, 0 where it sees everything."""
        return (0,) * layers

    def read_chunks(self, config: ModelConfig, layers: int) -> tuple[int, ...]:
        """The size of the chunks of each layer, 0 where it has none."""
        return (0,) * layers

    def read_mlp(self, config: ModelConfig, layer: int) -> MlpSpec | MoeSpec:
        """The block behind the attention of one layer."""
        return MlpSpec(config.read_integer("intermediate_size"))

    def read_max_position(self, config: ModelConfig) -> int:
        """`max_position_embeddings` or the default [tokens]."""
        return config.read_integer("max_position_embeddings", self.max_position)

    def read_max_context(self, config: ModelConfig) -> int:
        """Longest prompt + answer the model was made for [tokens]."""
        max_position = self.read_max_position(config)
        return stretched_context(self.read_rope(config), max_position)

    def _read_heads(self, config: ModelConfig) -> AttentionSpec:
        hidden = config.read_integer("hidden_size")
        heads = config.read_integer("num_attention_heads", self.heads)
        default_kv_heads = (
            heads if config.is_null("num_key_value_heads") else self.kv_heads or heads
        )
        kv_heads = config.read_integer("num_key_value_heads", default_kv_heads)
        if heads % kv_heads:
            config.refuse(
                "num_key_value_heads", kv_heads, f"it must divide num_attention_heads ({heads})"
            )
        if "head_dim" not in config.values and self.head_dim is None and hidden % heads:
            config.refuse(
                "hidden_size",
                hidden,
                f"without head_dim it must be a multiple of num_attention_heads ({heads})",
            )
        head_dim = config.read_integer("head_dim", self.head_dim or hidden // heads)
        if head_dim % 2:
            config.refuse("head_dim", head_dim, "rotary embedding needs an even size")
        return AttentionSpec(heads, kv_heads, head_dim)
