"""Sizes of published models, as their config.json states them: for tables in the docs and for tests of the reader."""

from __future__ import annotations

from typing import Any

_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_QWEN35_ROPE = {
    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Mistral 7B v0.1": {
        "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "Qwen2.5 7B": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": 131072,
        "use_sliding_window": False, "max_window_layers": 28,
    },
    "Qwen3 8B": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 36, "attention_bias": False,
    },
    "Phi-3-mini 4k": {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rope_scaling": None,
        "sliding_window": 2047,
    },
    "Phi-4": {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000,
        "rope_scaling": None, "sliding_window": None,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 47 + [32.0],
        },
    },
    "Seed-OSS 36B": {
        "architectures": ["SeedOssForCausalLM"], "hidden_size": 5120, "intermediate_size": 27648, "head_dim": 128,
        "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "vocab_size": 155136,
        "max_position_embeddings": 524288, "rope_theta": 10000000.0, "attention_bias": True,
        "attention_out_bias": False,
    },
    "OLMo 2 7B": {
        "architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
        "max_position_embeddings": 4096, "rope_theta": 500000, "rope_scaling": None, "attention_bias": False,
    },
    "OLMo 3 7B": {
        "architectures": ["Olmo3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278,
        "max_position_embeddings": 65536, "rope_theta": 500000, "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32,
            "beta_slow": 1, "attention_factor": 1.2079441541679836,
        },
    },
    "Granite 3.3 8B": {
        "architectures": ["GraniteForCausalLM"], "hidden_size": 4096, "intermediate_size": 12800,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49159,
        "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rope_scaling": None,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
        "residual_multiplier": 0.22, "tie_word_embeddings": True,
    },
    "SmolLM3 3B": {
        "architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
        "max_position_embeddings": 65536, "rope_theta": 5000000.0, "rope_scaling": None, "sliding_window": None,
        "use_sliding_window": False, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * 36,
    },
    "Gemma 2 9B": {
        "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 14336, "head_dim": 256,
        "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 256000,
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    },
    "Gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912, "head_dim": 256,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144,
        "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Mixtral 8x7B": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "Phi-3.5-MoE": {
        "architectures": ["PhimoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 6400,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32064,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
        "sliding_window": 131072, "num_local_experts": 16, "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 63 + [32.0],
            "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        },
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936,
        "max_position_embeddings": 8192, "rope_theta": 1000000.0, "sliding_window": 32768,
        "use_sliding_window": False, "max_window_layers": 21, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "sliding_window": None,
        "use_sliding_window": False, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "Kimi-Linear 48B A3B": {
        "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 72,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 163840,
        "model_max_length": 1048576, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 1024, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.446, "mla_use_nope": True, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [n for n in range(1, 27) if n % 4],
        },
    },
    "Qwen3.5 9B": {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 256,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144, "rope_parameters": _QWEN35_ROPE,
    },
    "Qwen3.5 35B A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "head_dim": 256,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 248320,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144, "rope_parameters": _QWEN35_ROPE, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "Qwen3-Next 80B A3B": {
        "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "intermediate_size": 5120, "head_dim": 256,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 262144, "rope_theta": 10000000, "rope_scaling": None, "attention_bias": False,
        "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rms_norm_eps": 1e-06,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 10944, "head_dim": 128,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "vocab_size": 151552,
        "max_position_embeddings": 131072, "rope_theta": 1000000, "partial_rotary_factor": 0.5,
        "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "DeepSeek V2 Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
        "max_position_embeddings": 163840, "rope_theta": 10000, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
    "DeepSeek V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rope_theta": 10000, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "Kimi K2": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "vocab_size": 163840, "max_position_embeddings": 131072,
        "rope_theta": 50000.0, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "rope_scaling": {
            "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880,
        "max_position_embeddings": 202752, "rope_theta": 1000000, "rope_scaling": None, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1,
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1,
    },
    "gpt-oss 20B": {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
        "max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling": _GPT_OSS_ROPE, "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss 120B": {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
        "max_position_embeddings": 131072, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling": _GPT_OSS_ROPE, "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0,
        "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "Llama 4 Scout": {
        "architectures": ["Llama4ForCausalLM"], "hidden_size": 5120, "intermediate_size": 8192, "head_dim": 128,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 202048, "max_position_embeddings": 10485760,
        "rope_theta": 500000.0, "attention_chunk_size": 8192, "attn_temperature_tuning": 4, "attn_scale": 0.1,
        "floor_scale": 8192, "use_qk_norm": True, "no_rope_layers": [], "interleave_moe_layer_step": 1,
        "num_local_experts": 16, "num_experts_per_tok": 1,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
"""Lists of longrope's factors stand for those of the files, which are as long."""
COMMON: dict[str, Any] = {
    "dtype": "bfloat16", "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip
"""Fields that all of them have."""


def published_config(name: str) -> dict[str, Any]:
    """config.json of a published model, as far as it decides sizes and blocks."""
    return COMMON | PUBLISHED[name]
