"""The GPU's measuring script, on the CPU: it runs, and its workload is the published one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.perf import bench_gpu
from tests.support.processes import cluster


def test_workload_is_that_of_nano_vllms_readme() -> None:
    prompts, lengths = bench_gpu.nano_vllm(256, (100, 1024))
    assert sum(lengths) == 133_966, "the number of answer tokens that README states"
    assert all(100 <= len(prompt) <= 1024 for prompt in prompts)
    assert all(0 <= token <= 10000 for token in prompts[7])


def test_all_that_needs_one_process_runs_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    flags = "--device cpu --shapes tiny --quick --sections copy,decode,prefill,workload --engine cpu-threads=1"
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *flags.split(), "--jsonl", str(rows)])
    assert bench_gpu.main() == 0, capsys.readouterr().out
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["section"] for row in found] == [
        "copy",
        "decode",
        "decode",
        "prefill",
        "prefill",
        "workload",
    ]
    decode = [row for row in found if row["section"] == "decode"]
    assert [row["batch"] for row in decode] == [1, 4]
    assert all(
        row["n"] == 10 and row["of roofline"] > 0 and 0 <= row["idle share"] < 1 for row in decode
    )
    assert decode[1]["least MB"] > decode[0]["least MB"], "more rows have more KV"


def test_section_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(bench_gpu, "load", broken)
    flags = "--device cpu --shapes tiny --quick --sections copy,decode"
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *flags.split()])
    assert bench_gpu.main() == 1
    said = capsys.readouterr().out
    assert "copy on the device" in said
    assert "FAILED tiny: RuntimeError: no kernel image is available" in said


@pytest.mark.parametrize("fallbacks", [0.0, 1.0])
def test_transfer_is_of_the_transport_it_names(
    fallbacks: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def pair(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(generate_ids=lambda *_: None, node=lambda role: {"url": role})

    def metric(url: str, name: str, transport: str = "") -> float:
        if name == "baton_kv_transport_fallbacks_total":
            return fallbacks
        return {"nccl": 1e6, "": 5e6}[transport]

    monkeypatch.setattr(bench_gpu, "pair", pair)
    monkeypatch.setattr(cluster, "metric", metric)
    report = bench_gpu.Report(None, {})
    effort = SimpleNamespace(transports=["nccl"], rounds=1, pair_prompts=[4])
    bench_gpu.transfer(report, None, effort, "tiny", Path())  # type: ignore[arg-type]
    said = capsys.readouterr().out
    if fallbacks:
        assert report.failed == ["transfer nccl"]
        assert "1 pairs changed to a slower transport" in said
    else:
        assert report.failed == []
        assert said.split()[-4:-2] == ["nccl", "1"], "MB of this transport alone"
