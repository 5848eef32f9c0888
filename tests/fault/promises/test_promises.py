"""Each promise in its short form; in `make test-all` in its long form, too. The scripts print and judge."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.fault.promises import (
    abort_storm,
    aborted_requests,
    bad_group,
    damaged_pair,
    feature_pairs,
    kill_matrix,
    late_grants,
    pull_break_even,
    slow_decode,
)
from tests.fault.promises.show import Show

SCRIPTS = (
    slow_decode,
    abort_storm,
    kill_matrix,
    aborted_requests,
    damaged_pair,
    bad_group,
    late_grants,
    pull_break_even,
    feature_pairs,
)


def _name(script: ModuleType) -> str:
    return script.__name__.rpartition(".")[2]


@pytest.mark.parametrize("script", SCRIPTS, ids=_name)
def test_promise_is_kept_in_its_short_form(script: ModuleType) -> None:
    script.short(Show())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", SCRIPTS, ids=_name)
def test_promise_is_kept(script: ModuleType) -> None:
    script.long(Show())
