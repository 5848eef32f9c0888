"""CONTRIBUTING.md's example of a router policy, followed in a copy of the crate `router-core`.

The fast suite looks its names up; `make test-all` compiles it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.repository.test_contributing import ROOT, code_of, insert

KINDS = re.search(
    r"^pub enum PolicyKind \{\n(.*?)^\}",
    (ROOT / "router/core/src/policy/mod.rs").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


def policy_names() -> list[str]:
    assert KINDS is not None
    variants = re.findall(r"^    (\w+),$", KINDS[1], re.MULTILINE)
    return [re.sub(r"(?<!^)([A-Z])", r"_\1", variant).lower() for variant in variants]


COMPANION = """
[package]
name = "companion"
edition = "2024"
[lib]
test = false
doctest = false
[dependencies]
"""


def write_companion(crate: Path) -> None:
    """A crate with the dependencies of all crates of the workspace.

    Tested beside the copy of `router-core`, it makes Cargo choose the same features of packages as
    for the whole workspace. With others, what the copy needs would be compiled again for a minute.
    """
    members = re.search(r"^members = (\[.*\])$", (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert members is not None
    needed: dict[str, str] = {}
    for member in json.loads(members[1]):
        text = (ROOT / member / "Cargo.toml").read_text(encoding="utf-8")
        sections = re.split(r"^\[(.*)\]\n", text, flags=re.MULTILINE)
        for name, lines in zip(sections[1::2], sections[2::2], strict=True):
            if name.endswith("dependencies"):
                rows = re.findall(r"^(([\w-]+)[. ].*)", lines, re.MULTILINE)
                needed |= {package: row for row, package in rows}
    own = {
        "baton-drafts",
        "baton-router",
        "baton-text",
        "kernels",
        "kv_transfer",
        "router-core",
    }
    without_python = {name: row for name, row in needed.items() if name not in own | {"pyo3"}}
    (crate / "src").mkdir(parents=True)
    (crate / "src/lib.rs").touch()
    manifest = crate / "Cargo.toml"
    manifest.write_text(COMPANION + "\n".join(without_python.values()) + "\n", encoding="utf-8")


def make_copy(folder: Path) -> Path:
    """A copy of the crate with the example's policy, in a workspace of its own below `folder`.

    Its place below the copied workspace is another one than the crate's, so that neither replaces
    what was built of the other.
    """
    crate = folder / "example/core"
    shutil.copytree(ROOT / "router/core", crate)
    shutil.copy(ROOT / "Cargo.lock", folder)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs/protocol.md", folder / "docs")
    workspace = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    alone, replaced = re.subn(
        r"^members = .*$",
        'members = ["example/core", "example/companion"]',
        workspace,
        flags=re.MULTILINE,
    )
    assert replaced == 1
    (folder / "Cargo.toml").write_text(alone, encoding="utf-8")

    policy, module, variant, constructor = code_of("a router policy", "rust")
    policies = crate / "src/policy"
    (policies / "least_requests.rs").write_text(policy, encoding="utf-8")
    insert(policies / "mod.rs", r"^/// `manual`\.\nmod manual;", module)
    insert(policies / "mod.rs", r"^\}\n\nnamed_choice!\(PolicyKind", variant)
    insert(policies / "mod.rs", r"^        PolicyKind::Cost => ", constructor)
    return crate


def test_names_of_the_router_policy_example_are_defined(tmp_path: Path) -> None:
    """Its places are found, and what its code uses is in the module that it names."""
    crate = make_copy(tmp_path)
    policy, *_ = code_of("a router policy", "rust")
    imports = re.findall(
        r"^ *use (super|crate)::(?:([\w:]+)::)?(\{.*\}|\w+);$", policy, re.MULTILINE
    )
    assert len(imports) == 4
    for origin, module, names in imports:
        folder = crate / "src" if origin == "crate" else crate / "src/policy"
        file = folder / (f"{module.replace('::', '/')}.rs" if module else "mod.rs")
        source = file.read_text(encoding="utf-8")
        for name in names.strip("{}").split(", "):
            assert re.search(rf"\b(?:fn|trait|enum|struct) {name}\b", source), (file, name)


@pytest.mark.slow  # compiles the crate
@pytest.mark.timeout(900)  # perhaps beside other compilers
def test_steps_of_the_router_policy_example_make_a_policy(tmp_path: Path) -> None:
    """The copy is compiled in the build folder of the workspace, where its dependencies are."""
    make_copy(tmp_path)
    tests = ("policy::least_requests", "policy::tests")
    write_companion(tmp_path / "example/companion")
    packages = ("-p", "router-core", "-p", "companion")
    command = ["cargo", "test", "--offline", *packages, "--lib", "--", *tests]
    env = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^test policy::(\S+) \.\.\. ok$", done.stdout, re.MULTILINE)
    assert "least_requests::tests::worker_with_fewest_requests_is_chosen" in passed
    assert "tests::only_candidates_are_chosen" in passed


def test_help_and_page_list_every_policy() -> None:
    config = (ROOT / "router/src/config/mod.rs").read_text(encoding="utf-8")
    names = policy_names()
    assert "cost" in names
    assert f"/// How a worker is chosen: {', '.join(names)}\n" in config
    routing = (ROOT / "docs/routing.md").read_text(encoding="utf-8")
    table = routing.split("| policy | rule | what it is for |\n")[1].split("\n\n")[0]
    first_cells = "".join(row.split("|")[1] for row in table.splitlines()[1:])
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(names)
