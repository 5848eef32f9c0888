"""Fields about latent attention that several families read alike. No torch here."""

from __future__ import annotations

from baton.models.config_file import ModelConfig
from baton.models.families.base import ModelFamily
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.norm import NormSpec

_LATENT_EPS = 1e-6
"""Of the norms of latents: the classes do not pass `rms_norm_eps` to them."""


def refuse_indexer(config: ModelConfig) -> None:
    """Raise ConfigError for layers that choose the tokens they attend to (DeepSeek V3.2, GLM 5)."""
    if (count := config.get("index_topk")) is not None:
        config.refuse(
            "index_topk",
            count,
            "attention to the tokens that an indexer chooses is not computed; use a checkpoint "
            "without an indexer, such as DeepSeek V3",
        )


class MlaFamily(ModelFamily):
    """Multi-head latent attention; attributes are defaults of transformers' class."""

    q_rank: int | None
    """Default q_lora_rank; null in config.json means none, as None does."""
    kv_rank: int = 512
    plain_dim: int = 128
    """Default qk_nope_head_dim."""
    rope_dim: int = 64
    """Default qk_rope_head_dim."""
    value_dim: int = 128
    attention = "latents and a rotated key per token (MLA); YaRN scales scores"

    def read_attention_block(self, config: ModelConfig) -> MlaBlockSpec:
        refuse_indexer(config)
        heads = config.read_integer("num_attention_heads")
        if config.read_integer("num_key_value_heads", heads) != heads:
            config.refuse(
                "num_key_value_heads",
                config.get("num_key_value_heads"),
                f"all heads share one latent: num_attention_heads ({heads}) is needed",
            )
        rope_dim = config.read_integer("qk_rope_head_dim", self.rope_dim)
        plain_dim = config.read_integer("qk_nope_head_dim", self.plain_dim)
        if rope_dim % 2:
            config.refuse("qk_rope_head_dim", rope_dim, "rotary embedding needs an even size")
        for field, size in (("head_dim", rope_dim), ("qk_head_dim", plain_dim + rope_dim)):
            if config.read_integer(field, size) != size:
                config.refuse(
                    field,
                    config.get(field),
                    f"qk_nope_head_dim ({plain_dim}) and qk_rope_head_dim ({rope_dim}) imply {size}",
                )
        q_rank = None if config.is_null("q_lora_rank") else config.get("q_lora_rank", self.q_rank)
        if q_rank is not None:
            q_rank = config.read_integer("q_lora_rank", q_rank)
        bias = config.read_flag("attention_bias", False)
        if bias and q_rank is None:
            config.refuse("attention_bias", bias, "without q_lora_rank: false")
        return MlaBlockSpec(
            heads,
            plain_dim,
            rope_dim,
            value_dim=config.read_integer("v_head_dim", self.value_dim),
            kv_rank=config.read_integer("kv_lora_rank", self.kv_rank),
            q_rank=q_rank,
            latent_norm=NormSpec(_LATENT_EPS),
            is_interleaved=self.is_interleaved(config),
            bias=bias,
        )

    def is_interleaved(self, config: ModelConfig) -> bool:
        """Return whether neighbors turn together."""
        return config.read_flag("rope_interleave", True)

    def check_router(self, config: ModelConfig, scoring: str, methods: tuple[str, ...]) -> None:
        """Raise ConfigError for routers that the class does not compute. Args: `methods`: supported
        values of topk_method, the default first."""
        if config.get("scoring_func", scoring) != scoring:
            config.refuse("scoring_func", config.get("scoring_func"), f"supported: {scoring}")
        method = config.get("topk_method", methods[0])
        if method not in methods:
            config.refuse("topk_method", method, f"supported: {', '.join(methods)}")
        if config.get("moe_layer_freq", 1) != 1:
            config.refuse("moe_layer_freq", config.get("moe_layer_freq"), "supported: 1")
