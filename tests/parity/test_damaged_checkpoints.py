"""Damaged checkpoints end the start in one sentence, before anything is computed: in each family, and with exit code 2
in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import build_config
from baton.errors import ConfigError
from baton.models.checkpoint import check_checkpoint
from tests.parity.conftest import Reference
from tests.support.models.checkpoints import VARIANTS, make_checkpoint

REPO = Path(__file__).parents[2]
Tensors = dict[str, torch.Tensor]


def drop_last(tensors: Tensors) -> str:
    """Remove the last tensor; the answer is what the sentence says of it."""
    name = sorted(tensors)[-1]
    del tensors[name]
    return f"missing tensor {name}"


def drop_norm(tensors: Tensors) -> str:
    name = next(name for name in sorted(tensors) if "norm" in name and ".layers.1." in name)
    del tensors[name]
    return f"missing tensor {name}"


def cut_row(tensors: Tensors) -> str:
    name = next(name for name in sorted(tensors) if "o_proj.weight" in name)
    tensors[name] = tensors[name][:-1].contiguous()
    return f"{name} is {list(tensors[name].shape)}, config.json implies"


def add_unknown(tensors: Tensors) -> str:
    tensors["model.layers.0.self_attn.q_scale"] = torch.ones(4)
    return "unexpected tensor model.layers.0.self_attn.q_scale"


@pytest.mark.parametrize("damage", [drop_last, drop_norm, cut_row, add_unknown])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_that_do_not_fit_are_named(
    reference: Callable[[str], Reference],
    variant: str,
    damage: Callable[[Tensors], str],
    tmp_path: Path,
) -> None:
    path = Path(shutil.copytree(reference(variant).path, tmp_path / "m"))
    file = path / "model.safetensors"
    tensors = load_file(file)
    words = damage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_checkpoint(build_config({"model_path": str(path)}), path)


def drop_expert(path: Path) -> str:
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return f"missing tensor {name}"


def halve_shard(path: Path) -> str:
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    return "the file is damaged, download it again"


def take_other_tokenizer(path: Path) -> str:
    shutil.copy(REPO / "engine/baton/models/demo/tokenizer.json", path / "tokenizer.json")
    return "it belongs to another model; give --tokenizer-path"


def lose_shard(path: Path) -> str:
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'
    )
    return "1 of 1 files are absent"


@pytest.mark.parametrize("damage", [drop_expert, halve_shard, take_other_tokenizer, lose_shard])
def test_start_says_what_is_wrong_and_exits_with_2(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    path = make_checkpoint("phimoe", tmp_path / "m")
    words = damage(path)
    done = subprocess.run(
        [sys.executable, "-m", "baton_ops.cli", "engine", "--model-path", str(path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPO / "engine")},
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
