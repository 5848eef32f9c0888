"""flashinfer's norms, rotation and activation as we call them: a strict stand-in's kernels against plain torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers import flashinfer_loader, ops, ops_cuda
from baton.layers.ops_cuda import FlashInferOps, try_out
from baton.layers.spec import AttentionSpec, KernelShapes
from tests.support.devices import fake_flashinfer
from tests.support.models import shapes
from tests.support.models.model_loop import ModelLoop
from tests.support.models.whole_model import load_model
from tests.support.probes import DecoderProbe
from tests.support.processes.prepared_python import PreparedPython

HALF = [torch.float16, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])
FAST = FlashInferOps(fake_flashinfer)
CPU = torch.device("cpu")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """baton.layers.ops without kernels: the reference."""
    monkeypatch.setattr(ops, "_kernels_for", lambda _: None)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@both_dtypes
@pytest.mark.usefixtures("plain")
def test_norms_are_plain_torchs(dtype: torch.dtype) -> None:
    x, residual, weight = (
        noise(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((5, 64), (5, 64), (64,)))
    )
    close(FAST.rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))
    want = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    got = FAST.add_rms_norm(x, residual, weight, 1e-5)
    assert got[0] is x
    assert got[1] is residual
    for one, other in zip(got, want, strict=True):
        close(one, other)


@both_dtypes
@pytest.mark.usefixtures("plain")
def test_heads_are_views_of_the_projection(dtype: torch.dtype) -> None:
    projection = noise(7, (4 + 2 + 2) * 64, dtype=dtype)
    q, k, _ = projection.view(7, -1, 64).split((4, 2, 2), dim=1)
    weight = noise(64, dtype=dtype, seed=1)
    close(FAST.rms_norm(k, weight, 1e-6), ops.rms_norm(k, weight, 1e-6))
    cos, sin = noise(50, 64, dtype=torch.float32, seed=2).chunk(2, dim=1)
    positions = torch.tensor([0, 49, 3, 3, 17, 20, 1])
    want = ops.apply_rope(q.clone(), k.clone(), positions, cos, sin)
    got = FAST.apply_rope(q, k, positions, cos, sin)
    assert got[0] is q
    for one, other in zip(got, want, strict=True):
        close(one, other)
    assert projection.view(7, -1, 64)[:, :4].equal(q), "in place"


@both_dtypes
@pytest.mark.usefixtures("plain")
def test_activation_is_plain_torchs(dtype: torch.dtype) -> None:
    gate_up = noise(9, 2 * 96, dtype=dtype)
    close(FAST.silu_mul(gate_up), ops.silu_mul(gate_up))


def test_tables_that_are_not_one_are_refused() -> None:
    q = noise(2, 2, 64, dtype=torch.float16)
    for cos, sin in (
        (torch.ones(9, 32), torch.ones(9, 32)),
        torch.ones(9, 64).chunk(2, dim=1)[::-1],
    ):
        with pytest.raises(ValueError, match="not halves of one table"):
            FAST.apply_rope(q, q.clone(), torch.zeros(2, dtype=torch.int64), cos, sin)


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": False, "attention_bias": True}])
def test_model_computes_alike_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], dtype: str
) -> None:
    path = shapes.make("tiny", tmp_path / "m", **shape)
    prompts = [[(7 * i + n) % 2048 for i in range(n)] for n in (1, 9, 40)]

    def logits(kernels: Any) -> Tensor:
        monkeypatch.setattr(ops, "_kernels_for", lambda _: kernels)
        model = load_model(path, dtype, "dummy")
        DecoderProbe(model).join_rope_tables()
        loop = ModelLoop(model, "torch", 4)
        work = [(loop.start(prompt, 0), len(prompt)) for prompt in prompts]
        return model.forward(loop.batch(work), loop.attn)

    torch.testing.assert_close(logits(FAST), logits(None), rtol=0.05, atol=0.05)


def test_chunk_that_samples_nothing_launches_no_kernel_over_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shapes.make("tiny", tmp_path / "m")
    monkeypatch.setattr(ops, "_kernels_for", lambda _: FAST)
    model = load_model(path, "bfloat16", "dummy")
    DecoderProbe(model).join_rope_tables()
    loop = ModelLoop(model, "torch", 4)
    seq = loop.start(list(range(9)), 0)
    assert model.forward(loop.batch([(seq, 4)]), loop.attn).shape == (0, model.spec.vocab_size)


def test_tables_elsewhere_than_on_the_cpu_are_whole_and_one(tmp_path: Path) -> None:
    model = load_model(shapes.make("tiny", tmp_path / "m"), load_format="dummy")
    rope = DecoderProbe(model).rope
    before = rope.cos
    model.to(CPU)
    assert rope.cos is before
    model.to(torch.device("meta"))
    cos = rope.cos
    sin = rope.sin
    assert len(cos) == len(sin) == model.spec.max_context
    assert cos.stride() == sin.stride() == (64, 1)
    assert sin.storage_offset() == cos.storage_offset() + 32


# ---------------------------------------------------------------------------------------------- the choice


def shapes_of(tmp_path: Path, **changes: Any) -> KernelShapes:
    path = shapes.make("tiny", tmp_path / "m")
    return replace(load_model(path, load_format="dummy").spec.kernel_shapes, **changes)


REFUSED = [
    ({"dtype": "float32"}, "they compute in float16 or bfloat16, the model in float32"),
    ({"heads": AttentionSpec(4, 2, 96)}, "they take heads of 64, 128, 256, the model's have 96"),
    (
        {"inner_sizes": {"intermediate_size": 100}},
        "the model's intermediate_size on one rank is 100",
    ),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_models_beyond_them_are_computed_by_plain_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    why: str,
) -> None:
    monkeypatch.setattr(flashinfer_loader, "find_obstacle", lambda: None)
    # Beside a model that they could compute, too.
    shapes = (shapes_of(tmp_path / "a"), shapes_of(tmp_path / "b", **changes))
    ops._choose_flashinfer(shapes, CPU, required=False)
    assert ops._flashinfer is None
    assert why in caplog.messages[-1]
    assert caplog.messages[-1].startswith("norms, rotation and activation: plain torch")


def test_every_function_is_run_once_and_one_that_does_not_compile_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                calls.append(name)
                return getattr(fake_flashinfer, name)(*args, **named)

            return call

    monkeypatch.setattr(flashinfer_loader, "load_flashinfer", Library)
    monkeypatch.setattr(flashinfer_loader, "find_obstacle", lambda: None)
    monkeypatch.setattr(ops, "_flashinfer", None)
    kernel_shapes = shapes_of(tmp_path)
    ops._choose_flashinfer([kernel_shapes], CPU, required=False)
    assert isinstance(ops._flashinfer, FlashInferOps)
    assert set(calls) == {
        "rmsnorm",
        "fused_add_rmsnorm",
        "apply_rope_with_cos_sin_cache_inplace",
        "silu_and_mul",
    }
    assert try_out(kernel_shapes, CPU) is not None

    def broken(*_: Any) -> Any:
        raise RuntimeError(
            "Ninja build failed. Ninja output:\nnorm.cu(3): error: identifier is undefined\n"
        )

    monkeypatch.setattr(ops_cuda, "try_out", broken)
    ops._choose_flashinfer([kernel_shapes], CPU, required=False)
    assert ops._flashinfer is None
    assert "flashinfer's: norm.cu(3): error: identifier is undefined" in caplog.messages[-1]
    with pytest.raises(
        ConfigError, match=r"norms cannot run here .*identifier is undefined.*cuBLAS and cuRAND"
    ):
        ops._choose_flashinfer([kernel_shapes], CPU, required=True)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flashinfer that is installed."""
    monkeypatch.setattr(flashinfer_loader, "load_flashinfer", lambda: fake_flashinfer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    flashinfer_loader.find_obstacle.cache_clear()
    yield
    flashinfer_loader.find_obstacle.cache_clear()


def nvcc(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "nvcc"
    program.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.48'\n"
    )
    program.chmod(0o755)
    return folder


@pytest.mark.usefixtures("library")
def test_missing_or_mismatched_compiler_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why(home: Path) -> str | None:
        monkeypatch.setenv("CUDA_HOME", str(home))
        flashinfer_loader.find_obstacle.cache_clear()
        return flashinfer_loader.find_obstacle()

    assert "or beside torch; install a CUDA 13.0 toolkit, or pip install" in str(
        why(tmp_path / "no")
    )
    assert "of CUDA 12.4 and torch of CUDA 13.0; point CUDA_HOME to" in str(
        why(nvcc(tmp_path / "old", "12.4"))
    )
    monkeypatch.setattr(flashinfer_loader.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert why(nvcc(tmp_path / "new", "13.2")) is None


def test_compiler_of_nvidias_wheels_is_used_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = nvcc(tmp_path / "site" / "nvidia" / "cu13", "13.0")
    (home / "lib").mkdir()
    (home / "lib" / "libcudart.so.13").write_text("")
    monkeypatch.setattr(flashinfer_loader, "_wheel_homes", lambda: [home])
    monkeypatch.setattr(flashinfer_loader.importlib, "import_module", lambda name: fake_flashinfer)
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_EXTRA_LDFLAGS"):
        monkeypatch.setenv(name, "")  # restored later, whatever `load` sets
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        flashinfer_loader.load_flashinfer()
        assert flashinfer_loader.os.environ["CUDA_HOME"] == str(home)
        links = tmp_path / "cache" / "baton" / "cuda"
        assert flashinfer_loader.os.environ["FLASHINFER_EXTRA_LDFLAGS"] == f"-L{links}"
        assert (links / "libcudart.so").resolve() == home / "lib" / "libcudart.so.13"


@pytest.mark.usefixtures("library")
def test_ninja_beside_the_interpreter_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(nvcc(tmp_path / "cuda", "13.0")))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "ninja", None)
    assert "with ninja, which is not in PATH" in str(flashinfer_loader.find_obstacle())
    flashinfer_loader.find_obstacle.cache_clear()

    class Ninja:
        BIN_DIR = "/venv/bin"

    monkeypatch.setitem(sys.modules, "ninja", Ninja)
    assert flashinfer_loader.find_obstacle() is None
    assert flashinfer_loader.os.environ["PATH"] == "/venv/bin:/nowhere"


def test_absent_library_is_one_sentence(torch_process: PreparedPython) -> None:
    code = "from baton.layers import flashinfer_loader as f; print(f.find_obstacle())"
    assert torch_process.output("-c", code).startswith(
        "it cannot be imported: No module named 'flashinfer'; install Baton's extra 'gpu'"
    )
