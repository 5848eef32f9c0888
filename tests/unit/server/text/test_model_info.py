"""Model directories as the front reads them, and its errors when it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.config import build_config
from baton.errors import ConfigError
from baton.models import checkpoint, weight_files
from baton.server.text import model_info
from baton.server.text.tokenizer import Tokenizer
from baton_ops.launch import local_cluster
from tests.support.file_kinds import KINDS, put_kind
from tests.support.models import tiny_model


def load(path: Path | str, **flags: Any) -> model_info.ModelFacts:
    return model_info.load(build_config({"model_path": str(path), **flags}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_model.make(tmp_path / "tiny")


def edit(file: Path, **values: Any) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def test_facts(path: Path) -> None:
    facts = load(path)
    assert (facts.name, facts.context_length, facts.eos_token_ids) == ("tiny", 512, (1,))
    assert facts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert load(path, served_model_name="x", context_length=100).context_length == 100


def test_end_of_sequence_ids_of_all_files_count(path: Path) -> None:
    edit(
        path / "generation_config.json",
        eos_token_id=[2, 1],
        temperature=0.6,
        top_k=20,
        do_sample=True,
    )
    facts = load(path)
    assert facts.eos_token_ids == (1, 2)
    assert facts.generation_config["top_k"] == 20


def test_multimodal_configs_keep_the_text_part_apart(path: Path) -> None:
    text = {"max_position_embeddings": 77, "eos_token_id": 5}
    edit(path / "config.json", text_config=text)
    facts = load(path)
    # What the whole says of its answers' end goes first, as in transformers.
    assert (facts.context_length, facts.eos_token_ids) == (77, (1,))
    edit(path / "config.json", eos_token_id=None)
    assert load(path).eos_token_ids == (5,)


def test_yarn_lengthens_the_context_that_flags_may_ask_for(path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit(path / "config.json", rope_scaling=scaling)
    assert load(path).context_length == 2048
    assert load(path, context_length=2048).context_length == 2048
    with pytest.raises(ConfigError, match="the model's limit is 2048 tokens"):
        load(path, context_length=2049)


def test_special_tokens_may_be_objects(path: Path) -> None:
    edit(
        path / "tokenizer_config.json",
        bos_token={"content": "<b>", "lstrip": False},
        eos_token=None,
    )
    assert load(path).special_tokens == {"bos_token": "<b>", "pad_token": "<pad>"}


def test_demo_model_is_found_without_importing_torch() -> None:
    assert model_info.resolve("demo").name == "demo"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"model_path": "/nowhere"},
            "/nowhere is not a directory; give a Hugging Face model directory",
        ),
        ({"model_path": "/proc"}, "/proc has no config.json"),
        ({"context_length": 100000}, "--context-length 100000: the model's limit is 512 tokens"),
        ({"chat_template": "/nowhere"}, "--chat-template /nowhere: .*No such file"),
    ],
)
def test_wrong_paths_are_named(path: Path, flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(**{"path": path} | {("path" if k == "model_path" else k): v for k, v in flags.items()})


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_broken_json_names_the_file(path: Path, content: str) -> None:
    (path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(path)


def test_tokenizer_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has none of tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


def test_hub_id_is_found_in_the_hub_cache_and_gives_the_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"hf download Qwen/Tiny-1\.0$"):
        load("Qwen/Tiny-1.0")
    folder = tmp_path / "hub/models--Qwen--Tiny-1.0"
    (folder / "snapshots").mkdir(parents=True)
    path.rename(folder / "snapshots/abc")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc\n")
    facts = load("Qwen/Tiny-1.0")
    assert (facts.name, facts.path) == ("Qwen/Tiny-1.0", folder / "snapshots/abc")


def test_tokenizer_path_may_be_a_hub_id(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        ConfigError, match=r"^--tokenizer-path Qwen/Tiny: .* hf download Qwen/Tiny$"
    ):
        load(path, tokenizer_path="Qwen/Tiny")
    with pytest.raises(ConfigError, match=r"^--tokenizer-path /nowhere: .* is not a directory"):
        load(path, tokenizer_path="/nowhere")
    snapshot = tmp_path / "hub/models--Qwen--Tiny/snapshots/abc"
    shutil.copytree(path, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc\n")
    assert load(path, tokenizer_path="Qwen/Tiny").tokenizer_path == snapshot
    assert local_cluster._tokenizer_flags({"model_path": str(path), "tokenizer_path": "Qwen/Tiny"})[
        -1
    ] == str(snapshot)


def test_checkpoints_truncation_does_not_cut_prompts(path: Path) -> None:
    edit(
        path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(Tokenizer(path).encode("hello world, how are you today?")) > 4


def test_fingerprint_differs_with_tokenizer_template_and_special_tokens(path: Path) -> None:
    prints = [load(path).tokenizer_fingerprint]
    assert load(path).tokenizer_fingerprint == prints[0]
    assert len(prints[0]) == 64
    edit(path / "tokenizer_config.json", model_max_length=99)  # nothing a prompt depends on
    assert load(path).tokenizer_fingerprint == prints[0]
    (path / "chat_template.jinja").write_text("{{ messages }}")
    prints.append(load(path).tokenizer_fingerprint)
    edit(path / "tokenizer_config.json", bos_token="<pad>")
    prints.append(load(path).tokenizer_fingerprint)
    with (path / "tokenizer.json").open("a") as file:
        file.write("\n")
    prints.append(load(path).tokenizer_fingerprint)
    assert len(set(prints)) == 4
    assert load("demo", simulate="h200-8b").tokenizer_fingerprint == ""


# ---- something else in place of a file -----------------------------------------------------------

CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file: the length of its header, and the header."""


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_files_are_refused_with_their_name(path: Path, kind: str) -> None:
    """A pipe would be waited for; a link that leads nowhere is a download that went wrong, not an absent file."""
    for name in CHECKPOINT_FILES:
        file = path / name
        kept = file.read_bytes() if file.exists() else None
        put_kind(file, kind)
        with pytest.raises(ConfigError) as refused:
            load(path)
        assert f"{file}" in refused.value.message, name
        assert KINDS[kind] in refused.value.message, name
        shutil.rmtree(file) if kind == "directory" else file.unlink()
        if kept is not None:
            file.write_bytes(kept)
    template = path / "template"
    put_kind(template, kind)
    with pytest.raises(ConfigError, match=KINDS[kind]):
        load(path, chat_template=str(template))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_other_kinds_of_weight_files_are_refused_with_their_name(
    path: Path, kind: str, name: str
) -> None:
    put_kind(path / name, kind)
    config = build_config({"model_path": str(path)})
    with pytest.raises(ConfigError, match=KINDS[kind]) as refused:
        checkpoint.check_checkpoint(config, path)
    assert str(path / name) in refused.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_listed_weight_files_are_refused(path: Path, kind: str) -> None:
    (path / "a.safetensors").write_bytes(NO_TENSORS)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    edit(path / "model.safetensors.index.json", **index)
    put_kind(path / "b.safetensors", kind)
    config = build_config({"model_path": str(path)})
    with pytest.raises(ConfigError, match=KINDS[kind]):
        checkpoint.check_checkpoint(config, path)


def test_file_that_vanishes_while_it_is_read_is_a_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path / "model.safetensors").write_bytes(NO_TENSORS)
    monkeypatch.setattr(weight_files, "refuse_other_kinds", lambda file: file.unlink())
    config = build_config({"model_path": str(path)})
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read: No such file"):
        checkpoint.check_checkpoint(config, path)


def test_path_that_cannot_be_looked_up_is_a_sentence() -> None:
    for flag in ("model_path", "tokenizer_path"):
        with pytest.raises(ConfigError, match="File name too long"):
            load("demo", **{flag: "x" * 5000})
        with pytest.raises(ConfigError, match="write the path out"):
            load("demo", **{flag: "~no-such-user/model"})


def test_deeply_nested_json_is_a_sentence(path: Path) -> None:
    (path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(path)
