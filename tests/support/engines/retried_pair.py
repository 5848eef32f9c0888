"""A pair in one process whose requests may fail, and are then sent again in a new room, as the router does."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.sched.types.request import Rendezvous, SamplingParams, ValidatedRequest
from baton_ops.launch.holdings import holdings
from tests.support.engines.pair import Half, Pair, next_room

ATTEMPTS = 5
"""As many as the router makes by default."""
_REASON = re.compile(r"[A-Z]+_[A-Z_]+|CHECKSUM|DEADLINE|QUARANTINED")


@dataclass
class Outcome:
    """What became of some requests."""

    tokens: list[list[int]] = field(default_factory=list)
    retried: int = 0
    failed: int = 0
    """Requests whose last attempt failed, too."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Of failed attempts."""


class RetriedPair(Pair):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for half in (self.p, self.d):
            half.takes_errors = True
        self.left = set[int]()
        """Rooms of clients that went away."""

    def room_state(self, room: int) -> str:
        """Of D's room: "over" when its transfer has ended, or has not begun."""
        live = json.loads(self.d.node.rooms_json(room))["live"]
        return str(live[0]["state"]).lower() if live else "over"

    def leave(self, room: int) -> None:
        """A client goes away: end its request on D and on P, as the router does."""
        self.left.add(room)
        self.d.engine.abort(room)
        self.p.engine.abort(room)

    def holdings(self) -> dict[str, float]:
        """What both halves still hold: nothing, when they are idle."""
        found = {}
        for role, half in (("P", self.p), ("D", self.d)):
            runtime = json.loads(half.node.stats_json())["gauges"]
            for key, value in holdings({**half.engine.gauges(), **runtime}).items():
                found[f"{role} {key}"] = value
        return found

    def wait_idle(self) -> None:
        """Until neither engine has a request, and their page ledgers balance."""
        self.until(lambda: self.p.engine.sched.is_idle and self.d.engine.sched.is_idle)
        for half in (self.p, self.d):
            half.engine.gauges()
            assert half.engine.not_accepting_reason is None, half.engine.not_accepting_reason

    def collect(
        self,
        rooms: Sequence[int],
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        attempts: int = ATTEMPTS,
    ) -> Outcome:
        """Answers of requests that were submitted; those that fail are submitted again."""
        outcome = Outcome()
        answers: dict[int, list[int]] = {}
        todo = dict(zip(range(len(prompts)), rooms, strict=True))
        for attempt in range(1, attempts + 1):
            current = set(todo.values())
            self.until(lambda current=current: self.d.finished >= current)
            failed = [number for number, room in todo.items() if room in self.d.errors]
            for number, room in todo.items():
                if room not in self.d.errors:
                    answers[number] = self.d.got[room]
            outcome.reasons.update(self._reason(todo[number]) for number in failed)
            if not failed or attempt == attempts:
                outcome.failed = len(failed)
                break
            outcome.retried += len(failed)
            for number in failed:
                self._abort_at_prefill(todo[number])
            again = self.submit([prompts[number] for number in failed], params)
            todo = dict(zip(failed, again, strict=True))
        outcome.tokens = [answers.get(number, []) for number in range(len(prompts))]
        return outcome

    def prefill_alone(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Let P compute prompts that no D asks for, until it holds none of them."""
        for prompt in prompts:
            room = next_room()
            meet = Rendezvous("127.0.0.1", self.bootstrap.port, room)
            tokens = array("i", prompt)
            self.p.engine.submit(
                ValidatedRequest(
                    room, f"r{room}", tokens, params, arrival=time.monotonic(), rendezvous=meet
                )
            )
        self.turn_until(self.p, lambda: self.p.engine.sched.is_idle)

    def turn_until(self, half: Half, done: Callable[[], bool]) -> None:
        """Let one half work while the other one stands still."""
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, half.engine.sched.report.counts()
            if not half.turn():
                time.sleep(0.002)  # its runtime's threads work

    def _abort_at_prefill(self, room: int) -> None:
        """As the router does with the prefill leg of an attempt that failed."""
        self.p.engine.abort(room)

    def _reason(self, room: int) -> str:
        found = _REASON.search(self.d.errors[room])
        return found[0] if found else self.d.errors[room]
