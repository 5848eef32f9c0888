"""kubectl as a program, with the operator's own access."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Collection
from typing import Any


class KubectlError(Exception):
    """kubectl could not be run or ended with an error.

    The message says which, or is its last line.
    """


class Kubectl:
    def __init__(self, command: str, namespace: str, timeout_secs: float) -> None:
        """`command`: kubectl with flags of its own, as a shell would read it."""
        self._command = [*shlex.split(command), "-n", namespace]
        self._timeout_secs = timeout_secs

    def run(self, *words: str, exits: Collection[int] = (0,)) -> str:
        """Standard output of kubectl with these words.

        Raises KubectlError for another exit code than `exits`, or one without output.
        """
        command = [*self._command, *words]
        try:
            outcome = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=self._timeout_secs,
                stdin=subprocess.DEVNULL,
            )
        except OSError as err:
            raise KubectlError(
                f"{command[0]} cannot be run ({err.strerror}); install it, or give --kubectl"
            ) from err
        except subprocess.TimeoutExpired as err:
            raise KubectlError(
                f"kubectl {shlex.join(words)} did not end within {self._timeout_secs:g} s"
            ) from err
        if outcome.returncode not in exits or (outcome.returncode and not outcome.stdout.strip()):
            lines = outcome.stderr.strip().splitlines() or [
                f"kubectl {shlex.join(words)} ended with {outcome.returncode}"
            ]
            raise KubectlError(lines[-1][-500:])
        return outcome.stdout

    def items(self, *words: str) -> list[dict[str, Any]]:
        """Objects that `kubectl get` lists, or the one it names."""
        answer = json.loads(self.run("get", *words, "-o", "json"))
        return list(answer["items"]) if "items" in answer else [answer]
