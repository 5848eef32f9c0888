"""Flags to a checked config: defaults, environment, and every mistake reported at once."""

from __future__ import annotations

import dataclasses

import pytest

from baton import config
from baton.errors import ConfigError


def test_no_flags_give_the_defaults_of_the_fields() -> None:
    assert config.parse([]) == config.EngineConfig()


def test_every_field_is_a_flag_with_help() -> None:
    for f in dataclasses.fields(config.EngineConfig):
        assert f.metadata["help"], f.name
        assert f"`{config.flag_name(f.name)}`" in config.markdown()


def test_flags_are_typed() -> None:
    c = config.parse(["--port", "0", "--kv-lease-secs", "2", "--disable-radix-cache", "--dp-size", "4"])
    assert (c.port, c.kv_lease_secs, c.disable_radix_cache, c.dp_size) == (0, 2.0, True, 4)


def test_environment_is_read_when_the_flag_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "from-environment")
    assert config.parse([]).api_key == "from-environment"
    assert config.parse(["--api-key", "from-flag"]).api_key == "from-flag"


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        config.build({"page_size": 256, "dp_size": 0, "port": 70000})
    assert caught.value.message.count("\n") == 2
    assert "--page-size 256: use a power of two" in caught.value.message
    assert "--dp-size 0: give 1 to 64 ranks" in caught.value.message
    assert "--port 70000: ports are 0 to 65535" in caught.value.message


@pytest.mark.parametrize("argv", [["--no-such-flag"], ["--port", "x"], ["--dtype", "int4"], ["--page-size", "3"]])
def test_mistakes_end_the_program_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config.parse(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_abbreviations_are_no_flags() -> None:
    with pytest.raises(SystemExit):
        config.parse(["--disagg", "prefill"])
