"""The official test suite of JSON Schema 2020-12, which the source distribution of jsonschema carries.

A schema that is compiled exactly (`strict`) accepts no instance that the suite calls invalid.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.errors import BadRequest
from baton.server.request.grammar.constraint import AnswerConstraint, ConstraintKind
from baton.server.request.grammar.markers import MarkerTokens
from baton.server.request.grammar.request_grammar import make_grammar
from tests.support.models.checkpoints import EOS, VOCAB, write_tokenizer

PACKAGE = "jsonschema==4.26.0"
SUITE = "json/tests/draft2020-12/"
SEPARATORS = ((",", ":"), (", ", ": "))
DOWNLOAD_SECS = 300
LEAST_SCHEMAS = 100
"""Least number of schemas that compile; the suite has some 370, many with keywords that no grammar can enforce."""


class SuiteGroup(NamedTuple):
    """A schema of the suite, and instances with what they are."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[SuiteGroup]:
    folder = tmp_path_factory.mktemp("jsonschema")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema",
        "--dest", str(folder), PACKAGE,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECS)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"{PACKAGE} could not be downloaded: {done.stderr.strip()[-300:]}")
    return list(read_suite(archives[0]))


def read_suite(archive: Path) -> Iterator[SuiteGroup]:
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition("/")[2]
            is_required = "/" not in name.removeprefix(SUITE)
            if not (name.startswith(SUITE) and name.endswith(".json") and is_required):
                continue
            file = files.extractfile(member)
            assert file is not None
            for group in json.load(file):
                instances = [(test["data"], test["valid"]) for test in group["tests"]]
                place = f"{name.removeprefix(SUITE)}: {group['description']}"
                yield SuiteGroup(place, group["schema"], instances)


@pytest.fixture(scope="module")
def trie(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return LLTokenizer((path / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=[EOS])


def compile_schema(schema: Any, trie: LLTokenizer) -> LLMatcher | None:
    """The schema's grammar at its beginning; None: it is refused."""
    constraint = AnswerConstraint(ConstraintKind.JSON_SCHEMA, schema, "schema", is_strict=True)
    try:
        text = make_grammar(constraint, "any", MarkerTokens(dict)).text
    except BadRequest:
        return None
    matcher = LLMatcher(trie, text, log_level=0)
    return None if matcher.is_error() else matcher


def accepts(matcher: LLMatcher, instance: Any, trie: LLTokenizer) -> bool:
    for separators in SEPARATORS:
        text = json.dumps(instance, separators=separators, ensure_ascii=False)
        tokens = trie.tokenize_str(text)
        fresh = matcher.deep_copy()
        if all(fresh.consume_token(token) for token in tokens) and fresh.is_accepting():
            return True
    return False


@pytest.mark.slow
def test_no_invalid_instance_is_accepted(groups: list[SuiteGroup], trie: LLTokenizer) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for group in groups:
        matcher = compile_schema(group.schema, trie)
        if matcher is None:
            counts["schemas refused"] += 1
            continue
        counts["schemas compiled"] += 1
        for instance, is_valid in group.instances:
            is_accepted = accepts(matcher, instance, trie)
            kind = "valid" if is_valid else "invalid"
            counts[f"{kind} {'accepted' if is_accepted else 'refused'}"] += 1
            if is_accepted and not is_valid:
                wrong.append((group.name, json.dumps(instance)))
    print(dict(counts))
    assert not wrong
    assert counts["schemas compiled"] > LEAST_SCHEMAS
    assert counts["valid accepted"] > counts["valid refused"]
