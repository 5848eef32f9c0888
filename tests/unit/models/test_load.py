"""Loading weights: complaints name what is wrong, dummies are reproducible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import build_config
from baton.errors import ConfigError
from baton.layers.shard import Shard
from baton.models import checkpoint as checkpoint_module
from baton.models import load
from baton.models.checkpoint import check_checkpoint
from baton.models.load import load_weights
from baton.models.spec.model import plan_weights, weight_bytes
from baton.models.spec_reader import read_spec
from tests.support.models import shapes
from tests.support.models.whole_model import held_tensors, load_model
from tests.support.probes import DecoderProbe

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float32",
    "tie_word_embeddings": False,
}  # fmt: skip
Edit = Callable[[dict[str, torch.Tensor]], Any]


def checkpoint(path: Path, edit: Edit = lambda tensors: None, **changes: Any) -> Path:
    """A directory with random weights in checkpoint names, after `edit`."""
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    generator = torch.Generator().manual_seed(0)
    parts = [part for _, param in plan_weights(read_spec(path)) for part in param.parts]
    tensors = {part.source: torch.randn(part.shape, generator=generator) for part in parts}
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_projections_are_stacked_in_order(tmp_path):
    kept: dict[str, torch.Tensor] = {}
    path = checkpoint(tmp_path, edit=kept.update)
    weights = load_model(path).weights
    prefix = "model.layers.1."
    qkv = [kept[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"]
    bias = [kept[f"{prefix}self_attn.{x}_proj.bias"] for x in "qkv"]
    gate_up = [kept[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(weights.layers[1].attention.qkv, torch.cat(qkv))
    assert torch.equal(weights.layers[1].attention.qkv_bias, torch.cat(bias))
    assert torch.equal(weights.layers[1].mlp.gate_up, torch.cat(gate_up))
    assert torch.equal(weights.lm_head, kept["lm_head.weight"])
    assert weights.layers[0].attention.o_bias is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["missing tensor model.layers.1.mlp.up_proj.weight"],
        ),
        (lambda t: t.pop("lm_head.weight"), ["missing tensor lm_head.weight"]),
        (
            lambda t: t.update({"model.layers.0.mlp.router.weight": torch.ones(2)}),
            ["unexpected", "mlp.router.weight"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(8)}),
            ["model.norm.weight is [8]", "implies [16]"],
        ),
        (lambda t: t.clear(), ["missing tensor", "more"]),
    ],
)
def test_weights_that_do_not_fit_are_listed(tmp_path, edit, words):
    with pytest.raises(ConfigError) as err:
        load_model(checkpoint(tmp_path, edit))
    for word in words:
        assert word in err.value.message


def test_start_refuses_what_headers_and_memory_show(tmp_path, monkeypatch):
    path = checkpoint(tmp_path)
    check_checkpoint(build_config({}), path)
    monkeypatch.setattr(checkpoint_module, "available_memory", lambda: 2**20)
    with pytest.raises(
        ConfigError, match=r"2 engines need 0\.00 GiB for weights and 0\.25 GiB for KV pools"
    ):
        check_checkpoint(build_config({}), path, 2)
    monkeypatch.setattr(checkpoint_module, "available_memory", lambda: None)
    check_checkpoint(build_config({"kv_pool_mib": 10**9}), path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-10], whole[:100], b"", b"\xff" * 64, whole[:8] + b"[]" + whole[10:]):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"model\.safetensors.*download it again"):
            check_checkpoint(build_config({}), path)
    file.unlink()
    (path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin; convert it"):
        check_checkpoint(build_config({}), path)
    with pytest.raises(ConfigError, match="64"):
        check_checkpoint(build_config({"tp_size": 64, "load_format": "dummy"}), path)


def test_computed_tensors_in_a_checkpoint_are_ignored(tmp_path):
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    weights = load_model(checkpoint(tmp_path, edit, tie_word_embeddings=True)).weights
    assert weights.lm_head is weights.embed


@pytest.mark.parametrize("row", [0, 31])
def test_head_of_other_content_overrules_tie_word_embeddings(tmp_path, caplog, row):
    kept: dict[str, torch.Tensor] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][row, -1] += 1
        kept.update(tensors)

    path = checkpoint(tmp_path, edit, tie_word_embeddings=True)
    weights = load_model(path).weights
    assert torch.equal(weights.lm_head, kept["lm_head.weight"])
    assert torch.equal(weights.embed, kept["model.embed_tokens.weight"])
    assert "lm_head.weight differs" in caplog.text
    assert read_spec(path).num_parameters == read_spec(path, load_format="dummy").num_parameters + (
        32 * 16
    )
    for rank in range(2):
        share = load_weights(read_spec(path), path, shard=Shard(rank, 2)).weights
        assert torch.equal(share.lm_head, kept["lm_head.weight"].split(16)[rank])


def test_single_file_counts_before_an_old_index(tmp_path):
    path = checkpoint(tmp_path)
    newest = load_file(path / "model.safetensors")
    old = {name: tensor.half() for name, tensor in newest.items()}
    save_file(old, path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    edited = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(edited | {"dtype": None}))
    assert read_spec(path).dtype == "float32"
    assert torch.equal(load_model(path).weights.embed, newest["model.embed_tokens.weight"])
    (path / "model.safetensors").unlink()
    assert read_spec(path, on_cpu=False).dtype == "float16"


def test_absent_and_damaged_files_are_named(tmp_path):
    path = checkpoint(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors.*damaged"):
        load_model(path)
    file.unlink()
    with pytest.raises(ConfigError, match="--load-format dummy"):
        load_model(path)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x-1.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"1 of 1 files are absent, first x-1\.safetensors"):
        load_model(path)


def test_dummy_weights_depend_on_the_seed_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    a, b, c = (load_model(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.weights.layers[1].mlp.down, b.weights.layers[1].mlp.down)
    assert not torch.equal(a.weights.layers[1].mlp.down, c.weights.layers[1].mlp.down)
    assert a.spec.model_hash == b.spec.model_hash != c.spec.model_hash
    half = load_model(tmp_path, dtype="bfloat16", load_format="dummy", seed=1)
    assert torch.equal(half.weights.embed, a.weights.embed.bfloat16())


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)])
def test_weights_go_straight_to_their_device(tmp_path, load_format, shard):
    """A meta tensor has no memory: what is there was never put together on the host."""
    spec = read_spec(checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=2))
    there = load_weights(spec, tmp_path, load_format, 0, shard, device=torch.device("meta"))
    here = load_weights(spec, tmp_path, load_format, 0, shard)
    assert {x.device.type for x in held_tensors(there)} == {"meta"}
    assert [x.shape for x in held_tensors(there)] == [x.shape for x in held_tensors(here)]
    assert sum(x.nbytes for x in held_tensors(here)) == weight_bytes(spec, shard)
    assert DecoderProbe(there).rope.cos.device.type == "meta"


def test_dummies_repeat_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_NOISE", 101)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    embed = load_model(tmp_path, load_format="dummy").weights.embed
    assert len({tuple(row) for row in embed.tolist()}) == len(embed) == 32
    assert 0.01 < embed.std() < 0.03


def test_long_loading_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(load, "_PROGRESS_SECS", 0.0)
    with caplog.at_level("INFO"):
        load_model(checkpoint(tmp_path))
    lines = [line for line in caplog.messages if line.startswith("loading weights")]
    assert lines[-1].startswith("loading weights: 100 %, 0.00 GiB")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_progress_grows_from_nothing_to_all_parameters_of_the_share(tmp_path, load_format, rank):
    path = checkpoint(tmp_path)
    spec, shard, progress = read_spec(path), Shard(rank, 2), []
    load_weights(
        spec,
        path,
        load_format,
        0,
        shard,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    mine = sum(param.size for _, param in plan_weights(spec, shard))
    assert progress[0] == (0, mine)
    assert progress[-1] == (mine, mine)
    assert len(progress) > 5
    assert progress == sorted(progress)


@pytest.mark.parametrize(
    ("shape", "parameters"), [("qwen3-0.6b", 596_049_920), ("llama-3-8b", 8_030_261_248)]
)
def test_shapes_of_well_known_models_are_theirs(tmp_path, shape, parameters):
    """The published numbers of parameters, from the index files of the checkpoints."""
    path = shapes.make(shape, tmp_path)
    spec = read_spec(path, load_format="dummy")
    assert weight_bytes(spec) == 2 * parameters
    meta = load_weights(spec, path, "dummy", device=torch.device("meta"))
    assert (
        sum(x.numel() for x in held_tensors(meta)) - meta.weights.embed.numel() * spec.tied
        == parameters
    )
