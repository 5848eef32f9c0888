"""`baton chat`: talk to a model behind a router or an engine, in the terminal.

1. The model's name comes from GET /v1/models unless --model gives it;
2. on a terminal each line is a message, or a command that begins with /; answers stream, and Ctrl-C
   stops the answer, at the prompt the line;
3. otherwise standard input is one message, and the answer alone goes to standard output.

Reasoning is shown dimmed, beside the answer: on standard error. The model may call the functions of
--tools; a call is shown as a line with its arguments, and in a dialog the next line is its result.

The conversation is kept here and sent whole with each message. Exit code: 0, 1 when the server gave
no answer, 2 for wrong flags.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from baton.config.files import read_regular_file
from baton.config.flags import FlagParser, add_flags, exit_with_mistakes, flags_table, opt
from baton.errors import counted
from baton_ops.clients.flags import API_KEY_ENV, DEFAULT_ROUTER, make_client, wrong_urls
from baton_ops.clients.http_client import HttpClient, StreamEnded, connection_remedy

PROG = "baton chat"
SILENCE_SECS = 600.0
"""Longest wait for the next part of an answer; a long queue is worth waiting for."""
COMMANDS = {
    "/help": "show this list",
    "/system TEXT": "instruct the model from here on; without TEXT: no instruction",
    "/clear": "forget the conversation",
    "/exit": "end; so does Ctrl-D",
}
PROMPT = "> "
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Flags of the command."""

    model: str | None = opt(None, "model to ask (default: the first of GET /v1/models)")
    system: str | None = opt(None, "instruction that stands before the conversation")
    max_tokens: int | None = opt(
        None,
        "longest answer (default: the server's) [tokens]",
        ge=1,
        also=("--max-completion-tokens",),
    )
    temperature: float | None = opt(None, "0: the likeliest token (default: the server's)", ge=0)
    seed: int | None = opt(None, "seed of the random choice of tokens")
    tools: str | None = opt(
        None, "JSON file with functions that the model may call, a list as in `tools` of a request"
    )
    api_key: str | None = opt(None, "key of the router or engine", env=API_KEY_ENV)
    ca_cert: str | None = opt(
        None, "PEM file of an authority to trust besides the system's, for https addresses"
    )


