"""How an engine starts on a GPU: weights straight onto it, a pool that fits, neighbors, and float16."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from baton.config import build_config
from baton.errors import ConfigError
from baton.layers.attention.flashinfer import FlashInferAttention
from baton.layers.attention.reference import TorchAttention
from baton.models.load import load_weights
from baton.models.spec_reader import read_spec
from baton.runtime import build as runtime
from tests.support.engines.engine_run import answer, greedy, make_engine
from tests.support.models import shapes
from tests.support.models.checkpoints import VOCAB, make_checkpoint
from tests.support.models.quantized_checkpoints import quantize
from tests.support.models.whole_model import held_tensors
from tests.support.probes import RunnerProbe
from tests.support.processes.cluster import Cluster

CUDA = torch.device("cuda")
pytestmark = pytest.mark.timeout(600)  # kernels are compiled at their first use


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_on_the_device_are_those_on_the_host(tmp_path: Path, load_format: str) -> None:
    path = make_checkpoint("qwen3", tmp_path / "m", dtype="float16")
    spec = read_spec(path, "bfloat16", load_format)
    here, there = (
        load_weights(spec, path, load_format, device=d) for d in (torch.device("cpu"), CUDA)
    )
    for one, other in zip(held_tensors(here), held_tensors(there), strict=True):
        assert other.is_cuda
        assert one.equal(other.cpu())


def engine_flags(path: Path, **flags: object) -> dict[str, object]:
    return {
        "model_path": str(path), "load_format": "dummy", "device": "cuda", "max_running_requests": 32,
        "chunked_prefill_size": 2048, **flags,
    }  # fmt: skip


def test_pool_is_what_the_fraction_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shapes.make("qwen3-0.6b", tmp_path / "m")
    with caplog.at_level(logging.INFO):
        loaded = runtime.load_rank(
            build_config(engine_flags(path, mem_fraction_static=0.3)), str(path)
        )
    total = torch.cuda.mem_get_info()[1]
    pool = int(str(loaded.info["kv_pool_bytes"]))
    assert 0.25 * total < pool < 0.3 * total, caplog.text
    assert torch.cuda.memory_reserved() < 0.35 * total
    line = next(m for m in caplog.messages if m.startswith("GPU memory of"))
    print(line)
    engine = loaded.make_engine_loop()
    prompts = [[(7 * i + n) % 1000 for i in range(700 + n)] for n in range(32)]
    got = answer(engine, prompts, greedy(8))
    assert [len(tokens) for tokens in got] == [8] * 32, "32 long prompts at once, as in the warm-up"
    engine.close()


def test_pool_or_model_that_cannot_fit_is_refused_before_it_is_tried(tmp_path: Path) -> None:
    path = shapes.make("qwen3-0.6b", tmp_path / "m")
    with pytest.raises(ConfigError, match=r"the KV pool asked for has .*lower --max-total-tokens"):
        runtime.load_rank(build_config(engine_flags(path, max_total_tokens=1 << 24)), str(path))
    huge = shapes.make("llama-3-8b", tmp_path / "huge", num_hidden_layers=1000)
    with pytest.raises(ConfigError, match=r"the model's weights take .* GiB"):
        runtime.load_rank(build_config(engine_flags(huge)), str(huge))


def test_two_engines_start_on_one_device(tmp_path: Path) -> None:
    path = shapes.make("tiny", tmp_path / "m")
    flags = [
        "--model-path",
        str(path),
        "--load-format",
        "dummy",
        "--device",
        "cuda",
        "--page-size",
        "16",
    ]
    with Cluster.up("--workers", "2", *flags, start_secs=500.0) as cluster:
        first = [cluster.generate_ids(list(range(3, 90)), 8) for _ in range(4)]
        assert first == first[:1] * 4, "both answer, and alike"


@pytest.mark.parametrize(
    ("variant", "name"), [("llama", "fp8-block"), ("llama", "awq"), ("qwen3-moe", "fp8-block")]
)
def test_quantized_checkpoint_stays_so_and_answers_as_on_the_cpu(
    tmp_path: Path, variant: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = quantize(make_checkpoint(variant, tmp_path / "m"), name, tmp_path)
    prompts = [[(11 * i + 37 * n) % VOCAB for i in range(n)] for n in range(1, 33)]
    flags = {"attention_backend": "torch", "dtype": "float32"}
    cpu = make_engine(path, **flags)
    with caplog.at_level(logging.INFO):
        gpu = make_engine(path, device="cuda", **flags)
    assert "matrices stay quantized" in caplog.text
    assert answer(gpu, prompts, greedy(4)) == answer(cpu, prompts, greedy(4))
    for engine in (cpu, gpu):
        engine.close()


@pytest.mark.parametrize("backend", ["flashinfer", "torch"])
def test_fp8_cache_is_near_the_cpus(tmp_path: Path, backend: str) -> None:
    path = shapes.make("tiny", tmp_path / "m")
    prompts = [[(11 * i + 37 * n) % 2048 for i in range(n)] for n in range(1, 65)]
    shared: dict[str, object] = {
        "load_format": "dummy",
        "page_size": 16,
        "max_total_tokens": 8192,
        "kv_cache_dtype": "fp8_e4m3",
    }
    cpu = make_engine(path, **shared)
    gpu = make_engine(path, **shared, device="cuda", dtype="bfloat16", attention_backend=backend)
    assert RunnerProbe(gpu.runner).kv_pool.data.dtype == torch.float8_e4m3fn
    a, b = (answer(engine, prompts, greedy(1)) for engine in (cpu, gpu))
    # The CPU computes in float32; a near tie may fall the other way.
    assert sum(x == y for x, y in zip(a, b, strict=True)) >= 48
    for engine in (cpu, gpu):
        engine.close()


@pytest.mark.parametrize("backend", [FlashInferAttention, TorchAttention])
def test_float16_is_near_the_cpus_float32(tmp_path: Path, backend: type) -> None:
    path = shapes.make("tiny", tmp_path / "m", dtype="float16")
    prompts = [[(11 * i + 37 * n) % 2048 for i in range(n)] for n in range(1, 65)]
    shared = {"load_format": "dummy", "page_size": 16, "max_total_tokens": 8192}
    cpu = make_engine(path, **shared)
    name = "flashinfer" if backend is FlashInferAttention else "torch"
    gpu = make_engine(
        path, **{**shared, "device": "cuda", "dtype": "auto", "attention_backend": name}
    )
    assert RunnerProbe(gpu.runner).kv_pool.data.dtype == torch.float16
    a, b = (answer(engine, prompts, greedy(1)) for engine in (cpu, gpu))
    assert sum(x == y for x, y in zip(a, b, strict=True)) >= 58, (
        "of 64; a near tie may fall the other way"
    )
    for engine in (cpu, gpu):
        engine.close()
