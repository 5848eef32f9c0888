"""--model-impl transformers: the module of a family over our pages equals transformers."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import build_config
from baton.errors import ConfigError
from baton.models.families import FAMILIES
from baton.models.transformers_backend import bridge
from baton.models.transformers_backend.choice import choose_impl
from baton.models.transformers_backend.model import load_module
from tests.parity.test_preempted_tokens import storm
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models.checkpoints import (
    VOCAB,
    make_checkpoint,
    reference_greedy,
    reference_model,
)
from tests.support.models.foreign_checkpoints import FOREIGN, REFUSED, make_foreign_checkpoint
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model

pair_module = pytest.importorskip(
    "tests.support.engines.pair", reason="needs the native module: make setup", exc_type=ImportError
)

OFTEN = {"cohere2", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "olmoe", "smollm3"}
"""Those whose modules differ most; the others are slow tests."""
ALL = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(FOREIGN)
]
PROMPTS = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in (33, 1, 50)]


def load(path: Path, **more: Any) -> Any:
    return load_module(path, more.get("dtype", "auto"), more.get("load_format", "auto"), 0)


@pytest.mark.parametrize("name", ALL)
def test_logits_and_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    path = make_foreign_checkpoint(name, tmp_path / "m")
    forced = build_config({"model_path": str(path), "model_impl": "transformers"})
    assert choose_impl(forced, path) == "transformers"
    has_blocks = name in {family.model_type for family in FAMILIES.values()}
    chosen = choose_impl(build_config({"model_path": str(path)}), path)
    assert chosen == ("native" if has_blocks else "transformers")
    reference = reference_model(path)
    model = load(path)
    for page_size, chunk in ((4, 7), (1, 1000), (16, 16)):
        loop = ModelLoop(model, "torch", page_size)
        for prompt in PROMPTS:
            with torch.inference_mode():
                expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(
                loop.prompt_logits(prompt, chunk), expected, atol=1e-4, rtol=1e-4
            )
    tokens = [reference_greedy(reference, prompt, 24) for prompt in PROMPTS]
    assert ModelLoop(model, "auto", 16).greedy(PROMPTS, 24, 9) == tokens


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_attention_that_backends_lack_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = make_foreign_checkpoint(name, tmp_path / "m")
    with pytest.raises(ConfigError, match=REFUSED[name][2]) as err:
        load(path)
    assert "--model-impl transformers" in err.value.message


OTHER_WINDOWS = ("cohere2", "cwm", "gemma2", "gemma3_text", "olmo3")


@pytest.mark.parametrize(
    "name", ["exaone4", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_WINDOWS)]
)
def test_module_that_leaves_pages_behind_windows_answers_as_transformers(
    name: str, tmp_path: Path
) -> None:
    """Preempted, from the cache, and on two nodes, of which D fetches what the prompt's end sees."""
    path = make_foreign_checkpoint(name, tmp_path / "m")
    reference = reference_model(path)
    tokens = [reference_greedy(reference, prompt, 24) for prompt in PROMPTS]
    small = {"max_total_tokens": 120, "schedule_conservativeness": 0.05}
    module = {"model_impl": "transformers"}
    for flags in (module, {"chunked_prefill_size": 8, **module}, {**small, **module}):
        engine = make_engine(path, **flags)
        assert [rule.kind for rule in engine.sched.limits.page_groups] == ["window"]
        assert answer(engine, PROMPTS, greedy(24)) == tokens
        disturb = storm(engine, random.Random(3))
        assert answer(engine, PROMPTS, greedy(24), disturb=disturb) == tokens
        engine.sched.ledger().check_idle(engine.sched.limits.num_pages)
        engine.close()
    with closing(pair_module.Pair(path, "shm", **module)) as pair:
        assert pair.answer(PROMPTS, greedy(24)) == tokens
        assert pair.answer(PROMPTS, greedy(24)) == tokens


def test_family_with_blocks_can_be_computed_by_its_module(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "m")
    native = make_engine(path)
    module = make_engine(path, model_impl="transformers")
    tokens = answer(native, PROMPTS, greedy(24))
    assert answer(module, PROMPTS, greedy(24)) == tokens
    native.close()
    module.close()


def test_module_is_another_model_to_peers_because_its_keys_differ_by_rounding(
    tmp_path: Path,
) -> None:
    path = make_checkpoint("qwen3", tmp_path / "m")
    assert load(path).spec.model_hash != load_model(path).spec.model_hash


def edited(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({}, {"tp_size": 2}, "one process, not --tp-size 2"),
        ({}, {"device": "cuda"}, "use --device cpu"),
        ({}, {"model_impl": "native"}, "supported: LlamaForCausalLM"),
        ({"model_type": "unheard_of"}, {}, "supported: LlamaForCausalLM"),
        (
            {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            {"model_impl": "transformers"},
            "code of a checkpoint is not executed",
        ),
        ({"index_topk": 2048}, {}, "an indexer"),
        ({"is_encoder_decoder": True}, {}, "cross attention is not served"),
        ({"layer_types": ["linear_attention"]}, {}, "linear_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "longest row of a batch"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "awq"),
    ],
)
def test_start_refuses_what_config_shows(
    tmp_path: Path, changes: dict[str, Any], flags: dict[str, Any], words: str
) -> None:
    path = edited(make_foreign_checkpoint("exaone4", tmp_path / "m"), **changes)
    with pytest.raises(ConfigError) as err:
        choose_impl(build_config({"model_path": str(path), **flags}), path)
    assert words in err.value.message


def test_start_without_the_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_foreign_checkpoint("exaone4", tmp_path / "m")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for flags in ({}, {"model_impl": "transformers"}):
        with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[transformers\]'"):
            choose_impl(build_config({"model_path": str(path), **flags}), path)


def test_choice_is_made_without_torch_and_transformers() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
        "import baton.models.transformers_backend.choice"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": "engine"}, timeout=240
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing tensor model.layers.1.mlp"),
        (lambda t: t.update({"model.layers.0.odd.weight": torch.ones(2)}), "unexpected tensor"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(8)}),
            "model.norm.weight is [8], config.json implies [64]",
        ),
    ],
)
def test_weights_that_do_not_fit_end_the_start(tmp_path: Path, edit: Any, words: str) -> None:
    path = make_foreign_checkpoint("exaone4", tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as err:
        load(path)
    assert words in err.value.message


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = make_foreign_checkpoint("exaone4", tmp_path / "m")
    one, other = (
        ModelLoop(load(path, load_format="dummy"), "torch", 4).prompt_logits(PROMPTS[0], 16)
        for _ in range(2)
    )
    assert torch.equal(one, other)


def test_masks_are_asked_for_during_the_probe_alone(tmp_path: Path) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    model = load(make_foreign_checkpoint("gemma3_text", tmp_path / "m"))
    assert bridge.NAME not in ALL_MASK_ATTENTION_FUNCTIONS
    assert [layer.window for layer in model.spec.attention] == [8, 8, 8, 8, 8, 0, 8]
    assert {layer.factor for layer in model.spec.attention} == {256**-0.5}
