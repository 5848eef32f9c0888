"""Golden streams of /v1/responses, read by openai-python (tests/clients reads them with other versions and libraries).

engine/text/src/dialect/tests/golden.rs writes the files: requests and scripted answers in, streams out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripts.replay_streams import replay_openai

GOLDEN = Path(__file__).parent / "golden" / "dialects"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "responses.json").read_text())
UNFINISHED = frozenset({"cut_message", "cut_call", "broken"})
"""Cases whose stream ends without `response.completed`: the library's stream helper raises."""


def without_parsed(value: Any) -> Any:
    """Items as the server sent them: the library's stream helper adds members."""
    if isinstance(value, list):
        return [without_parsed(item) for item in value]
    if isinstance(value, dict):
        own = {name: item for name, item in value.items() if not name.startswith("parsed")}
        return {name: without_parsed(item) for name, item in own.items()}
    return value


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_client_library_reads_streams_and_whole_answers(case: dict[str, Any]) -> None:
    seen = replay_openai(case)
    if case["name"] in UNFINISHED:
        assert seen["error"] == "RuntimeError"
    else:
        whole = json.loads(case["expected"]["whole"])
        assert without_parsed(seen["streamed"]) == whole["output"]
        assert seen["whole"] == whole["output"]
        assert seen["usage"] == whole["usage"]
        assert seen["text"] == seen["whole_text"]
