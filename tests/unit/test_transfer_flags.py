"""--disaggregation-transfer-backend: each value it takes has its transports."""

from __future__ import annotations

import dataclasses

from baton.config import EngineConfig
from baton.server.transfer import TRANSPORTS


def test_every_value_of_the_flag_names_transports() -> None:
    fields = {f.name: f for f in dataclasses.fields(EngineConfig)}
    assert set(TRANSPORTS) == set(fields["disaggregation_transfer_backend"].metadata["choices"])
