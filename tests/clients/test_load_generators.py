"""Load generators and lm-eval in front of the cluster: no request fails while a decode node is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.coding_agents.scripted_model import DEMO
from tests.clients.decode_kills import DecodeKills
from tests.clients.environments import clean_environment, require_environment
from tests.support.processes.cluster import POLL_SECS, Cluster, eventually

REQUESTS = 24
STREAMS = 4
PROMPT_TOKENS = 64
ANSWER_TOKENS = 200
RUN_SECS = 400.0
RIGHT_ANSWERS = 18
HUB_NAME = "baton/demo"
REVISION = "0" * 40


def hub_cache(folder: Path) -> Path:
    """A Hugging Face cache that holds the demo model: aiperf takes tokenizers from there alone."""
    repository = folder / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    shutil.copytree(DEMO, repository / "snapshots" / REVISION)
    return folder


def guidellm(url: str, folder: Path) -> list[str]:
    tokens = f"prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"
    return [
        *("guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model=demo"),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO}"),
        *("--data", f"kind=synthetic_text,{tokens}"),
        *("--output", f"kind=json,path={folder / 'report.json'}"),
    ]


def guidellm_counts(folder: Path) -> tuple[int, int]:
    (run,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    return totals["successful"], totals["errored"] + totals["incomplete"]


def aiperf(url: str, folder: Path) -> list[str]:
    return [
        *("aiperf", "profile", "--ui", "none", "--model", "demo", "--url", url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", HUB_NAME),
        *("--concurrency", str(STREAMS), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
        *("--output-tokens-mean", str(ANSWER_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(folder / "artifacts")),
    ]


def aiperf_counts(folder: Path) -> tuple[int, int]:
    report = json.loads((folder / "artifacts" / "profile_export_aiperf.json").read_text())
    return int(report["request_count"]["avg"]), len(report["error_summary"])


def sglang(url: str, folder: Path) -> list[str]:
    return [
        *("python", "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", url, "--model", "demo", "--served-model-name", "demo"),
        *("--tokenizer", str(DEMO), "--dataset-name", "random-ids", "--disable-tqdm"),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(ANSWER_TOKENS)),
        *("--random-range-ratio", "1", "--num-prompts", str(REQUESTS)),
        *("--max-concurrency", str(STREAMS), "--output-file", str(folder / "report.jsonl")),
    ]


def sglang_counts(folder: Path) -> tuple[int, int]:
    report = json.loads((folder / "report.jsonl").read_text())
    completed = int(report["completed"])
    return completed, REQUESTS - completed


def vllm(url: str, folder: Path) -> list[str]:
    return [
        *("vllm", "bench", "serve", "--backend", "openai-chat", "--base-url", url),
        *("--endpoint", "/v1/chat/completions", "--model", "demo", "--tokenizer", str(DEMO)),
        *("--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)),
        *("--random-output-len", str(ANSWER_TOKENS), "--ignore-eos", "--disable-tqdm"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS)),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "report.json"),
    ]


def vllm_counts(folder: Path) -> tuple[int, int]:
    report = json.loads((folder / "report.json").read_text())
    return int(report["completed"]), int(report["failed"])


def lm_eval(url: str, folder: Path) -> list[str]:
    """A task whose expected answers are the demo model's own, but for some that it never gives."""
    documents = folder / "documents.jsonl"
    task = {
        "task": "baton_answers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 120, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / "baton_answers.yaml").write_text(json.dumps(task))
    arguments = f"model=demo,base_url={url}/v1/chat/completions,num_concurrent={STREAMS}"
    return [
        *("lm_eval", "--model", "local-chat-completions", "--apply_chat_template"),
        *("--model_args", f"{arguments},max_retries=1"),
        *("--include_path", str(folder), "--tasks", "baton_answers"),
        *("--output_path", str(folder / "results")),
    ]


def lm_eval_counts(folder: Path) -> tuple[int, int]:
    (report,) = (folder / "results").rglob("results_*.json")
    found = json.loads(report.read_text())
    score = found["results"]["baton_answers"]["exact_match,none"]
    assert score == pytest.approx(RIGHT_ANSWERS / REQUESTS)
    answered = found["n-samples"]["baton_answers"]["effective"]
    return answered, REQUESTS - answered


@dataclass(frozen=True)
class Generator:
    environment: str
    command: Callable[[str, Path], list[str]]
    counts: Callable[[Path], tuple[int, int]]
    """Requests that were answered, and that failed, from the report in a folder."""


GENERATORS = {
    "guidellm": Generator("guidellm", guidellm, guidellm_counts),
    "aiperf": Generator("aiperf", aiperf, aiperf_counts),
    "sglang.bench_serving": Generator("sglang", sglang, sglang_counts),
    "vllm bench serve": Generator("vllm", vllm, vllm_counts),
    "lm-eval": Generator("lm-eval", lm_eval, lm_eval_counts),
}


def write_documents(cluster: Cluster, path: Path) -> None:
    """Questions with the cluster's own answers, the last ones with wrong answers."""
    question = "How do KV pages get from P to D?"
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 120,
    }
    status, answer = cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    right = answer["choices"][0]["message"]["content"]
    answers = [right] * RIGHT_ANSWERS + ["Never."] * (REQUESTS - RIGHT_ANSWERS)
    lines = [json.dumps({"question": question, "answer": text}) for text in answers]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", GENERATORS)
def test_no_request_fails_when_a_decode_node_is_killed(
    name: str, cluster: Cluster, tmp_path: Path
) -> None:
    generator = GENERATORS[name]
    binaries = require_environment(generator.environment) / "bin"
    write_documents(cluster, tmp_path / "documents.jsonl")
    cache = hub_cache(tmp_path / "cache")
    kills = DecodeKills(cluster)
    kills.await_nodes()
    program, *arguments = generator.command(cluster.url, tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(binaries / program), *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=clean_environment(HF_HOME=str(cache), OPENAI_API_KEY="none"),
        )
    try:
        deadline = time.monotonic() + RUN_SECS
        while process.poll() is None and time.monotonic() < deadline:
            if kills.killed is None:
                kills.kill()
            time.sleep(POLL_SECS)
    finally:
        process.kill()
    code = process.wait()
    assert code == 0, log.read_text(errors="replace")[-4000:]
    assert generator.counts(tmp_path) == (REQUESTS, 0)
    assert kills.killed is not None, "no request was seen under way"
    kills.await_nodes()
    eventually("idle", lambda: not any(cluster.loads().values()))
    cluster.assert_nothing_is_held()
