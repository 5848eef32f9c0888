"""config.json → ModelSpec: published configs, both spellings, and every refusal."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.layers.spec import AttentionSpec, common_heads
from baton.models.config_file import read_model_config
from baton.models.spec.model import ModelSpec
from baton.models.spec.norm import NormSpec
from baton.models.spec.rope import RopeSpec
from baton.models.spec_reader import hash_model, read_max_context, read_spec
from tests.support.effort import examples
from tests.support.models.published import PUBLISHED, published_config

LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "vocab_size": 128256,
}  # fmt: skip
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "eos_token_id": 151645, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip


def write(path: Path, config: dict[str, Any], **changes: Any) -> Path:
    """config.json with changes; a change to `...` removes the field."""
    merged = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    (path / "config.json").write_text(json.dumps(merged))
    return path


def spec_of(path: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    return read_spec(write(path, config, **changes))


def heads_of(spec: ModelSpec) -> AttentionSpec:
    return common_heads(spec.attention)


def rope_of(spec: ModelSpec) -> RopeSpec:
    (rope,) = {layer.attention.rope for layer in spec.layers}
    return rope


def windows_of(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(layer.window for layer in spec.attention)


def test_llama_3_2(tmp_path):
    spec = spec_of(tmp_path, LLAMA_32_1B)
    assert rope_of(spec) == RopeSpec(
        500000.0, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    layer = spec.layers[0]
    assert spec.tied
    attention = layer.attention
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (False, False, None)
    assert layer.mlp.bias is False
    assert (spec.max_context, spec.eos_token_ids, spec.dtype) == (
        131072,
        (128001, 128008, 128009),
        "bfloat16",
    )
    assert spec.num_parameters == pytest.approx(1.236e9, rel=1e-3)
    assert spec.kv_spec(16).token_bytes == 32768
    assert spec.kv_spec(16).page_bytes == 524288


def test_qwen_2_5(tmp_path):
    spec = spec_of(tmp_path, QWEN25_05B)
    attention = spec.layers[0].attention
    assert attention.heads.head_dim == 64
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (True, False, None)
    assert windows_of(spec) == (0,) * 24
    assert spec.num_parameters == pytest.approx(0.494e9, rel=1e-3)


def test_qwen_3_head_dim_is_not_hidden_over_heads(tmp_path):
    spec = spec_of(tmp_path, QWEN3_06B)
    attention = spec.layers[0].attention
    assert (attention.heads.head_dim, attention.heads.q_size) == (128, 2048)
    assert (attention.qk_norm, attention.qkv_bias) == (NormSpec(1e-6), False)
    assert spec.num_parameters == pytest.approx(0.596e9, rel=1e-3)


def test_mistral_windows_every_layer(tmp_path):
    assert windows_of(spec_of(tmp_path, MISTRAL_7B_V01)) == (4096,) * 32
    assert windows_of(spec_of(tmp_path, MISTRAL_7B_V01, sliding_window=None)) == (0,) * 32


def test_qwen_windows_the_layers_from_max_window_layers_on(tmp_path):
    on = {"use_sliding_window": True, "sliding_window": 512}
    assert windows_of(spec_of(tmp_path, QWEN25_05B, **on)) == (0,) * 21 + (512,) * 3
    types = ["sliding_attention", "full_attention"] * 12
    assert windows_of(spec_of(tmp_path, QWEN25_05B, **on, layer_types=types)) == (512, 0) * 12


def test_absent_fields_mean_what_the_family_says(tmp_path):
    assert heads_of(spec_of(tmp_path, LLAMA_32_1B, num_key_value_heads=...)).num_kv_heads == 32
    assert heads_of(spec_of(tmp_path, MISTRAL_7B_V01, num_key_value_heads=...)).num_kv_heads == 8
    assert windows_of(spec_of(tmp_path, MISTRAL_7B_V01, sliding_window=...)) == (4096,) * 32
    assert heads_of(spec_of(tmp_path, QWEN3_06B, head_dim=...)).head_dim == 128
    assert spec_of(tmp_path, LLAMA_32_1B, tie_word_embeddings=...).tied is False
    assert spec_of(tmp_path, LLAMA_32_1B, max_position_embeddings=...).max_context == 2048


def test_transformers_5_spelling_means_the_same(tmp_path):
    rope = {**LLAMA_32_1B["rope_scaling"], "rope_theta": 500000.0}
    new = {
        "rope_parameters": rope,
        "rope_scaling": ...,
        "rope_theta": ...,
        "dtype": "bfloat16",
        "torch_dtype": ...,
    }
    old_spec, new_spec = spec_of(tmp_path, LLAMA_32_1B), spec_of(tmp_path, LLAMA_32_1B, **new)
    assert {f: getattr(old_spec, f) for f in old_spec.__slots__ if f != "model_hash"} == {
        f: getattr(new_spec, f) for f in new_spec.__slots__ if f != "model_hash"
    }


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SPELLINGS = {
    "rope_scaling replaces rope_parameters": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    },
    "empty rope_scaling leaves rope_parameters": {
        "rope_scaling": {},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    },
    "theta inside counts before theta beside": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        "rope_theta": 7.0,
    },
    "theta beside": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
    "no theta": {"rope_theta": ...},
    "rope_type counts before type": {
        "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 3.0}
    },
    "original length beside counts": {
        "rope_scaling": YARN,
        "original_max_position_embeddings": 1024,
    },
    "original length absent": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "null key-value heads": {"num_key_value_heads": None},
    "absent key-value heads": {"num_key_value_heads": ..., "num_attention_heads": 32},
    "windows of null": {
        "use_sliding_window": True,
        "sliding_window": None,
        "max_window_layers": 0,
    },
    "null layer_types": {"use_sliding_window": True, "max_window_layers": 3, "layer_types": None},
    "dtype counts before torch_dtype": {"dtype": "float32", "torch_dtype": "bfloat16"},
    "null dtype": {"dtype": None, "torch_dtype": "bfloat16"},
    "model_type alone": {"architectures": ...},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_two_spellings_of_a_field_mean_what_they_mean_to_transformers(tmp_path, spelling):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {"model_type": "qwen2", "head_dim": 64, **SPELLINGS[spelling]}
    spec = spec_of(tmp_path, QWEN25_05B, **changes)
    theirs = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(theirs)  # completes the rotary embedding's parameters
    rope = theirs.rope_parameters
    assert (rope_of(spec).kind, rope_of(spec).theta) == (rope["rope_type"], rope["rope_theta"])
    assert rope_of(spec).factor == rope.get("factor", 1.0)
    assert rope_of(spec).original_max_position == rope.get("original_max_position_embeddings", 0)
    assert heads_of(spec).num_kv_heads == theirs.num_key_value_heads
    assert spec.dtype == str(theirs.dtype).removeprefix("torch.")
    windowed = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert windows_of(spec) == tuple(theirs.sliding_window if w else 0 for w in windowed)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 32768),
        (YARN, 131072),
        (YARN | {"original_max_position_embeddings": 4096}, 32768),
        (YARN | {"factor": 1.5}, 49152),
        ({"type": "yarn", "factor": 2.0}, 65536),
        ({"type": "linear", "factor": 2.5}, 81920),
        ({"type": "linear", "factor": 0.5}, 32768),
        (LLAMA_32_1B["rope_scaling"], 32768),
    ],
)
def test_stretched_rotary_embedding_stretches_the_context(tmp_path, scaling, context):
    """Right values: original length × factor, but for llama3; as in vLLM."""
    assert spec_of(tmp_path, QWEN25_05B, rope_scaling=scaling).max_context == context
    assert read_max_context(read_model_config(tmp_path)) == context


def test_old_rope_type_key_and_yarn_defaults(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = rope_of(spec_of(tmp_path, QWEN25_05B, rope_scaling=scaling))
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32768)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(1.1386294)


def test_eos_ids_come_from_both_files_without_repeats(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert spec_of(tmp_path, QWEN25_05B).eos_token_ids == (151645, 151643)
    (tmp_path / "generation_config.json").write_text(json.dumps({}))
    assert spec_of(tmp_path, QWEN25_05B, eos_token_id=None).eos_token_ids == ()


def test_float16_is_computed_as_bfloat16_on_a_cpu_unless_dtype_is_given(tmp_path):
    path = write(tmp_path, LLAMA_32_1B, torch_dtype="float16")
    assert read_spec(path).dtype == "bfloat16"
    assert read_spec(path, dtype="float32").dtype == "float32"
    assert (
        read_spec(path, dtype="float16").dtype == read_spec(path, on_cpu=False).dtype == "float16"
    )
    on_gpu = read_spec(path, on_cpu=False).kv_spec(16)
    assert on_gpu.token_bytes == read_spec(path).kv_spec(16).token_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            ["architectures", "GPT2LMHeadModel", "Qwen3ForCausalLM"],
        ),
        ({"architectures": ...}, ["architectures", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        (
            {"quantization_config": {"quant_method": "quark"}},
            ["quantization_config.quant_method", "quark", "awq", "unquantized"],
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            ["rope_scaling.rope_type", "dynamic", "llama3", "yarn"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing", "linear"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "sharpness": 3}},
            ["rope_scaling.sharpness", "3"],
        ),
        (
            {"rope_scaling": ..., "rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            ["rope_parameters", "all layers"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        ({"num_key_value_heads": 7}, ["num_key_value_heads", "7", "32"]),
        ({"head_dim": 63}, ["head_dim", "63", "even"]),
        ({"hidden_size": "big"}, ["hidden_size", "big", "positive integer"]),
        ({"vocab_size": ...}, ["vocab_size", "positive integer"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0", "positive"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes", "true or false"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>", "token id"]),
        ({"model_type": "mistral"}, ["model_type", "mistral", "LlamaForCausalLM", "agree"]),
        ({"model_type": "phi3"}, ["model_type", "phi3", "LlamaForCausalLM", "agree"]),
        ({"transformers_weights": "x.safetensors"}, ["transformers_weights", "x.safetensors"]),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ConfigError) as err:
        spec_of(tmp_path, LLAMA_32_1B, **changes)
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in err.value.message


def test_layer_types_must_fit(tmp_path):
    on = {"use_sliding_window": True, "sliding_window": 512}
    for types in (["full_attention"], ["chunked_attention"] * 24, 7):
        with pytest.raises(ConfigError, match="layer_types"):
            spec_of(tmp_path, QWEN25_05B, **on, layer_types=types)
    with pytest.raises(ConfigError, match="use_sliding_window"):
        spec_of(tmp_path, QWEN25_05B, layer_types=["sliding_attention"] * 24)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        read_spec(tmp_path)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=2), st.dictionaries(st.sampled_from(["type", "factor", "x"]), st.integers()),
)  # fmt: skip
FIELDS = (
    "layer_types", "rope_parameters", "rope_scaling", "rope_theta", "dtype", "torch_dtype", "head_dim", "hidden_act",
    "original_max_position_embeddings", "num_local_experts", "mlp_only_layers", "no_rope_layers", "sliding_window",
    "use_bidirectional_attention", "partial_rotary_factor", "quantization_config", "eos_token_id",
)  # fmt: skip
"""Read of several families, beside the fields that a config.json has."""


@pytest.mark.parametrize("name", PUBLISHED)
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), junk=JUNK, windowed=st.booleans(), is_nested=st.booleans())
def test_junk_in_any_field_is_a_config_error_or_harmless(
    tmp_path, name, data, junk, windowed, is_nested
):
    config = published_config(name) | {"use_sliding_window": windowed}
    field = data.draw(st.sampled_from([*config, *FIELDS]))
    value = config.get(field)
    if is_nested and isinstance(value, dict):
        junk = value | {data.draw(st.sampled_from([*value, "rope_theta", "x"])): junk}
    with contextlib.suppress(ConfigError):
        spec = spec_of(tmp_path, config, **{field: junk})
        assert spec.num_layers >= 1
        assert spec.kv_spec(16).token_bytes >= 1


def test_unnamed_dtype_is_that_of_the_weights(tmp_path):
    path = write(tmp_path, LLAMA_32_1B, torch_dtype=...)
    assert read_spec(path, on_cpu=False).dtype == "float32"
    header = json.dumps(
        {"__metadata__": {}, "x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    ).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert read_spec(path, on_cpu=False).dtype == "bfloat16"
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors.*damaged"):
        read_spec(path)


def test_model_hash_covers_what_changes_answers(tmp_path):
    def tokenizer(text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)

    def weights(fill: int) -> None:
        header = json.dumps(
            {"x": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}
        ).encode()
        (tmp_path / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + bytes([fill]) * 16384
        )

    write(tmp_path, LLAMA_32_1B)
    tokenizer("{}")
    weights(0)
    first = hash_model(tmp_path)
    assert first == read_spec(tmp_path).model_hash
    write(tmp_path, LLAMA_32_1B, transformers_version="5.0.0")
    assert hash_model(tmp_path) == first
    tokenizer("{ }")
    second = hash_model(tmp_path)
    weights(1)
    third = hash_model(tmp_path)
    write(tmp_path, LLAMA_32_1B, rms_norm_eps=1e-6)
    fourth = hash_model(tmp_path)
    dummies = [hash_model(tmp_path, "dummy", seed) for seed in (0, 1)]
    assert len({first, second, third, fourth, *dummies}) == 6


def test_spec_and_weight_plan_load_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None; "
        "import baton.models.checkpoint"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "engine"}, timeout=240
    )
