"""openai-python and litellm in front of router, prefill node and two decode nodes.

Also golden streams of /v1/responses and /v1/messages, read by the newest openai-python and by anthropic-python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import run_script
from tests.clients.routers.cases import CHAT, COMPLETION, QUESTION, pulled
from tests.clients.routers.wire import answer, texts
from tests.contract.test_dialect_streams import GOLDEN, UNFINISHED, without_parsed
from tests.support.processes.cluster import Cluster, eventually, settled

SCRIPTS = Path(__file__).parent / "scripts"
REPLAY = SCRIPTS / "replay_streams.py"
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 16}
BATCH = ["A lease ends", "Pages"]


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> str:
    """Where the same is asked without a library."""
    return cluster.url


@pytest.fixture(scope="module")
def baton(reference: str) -> str:
    """The engine's answer to the question that all clients ask."""
    return texts(CHAT, answer(reference, CHAT, {**GREEDY, "messages": QUESTION}))[0]


@pytest.fixture(scope="module")
def batch(reference: str) -> list[str]:
    return texts(COMPLETION, answer(reference, COMPLETION, {**GREEDY, "prompt": BATCH}))


def each(reference: str, path: str, bodies: list[dict[str, Any]]) -> list[str]:
    """The engine's answers, one after the other."""
    return [texts(path, answer(reference, path, {**GREEDY, **body}))[0] for body in bodies]


@pytest.mark.parametrize("major", ["2", "3"], scope="class")
class TestOpenai:
    @pytest.fixture(scope="class")
    @classmethod
    def said(cls, major: str, cluster: Cluster) -> dict[str, Any]:
        before = settled(lambda: pulled(cluster))
        said: dict[str, Any] = run_script(f"openai-{major}", SCRIPTS / "ask_openai.py", cluster.url)
        assert said["version"].startswith(f"{major}.")
        eventually(
            "a KV page traveled: these answers did not come from one node",
            lambda: pulled(cluster) > before,
        )
        return said

    def test_chat(self, said: dict[str, Any], baton: str) -> None:
        forms = ("chat", "stream", "parts", "logprobs", "max_completion_tokens")
        assert {form: said[form] for form in forms} == dict.fromkeys(forms, baton)
        assert said["n"] == [baton, baton]
        assert (said["finish"], said["stream_finish"]) == ("length", ["length"])
        assert said["usage"][1:] == [16, said["usage"][0] + 16]
        assert said["stream_usage"] == 16
        assert said["extra_body"] == 300, "ignore_eos did not arrive"

    def test_stream_helper(self, said: dict[str, Any], reference: str) -> None:
        assert (
            said["helper"] == each(reference, CHAT, [{"messages": QUESTION, "max_tokens": 400}])[0]
        )
        assert said["helper_events"] == ["chunk", "content.delta", "content.done"]

    def test_completions(self, said: dict[str, Any], reference: str, batch: list[str]) -> None:
        assert said["batch"] == batch
        assert said["completion_stream"] == batch[0]
        assert said["ids"] == each(reference, COMPLETION, [{"prompt": [5, 6, 7]}])[0]

    def test_many_at_once(self, said: dict[str, Any], reference: str) -> None:
        bodies = [{"prompt": f"Runner {i} says"} for i in range(16)]
        assert said["at_once"] == each(reference, COMPLETION, bodies)

    def test_facts(self, said: dict[str, Any]) -> None:
        assert said["models"] == ["demo"]
        assert said["request_id"] == ["from-openai", True]

    def test_mistakes_keep_status_code_and_parameter(self, said: dict[str, Any]) -> None:
        kind, seen = "invalid_request_error", [True, True]  # a request id, a message
        long = ["BadRequestError", 400, "context_length_exceeded", "prompt", kind, *seen]
        assert said["mistakes"] == {
            "negative": ["BadRequestError", 400, "invalid_value", "max_tokens", kind, *seen],
            "long": long,
            "long, streamed": long,
            "model": ["NotFoundError", 404, "model_not_found", "model", kind, *seen],
            "embeddings": ["NotFoundError", 404, "not_found", None, kind, *seen],
        }

    def test_nothing_is_held_afterwards(self, said: dict[str, Any], cluster: Cluster) -> None:
        """One of the streams was left after its first event."""
        cluster.assert_nothing_is_held()


