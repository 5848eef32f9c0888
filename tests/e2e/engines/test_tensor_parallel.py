"""`baton engine --tp-size 2` as processes: it answers, rests, ends in order, and ends when one of them dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.engines.test_equal import prompts
from tests.support.models import tiny_model
from tests.support.models.checkpoints import (
    VOCAB,
    make_checkpoint,
    reference_greedy,
    reference_model,
)
from tests.support.processes.cluster import Cluster, metric
from tests.support.processes.front import REPO

DIED = 30.0
"""Longest wait for what a death must bring about [s]; it takes a tenth of a second."""


@dataclass
class Engine:
    process: subprocess.Popen[str]
    url: str
    pids: list[int]
    log: Path

    def complete(self, **fields: Any) -> httpx.Response:
        return httpx.post(
            self.url + "/v1/completions", json={"prompt": "the relay race", **fields}, timeout=60
        )


@contextlib.contextmanager
def started(tmp_path: Path, *flags: str) -> Iterator[Engine]:
    model = tiny_model.make(tmp_path / "model")
    log = tmp_path / "log"
    env = {**os.environ, "PYTHONPATH": str(REPO / "engine")}
    command = [
        sys.executable, "-m", "baton_ops.cli", "engine", "--model-path", str(model), "--load-format", "dummy", "--port",
        "0", "--tp-size", "2", *flags,
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=out, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("READY "), log.read_text()
        url = json.loads(line.removeprefix("READY "))["url"]
        pids = httpx.get(url + "/get_server_info").json()["pids"]
        yield Engine(process, url, pids, log)
        assert not any(psutil.pid_exists(pid) for pid in pids), "a process outlived its engine"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wakeups(pid: int) -> dict[str, int]:
    """Times that each thread of a process went to sleep since it started: one that rests, does not."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        found[f"{fields['Name'].strip()} {task.name}"] = int(fields["voluntary_ctxt_switches"])
    return found


def woken_in_a_second(pid: int) -> set[str]:
    """Threads that ran; gloo looks at its sockets a hundred times a second, whatever one does."""
    before = wakeups(pid)
    time.sleep(1.0)  # nothing may happen in it
    woken = {name for name, n in wakeups(pid).items() if n != before.get(name, 0)}
    return {name for name in woken if not name.startswith("gloo_tcp_loop")}


def collectives(engine: Engine) -> float:
    return metric(engine.url, "baton_tp_collectives_total")


def test_it_answers_rests_and_ends_in_order(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        assert len(engine.pids) == 2
        info = httpx.get(engine.url + "/get_server_info").json()
        layout = info["layout"]
        assert (info["tp_size"], layout["tp_size"]) == (2, 2)
        assert layout["groups"][0]["heads"] == [[0, 1]], "the first rank's share of two heads"
        answer = engine.complete(max_tokens=9, ignore_eos=True, temperature=0).json()
        assert answer["usage"]["completion_tokens"] == 9
        # Embedding, two per layer, logits: at least one prompt step and 8 decode steps.
        assert collectives_at_rest(engine) >= 9 * 6
        until(lambda: not any(woken_in_a_second(pid) for pid in engine.pids))
        os.kill(engine.pids[1], signal.SIGTERM)  # as a service manager does to every process
        assert engine.complete(max_tokens=1).status_code == 200, (
            "an executor rank ends with its group, not before"
        )
        engine.process.send_signal(signal.SIGINT)
        assert engine.process.wait(timeout=DIED) == 0
        assert "Traceback" not in engine.log.read_text()


def collectives_at_rest(engine: Engine) -> float:
    """Reports come once a second, and when a rank turns idle."""
    deadline = time.monotonic() + DIED
    last = -1.0
    while (now := collectives(engine)) != last or not now:
        assert time.monotonic() < deadline, "the counter never rested"
        last = now
        time.sleep(1.1)
    return now


def test_killed_executor_rank_ends_the_group_and_its_requests(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        results: list[httpx.Response] = []
        threads = [
            threading.Thread(
                target=lambda: results.append(engine.complete(max_tokens=450, ignore_eos=True))
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: metric(engine.url, "baton_requests", state="running") == 2)
        os.kill(engine.pids[1], signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=DIED)
        assert [(r.status_code, r.json()["error"]["code"]) for r in results] == [
            (503, "engine_dead")
        ] * 2
        assert engine.process.wait(timeout=DIED) == 1, "so that a supervisor starts it again"


@pytest.mark.slow
@pytest.mark.timeout(300)  # six processes import torch, perhaps on a machine with two cores
def test_divided_nodes_exchange_pages_and_equal_one_process(solo: Cluster) -> None:
    """Each process of D reads the heads it needs from the one of P that has them; then one of P's dies."""
    expected = [solo.generate_ids(prompt, 24) for prompt in prompts()]
    with Cluster.up("--tp-size", "2") as cluster:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(2):  # the second time with what both have cached
                assert (
                    list(pool.map(lambda prompt: cluster.generate_ids(prompt, 24), prompts()))
                    == expected
                )
        cluster.assert_nothing_is_held()
        assert (
            metric(cluster.node("decode")["url"], "baton_kv_pull_bytes_total", transport="shm") > 0
        )
        pids = httpx.get(cluster.node("prefill")["url"] + "/get_server_info").json()["pids"]
        os.kill(pids[1], signal.SIGKILL)
        cluster.await_restart("prefill")
        assert [cluster.generate_ids(prompt, 24) for prompt in prompts()] == expected
        cluster.assert_nothing_is_held()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_divided_nodes_exchange_states_and_equal_transformers(tmp_path: Path) -> None:
    """Each process of D reads the share of the state that belongs to its heads."""
    path = make_checkpoint("qwen3-next", tmp_path / "model")
    ref = reference_model(path)
    asked = [[token % VOCAB for token in prompt] for prompt in prompts() if len(prompt) < 300]
    expected = [reference_greedy(ref, prompt, 24) for prompt in asked]
    texts = tiny_model.make(tmp_path / "texts", vocab_size=VOCAB)
    flags = ["--tokenizer-path", str(texts), "--tp-size", "2", "--dtype", "float32"]
    with Cluster.up("--model-path", str(path), *flags) as cluster:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(2):
                answers = pool.map(lambda prompt: cluster.generate_ids(prompt, 24), asked)
                assert list(answers) == expected
        cluster.assert_nothing_is_held()
        info = httpx.get(cluster.node("decode")["url"] + "/get_server_info").json()
        tokens, *_, states = info["page_groups"]
        assert info["state_tokens"] * tokens["block_bytes"] == (
            info["page_size"] * states["block_bytes"]
        )


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DIED
    while not fact():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)  # polls another process


def test_model_that_cannot_be_divided_ends_the_start(tmp_path: Path) -> None:
    model = tiny_model.make(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 129}))
    command = [
        sys.executable,
        "-m",
        "baton_ops.cli",
        "engine",
        "--model-path",
        str(model),
        "--load-format",
        "dummy",
    ]
    done = subprocess.run(
        [*command, "--port", "0", "--tp-size", "2"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPO / "engine")},
    )  # fmt: skip
    assert done.returncode == 2
    text = (
        "--tp-size 2: the model's intermediate_size = 129 is no multiple of it; this model takes 1"
    )
    assert f"baton engine: {text}" in done.stderr
