"""POST /v1/requests/{rid}/suspend and /resume at the front: which items they reach, what the client sees, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.contract.test_server_http import script, wait_until
from tests.support.processes.front import FakeEngine, fake_engine, model


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with fake_engine("--model-path", model(), "--dp-size", "2", keepalive_secs=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=engine.url, timeout=20) as client:
        yield client


def suspended(engine: FakeEngine) -> int:
    return sum(engine.ledger(rank)["suspended"] for rank in (0, 1))


class Stream:
    """A streaming completion in a thread; `text` is what came so far."""

    def __init__(self, url: str, **body: Any) -> None:
        self.text = ""
        self._url, self._body = url, {"stream": True, "ignore_eos": True, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream(
            "POST", self._url + "/v1/completions", json=self._body, timeout=20
        ) as response:
            for part in response.iter_text():
                self.text += part

    @property
    def answers(self) -> dict[int, str]:
        """Text received so far, by choice."""
        found: dict[int, str] = {}
        for event in self.text.split("\n\n"):
            if event.startswith("data: {"):
                choice = json.loads(event.removeprefix("data: "))["choices"][0]
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return found

    def join(self) -> dict[int, str]:
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert self.text.endswith("data: [DONE]\n\n")
        return self.answers


@pytest.mark.parametrize("choices", [1, 4])
def test_suspended_stream_pauses_with_comments_and_goes_on(
    engine: FakeEngine, http: httpx.Client, choices: int
) -> None:
    """A request of several choices has items on both ranks; all of them pause."""
    body = {"prompt": "the prompt", "max_tokens": 12, "n": choices, "rid": f"job/{choices}"}
    rid = str(body["rid"])
    stream = Stream(engine.url, cache_salt=script(step=0.02), **body)
    wait_until(lambda: stream.answers)
    done = http.post(f"/v1/requests/{rid}/suspend")
    assert (done.status_code, done.json()) == (
        200,
        {"rid": rid, "state": "suspended", "items": choices},
    )
    assert http.post(f"/v1/requests/{rid}/suspend").json() == done.json(), "again: no change"
    answer_id = f"cmpl-{rid}"
    again = http.post(f"/v1/requests/{answer_id}/suspend").json()
    assert again == {**done.json(), "rid": answer_id}, "the same request by the id of its answer"
    assert suspended(engine) == choices
    wait_until(lambda: stream.text.endswith(": waiting\n\n: waiting\n\n"))
    assert "[DONE]" not in stream.text
    assert http.post(f"/v1/requests/{rid}/resume").json() == {
        "rid": rid,
        "state": "resumed",
        "items": choices,
    }
    assert http.post(f"/v1/requests/{rid}/resume").status_code in (200, 404), (
        "again: no change, or just over"
    )
    paused = stream.join()
    plain = Stream(engine.url, **body).join()
    assert paused == plain
    assert suspended(engine) == 0


def test_unknown_and_finished_requests_are_not_found(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "rid": "over"})
    for rid in ("never", "over"):
        for op in ("suspend", "resume"):
            error = http.post(f"/v1/requests/{rid}/{op}").json()["error"]
            assert (error["code"], error["param"]) == ("not_found", "rid")
    assert http.get("/v1/requests/never/suspend").status_code == 405


def test_request_in_transfer_is_refused_and_the_key_is_asked_for() -> None:
    with fake_engine(
        "--model-path", model(), "--api-key", "k", script={"unsuspendable": "it is in transfer"}
    ) as one:
        key = {"authorization": "Bearer k"}
        body = {
            "prompt": "a",
            "max_tokens": 400,
            "ignore_eos": True,
            "rid": "r",
            "cache_salt": script(step=0.02),
        }
        with httpx.stream(
            "POST", one.url + "/v1/completions", json={**body, "stream": True}, headers=key
        ) as stream:
            parts = stream.iter_bytes()  # kept: when it is collected, the connection closes
            next(parts)
            url = one.url + "/v1/requests/r/suspend"
            assert httpx.post(url).status_code == 401
            refused = httpx.post(url, headers=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong_state")
        assert refused.json()["error"]["message"] == "it is in transfer"
