"""How many connections fit the limit of open files, and what counts as one source of connections."""

from __future__ import annotations

import resource

import pytest

from baton.server.launch import listener


@pytest.mark.parametrize(
    ("hard", "wanted", "fitting"),
    [
        (1_048_576, 65_536, 65_536),
        (resource.RLIM_INFINITY, 65_536, 65_536),
        (20_000, 65_536, 20_000 - listener.RESERVED_DESCRIPTORS),
        (20_000, 100, 100),
        (1_024, 65_536, 512),
    ],
)
def test_connections_leave_descriptors_for_the_process(
    monkeypatch: pytest.MonkeyPatch, hard: int, wanted: int, fitting: int
) -> None:
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert listener.fit_descriptors(wanted) == fitting
    assert raised == [(hard, hard)]


@pytest.mark.parametrize(("wanted", "warnings"), [(65_536, 0), (30_000, 1)])
def test_lower_limit_is_a_warning_to_who_asked_for_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: int, warnings: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 20_000))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    listener.fit_descriptors(wanted)
    assert len([line for line in caplog.records if line.levelname == "WARNING"]) == warnings


def test_limit_that_cannot_be_raised_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, limits: tuple[int, int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (4_096, 1_048_576))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert listener.fit_descriptors(65_536) == 4_096 - listener.RESERVED_DESCRIPTORS


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (("10.0.0.1", 1), ("10.0.0.1", 2), True),
        (("10.0.0.1", 1), ("10.0.0.2", 1), False),
        (("10.0.0.1", 1), ("::ffff:10.0.0.1", 1, 0, 0), True),
        (("fd00::1", 1, 0, 0), ("fd00::ffff:2", 1, 0, 0), True),
        (("fd00::1", 1, 0, 0), ("fd00:0:0:1::1", 1, 0, 0), False),
        (("fe80::1%eth0", 1, 0, 2), ("fe80::2", 1, 0, 2), True),
    ],
)
def test_source_is_an_ipv4_address_or_an_ipv6_network(
    one: tuple[str, int], other: tuple[str, int], is_same: bool
) -> None:
    assert (listener._source_of(one) == listener._source_of(other)) is is_same