@dataclass(slots=True)
class ToolCall:
    """Call of a function as it arrives."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def add_delta(self, delta: dict[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = delta.get("id") or self.id
        self.name += function.get("name") or ""
        self.arguments += function.get("arguments") or ""

    def member(self) -> dict[str, Any]:
        """The call as a member of `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def call_line(self) -> str:
        return f"{self.name}({self.arguments})"


@dataclass(slots=True)
class Conversation:
    """Messages so far, and the instruction before them."""

    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    open_calls: list[ToolCall] = field(default_factory=list)
    """Calls of the last answer that have no result yet, in their order."""

    def request_messages(self) -> list[dict[str, Any]]:
        first = [] if not self.system else [{"role": "system", "content": self.system}]
        return first + self.turns

    def add_user_line(self, text: str) -> None:
        """A message, or the result of the first open call."""
        if not self.open_calls:
            self.turns.append({"role": "user", "content": text})
            return
        call = self.open_calls.pop(0)
        self.turns.append({"role": "tool", "tool_call_id": call.id, "content": text})

    def add_answer(self, answer: ChatAnswer) -> None:
        turn: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.calls:
            turn["tool_calls"] = [call.member() for call in answer.calls.values()]
            # Models that reason before a call continue from there when they get its result.
            if answer.reasoning:
                turn["reasoning_content"] = answer.reasoning
        self.turns.append(turn)
        self.open_calls = list(answer.calls.values())

    def forget(self) -> None:
        self.turns.clear()
        self.open_calls.clear()


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Piece of an answer's text or of the reasoning before it."""

    text: str
    is_reasoning: bool


@dataclass(slots=True)
class ChatAnswer:
    """Answer as it arrives, with the times at which parts of it came."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)
    """By their index."""
    began: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    last_at: float = 0.0
    tokens: int | None = None
    """As the server counts them; None: it did not, e.g. since the answer was stopped."""
    finish_reason: str | None = None

    def add_part(self, part: AnswerPart) -> None:
        self._note_time()
        if part.is_reasoning:
            self.reasoning += part.text
        else:
            self.text += part.text

    def add_call_delta(self, delta: dict[str, Any]) -> None:
        self._note_time()
        self.calls.setdefault(delta.get("index") or 0, ToolCall()).add_delta(delta)

    def _note_time(self) -> None:
        now = time.monotonic()
        self.first_at = self.first_at or now
        self.last_at = now

    def summary_line(self) -> str:
        """TTFT, tokens and their rate, as far as they are known."""
        if self.first_at is None:
            return "no text"
        parts = [f"TTFT {(self.first_at - self.began) * 1e3:.0f} ms"]
        if self.tokens is not None:
            parts.append(counted(self.tokens, "token"))
            later_secs = self.last_at - self.first_at
            if self.tokens > 1 and later_secs > 0:
                parts.append(f"{(self.tokens - 1) / later_secs:.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("cut at the longest answer (--max-tokens)")
        return ", ".join(parts)


class AnswerFailed(Exception):
    """The server gave no answer, or broke it off. The message says why."""


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Router or engine that is asked."""

    url: str
    key: str | None
    client: HttpClient

    def find_model(self) -> str:
        """Name of the first model. Raises AnswerFailed."""
        answer = self.client.get(f"{self.url}/v1/models", self.key)
        if not answer.is_ok:
            raise self._make_failure(answer.problem)
        models = answer.object.get("data") or []
        if not models:
            raise AnswerFailed(f"{self.url} serves no model yet; GET /readyz says why")
        return str(models[0]["id"])

    def stream_answer(self, body: dict[str, Any], answer: ChatAnswer) -> Iterator[AnswerPart]:
        """Parts of reasoning and text; `answer` gets them too, and the calls. Raises
        AnswerFailed.
        """
        url = f"{self.url}/v1/chat/completions"
        lines = self.client.lines(url, self.key, body=body, timeout_secs=SILENCE_SECS)
        with contextlib.closing(lines):
            try:
                for line in lines:
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if line.startswith("data:"):
                        yield from self._read_chunk(json.loads(data), answer)
            except StreamEnded as err:
                raise self._make_failure(str(err)) from err
            except ValueError as err:
                raise AnswerFailed(f"{self.url} sent an event that is no JSON: {err}") from err

    def _read_chunk(self, chunk: dict[str, Any], answer: ChatAnswer) -> Iterator[AnswerPart]:
        if error := chunk.get("error"):
            raise AnswerFailed(f"the answer broke off: {error.get('message', error)}")
        if usage := chunk.get("usage"):
            answer.tokens = usage.get("completion_tokens")
        for choice in chunk.get("choices", []):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            delta = choice.get("delta") or {}
            for part in _parts_of(delta):
                answer.add_part(part)
                yield part
            for call_delta in delta.get("tool_calls") or []:
                answer.add_call_delta(call_delta)

    def _make_failure(self, problem: str) -> AnswerFailed:
        remedy = connection_remedy(self.url, problem)
        if remedy is None and "connection refused" in problem:
            remedy = "start one with baton up, or give the URL of a router or engine"
        if remedy is None and "api key" in problem.lower():
            remedy = f"give --api-key, or {API_KEY_ENV}"
        return AnswerFailed(f"{self.url}: {problem}" + (f"; {remedy}" if remedy else ""))


def _parts_of(delta: dict[str, Any]) -> Iterator[AnswerPart]:
    # Engines with --reasoning-field both have both members, of the same text.
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield AnswerPart(reasoning, is_reasoning=True)
    if text := delta.get("content"):
        yield AnswerPart(text, is_reasoning=False)


class ChatSession:
    """Conversation with one model, shown on `out`; errors and notes go to `notes`."""

    def __init__(
        self,
        server: ChatServer,
        model: str,
        config: ChatConfig,
        *,
        tools: list[Any] | None,
        out: TextIO,
        notes: TextIO,
    ) -> None:
        self.conversation = Conversation(config.system)
        self._server = server
        self._model = model
        self._config = config
        self._tools = tools
        self._out = out
        self._notes = notes

    def ask_model(self, text: str) -> ChatAnswer:
        """Send a message and print the answer as it comes.

        Raises AnswerFailed; then the message is forgotten.

        A KeyboardInterrupt stops the answer: the server sees the connection close. Its text so far
        stays in the conversation.
        """
        conversation = self.conversation
        open_calls = list(conversation.open_calls)
        conversation.add_user_line(text)
        answer = ChatAnswer()
        # With several calls the model is asked when all have their results.
        if conversation.open_calls:
            return answer
        try:
            self._show_parts(self._server.stream_answer(self._request_body(), answer))
            self._show_calls(answer)
        except KeyboardInterrupt:
            answer.calls.clear()  # they may be incomplete
            self._notes.write("\n[stopped]")
        except AnswerFailed:
            answer.calls.clear()
            self._keep_turn(answer, open_calls)
            raise
        self._keep_turn(answer, open_calls)
        return answer

    def _keep_turn(self, answer: ChatAnswer, open_calls: list[ToolCall]) -> None:
        """Keep the message with its answer; without one the message is as if it was not sent."""
        if answer.text or answer.calls:
            self.conversation.add_answer(answer)
            return
        self.conversation.turns.pop()
        self.conversation.open_calls = open_calls

    def _show_parts(self, parts: Iterator[AnswerPart]) -> None:
        was_reasoning = False
        for part in parts:
            if part.is_reasoning:
                self._write_dimmed(part.text)
            else:
                if was_reasoning:
                    self._write_note("")
                self._out.write(part.text)
                self._out.flush()
            was_reasoning = part.is_reasoning
        if was_reasoning:
            self._write_note("")

    def _show_calls(self, answer: ChatAnswer) -> None:
        lines = [call.call_line() for call in answer.calls.values()]
        if lines:
            start = "\n" if answer.text else ""
            self._out.write(start + "\n".join(lines))
            self._out.flush()

    def _request_body(self) -> dict[str, Any]:
        config = self._config
        body = {
            "model": self._model,
            "messages": self.conversation.request_messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "tools": self._tools,
        }
        return {name: value for name, value in body.items() if value is not None}

    def run_command(self, line: str) -> bool:
        """Carry out a line that begins with /; False: end."""
        name, _, argument = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/clear":
            self.conversation.forget()
            self._write_note("the conversation is forgotten")
        elif name == "/system":
            self.conversation.system = argument.strip() or None
            now = self.conversation.system
            self._write_note(f"instruction: {now}" if now else "no instruction")
        elif name == "/help":
            self._write_note(
                "\n".join(f"{command:<14} {text}" for command, text in COMMANDS.items())
            )
        else:
            self._write_note(f"there is no command {name}; /help lists them")
        return True

    def _write_note(self, text: str) -> None:
        self._write_dimmed(f"{text}\n")

    def _write_dimmed(self, text: str) -> None:
        is_colored = self._notes.isatty()
        self._notes.write(f"{DIM}{text}{PLAIN}" if is_colored else text)
        self._notes.flush()

    def run_dialog(self) -> int:
        """Lines from the terminal until /exit or Ctrl-D; returns the exit code."""
        self._write_note(f"{self._model} at {self._server.url}; /help lists commands, Ctrl-D ends")
        while True:
            try:
                line = input(self._prompt()).strip()
            except EOFError:
                self._out.write("\n")
                return 0
            except KeyboardInterrupt:
                self._write_note("\nCtrl-D or /exit ends")
                continue
            if line.startswith("/"):
                if not self.run_command(line):
                    return 0
            elif line:
                self._answer_line(line)

    def _prompt(self) -> str:
        open_calls = self.conversation.open_calls
        return f"result of {open_calls[0].call_line()}{PROMPT}" if open_calls else PROMPT

    def _answer_line(self, line: str) -> None:
        """Send a message of a dialog, which an answer that fails does not end."""
        try:
            answer = self.ask_model(line)
        except AnswerFailed as err:
            self._write_note(f"\n{err}")
            return
        if not self.conversation.open_calls or answer.calls:
            self._write_note(f"\n[{answer.summary_line()}]")


def make_parser() -> FlagParser:
    parser = FlagParser(
        PROG,
        "Talk to a model in the terminal. Without a terminal standard input is one message, and "
        "the answer goes to standard output.",
    )
    parser.usage = f"{PROG} [URL] [flags]"
    parser.epilog = "exit code: 0, 1 when the server gave no answer, 2 wrong flags"
    text = f"URL of a router or an engine (default: {DEFAULT_ROUTER})"
    parser.add_argument("url", nargs="?", metavar="URL", help=text)
    add_flags(parser, ChatConfig)
    return parser


def read_tools(path: str) -> list[Any]:
    """The list in a file of --tools. Raises ValueError that says what is wrong with it."""
    try:
        tools = json.loads(read_regular_file(Path(path)).decode())
    except OSError as err:
        raise ValueError(f"--tools {path}: {err.strerror}") from err
    except ValueError as err:
        raise ValueError(f"--tools {path}: this is no JSON: {err}") from err
    if not isinstance(tools, list):
        raise ValueError(f"--tools {path}: give a list, as in `tools` of a request")
    return tools


def parse_flags(argv: Sequence[str]) -> tuple[ChatConfig, str]:
    """Flags and URL; prints mistakes and exits with 2."""
    config, others, bad = make_parser().read_config(ChatConfig, argv)
    url = (others["url"] or DEFAULT_ROUTER).rstrip("/").removesuffix("/v1")
    bad += wrong_urls([url], "")
    if bad:
        exit_with_mistakes(PROG, bad)
    return config, url


def main(argv: Sequence[str]) -> int:
    config, url = parse_flags(argv)
    server = ChatServer(url, config.api_key, make_client(PROG, config.ca_cert))
    try:
        tools = None if config.tools is None else read_tools(config.tools)
    except ValueError as err:
        exit_with_mistakes(PROG, [str(err)])
    is_dialog = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        model = config.model or server.find_model()
        session = ChatSession(server, model, config, tools=tools, out=sys.stdout, notes=sys.stderr)
        if is_dialog:
            with contextlib.suppress(ImportError):  # a Python without readline: no editing of lines
                import readline  # noqa: F401  # input() then edits lines and keeps their history
            return session.run_dialog()
        return answer_once(session, sys.stdin.read())
    except AnswerFailed as err:
        print(f"{PROG}: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def answer_once(session: ChatSession, message: str) -> int:
    """Answer to a message that was piped in; returns the exit code."""
    if not message.strip():
        print(f"{PROG}: standard input is empty; pipe a message in", file=sys.stderr)
        return 2
    answer = session.ask_model(message)
    print()
    print(f"[{answer.summary_line()}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    print(flags_table(ChatConfig))
