"""Trace files → requests: arrival times, lengths, and prompts whose prefixes are equal exactly
where the trace says so.

 1. `read_trace` parses and checks JSON Lines (gzip'd or not): timestamp [ms], input_length,
    output_length [tokens], hash_ids (one id per 512-token block of the prompt), and who asks:
    priority, priority_class, tenant (all four optional). A bad line is an error with its number.
 2. `arrival_times` turns time stamps into seconds: stamps of coarse clocks are spread evenly over
    the gap to the next one.
 3. `prompt_tokens` makes token ids when a request arrives: each token of a block is the block's
    number, so equal ids behind equal prefixes are equal tokens, different ids differ in every page,
    and a partial block is a prefix of the whole one. Answers use numbers of their own
    (`answer_token`): a trace does not tell what was answered, so nothing matches them.

Format: Mooncake's (arXiv 2407.00079).
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config.classes import LEAST_PRIORITY, MOST_PRIORITY
from baton.config.simulated import BLOCK_TOKENS, CONTEXT_LENGTH, scale_tokens
from baton.config.tenants import NAME_RULE, TENANT_NAME
from baton.errors import ConfigError

FIRST_ANSWER_TOKEN = 1 << 30
"""Blocks are numbered from 0, answers from here: they never meet."""
MAX_TIMESTAMP_MS = 1e13
"""Three centuries: stamps since 1970 fit, and sums with them keep their milliseconds."""
_START = -1
_UNLIKE_ANY = -2
"""Stand for "the block before" of a first block, and of blocks that nothing is equal to."""
SHIPPED = Path(__file__).parent / "traces"
SHIPPED_NAMES = {path.name.split(".")[0]: path for path in sorted(SHIPPED.glob("*.jsonl.gz"))}
"""Traces that come with Baton, by their short names."""
SHIPPED_HELP = f"one that comes with Baton: {', '.join(SHIPPED_NAMES)}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    timestamp_ms: float
    input_length: int
    output_length: int
    blocks: tuple[int, ...]
    """Numbers from 0 on, of BLOCK_TOKENS tokens each, per distinct hash id and prefix."""
    priority: int | None = None
    priority_class: str | None = None
    tenant: str | None = None


class _BadLine(ValueError):
    pass


def locate_trace(name: str) -> Path:
    """A file, or one of the traces that come with Baton, by its short name. Raises ConfigError."""
    path = Path(name)
    if path.is_file():
        return path
    if name not in SHIPPED_NAMES:
        names = " or ".join(SHIPPED_NAMES)
        raise ConfigError(
            f"--trace {name}: no such file; give a .jsonl or .jsonl.gz file, or {names}"
        )
    return SHIPPED_NAMES[name]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace.

    Raises ConfigError, with the line number, for what is not one.
    """
    number = 0  # the last line read, for messages
    ids: dict[tuple[int, int], int] = {}
    requests: list[TraceRequest] = []
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as lines
        ):
            for line in lines:
                if limit is not None and len(requests) >= limit:
                    break
                number += 1
                if line.strip():
                    requests.append(
                        _parse_line(line, ids, requests[-1].timestamp_ms if requests else 0.0)
                    )
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as err:
        raise ConfigError(f"{path}: cannot be read after line {number}: {err}") from err
    except _BadLine as err:
        raise ConfigError(f"{path}, line {number}: {err}") from err
    if not requests:
        raise ConfigError(f"{path}: has no requests")
    return requests


def _parse_line(line: str, ids: dict[tuple[int, int], int], previous_ms: float) -> TraceRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise _BadLine(f"not JSON: {err}") from err
    if not isinstance(row, dict):
        raise _BadLine(f"a request is a JSON object, this is {type(row).__name__}")
    timestamp = row.get("timestamp")
    if (
        isinstance(timestamp, bool)
        or not isinstance(timestamp, int | float)
        or not 0 <= timestamp <= MAX_TIMESTAMP_MS
    ):
        raise _BadLine(
            f"timestamp is {timestamp!r:.40}; give milliseconds from the start, 0 to "
            f"{MAX_TIMESTAMP_MS:g}"
        )
    if timestamp < previous_ms:
        raise _BadLine(
            f"timestamp {timestamp} is before the previous line's {previous_ms}; sort the file"
        )
    prompt = _read_length(row, "input_length")
    answer = _read_length(row, "output_length")
    priority = row.get("priority")
    if priority is not None and (
        type(priority) is not int or not LEAST_PRIORITY <= priority <= MOST_PRIORITY
    ):
        raise _BadLine(
            f"priority is {priority!r:.40}; give an integer from {LEAST_PRIORITY} to "
            f"{MOST_PRIORITY}, or leave it out"
        )
    blocks = _read_blocks(row.get("hash_ids"), prompt, ids)
    return TraceRequest(
        float(timestamp),
        prompt,
        answer,
        blocks,
        priority,
        _read_name(row, "priority_class"),
        _read_name(row, "tenant"),
    )


