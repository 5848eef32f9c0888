"""Description of a checkpoint's model, as far as computing it goes. No torch here.

`models.spec_reader` makes it of config.json. It sizes the KV pool (`KVSpec`), plans the weights (`models.weights`) and
builds the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The cache of one token: `tensors_per_layer` (K and V) of [num_kv_heads, head_dim] in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    tensors_per_layer: int = 2

    @property
    def token_bytes(self) -> int:
        return (
            self.num_layers
            * self.tensors_per_layer
            * self.num_kv_heads
            * self.head_dim
            * DTYPE_BYTES[self.dtype]
        )

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.token_bytes


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base `theta` and how its frequencies are stretched (`kind`)."""

    theta: float
    kind: str = "default"
    """default | linear | llama3 | yarn"""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder, as far as computing it goes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Longest prompt + answer the model was made for [tokens]."""
    rms_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    """The output head is the embedding matrix: config.json says so, and the files hold no other head."""
    windows: tuple[int, ...]
    """Per layer: 0 sees everything before it, W > 0 the last W tokens including itself."""
    dtype: str
    """Compute type, also of the KV cache: float32 | bfloat16 | float16."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    model_hash: str
    """Equal on nodes that may exchange KV pages: config, tokenizer and (sampled) weights, see `hash_model` of
    `models.spec_reader`."""

    @property
    def kv(self) -> KVSpec:
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights that are multiplied or looked up, biases and norms left out."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * (attention + mlp) + embeddings