class TestLitellm:
    @pytest.fixture(scope="class")
    @classmethod
    def said(cls, cluster: Cluster) -> dict[str, Any]:
        said: dict[str, Any] = run_script("litellm", SCRIPTS / "ask_litellm.py", cluster.url)
        return said

    @pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
    def test_chat(self, said: dict[str, Any], baton: str, provider: str) -> None:
        chat = said[provider]
        assert (chat["chat"], chat["stream"], chat["n"]) == (baton, baton, [baton, baton])
        assert (chat["finish"], chat["stream_finish"]) == ("length", ["length"])
        assert chat["usage"][1:] == [16, chat["usage"][0] + 16]
        assert (chat["stream_usage"], chat["logprobs"]) == ([16], 16)

    def test_completions(self, said: dict[str, Any], batch: list[str]) -> None:
        assert (said["batch"], said["completion_stream"]) == (batch, batch[0])

    def test_many_at_once(self, said: dict[str, Any], reference: str) -> None:
        bodies = [
            {"messages": [{"role": "user", "content": f"Runner {i} asks?"}]} for i in range(16)
        ]
        assert said["at_once"] == each(reference, CHAT, bodies)

    def test_mistakes_become_its_own_errors(self, said: dict[str, Any]) -> None:
        """`ContextWindowExceededError` is what its fallbacks to another model wait for."""
        assert said["mistakes"] == {
            "negative": ["BadRequestError", 400],
            "long": ["ContextWindowExceededError", 400],
            "model": ["NotFoundError", 404],
        }

    def test_nothing_is_held_afterwards(self, said: dict[str, Any], cluster: Cluster) -> None:
        cluster.assert_nothing_is_held()


def cases_of(file: str) -> dict[str, Any]:
    cases = json.loads((GOLDEN / file).read_text())
    return {case["name"]: case for case in cases}


def test_openai_reads_responses() -> None:
    cases = cases_of("responses.json")
    seen = run_script("openai-3", REPLAY, "openai", str(GOLDEN / "responses.json"))
    assert seen.keys() == cases.keys()
    for name, case in cases.items():
        if name in UNFINISHED:
            assert seen[name]["error"] == "RuntimeError"
        else:
            whole = json.loads(case["expected"]["whole"])
            assert without_parsed(seen[name]["streamed"]) == whole["output"]
            assert seen[name]["whole"] == whole["output"]


@pytest.fixture(scope="module")
def messages() -> dict[str, Any]:
    seen: dict[str, Any] = run_script(
        "anthropic", REPLAY, "anthropic", str(GOLDEN / "messages.json")
    )
    return seen


def test_anthropic_reads_messages(messages: dict[str, Any]) -> None:
    cases = cases_of("messages.json")
    assert messages.keys() == cases.keys()
    for name, case in cases.items():
        if case["expected"]["whole"] is None:
            continue
        whole = json.loads(case["expected"]["whole"])
        seen = messages[name]
        assert seen["whole"] == whole["content"]
        assert seen["stop"] == [whole["stop_reason"], whole["stop_sequence"]]
        assert seen["usage"] == whole["usage"]
        if name != "cut_call":
            assert seen["streamed"] == whole["content"]


def test_input_of_a_call_that_was_cut_off(messages: dict[str, Any]) -> None:
    """A stream's user has what the library can read of the input, a whole answer's user has its text."""
    seen = messages["cut_call"]
    assert seen["streamed"][0]["input"] == {}
    assert seen["whole"][0]["input"] == {"INVALID_JSON": '{"path": "a'}


def test_error_in_a_stream_is_that_of_the_library(messages: dict[str, Any]) -> None:
    assert messages["broken"]["error"] == "APIStatusError"
    assert "this node is leaving" in messages["broken"]["message"]
