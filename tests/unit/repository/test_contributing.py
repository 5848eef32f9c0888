"""The worked examples of CONTRIBUTING.md, followed: its code runs, its places exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest
import torch

from baton.models.families import FAMILIES
from baton.server.request.grammar.lark_builder import LarkBuilder
from baton.server.request.grammar.tool_calls.call_format import CallScope, GrammarTool
from baton.server.request.grammar.tool_calls.call_rules import arguments_constraint
from baton.server.request.grammar.tool_calls.formats import call_format_of
from baton.server.request.tools import CallableTool
from baton.server.text.answer_spec import Dialect
from baton.server.text.tool_formats import ToolFormat, tool_formats
from tests.structure.sources import product_files, rust_code, text
from tests.support.grammars.call_walks import follows, make_vocabulary
from tests.support.models import checkpoints
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(title: str) -> str:
    return PAGE.split(f"## Example: {title}\n")[1].split("\n## ")[0]


def code_of(title: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", example(title), re.DOTALL | re.MULTILINE)


def insert(path: Path, anchor: str, text: str) -> None:
    """Insert text before the only match of a pattern."""
    source = path.read_text(encoding="utf-8")
    (match,) = re.finditer(anchor, source, re.MULTILINE)
    path.write_text(source[: match.start()] + text + source[match.start() :], encoding="utf-8")


def insert_row(path: Path) -> None:
    """Add a row for newest-first to the first table."""
    source = path.read_text(encoding="utf-8")
    match = re.search(r"^\|[-|]+\n", source, re.MULTILINE)
    assert match is not None
    cells = match[0].count("|") - 2
    row = "| `newest-first` |" + " - arrival |" * cells + "\n"
    path.write_text(source[: match.end()] + row + source[match.end() :], encoding="utf-8")


ORDER_OF_ENDS = """
from baton import config
from baton.sched.setup import from_config
from tests.support.sched.sched_sim import Node, request

flags = ["--schedule-policy", "newest-first", "--max-running-requests", "1", "--page-size", "4"]
node = Node(from_config.limits(config.parse_config(flags), 64), depth=1)
for handle in range(4):
    node.sched.add(request(handle, [handle + 1] * 4, 2, ignore_eos=True))
for _ in range(100):
    node.step()
    node.absorb()
print(list(node.finished))
"""


def test_steps_of_the_policy_example_make_a_policy(tmp_path: Path) -> None:
    # Bytecode goes along: it is that of a file with the same time and size.
    unneeded = shutil.ignore_patterns("*.so")
    for folder in ("engine/baton", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    for native in (ROOT / "engine/baton").glob("*.so"):
        (tmp_path / "engine/baton" / native.name).symlink_to(native)
    for name in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)

    def run(*arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'engine'}:{tmp_path}"}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    policy, definition = code_of("a scheduling policy")
    policies = tmp_path / "engine/baton/sched/policies"
    flags = tmp_path / "docs/flags.md"
    old_flags = run("-m", "baton.config").strip()
    (policies / "newest_first.py").write_text(policy, encoding="utf-8")
    insert(
        policies / "__init__.py",
        r"^from baton.sched.policies.random",
        "from baton.sched.policies.newest_first import NewestFirst\n",
    )
    insert(policies / "__init__.py", r"^\)\nPOLICIES", "    NewestFirst,\n")
    insert(
        tmp_path / "engine/baton/config/groups/queue.py",
        r'^\)\n"""Values of --schedule-policy',
        '    "newest-first",\n',
    )
    insert_row(policies / "__init__.py")
    insert_row(tmp_path / "docs/scheduling/orders.md")
    new_flags = run("-m", "baton.config").strip()
    page = flags.read_text(encoding="utf-8")
    assert old_flags in page
    flags.write_text(page.replace(old_flags, new_flags), encoding="utf-8")
    insert(tmp_path / "tests/support/sched/watched.py", r'^            case "lof":', definition)
    run("-m", "tests.support.sched.recorded_plans")
    assert run("-c", ORDER_OF_ENDS) == "[3, 2, 1, 0]\n"
    chosen = "newest or test_policy_lists or test_flags_table_is_current"
    report = run("-m", "pytest", "-p", "no:cacheprovider", "-rA", "-k", chosen,
        "tests/unit/sched/policies/test_policy_lists.py", "tests/unit/repository/test_generated_docs.py",
        "tests/sim/scenarios/test_scenarios.py", "tests/sim/replay/test_recorded_plans.py")  # fmt: skip
    passed = "\n".join(re.findall(r"^PASSED (\S+)", report, re.MULTILINE))
    for name in ("test_policy_lists", "test_flags_table", "test_scenarios", "test_recorded_plans"):
        assert name in passed


