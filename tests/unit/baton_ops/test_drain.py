"""`baton drain`: whose answer a report is."""

from __future__ import annotations

import dataclasses

import pytest

from baton_ops.clients.http_client import HttpClient
from baton_ops.drain import DrainReport, UrlPlace, _ask_place
from tests.support.processes.http_server import QuietHandler, serve_requests, url_of

FIRST = DrainReport("http://d", "draining", incarnation="a")


class Place(UrlPlace):
    """Place that reports one thing."""

    def __init__(self, report: DrainReport) -> None:
        super().__init__("http://d", "http://d", None, HttpClient().opener)
        self.report = report

    def ask(self, verb: str) -> DrainReport:
        return self.report


def test_report_of_another_process_at_the_address_is_no_report() -> None:
    """It may be ready, or drain work of its own: neither tells about the process that was asked."""
    for state in ("ready", "draining"):
        place = Place(DrainReport("http://d", state, incarnation="b"))
        lost = _ask_place("status", place, FIRST)
        assert (lost.state, lost.is_drained) == ("gone", False)
        assert "another one answers at http://d" in str(lost.error)
        final = _ask_place("status", place, dataclasses.replace(FIRST, is_final=True))
        assert (final.state, final.is_drained, final.error) == ("gone", True, None)
    same = _ask_place("status", Place(FIRST), FIRST)
    assert same == FIRST
    unknown = dataclasses.replace(FIRST, incarnation=None)
    assert _ask_place("status", Place(unknown), FIRST) == unknown, "as through an older router"


@pytest.mark.parametrize("body", [b"{}", b'{"status": 200, "left": {}}', b'{"status": "ok"}'])
def test_answer_of_another_program_is_refused(body: bytes) -> None:
    class AnyServer(QuietHandler):
        def do_GET(self) -> None:
            self.answer(body)

    with serve_requests(AnyServer) as server:
        url = url_of(server)
        report = _ask_place("status", UrlPlace(url, url, None, HttpClient().opener), None)
    assert "is it an engine or a router of Baton?" in str(report.error)
