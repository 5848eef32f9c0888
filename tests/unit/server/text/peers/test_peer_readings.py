"""Our readers against those of vLLM, SGLang, Dynamo, smg and openai-harmony, on the same answers.

`tests/support/goldens/peers/differences.py` prints the figures and the differences.
"""

from __future__ import annotations

import pytest

from tests.support.goldens.peers.differences import (
    ReadCase,
    count_agreement,
    find_differences,
    load_differences,
    read_cases,
    stored_reasons,
)

LEAST_AGREEMENT = 0.995


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> list[ReadCase]:
    return read_cases(tmp_path_factory.mktemp("readers"))


def test_readers_agree_where_all_peers_agree(read: list[ReadCase]) -> None:
    figures = count_agreement(read, load_differences())
    assert figures.agreed > 800
    assert figures.agreement >= LEAST_AGREEMENT, figures


def test_differences_from_peers_are_those_that_are_listed(read: list[ReadCase]) -> None:
    """A new one needs a reason, in `differences.json`, or a reader that is mended."""
    stored = load_differences()
    listed = {
        (line["format"], line["answer"]): line.get("as", []) for line in stored["differences"]
    }
    assert find_differences(read) == listed


def test_differences_from_all_peers_have_reasons(read: list[ReadCase]) -> None:
    stored = load_differences()
    reasons = stored_reasons(stored)
    needed = {case.key for case in read if case.verdict.needs_reason}
    assert reasons.keys() == needed
    assert set(reasons.values()) == stored["reasons"].keys()


def test_streams_say_what_whole_answers_say(read: list[ReadCase]) -> None:
    streamed = [case for case in read if case.streamed is not None]
    assert len(streamed) > 900
    assert [case.key for case in streamed if case.streamed != case.ours] == []
