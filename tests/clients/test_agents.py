"""Libraries of agents in front of router, prefill node and two decode nodes, one of which is killed in mid-answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.decode_kills import DecodeKills
from tests.clients.environments import run_script
from tests.clients.scripts import conversation as talk
from tests.support.processes.cluster import Cluster

SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = {
    "openai-2": "ask_openai_turns.py",
    "openai-3": "ask_openai_turns.py",
    "anthropic": "ask_anthropic.py",
    "litellm": "ask_litellm_turns.py",
    "openai-agents": "ask_openai_agents.py",
    "langchain": "ask_langchain.py",
    "pydantic-ai": "ask_pydantic_ai.py",
}
SHORT_ONLY = ("openai/responses", "anthropic")
"""APIs of litellm through which no long answer can be asked for."""
WEATHER = "It is sunny in Paris, with 21 degrees."


def ask(environment: str, script: str, cluster: Cluster) -> Any:
    """Values that the script found; the decode node of its long answer was killed."""
    kills = DecodeKills(cluster)
    found = run_script(environment, SCRIPTS / script, cluster.url, reply=kills.reply)
    kills.await_nodes()
    cluster.assert_nothing_is_held()
    return found


def answer_of(cluster: Cluster, **more: Any) -> str:
    """The answer without any library."""
    question = {"role": "user", "content": talk.QUESTION}
    body = {"model": talk.MODEL, "messages": [question], "temperature": 0, **more}
    status, answer = cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def answer(cluster: Cluster) -> str:
    return answer_of(cluster, max_tokens=talk.ANSWER_TOKENS)


@pytest.fixture(scope="module")
def long_answer(cluster: Cluster) -> str:
    return answer_of(cluster, max_tokens=talk.LONG_TOKENS, **talk.LONG_EXTRA)


def assert_is_person(person: dict[str, Any]) -> None:
    assert person.keys() == {"name", "age"}
    assert isinstance(person["name"], str)
    assert 0 <= person["age"] <= 120


@pytest.mark.parametrize("client", CLIENTS, scope="class")
class TestClient:
    """Members that all scripts report for each API of the library."""

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, client: str, cluster: Cluster) -> dict[str, dict[str, Any]]:
        return ask(client, CLIENTS[client], cluster)

    def test_answers_are_the_clusters_own(self, found: dict[str, Any], answer: str) -> None:
        for api, seen in found.items():
            assert (seen["answer"], seen["streamed"]) == (answer, answer), api

    def test_tool_is_called_and_its_result_answered(self, found: dict[str, Any]) -> None:
        for api, seen in found.items():
            assert seen["cities"] == ["Paris", "Paris"], api
            assert (seen["weather"], seen["weather_streamed"]) == (WEATHER, WEATHER), api

    def test_typed_answer_is_parsed(self, found: dict[str, Any]) -> None:
        for seen in found.values():
            assert_is_person(seen["person"])

    def test_killed_decode_node_changes_no_answer(
        self, found: dict[str, Any], long_answer: str
    ) -> None:
        for api, seen in found.items():
            expected = None if api in SHORT_ONLY else long_answer
            assert seen["long"] == expected, api

    def test_forced_calls(self, found: dict[str, Any]) -> None:
        for seen in found.values():
            forced = seen["forced"]
            assert forced.get("required", "get_weather") == "get_weather"
            assert forced.get("named", "get_weather") == "get_weather"
            assert forced.get("result", talk.WEATHER_RESULT) == talk.WEATHER_RESULT
            if "person" in forced:
                assert_is_person(forced["person"])

    def test_facts_of_single_libraries(self, client: str, found: dict[str, Any]) -> None:
        if client == "anthropic":
            counted, used = found["messages"]["counts"]
            assert counted == used
            assert found["messages"]["mistakes"] == {
                "negative": ["BadRequestError", 400, True],
                "long": ["BadRequestError", 400, True],
                "model": ["NotFoundError", 404, True],
            }
        if client == "langchain":
            parts = ["router", "prefill node", "decode node"]
            for api in ("chat", "responses"):
                assert found[api]["json_mode"] == {"name": "Baton", "parts": parts}
        if client == "openai-agents":
            items = ["reasoning_item", "tool_call_item", "tool_call_output_item"]
            for seen in found.values():
                assert seen["items"] == [*items, "message_output_item"]


def test_instructor_reads_objects(cluster: Cluster) -> None:
    found = ask("instructor", "ask_instructor.py", cluster)
    assert_is_person(found["person"])
    assert found["person_streamed"] == found["person"]
    assert len(found["items"]) == 60
    assert found["items_interrupted"] == found["items"]
    assert_is_person(found["forced"]["person"])
    # The library asks for a stream by a tool of another name: the answer need not be the same.
    assert_is_person(found["forced"]["person_streamed"])
