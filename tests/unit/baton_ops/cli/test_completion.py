"""`baton completion`: each shell completes the commands and flags that the parsers have."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from baton_ops.cli import completion, main
from baton_ops.cli.completion import SCRIPTS, CommandWords, read_commands

commands = cache(read_commands)


def command(name: str) -> CommandWords:
    return next(found for found in commands() if found.name == name)


def test_every_command_has_the_flags_of_its_parser() -> None:
    assert [found.name for found in commands()] == list(main.COMMANDS)
    for name, module in main.PARSERS.items():
        parser = import_module(module).make_parser()
        assert {flag.name for flag in command(name).flags} == set(parser._option_string_actions)
    router = {flag.name: flag for flag in command("router").flags}
    assert {"--policy", "--prefill", "--help-all"} <= set(router)
    assert router["--log-format"].values == ("text", "json")
    assert "--json" in {flag.name for flag in command("replay").flags}
    transport = next(flag for flag in command("up").flags if flag.name == "--transport")
    assert "tcp" in transport.values


def bash_completes(script: Path, *words: str) -> list[str]:
    """Words that bash offers for the last one."""
    line = " ".join(f"'{word}'" for word in words)
    program = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _baton;"
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_flags_and_values(tmp_path: Path) -> None:
    script = tmp_path / "baton.bash"
    script.write_text(SCRIPTS["bash"](commands()))
    assert bash_completes(script, "baton", "do") == ["doctor"]
    assert bash_completes(script, "baton", "up", "--transport", "t") == ["tcp"]
    assert bash_completes(script, "baton", "up", "--disable-radix-c") == ["--disable-radix-cache"]
    assert bash_completes(script, "baton", "router", "--prefill-p") == ["--prefill-policy"]
    assert bash_completes(script, "baton", "completion", "z") == ["zsh"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / f"baton.{shell}"
    script.write_text(SCRIPTS[shell](commands()))
    subprocess.run([shell, "-n", str(script)], check=True, capture_output=True)
    if shell == "fish":
        asked = f"source {script}; complete --do-complete 'baton up --transport t'"
        done = subprocess.run([shell, "-c", asked], capture_output=True, text=True, check=True)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["tcp"]


def test_unknown_shell_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ([], "no shell is given"), (["csh"], "csh: unknown shell"):
        with pytest.raises(SystemExit) as ended:
            completion.main(words)
        assert ended.value.code == 2
        assert f"{said}; give one of bash, zsh, fish" in capsys.readouterr().err
