"""`--simulate`: a cluster without a model speaks and accounts like one with a model; a trace goes through it.

Starting its five processes takes most of the time here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.cluster import Cluster, get

DEVICE = "reference,speed=100,length_scale=8"


@pytest.fixture(scope="module")
def simulated() -> Iterator[Cluster]:
    with Cluster.up("--prefill", "2", "--simulate", DEVICE) as cluster:
        yield cluster


def test_openai_surface_answers(simulated: Cluster) -> None:
    prompt = "the same words again " * 20  # 105 tokens of four bytes: six pages of 16 and a bit
    with simulated.client() as client:
        for cached in (0, 96):
            answer = client.completions.create(model="demo", prompt=prompt, max_tokens=9)
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (105, 9)
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
            assert answer.choices[0].finish_reason == "length"
            assert len(answer.choices[0].text) == 36
        chunks = list(
            client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=5,
                stream=True,
                logprobs=True,
            )
        )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[-1].finish_reason == "length"
    assert sum(len(c.logprobs.content or ()) for c in choices if c.logprobs) == 5


def test_logprobs_of_prompts_are_refused(simulated: Cluster) -> None:
    body = {"model": "demo", "prompt": "hi", "echo": True, "logprobs": 1, "max_tokens": 1}
    status, answer = simulated.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


def test_it_reports_like_an_engine(simulated: Cluster) -> None:
    url = simulated.node("prefill")["url"]
    info = json.loads(get(f"{url}/get_server_info") or "")
    assert (info["engine"], info["max_total_num_tokens"], info["disaggregation_mode"]) == (
        "baton",
        124_992,
        "prefill",
    )
    loads = json.loads(get(f"{url}/v1/loads") or "")["loads"]
    assert loads[0]["load"]["pages"] == 125_000 // 16


def test_trace_of_twenty_requests(simulated: Cluster, tmp_path: Path) -> None:
    lines = []
    for i in range(20):
        length = 1100 + 100 * i
        own = range(10 * i + 10, 10 * i + 8 + -(-length // 512))
        lines.append(
            {
                "timestamp": 40 * i,
                "input_length": length,
                "output_length": 40,
                "hash_ids": [1, 2, *own],
            }
        )
    trace, results = tmp_path / "trace.jsonl", tmp_path / "results.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        sys.executable,
        "-m",
        "baton_ops.cli",
        "bench",
        "--trace",
        str(trace),
        "--url",
        simulated.url,
    ]
    command += ["--length-scale", "8", "--hold-turns", "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 requests in" in done.stdout
    result = json.loads(results.read_text())["results"][0]
    assert result["answered"] == 20
    assert result["hit_rate"] > 0.2  # two blocks of two to six are everybody's
    prefill = [simulated.node("prefill", i)["url"] for i in (0, 1)]
    assert sum(result["requests_per_worker"][url] for url in prefill) == 20
    assert result["times"]["TTFT ms"]["mean"] > 0
    simulated.assert_nothing_is_held()