def test_example_of_a_family_computes_what_transformers_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family_code, variant_code = code_of("a model family")
    module = types.ModuleType("baton.models.families.dots1")
    exec(compile(family_code, "CONTRIBUTING.md", "exec", dont_inherit=True), vars(module))
    family = module.Dots1Family()
    variant = eval(f"{{{variant_code}}}")
    (name,) = variant
    for table, added in (
        (FAMILIES, {family.architecture: family}),
        (checkpoints.VARIANTS, variant),
    ):
        for key, value in added.items():
            assert key not in table, f"{key} is supported by now; the page needs another example"
            monkeypatch.setitem(table, key, value)
    path = checkpoints.make_checkpoint(name, tmp_path / name)
    prompt = list(range(1, 30))
    with torch.inference_mode():
        expected = checkpoints.reference_model(path)(torch.tensor([prompt])).logits[0]
    logits = ModelLoop(load_model(path), "torch", page_size=4).prompt_logits(prompt, 7)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_row_of_the_tool_format_example_makes_a_grammar(tmp_path: Path) -> None:
    """A test of the text layer reads answers with the same row, and compares it with `row.json`."""
    folder = ROOT / "engine/text/src/stream/tests/families/new_format"
    (row_code,) = code_of("a format of tool calls", "rust")
    assert row_code in (folder / "mod.rs").read_text(encoding="utf-8")
    assert "jamba" not in tool_formats(), "the format is known by now; take another example"
    row = msgspec.json.decode((folder / "row.json").read_bytes(), type=ToolFormat)
    vocabulary = make_vocabulary(tmp_path, row.markers)
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": ["x"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = CallableTool("f", parameters, "tools[0].function", is_strict=True)
    builder = LarkBuilder(vocabulary.markers, "bounded")
    grammar_tool = GrammarTool(tool.name, arguments_constraint(tool))
    scope = CallScope(builder, (grammar_tool,), is_single=False)
    grammar = builder.text(call_format_of(row).calls_alone(scope))
    cases = json.loads((folder / "jamba.json").read_text(encoding="utf-8"))
    (text,) = (case["text"] for case in cases if case["name"] == "one call")
    assert follows(vocabulary, grammar, text)
    assert not follows(vocabulary, grammar, text.replace("x", "y"))
    assert not follows(vocabulary, grammar, text.removesuffix("</tool_calls>"))


def test_guide_has_a_row_of_each_tool_format() -> None:
    page = (ROOT / "docs/guide/tools.md").read_text(encoding="utf-8")
    table = page.split("| `--tool-parser` | models |\n")[1].split("\n\n")[0]
    first_cells = "".join(row.split("|")[1] for row in table.splitlines()[1:])
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(tool_formats())


