"""The worked examples of CONTRIBUTING.md, followed: its code runs, its places exist."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from baton.models import spec_reader
from baton.sched.policies import POLICIES
from baton.sched.setup.limits import Limits
from tests.support import checkpoints
from tests.support.model_loop import ModelLoop
from tests.support.sched_sim import Node, request
from tests.support.whole_model import load_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(title: str) -> str:
    return PAGE.split(f"## Example: {title}\n")[1].split("\n## ")[0]


def code_of(title: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", example(title), re.DOTALL)


def first_served(policy: str) -> list[int]:
    """Handles in the order of their ends, where one request runs at a time and all wait from the beginning."""
    node = Node(Limits(64, 4, 1, 10, 16, policy=policy), depth=1)
    for handle in range(4):
        node.sched.add(request(handle, [handle + 1] * 4, 2, ignore_eos=True))
    for _ in range(100):
        node.step()
        node.absorb()
    return list(node.finished)


def test_the_example_of_a_policy_orders_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("newest_first")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (code,) = code_of("a scheduling policy")
    exec(compile(code, "CONTRIBUTING.md", "exec"), module.__dict__)
    monkeypatch.setitem(POLICIES, module.NewestFirst.name, module.NewestFirst)
    assert first_served("fcfs") == [0, 1, 2, 3]
    assert first_served("newest-first") == [3, 2, 1, 0]


def test_the_example_of_a_family_computes_what_transformers_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family, variant = (eval(f"{{{code}}}", vars(spec_reader)) for code in code_of("a model family"))
    (name,) = variant
    for table, added in ((spec_reader.FAMILIES, family), (checkpoints.VARIANTS, variant)):
        for key, value in added.items():
            assert key not in table, f"{key} is supported by now; the page needs another example"
            monkeypatch.setitem(table, key, value)
    path = checkpoints.make_checkpoint(name, tmp_path / name)
    prompt = list(range(1, 30))
    with torch.inference_mode():
        expected = checkpoints.reference_model(path)(torch.tensor([prompt])).logits[0]
    logits = ModelLoop(load_model(path), "torch", page_size=4).prompt_logits(prompt, 7)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("path", "function"), re.findall(r"`([\w/]+\.(?:rs|py)):(\w+)`", PAGE))
def test_the_functions_it_names_are_defined_there(path: str, function: str) -> None:
    defined = rf"^ *(?:pub(?:\(\w+\))? )?(?:async )?(?:def|fn) {function}\b"
    assert re.search(defined, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_its_places_exist_and_hold_the_names_it_gives_them() -> None:
    places = re.findall(r"`((?:engine|router|kv_transfer|tests|docs)/[\w./]*?)`", PAGE)
    assert len(places) > 20
    assert [place for place in places if not (ROOT / place).exists()] == []
    for path, names in {
        "engine/baton/sched/policies/__init__.py": ["_ALL"],
        "engine/baton/sched/policies/base.py": ["keys_are_independent", "cache_key", "expiries"],
        "tests/support/watched.py": ["_key"],
        "engine/baton/models/spec_reader.py": ["FAMILIES"],
        "tests/support/checkpoints.py": ["VARIANTS"],
        "engine/baton/server/request/schema.py": ["SamplingFields"],
        "engine/baton/server/request/sampling.py": ["read_params", "DEFAULT_KEYS"],
        "engine/baton/sched/types/request.py": ["SamplingParams"],
        "engine/baton/runtime/sampling/sampler.py": ["LogitEdits", "draw_columns", "kept_ids"],
        "engine/baton/runtime/memory/warmup.py": ["SAMPLINGS"],
    }.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in names:
            assert f"`{name}`" in PAGE, name
            assert re.search(rf"\b{name}\b", text), f"{path} has no {name}"


def test_its_make_targets_exist() -> None:
    targets = re.findall(r"^(\S+): ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^make (\S+)", PAGE, re.MULTILINE)) <= {
        target.rstrip(":") for target in targets
    }
