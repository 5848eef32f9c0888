"""Checkpoints with parts for images beside a text part that is one of our families: prompts of text are answered as
transformers' whole model answers them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from baton.models.checkpoint import check_files
from baton.models.config_file import read_model_config
from baton.models.families.multimodal import MULTIMODAL
from baton.models.spec_reader import find_architecture, read_spec
from tests.parity.conftest import Reference
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import reference_greedy, save_random, variant_config

STEPS = 24
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN35_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("gemma3", {"model_type": "siglip_vision_model"}),
    "Kimi_K25": ("deepseek-v3", {}),
    "Llama4": (
        "llama4",
        {
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    ),
    "Qwen3_5": ("qwen3.5", _QWEN35_VISION),
    "Qwen3_5Moe": ("qwen3.5-moe", _QWEN35_VISION),
    "Mistral3": ("mistral-window", {"model_type": "pixtral", "head_dim": 8}),
}
"""By the name of transformers' class: a variant for the text part, and what its vision_config has beside _VISION."""


def make(name: str, path: Path) -> Any:
    """Write a checkpoint with the names that published files have. Returns transformers' model."""
    variant, vision = PARTS[name]
    fields = {"text_config": variant_config(variant).to_dict(), "vision_config": _VISION | vision}
    config = getattr(transformers, f"{name}Config")(**fields)
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    save_random(model_class(config), variant, path)
    # transformers renames the layers of Kimi's text part, too, when it saves those for images.
    tensors = load_file(path / "model.safetensors")
    renamed = {
        n.replace("language_model.model.blocks.", "language_model.model.layers."): t
        for n, t in tensors.items()
    }
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    return model_class.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", PARTS)
def test_prompts_of_text_are_answered_as_by_the_whole_model(
    reference: Any, name: str, tmp_path: Path
) -> None:
    model = make(name, tmp_path / "m")
    names = load_file(tmp_path / "m" / "model.safetensors")
    assert any("vis" in each for each in names)
    prompts = Reference(tmp_path / "m").prompts
    engine = make_engine(tmp_path / "m")
    got = answer(engine, prompts, greedy(STEPS))
    engine.close()
    assert got == [reference_greedy(model, prompt, STEPS) for prompt in prompts]
    plain = read_spec(reference(PARTS[name][0]).path)
    whole = read_spec(tmp_path / "m")
    assert whole.model_hash != plain.model_hash
    assert dataclasses.replace(whole, model_hash="", has_other_parts=False, tied=plain.tied) == (
        dataclasses.replace(plain, model_hash="")
    )


def test_classes_are_those_of_transformers() -> None:
    for name, parts in MULTIMODAL.items():
        cls = getattr(transformers, name.replace("KimiK25", "Kimi_K25"))
        assert cls.config_class.model_type == parts.model_type
        assert cls.config_class().tie_word_embeddings is parts.tied


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama4"}, "architectures says Gemma3ForConditionalGeneration, which is gemma3"),
        ({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}, "supported: LlamaForCausalLM"),
        ({"text_config": {"model_type": "mamba2"}}, "supported: LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_other_classes_are_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make("Gemma3", tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError) as err:
        read_spec(tmp_path / "m")
    assert words in err.value.message


def test_tensor_of_no_known_part_is_refused_by_the_name_in_the_file(tmp_path: Path) -> None:
    make("Mistral3", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file) | {"language_model.model.mask": torch.zeros(2)}, file)
    with pytest.raises(ConfigError, match=r"unexpected tensor language_model\.model\.mask"):
        check_files(read_spec(tmp_path / "m"), tmp_path / "m")


def test_tensor_under_two_names_is_refused_by_both(tmp_path: Path) -> None:
    make("Mistral3", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    norm = {"model.norm.weight": tensors["language_model.model.norm.weight"].clone()}
    save_file(tensors | norm, file)
    with pytest.raises(ConfigError, match="are names of one tensor; remove one") as err:
        check_files(read_spec(tmp_path / "m"), tmp_path / "m")
    assert all(name in err.value.message for name in ("language_model.model.norm.weight", *norm))


def test_published_config_of_gemma_3_leaves_out_what_its_class_knows(tmp_path: Path) -> None:
    """google/gemma-3-4b-it."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert find_architecture(read_model_config(tmp_path)) == "Gemma3ForCausalLM"
    spec = read_spec(tmp_path, load_format="dummy")
    want = transformers.Gemma3Config(**whole).text_config
    heads = spec.layers[0].attention.heads
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (
        want.num_attention_heads, want.num_key_value_heads, want.head_dim,
    )  # fmt: skip
    assert (spec.vocab_size, spec.dtype, spec.eos_token_ids, spec.tied) == (
        want.vocab_size, "bfloat16", (1, 106), True,
    )  # fmt: skip
