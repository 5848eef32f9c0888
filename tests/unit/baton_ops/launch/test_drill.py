"""Flags of `baton up --drill`: shorter leases, longer waits, and shapes that it cannot show anything on."""

from __future__ import annotations

import pytest

from baton_ops.launch.cluster_plan import parse_flags


def test_drill_shortens_leases_and_lengthens_waits_unless_they_are_given() -> None:
    plan = parse_flags(["--drill"])
    assert plan.engine["kv_lease_secs"] == 1
    assert plan.args["router"] == ["--worker-wait-timeout-secs", "120"]
    given = parse_flags(
        ["--drill", "--kv-lease-secs", "3", "--router-args=--worker-wait-timeout-secs=9"]
    )
    assert given.engine["kv_lease_secs"] == 3
    assert given.args["router"] == ["--worker-wait-timeout-secs=9"]
    assert "kv_lease_secs" not in parse_flags([]).engine


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--drill", "--workers", "1"], "--drill with --workers 1: it stops and kills a decode"),
        (["--drill", "--smoke"], "--drill with --smoke: each ends the cluster"),
    ],
)
def test_drill_refuses_what_it_cannot_show(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(flags)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
