"""Fields and headers that engines read from routers are in the table by which the router removes a client's own."""

from __future__ import annotations

import re

from baton.server.request.schema import RequestFields
from baton.server.text.native import native_extension
from tests.structure.sources import text

TABLE = "engine/text/src/dialect/body/router_fields.rs"
OF_ROUTERS = re.compile(r"bootstrap_\w+|\w*(dp|parallel)_rank\w*|baton_\w+|\w+_transfer_params")


def test_fields_of_routers_that_engines_read_are_in_the_routers_table() -> None:
    fields = {name for name in RequestFields.__struct_fields__ if OF_ROUTERS.fullmatch(name)}
    assert len(fields) == 8
    constants = text("engine/text/src/dialect/resume.rs")
    listed = set(re.findall(r'"(\w+)"', text(TABLE) + constants))
    assert fields <= listed


def test_headers_of_routers_that_engines_read_have_the_routers_prefix() -> None:
    (prefix,) = re.findall(r'ROUTER_HEADER_PREFIX: &str = "(\S+)"', text(TABLE))
    headers = native_extension().headers
    for name in ("AUTH", "CLIENT", "EMIT_TOKENS", "LOAD", "READY_PEERS", "STAGES"):
        assert getattr(headers, name).startswith(prefix), name
