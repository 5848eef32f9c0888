"""Bodies of generation requests as JSON objects.

All streams wait while the event loop makes objects of JSON: 5 to 100 ms per MB, of which most is
the garbage collector's. So of a large body

* only members are decoded that a check reads; others stay JSON (`msgspec.Raw`), which takes 1 ms
  per MB: messages, which go to the text layer, schemas and grammars, which a process beside the
  front reads, and members without effect;
* one is decoded at a time, in order of arrival, and other work of the loop gets its turn between
  two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Set
from typing import Any, TypeVar

import msgspec

from baton.errors import InvalidJson, PayloadTooLarge, QueueFull
from baton.server.fields import decode_exact
from baton.server.http.http_utils import INLINE_BYTES, decode_object
from baton.server.request import schema, unsupported_fields
from baton.server.request.grammar.constraint import GrammarFields, NativeGrammarFields
from baton.server.request.tools import MAX_TOOLS

T = TypeVar("T")
RawObject = dict[str, msgspec.Raw]

MAX_WAITING = 256
"""Large bodies that wait for their turn."""
MAX_MEMBER_BYTES = 2 * 2**20
"""A member of a large body that is neither a prompt nor without effect. The text of a grammar has
at most 1 MiB.
"""
SMALL_BYTES = 1024
"""Schemas and parts of tools up to here are decoded in any case."""

_PROMPTS = frozenset(("prompt", "text", "input_ids", "tokens", "messages"))
_CONSTRAINTS = frozenset(GrammarFields.__struct_fields__)
_NATIVE_CONSTRAINTS = frozenset(NativeGrammarFields.__struct_fields__)


def _names(*schemas: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(name for each in schemas for name in each.__struct_fields__)


_READ = _names(
    schema.ChatCompletionRequest,
    schema.CompletionRequest,
    schema.GenerateRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
    schema.SamplingFields,
    GrammarFields,
).union(unsupported_fields.CHAT, unsupported_fields.COMPLETION, unsupported_fields.GENERATE)
"""Members of bodies whose values a check reads."""
_READ_NATIVE = _names(schema.GenerateSampling, NativeGrammarFields).union(unsupported_fields.SHARED)
"""Members of `sampling_params` whose values a check reads."""


class BodyDecoder:
    """The bodies of one server. Not thread-safe: called on the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def decode(self, raw: bytes) -> dict[str, Any]:
        """A JSON object. Raises InvalidJson, and for large ones PayloadTooLarge or QueueFull."""
        if len(raw) <= INLINE_BYTES:
            return decode_object(raw)
        async with self._large_turn():
            return decode_large_object(raw)

    async def translate(self, raw: bytes, work: Callable[[], T]) -> T:
        """Result of the text layer's work on a body, which releases Python's lock: for a large one
        on a thread.
        """
        if len(raw) <= INLINE_BYTES:
            return work()
        async with self._large_turn():
            return await asyncio.to_thread(work)

    @contextlib.asynccontextmanager
    async def _large_turn(self) -> AsyncIterator[None]:
        """The turn of a large body; the next one begins in a later turn of the event loop."""
        if self._waiting >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} large requests wait to be read; try again later",
                retry_after_secs=1,
            )
        self._waiting += 1
        try:
            async with self._turn:
                yield
                await asyncio.sleep(0)
        finally:
            self._waiting -= 1


def decode_large_object(raw: bytes) -> dict[str, Any]:
    """A JSON object of which large members may be `msgspec.Raw`. Raises InvalidJson or
    PayloadTooLarge.

    Numbers and escapes in such a member are not checked.
    """
    try:
        if not raw.isascii():
            str(raw, "utf-8")
        members = msgspec.json.decode(raw, type=RawObject)
        return {name: _read_member(name, member) for name, member in members.items()}
    except UnicodeDecodeError as err:
        raise InvalidJson(f"the body is not UTF-8: {err.reason} at byte {err.start}") from err
    except msgspec.ValidationError as err:
        if not raw.lstrip().startswith(b"{"):
            raise InvalidJson("the body must be a JSON object") from None
        raise InvalidJson(f"the body ({len(raw)} bytes) is not JSON: {err}") from err
    except (msgspec.DecodeError, RecursionError) as err:
        raise InvalidJson(f"the body ({len(raw)} bytes) is not JSON: {err}") from err


def _read_member(name: str, member: msgspec.Raw) -> Any:
    if name not in _READ or name == "messages":
        return member
    size = len(memoryview(member))
    if size > MAX_MEMBER_BYTES and name not in _PROMPTS:
        raise PayloadTooLarge(
            f"{name} has {size} bytes, at most {MAX_MEMBER_BYTES} are accepted; simplify it",
            param=name,
        )
    if name in _CONSTRAINTS:
        return _decode_small(member)
    if name == "sampling_params":
        return _decode_sampling(member)
    if name in ("tools", "functions"):
        return _decode_tools(member)
    return decode_exact(member)


def _decode_sampling(member: msgspec.Raw) -> Any:
    """`sampling_params` of /generate, of which large schemas and grammars stay JSON."""
    nested = _raw_members(member)
    if nested is None:
        return decode_exact(member)
    return {
        name: _decode_small(value)
        if name in _NATIVE_CONSTRAINTS
        else _decode_if_read(name, value, _READ_NATIVE)
        for name, value in nested.items()
    }


def _decode_if_read(name: str, value: msgspec.Raw, read: Set[str]) -> Any:
    return decode_exact(value) if name in read else value


def _decode_tools(member: msgspec.Raw) -> Any:
    """An array of tools or functions, whose large parts stay JSON."""
    try:
        tools = msgspec.json.decode(member, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        return decode_exact(member)
    if len(tools) > MAX_TOOLS:
        return tools  # they are refused by their number
    return [_decode_tool(tool) for tool in tools]


def _decode_tool(tool: msgspec.Raw) -> Any:
    """A tool, or the function in one."""
    parts = _raw_members(tool)
    if parts is None or len(memoryview(tool)) <= SMALL_BYTES:
        return decode_exact(tool)
    return {
        name: _decode_tool(part) if name == "function" else _decode_small(part)
        for name, part in parts.items()
    }


def _decode_small(value: msgspec.Raw) -> Any:
    """The value, or its JSON if that is large."""
    return value if len(memoryview(value)) > SMALL_BYTES else decode_exact(value)


def _raw_members(value: msgspec.Raw) -> RawObject | None:
    """Members of an object; None for another value."""
    try:
        return msgspec.json.decode(value, type=RawObject)
    except msgspec.ValidationError:
        return None
