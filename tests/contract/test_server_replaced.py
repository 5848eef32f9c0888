"""An engine that is killed, and another with another model under its address before the router looks again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.support.processes.front import fake_engine, model
from tests.support.processes.router import Router

TEXT = "hello world, the relay race"


def ask(router: str, name: str) -> httpx.Response:
    body: dict[str, Any] = {"model": name, "prompt": TEXT, "max_tokens": 2}
    return httpx.post(router + "/v1/completions", json=body, timeout=60)


def ids(path: str) -> list[int]:
    """Tokens of TEXT, by the tokenizers library."""
    return list(Tokenizer.from_file(str(Path(path) / "tokenizer.json")).encode(TEXT).ids)


def test_tokens_and_names_are_those_of_the_engine_that_answers() -> None:
    first, second = model(vocab_size=384), model(vocab_size=300)
    assert ids(first) != ids(second)
    with fake_engine("--model-path", first, "--served-model-name", "shared") as engine:
        port = httpx.URL(engine.url).port
        flags = ["--worker-urls", engine.url, "--policy", "round_robin"]
        flags += ["--model-path", first, "--forward-input-ids"]
        # No probe but those that an answer asks for.
        flags += ["--health-check-interval-secs", "3600"]
        with Router.up(*flags) as router:
            assert ask(router, "shared").status_code == 200
            assert engine.last_submit()["prompt"] == ids(first)
            forwarded = httpx.get(router + "/metrics").text
            assert 'baton_router_input_ids_forwarded_total{role="regular"} 1' in forwarded
            engine.stop(signal.SIGKILL)
            names = ["--model-path", second, "--served-model-name", "shared", "--port", str(port)]
            with fake_engine(*names) as successor:
                assert successor.url == engine.url
                answer = ask(router, "shared")
                assert answer.status_code == 200, answer.text
                assert successor.last_submit()["prompt"] == ids(second)
                health = httpx.get(successor.url + "/health").json()
                (worker,) = httpx.get(router + "/workers").json()["workers"]
                assert worker["incarnation"] == health["incarnation"]
                assert ask(router, "another").status_code == 404
