"""Templates and tokenizers run in Rust: the engine needs no Python library for them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.structure.sources import python_files, text, tree

LIBRARIES = ("jinja2", "tokenizers", "transformers", "minijinja")
BACKEND = "engine/baton/models/transformers_backend/"
"""Computes layers by transformers' classes (an extra), and reads no text with it."""
IMPL_NAME = "transformers"
"""A value of --model-impl too, which several files compare."""
LOCK_FILES = ("engine/requirements.lock", "engine/requirements-gpu.lock")


def imported_packages(path: str) -> set[str]:
    """Names of the packages that a file imports, inside functions and for type checking too."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} - {IMPL_NAME}  # importlib takes a string
    return {name.partition(".")[0] for name in found if re.fullmatch(r"[\w.]+", name)}


def requirements(lock: str) -> dict[str, set[str]]:
    """Package → packages that require it, of a lock file that uv wrote."""
    required_by: dict[str, set[str]] = {}
    for entry in re.split(r"^(?=\S+==)", text(lock), flags=re.MULTILINE)[1:]:
        comments = re.findall(r"^    #  ?(?:via)? *(.*)$", entry, re.MULTILINE)
        required_by[entry.partition("==")[0]] = {
            name for name in comments if name and not name.startswith("-c ")
        }
    return required_by


def test_neither_package_imports_a_template_or_tokenizer_library() -> None:
    paths = [path for path in python_files() if not path.startswith(BACKEND)]
    users = {path: imported_packages(path).intersection(LIBRARIES) for path in paths}
    assert {path: names for path, names in users.items() if names} == {}


def test_backend_of_transformers_reads_no_text_with_it() -> None:
    imported: set[str] = set()
    names: set[str] = set()
    for path in python_files():
        if path.startswith(BACKEND):
            imported |= imported_packages(path).intersection(LIBRARIES)
            names |= set(re.findall(r"Auto\w+", text(path)))
    assert imported == {"transformers"}
    assert names == {"AutoConfig", "AutoModelForCausalLM"}


def test_imports_inside_functions_and_by_importlib_are_found(tmp_path: Path) -> None:
    source = tmp_path / "lazy.py"
    source.write_text(
        "def render():\n    from jinja2.sandbox import Environment\n"
        "    import_module('tokenizers.models')\n",
        encoding="utf-8",
    )
    assert imported_packages(str(source)).intersection(LIBRARIES) == {"jinja2", "tokenizers"}


@pytest.mark.parametrize("lock", LOCK_FILES)
def test_lock_file_has_these_libraries_for_torch_alone(lock: str) -> None:
    """torch requires jinja2, for its compiler."""
    required_by = requirements(lock)
    assert required_by, lock
    found = {name: required_by[name] for name in LIBRARIES if name in required_by}
    assert found.pop("jinja2", {"torch"}) == {"torch"}
    assert found == {}


def test_project_requires_none_of_them() -> None:
    dependencies = re.search(r"^dependencies = \[\n(.*?)^\]", text("pyproject.toml"), re.M | re.S)
    assert dependencies is not None
    names = set(re.findall(r'"([\w-]+)', dependencies[1]))
    assert "torch" in names
    assert names.isdisjoint(LIBRARIES)
