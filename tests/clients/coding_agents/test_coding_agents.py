"""Codex CLI and Claude Code, without a network but loopback: three turns with a tool, through P and D over TCP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.coding_agents.recording_proxy import Exchange, RecordingProxy
from tests.clients.coding_agents.scripted_model import ANSWER, write_model
from tests.clients.environments import clean_environment, require_environment
from tests.support.processes.cluster import Cluster, eventually

RUN_ON_LOOPBACK = Path(__file__).with_name("run_on_loopback.py")
PORT = 8000
TURN_SECS = 180.0
PROMPTS = ("Read facts.txt.", "How long does a lease last?", "Read it once more.")
FACT = "The lease ends after 30 seconds."

CODEX_CONFIG = f"""
model = "demo"
model_provider = "baton"

[model_providers.baton]
name = "Baton"
base_url = "http://127.0.0.1:{PORT}/v1"
wire_api = "responses"
"""
CLAUDE_VARIABLES = {
    "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{PORT}",
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "demo",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


@dataclass(frozen=True)
class CodingAgent:
    """A command line program, and how a turn of it is run and read."""

    environment: str
    path: str
    tool: str
    arguments: dict[str, str]
    command: Callable[[str, bool], list[str]]
    """Arguments for a prompt; the flag says whether the last conversation goes on."""
    answer: Callable[[str], str]
    """Text that the program shows, of what it prints."""
    results: Callable[[Any], list[str]]
    """Results of calls in a request's body."""


def codex_command(prompt: str, is_resumed: bool) -> list[str]:
    resume = ["resume", "--last"] if is_resumed else []
    # The namespace is the sandbox: Codex's own needs rights that a container may not give.
    flags = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *resume, *flags, prompt]


def codex_answer(output: str) -> str:
    events = [json.loads(line) for line in output.splitlines()]
    assert events[-1]["type"] == "turn.completed", events
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return "".join(item["text"] for item in items if item["type"] == "agent_message")


def codex_results(body: Any) -> list[str]:
    return [item["output"] for item in body["input"] if item["type"] == "function_call_output"]


def claude_command(prompt: str, is_resumed: bool) -> list[str]:
    resume = ["--continue"] if is_resumed else []
    flags = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    return ["claude", "--print", prompt, *resume, *flags]


def claude_answer(output: str) -> str:
    end = json.loads(output.splitlines()[-1])
    assert end["type"] == "result", end
    assert not end["is_error"], end
    return str(end["result"])


def claude_results(body: Any) -> list[str]:
    blocks = [
        block
        for message in body["messages"]
        if not isinstance(message["content"], str)
        for block in message["content"]
    ]
    return [json.dumps(block["content"]) for block in blocks if block["type"] == "tool_result"]


AGENTS = {
    "codex": CodingAgent(
        environment="codex",
        path="/v1/responses",
        tool="exec_command",
        arguments={"cmd": "cat facts.txt"},
        command=codex_command,
        answer=codex_answer,
        results=codex_results,
    ),
    "claude": CodingAgent(
        environment="claude-code",
        path="/v1/messages",
        tool="Bash",
        arguments={"command": "cat facts.txt", "description": "Read the facts"},
        command=claude_command,
        answer=claude_answer,
        results=claude_results,
    ),
}


@pytest.fixture(scope="module", params=AGENTS)
def agent(request: pytest.FixtureRequest) -> CodingAgent:
    found = AGENTS[request.param]
    require_environment(found.environment)
    return found


