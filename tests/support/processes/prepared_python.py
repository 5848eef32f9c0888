"""A Python process that has imported torch, and runs each script in a fork of itself.

An import of torch and triton takes 2 to 5 s of CPU time; with `PreparedPython` it is paid once for
all scripts, and none of them sees what another one has changed.

1. the process imports the modules that it is told, and does nothing else with them: it has no
   threads that a fork would lose;
2. for each line of JSON on its standard input it forks; the child sets the environment variables
   of the request and runs its `-m MODULE` or `-c CODE` as `python` would;
3. it answers with a line of JSON: exit code, output and error output of the child;
4. it ends with its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ANSWER_SECS = 280.0
"""Below the time limit of a test, so that the script is named."""


class PreparedPython:
    """The client of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, *modules: str, **variables: str) -> Iterator[PreparedPython]:
        """A process that has these modules and environment variables; ended after use."""
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            process.communicate()

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS` with these environment variables on top."""
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"arguments": arguments, "variables": variables}) + "\n")
        stdin.flush()
        readable, _, _ = select.select([stdout], [], [], ANSWER_SECS)
        assert readable, f"{arguments}: no end after {ANSWER_SECS:g} s"
        answer = stdout.readline()
        assert answer, f"{arguments}: the process that should run it has ended"
        return subprocess.CompletedProcess(list(arguments), **json.loads(answer))

    def output(self, *arguments: str, **variables: str) -> str:
        """Output of a script that must succeed."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
        return str(done.stdout)


def run_forked(arguments: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.environ.update(variables)
            # The loop below is the parent's: a child that returned into it would answer requests.
            os._exit(exit_code_of(arguments))
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "stdout": texts[0],
        "stderr": texts[1],
    }


def exit_code_of(arguments: Sequence[str]) -> int:
    """Run a script in this process, whatever it raises."""
    option, script, *others = arguments
    try:
        sys.argv = [option, *others]
        if option == "-m":
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            assert option == "-c", option
            exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does with any
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(run_forked(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
