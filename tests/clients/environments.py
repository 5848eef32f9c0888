"""Programs of other projects in their environments under .venv-peers, made by setup.sh."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-peers"
CLIENT_SECS = 240.0
FOREIGN_VARIABLES = (
    "PYTHON",
    "OPENAI",
    "ANTHROPIC",
    "CLAUDE",
    "CODEX",
    "LITELLM",
    "LANGCHAIN",
    "LANGSMITH",
    "BATON",
)
"""Beginnings of variables that would configure a client behind the test's back."""
NO_NETWORK = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # litellm fetches its price list otherwise
    "OPENAI_AGENTS_DISABLE_TRACING": "1",  # openai-agents sends its traces to OpenAI otherwise
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


def require_environment(name: str) -> Path:
    """Folder of environment `name`; skips the test when it could not be made."""
    folder = FOLDER / name
    if not (folder / ".installed").exists():
        log = folder.with_name(f"{name}.log")
        reason = "run tests/clients/setup.sh"
        if log.exists():
            reason = f"it could not be installed: {log.read_text(errors='replace').strip()[-300:]}"
        pytest.skip(f"{name}: {reason}")
    return folder


def python_of(name: str) -> Path:
    """Interpreter of environment `name`; skips the test when it could not be made."""
    return require_environment(name) / "bin" / "python"


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's variables without those that configure a client, and `variables`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)
    }
    return {**kept, **NO_NETWORK, **variables}


def run_script(
    name: str,
    script: Path,
    *args: str,
    reply: Callable[[str], str] | None = None,
    timeout_secs: float = CLIENT_SECS,
) -> Any:
    """Run `script` under the Python of environment `name`; the JSON of the last line that it printed.

    Args:
        reply: is given every earlier line, and returns the line that the script reads as an answer.
        timeout_secs: the script is killed then.
    """
    process = subprocess.Popen(
        [str(python_of(name)), str(script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    timer = threading.Timer(timeout_secs, process.kill)
    timer.start()
    line = ""
    try:
        for line in process.stdout:
            if reply is not None and not line.startswith("{"):
                process.stdin.write(reply(line.strip()) + "\n")
                process.stdin.flush()
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        reader.join()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
    assert code == 0, line[-2000:] + "".join(errors)[-4000:]
    return json.loads(line)