@pytest.fixture(scope="module")
def cluster(agent: CodingAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Router, one prefill node and two decode nodes with a model that calls the agent's tool."""
    folder = tmp_path_factory.mktemp("model") / "scripted"
    model = write_model(folder, agent.tool, agent.arguments)
    flags = ["--model-path", str(model), "--served-model-name", "demo", "--transport", "tcp"]
    with Cluster.up(*flags, "--prefill", "1", "--decode", "2") as cluster:
        yield cluster


class Session:
    """A conversation of a coding agent in a folder of its own."""

    def __init__(self, agent: CodingAgent, folder: Path) -> None:
        self.agent = agent
        self.socket = folder / "socket"
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "facts.txt").write_text(FACT + "\n")
        codex_home = folder / "codex"
        codex_home.mkdir()
        (codex_home / "config.toml").write_text(CODEX_CONFIG)
        binaries = require_environment(agent.environment) / "node_modules" / ".bin"
        self.environment = clean_environment(
            HOME=str(folder),
            CODEX_HOME=str(codex_home),
            PATH=f"{binaries}:{os.environ['PATH']}",
            **CLAUDE_VARIABLES,
        )

    def turn(self, prompt: str, is_resumed: bool) -> str:
        """Run the agent on `prompt`; the text that it shows."""
        relay = [sys.executable, str(RUN_ON_LOOPBACK), str(self.socket), str(PORT)]
        done = subprocess.run(
            [*new_network(), *relay, *self.agent.command(prompt, is_resumed)],
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TURN_SECS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return self.agent.answer(done.stdout)


def new_network() -> list[str]:
    """Command that runs another one in a network namespace of its own; skips where none can be made."""
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    made = subprocess.run([*command, "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.decode().strip()}")
    return command


@dataclass(frozen=True)
class Conversation:
    answers: list[str]
    exchanges: list[Exchange]


@pytest.fixture(scope="module")
def conversation(
    agent: CodingAgent, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Conversation:
    """Three turns; a decode node is killed after the first one, and the second does not wait for it."""
    folder = tmp_path_factory.mktemp(agent.environment)
    session = Session(agent, folder)
    proxy = RecordingProxy(cluster.url)
    answers = []
    with proxy.listening(session.socket):
        for number, prompt in enumerate(PROMPTS):
            answers.append(session.turn(prompt, is_resumed=number > 0))
            if number == 0:
                cluster.kill("decode", 0)
    cluster.await_restart("decode", 0)
    return Conversation(answers, proxy.exchanges)


def test_each_turn_ends_with_the_models_answer(conversation: Conversation) -> None:
    assert conversation.answers == ["".join(ANSWER)] * len(PROMPTS)


def test_every_request_is_accepted_and_none_is_repeated(
    agent: CodingAgent, conversation: Conversation
) -> None:
    seen = [(it.method, it.path, it.status) for it in conversation.exchanges]
    assert seen == [("POST", agent.path, 200)] * (2 * len(PROMPTS))
    for exchange in conversation.exchanges:
        assert exchange.answer.endswith(b"data: [DONE]\n\n")


def test_results_of_the_tool_go_back_to_the_model(
    agent: CodingAgent, conversation: Conversation
) -> None:
    results = [agent.results(exchange.body) for exchange in conversation.exchanges]
    assert [len(found) for found in results] == [0, 1, 1, 2, 2, 3]
    assert all(FACT in result for found in results for result in found)


def test_later_turns_find_the_prompt_of_the_first_in_the_cache(
    conversation: Conversation,
) -> None:
    """The window that these programs send again is read once."""
    last = conversation.exchanges[-1].answer.decode()
    data = [json.loads(line[6:]) for line in last.splitlines() if line.startswith("data: {")]
    usages = [
        found
        for event in data
        for found in ((event.get("response") or event.get("message") or event).get("usage"),)
        if found
    ]
    assert usages
    cached = [
        usage.get("cache_read_input_tokens")
        or usage.get("input_tokens_details", {}).get("cached_tokens", 0)
        for usage in usages
    ]
    assert max(cached) > 10_000


def test_nothing_is_held_afterwards(conversation: Conversation, cluster: Cluster) -> None:
    eventually("idle", lambda: not any(cluster.loads().values()))
    cluster.assert_nothing_is_held()
