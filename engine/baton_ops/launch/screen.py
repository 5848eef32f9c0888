"""Terminal of `baton up`: lines that stay, and below them live lines that are drawn again.

1. `say` prints a line that stays, above the live ones;
2. `show` replaces the live lines; `clear` removes them, before the end.

Where standard output is no terminal, in CI, or with NO_COLOR or TERM=dumb there are no live lines.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import TextIO

PLAIN_VARIABLES = ("CI", "NO_COLOR")
"""Environment variables that, when set, ask programs for plain output."""
ERASE_BELOW = "\r\x1b[J"


def is_live(out: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """True if `out` is a terminal on which lines can be drawn again."""
    wants_plain = any(environment.get(name) for name in PLAIN_VARIABLES)
    return out.isatty() and not wants_plain and environment.get("TERM", "dumb") != "dumb"


class StatusScreen:
    """Lines on `out`; live ones only if `is_live`."""

    def __init__(self, out: TextIO, *, is_live: bool) -> None:
        self.is_live = is_live
        self._out = out
        self._shown: list[str] = []

    def print_text(self, text: str) -> None:
        """Print a text that stays."""
        self._out.write(f"{self._erase_sequence()}{text}\n")
        again = self._shown
        self._shown = []
        self.show_lines(again)
        self._out.flush()

    def show_lines(self, lines: Sequence[str]) -> None:
        """Replace the live lines; each is cut at the width of the terminal."""
        if not self.is_live:
            return
        columns = shutil.get_terminal_size().columns
        cut = [line[: columns - 1] for line in lines]
        if cut == self._shown:
            return
        self._out.write(self._erase_sequence() + "\n".join(cut))
        self._out.flush()
        self._shown = cut

    def clear(self) -> None:
        self.show_lines([])

    def _erase_sequence(self) -> str:
        """Sequence that erases the live lines; the cursor is at the end of the last one."""
        if not self._shown:
            return ""
        columns = shutil.get_terminal_size().columns
        # A terminal that was made narrower since has broken them into several rows.
        rows = sum(max(1, -(-len(line) // columns)) for line in self._shown)
        above = rows - 1
        return (f"\x1b[{above}A" if above else "") + ERASE_BELOW


def make_greeting(
    url: str,
    model: str,
    *,
    api_key: str | None = None,
    key_in_environment: bool = False,
    control_key: str | None = None,
) -> str:
    """Lines to paste for a first answer. A key that comes from BATON_API_KEY stays there.

    `control_key`: the page takes it from its address; browsers send that part to no server.
    """
    page = f"{url}/ui/" if control_key is None else f"{url}/ui/#control-key={control_key}"
    header = ""
    setup = ""
    key = '"none"'
    if api_key is not None and key_in_environment:
        header = ' -H "authorization: Bearer $BATON_API_KEY"'
        setup = "import os\n"
        key = 'os.environ["BATON_API_KEY"]'
    elif api_key is not None:
        header = " -H " + shlex.quote(f"authorization: Bearer {api_key}")
        key = repr(api_key)
    return f"""
Baton is up at {url}    Ctrl-C stops it.
In a browser: {page}
In a terminal: baton chat {url}

curl -s {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
  -d '{{"model":"{model}","temperature":0,"messages":[{{"role":"user","content":"What is Baton?"}}]}}'

{setup}from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(
    model="{model}", temperature=0, messages=[{{"role": "user", "content": "What is Baton?"}}])
print(answer.choices[0].message.content)
"""
