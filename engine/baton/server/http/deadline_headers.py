"""Deadlines that proxies state as headers of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from baton.errors import BadRequest
from baton.server.request.accepted import AcceptedRequest
from baton.server.request.schema import MAX_DEADLINE_MS

DEADLINE_HEADER = "x-deadline-remaining-ms"
TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
DEADLINE_HEADERS = (DEADLINE_HEADER, *TTFT_HEADERS)


def with_deadline_headers(accepted: AcceptedRequest, headers: Mapping[str, str]) -> AcceptedRequest:
    """Deadlines that proxies state as headers: remaining time of the whole request, wanted time to
    first token [ms].

    The smaller of field and header counts. Raises BadRequest for a header that is not a number of
    milliseconds.
    """
    if not any(name in headers for name in DEADLINE_HEADERS):
        return accepted
    ttft = [accepted.ttft_deadline_secs, *(_header_secs(headers, name) for name in TTFT_HEADERS)]
    total = [accepted.deadline_secs, _header_secs(headers, DEADLINE_HEADER)]
    return msgspec.structs.replace(
        accepted, ttft_deadline_secs=_least_of(ttft), deadline_secs=_least_of(total)
    )


def _header_secs(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_DEADLINE_MS:
        raise BadRequest(
            f"header {name} is {text[:32]!r}, must be 1 to {MAX_DEADLINE_MS} milliseconds",
            param=name,
        )
    return int(text) / 1000


def _least_of(values: Iterable[float | None]) -> float | None:
    return min((v for v in values if v is not None), default=None)