@pytest.mark.parametrize(("path", "function"), re.findall(r"`([\w/]+\.(?:rs|py)):(\w+)`", PAGE))
def test_functions_it_names_are_defined_there(path: str, function: str) -> None:
    defined = rf"^ *(?:pub(?:\(\w+\))? )?(?:async )?(?:def|fn) {function}\b"
    assert re.search(defined, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_its_places_exist_and_hold_the_names_it_gives_them() -> None:
    places = re.findall(r"`((?:engine|router|kv_transfer|tests|docs)/[\w./]*?)`", PAGE)
    assert len(places) > 20
    written_by_reader = [
        "engine/baton/sched/policies/newest_first.py",
        "router/core/src/policy/least_requests.rs",
    ]
    assert [place for place in places if not (ROOT / place).exists()] == written_by_reader
    for path, names in {
        "engine/baton/sched/policies/__init__.py": ["_ALL"],
        "engine/baton/config/groups/queue.py": ["QUEUE_ORDERS", "EVICTION_ORDERS"],
        "engine/baton/cache/eviction.py": ["EVICTION_POLICIES"],
        "engine/baton/sched/policies/base.py": ["keys_are_independent", "cache_key", "expiries"],
        "tests/support/sched/watched.py": ["_key"],
        "engine/baton/models/families/__init__.py": ["_ALL"],
        "tests/parity/test_tensor_parallel.py": ["FAMILIES"],
        "tests/support/models/checkpoints.py": ["VARIANTS"],
        "engine/baton/server/request/schema.py": ["SamplingFields"],
        "engine/baton/server/request/sampling/params.py": ["read_params", "DEFAULT_KEYS"],
        "engine/baton/sched/types/request.py": ["SamplingParams"],
        "engine/baton/runtime/sampling/sampler.py": ["LogitEdits", "draw_columns", "kept_ids"],
        "engine/baton/runtime/memory/warmup.py": ["SAMPLINGS"],
        "engine/text/src/dialect/mod.rs": ["Dialect", "DialectFields"],
        "engine/text/src/dialect/write/mod.rs": ["AnswerWriter"],
        "engine/baton/server/request/accepted.py": ["AcceptedRequest"],
        "engine/text/src/stream/tools/formats.rs": ["CallSyntax", "template_mark"],
        "router/core/src/policy/mod.rs": ["PolicyKind", "choose", "observe", "explain"],
        "router/core/src/types.rs": ["SelectionReason"],
        "engine/baton/server/observability/metrics.py": ["RANK"],
    }.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in names:
            assert f"`{name}`" in PAGE, name
            assert re.search(rf"\b{name}\b", text), f"{path} has no {name}"


DIALECTS = re.findall(
    r"^    (\w+),$",
    (ROOT / "engine/text/src/dialect/mod.rs")
    .read_text(encoding="utf-8")
    .split("pub enum Dialect {\n")[1]
    .split("\n}\n")[0],
    re.MULTILINE,
)


def test_dialects_are_named_in_the_files_of_the_endpoint_example_alone() -> None:
    """Each dialect of today, followed through the steps: a file that names one is on the page."""
    assert [dialect.value for dialect in Dialect] == [name.lower() for name in DIALECTS]
    any_dialect = re.compile(rf"\bDialect(?:::({'|'.join(DIALECTS)})|\.[A-Z]+)\b")
    naming = {
        path
        for path in product_files()
        if "/tests/" not in path
        if any_dialect.search(rust_code(path) if path.endswith(".rs") else text(path))
    }
    page = example("an endpoint")
    assert naming
    assert {path for path in naming if f"`{path}" not in page} == set()


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "path", re.findall(r"`((?:engine|router)/\S+):\w+`", example("an endpoint"))
)
def test_each_dialect_has_its_line_in_the_endpoint_example_functions(path: str, name: str) -> None:
    member = f"Dialect.{name.upper()}" if path.endswith(".py") else f"Dialect::{name}"
    assert member in (ROOT / path).read_text(encoding="utf-8")


def test_its_make_targets_exist() -> None:
    targets = re.findall(r"^(\S+): ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"^make (\S+)", PAGE, re.MULTILINE)) <= {
        target.rstrip(":") for target in targets
    }
