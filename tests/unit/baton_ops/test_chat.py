"""`baton chat` against a server that speaks the OpenAI API over a real socket."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_ops import chat
from baton_ops.chat import AnswerFailed, ChatAnswer, ChatConfig, ChatServer, ChatSession
from baton_ops.clients.http_client import HttpClient
from tests.support.processes.http_server import QuietHandler, serve_requests, url_of

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def chunk(content: str | None = None, finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk as openai-python parses it."""
    return delta_chunk({} if content is None else {"content": content}, finish_reason)


def delta_chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


HELLO = [chunk(""), chunk("Hel"), chunk("lo"), chunk(None, "stop"), {"choices": [], "usage": USAGE}]


class ScriptedServer:
    """Answers each message with the next list of events; keeps the bodies."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["m", "n"]

    @contextmanager
    def listen(self) -> Iterator[str]:
        scripted = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                scripted.keys.append(self.headers["authorization"])
                listed = {"object": "list", "data": [{"id": name} for name in scripted.models]}
                self.answer(json.dumps(listed).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                scripted.bodies.append(json.loads(body))
                scripted.keys.append(self.headers["authorization"])
                events = scripted.answers.pop(0)
                text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
                self.answer(b": keep-alive\n\n" + text.encode() + b"data: [DONE]\n\n")

        with serve_requests(Handler) as server:
            yield url_of(server)


def session(url: str, **flags: Any) -> tuple[ChatSession, io.StringIO, io.StringIO]:
    out = io.StringIO()
    notes = io.StringIO()
    server = ChatServer(url, None, HttpClient())
    talking = ChatSession(server, "m", ChatConfig(**flags), tools=None, out=out, notes=notes)
    return talking, out, notes


def test_piped_message_is_answered_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ScriptedServer(HELLO)
    with server.listen() as url:
        monkeypatch.setattr("sys.stdin", io.StringIO("Who are you?\n"))
        flags = ["--api-key", "k", "--system", "be brief", "--max-tokens", "9", "--seed", "1"]
        assert chat.main([f"{url}/v1", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello\n"
    assert printed.err.startswith("[TTFT ")
    assert " ms, 2 tokens" in printed.err
    assert server.bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "Who are you?\n"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 9,
            "seed": 1,
        }
    ]
    assert server.keys == ["Bearer k", "Bearer k"]


def test_dialog_keeps_the_conversation_and_runs_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two", "/system short", "/clear", "/help", "/what", "", "three", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    server = ScriptedServer(HELLO, HELLO, HELLO)
    with server.listen() as url:
        talking, out, notes = session(url)
        assert talking.run_dialog() == 0
    sent = [[turn["content"] for turn in body["messages"]] for body in server.bodies]
    assert sent == [["one"], ["one", "Hello", "two"], ["short", "three"]]
    assert out.getvalue() == "HelloHelloHello"
    assert "/clear" in notes.getvalue()
    assert "there is no command /what; /help lists them" in notes.getvalue()
    assert notes.getvalue().count(" ms, 2 tokens") == 3


def call_chunk(
    index: int, *, id: str | None = None, name: str | None = None, arguments: str = ""
) -> dict[str, Any]:
    """A part of a call: the first one has id and name."""
    delta: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if id is not None:
        delta.update(id=id, type="function")
        delta["function"]["name"] = name
    return delta_chunk({"tool_calls": [delta]})


CALLS = [
    delta_chunk({"reasoning_content": "two "}),
    delta_chunk({"reasoning_content": "cities"}),
    call_chunk(0, id="call_a", name="weather", arguments='{"city":'),
    call_chunk(0, arguments=' "Oslo"}'),
    call_chunk(1, id="call_b", name="weather", arguments='{"city": "Rome"}'),
    chunk(None, "tool_calls"),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reasoning_is_dimmed_and_calls_take_the_next_lines_as_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = iter(["compare", "cold", "warm", "thanks", "/exit"])
    prompts = []

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        return next(lines)

    monkeypatch.setattr("builtins.input", read_line)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setattr("sys.stderr", notes := Terminal())
    tools = [{"type": "function", "function": {"name": "weather"}}]
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(tools))
    server = ScriptedServer(CALLS, [delta_chunk({"reasoning": "short"}), *HELLO], HELLO)
    with server.listen() as url:
        assert chat.main([url, "--tools", str(file)]) == 0
    oslo = 'weather({"city": "Oslo"})'
    rome = 'weather({"city": "Rome"})'
    assert out.getvalue() == f"{oslo}\n{rome}HelloHello"
    assert "\x1b[2mtwo \x1b[0m\x1b[2mcities\x1b[0m" in notes.getvalue()
    assert notes.getvalue().count("TTFT") == 3
    assert prompts == ["> ", f"result of {oslo}> ", f"result of {rome}> ", "> ", "> "]
    assert all(body["tools"] == tools for body in server.bodies)
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "compare"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "two cities",
            "tool_calls": [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
                }
                for id, city in (("call_a", "Oslo"), ("call_b", "Rome"))
            ],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "cold"},
        {"role": "tool", "tool_call_id": "call_b", "content": "warm"},
    ]
    last = server.bodies[2]["messages"][4:]
    assert [turn["content"] for turn in last] == ["Hello", "thanks"]
    assert "reasoning_content" not in last[0]


def test_failed_answer_to_a_result_leaves_its_call_open() -> None:
    server = ScriptedServer(CALLS, [{"error": {"message": "the worker is gone"}}])
    with server.listen() as url:
        talking, _, _ = session(url)
        talking.ask_model("compare")
        talking.ask_model("cold")
        with pytest.raises(AnswerFailed):
            talking.ask_model("warm")
    assert [call.id for call in talking.conversation.open_calls] == ["call_b"]
    assert talking.conversation.turns[-1]["content"] == "cold"


def test_end_of_input_ends_the_dialog_and_ctrl_c_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    events = iter([KeyboardInterrupt(), EOFError()])

    def press(prompt: str) -> str:
        raise next(events)

    monkeypatch.setattr("builtins.input", press)
    talking, _, notes = session("http://127.0.0.1:1")
    assert talking.run_dialog() == 0
    assert "Ctrl-D or /exit ends" in notes.getvalue()


class InterruptedOutput(io.StringIO):
    """Ctrl-C is pressed when the first part of the answer is shown."""

    def flush(self) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    server = ScriptedServer(HELLO)
    with server.listen() as url:
        notes = io.StringIO()
        client = ChatServer(url, None, HttpClient())
        out = InterruptedOutput()
        talking = ChatSession(client, "m", ChatConfig(), tools=None, out=out, notes=notes)
        answer = talking.ask_model("hi")
    assert answer.text == "Hel"
    assert [turn["content"] for turn in talking.conversation.turns] == ["hi", "Hel"]
    assert "[stopped]" in notes.getvalue()


def test_error_event_ends_the_answer_with_its_message() -> None:
    broken = [chunk("Hel"), {"error": {"message": "the worker is gone", "code": "upstream_error"}}]
    server = ScriptedServer(broken)
    with server.listen() as url:
        talking, out, _ = session(url)
        with pytest.raises(AnswerFailed, match="the answer broke off: the worker is gone"):
            talking.ask_model("hi")
    assert out.getvalue() == "Hel"


def test_missing_server_is_named_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "connection refused; start one with baton up" in said


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["localhost:8000"], "baton chat: localhost:8000: give http://HOST:PORT"),
        (["--max-tokens", "0"], "--max-tokens 0: give at least 1"),
        (["--temperature", "warm"], "--temperature warm: give a number"),
        (["--tools", "no-such-file"], "--tools no-such-file: No such file or directory"),
        (["--tools", "/dev/null"], "--tools /dev/null: it is a device, not a regular file"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        chat.main(flags)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_summary_has_the_rate_of_the_later_tokens() -> None:
    answer = ChatAnswer(began=10.0, first_at=10.5, last_at=12.5, tokens=11, finish_reason="length")
    assert answer.summary_line() == (
        "TTFT 500 ms, 11 tokens, 5.0 tokens/s, cut at the longest answer (--max-tokens)"
    )
    assert ChatAnswer().summary_line() == "no text"