def _read_name(row: dict[str, Any], field: str) -> str | None:
    value = row.get(field)
    if value is not None and not (isinstance(value, str) and TENANT_NAME.fullmatch(value)):
        raise _BadLine(f"{field} is {value!r}; a name has {NAME_RULE}")
    return value


def _read_length(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 1 <= value <= CONTEXT_LENGTH:
        raise _BadLine(
            f"{name} is {value!r:.40}; give a whole number of tokens, 1 to {CONTEXT_LENGTH}"
        )
    return value


def _read_blocks(hash_ids: Any, prompt: int, ids: dict[tuple[int, int], int]) -> tuple[int, ...]:
    """`ids`: (number of the block before, hash id) → number."""
    count = -(-prompt // BLOCK_TOKENS)
    if hash_ids is None:  # no prefix information: this prompt is like no other
        first = len(ids)
        ids.update({(_UNLIKE_ANY, first + i): first + i for i in range(count)})
        return tuple(range(first, first + count))
    if not isinstance(hash_ids, list) or any(type(item) is not int for item in hash_ids):
        raise _BadLine("hash_ids is not a list of integers")
    if len(hash_ids) != count:
        expected = f"{count} blocks of {BLOCK_TOKENS} expected"
        raise _BadLine(f"{len(hash_ids)} hash_ids for {prompt} prompt tokens; {expected}")
    numbers: list[int] = []
    for item in hash_ids:
        numbers.append(ids.setdefault((numbers[-1] if numbers else _START, item), len(ids)))
    return tuple(numbers)


def arrival_times(trace: Sequence[TraceRequest]) -> list[float]:
    """Arrival in seconds from the first request.

    Equal stamps are spread evenly over the gap to the next stamp.
    """
    counts = Counter(request.timestamp_ms for request in trace)
    gaps = [after - stamp for stamp, after in itertools.pairwise(counts)]
    gaps.append(
        gaps[-1] if gaps else 0.0
    )  # the last stamp has no next one: it takes the gap before
    first = trace[0].timestamp_ms
    stamps = zip(counts.items(), gaps, strict=True)
    return [
        (stamp - first + gap * i / count) / 1e3
        for (stamp, count), gap in stamps
        for i in range(count)
    ]


def prompt_tokens(request: TraceRequest, scale: int) -> array[int]:
    """The prompt's token ids.

    One of them stands for `scale` real tokens (a divisor of BLOCK_TOKENS).
    """
    per_block = BLOCK_TOKENS // scale
    tokens = array("i")
    for block in request.blocks:
        tokens.extend(array("i", (block,)) * per_block)
    del tokens[scale_tokens(request.input_length, scale) :]
    return tokens


def answer_token(handle: int) -> int:
    """The token that the answer of request `handle` consists of."""
    return FIRST_ANSWER_TOKEN + handle


def cached_in_arrival_order(trace: Iterable[TraceRequest], capacity_tokens: int) -> list[int]:
    """Prompt tokens per request that an LRU cache of this size holds when requests run one after
    the other.

    A yardstick for --load, not a bound: a scheduler that reorders may do better or worse.
    """
    capacity = capacity_tokens // BLOCK_TOKENS
    cache: OrderedDict[int, None] = OrderedDict()  # a block's number stands for its whole prefix
    cached: list[int] = []
    for request in trace:
        hits = len(list(itertools.takewhile(cache.__contains__, request.blocks)))
        cached.append(min(hits * BLOCK_TOKENS, request.input_length - 1))
        for block in reversed(
            request.blocks
        ):  # leaves first: a prefix is used no later than what follows it
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return cached
