"""The kernels of a layer on the device: flashinfer's norms, rotation and activation against plain torch in float32, our
own for heads against plain torch, and all in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.ops_cuda import FlashInferOps, find_obstacle, try_out
from tests.support.kernels import coded_cases, expert_cases, head_cases, recurrent_cases
from tests.support.models import shapes
from tests.support.models.whole_model import load_model

CUDA = torch.device("cuda")
pytestmark = pytest.mark.timeout(600)  # kernels are compiled at their first use


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def fast(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FlashInferOps, torch.dtype]:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    kernel_shapes = load_model(
        shapes.make("tiny", tmp_path_factory.mktemp("m")), request.param, "dummy"
    ).spec.kernel_shapes
    assert find_obstacle(kernel_shapes) is None
    return try_out(kernel_shapes, CUDA), getattr(torch, request.param)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """baton.layers.ops is the reference here."""
    monkeypatch.setattr(ops, "_kernels_for", lambda _: None)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize("hidden", [128, 1024, 4096])
def test_norms(fast: tuple[FlashInferOps, torch.dtype], rows: int, hidden: int) -> None:
    kernels, dtype = fast
    x, residual, weight = (
        noise(*s, dtype=dtype, seed=i)
        for i, s in enumerate(((rows, hidden), (rows, hidden), (hidden,)))
    )
    close(kernels.rms_norm(x, weight, 1e-5), ops.rms_norm(x.float(), weight.float(), 1e-5))
    want = ops.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)
    for one, other in zip(kernels.add_rms_norm(x, residual, weight, 1e-5), want, strict=True):
        close(one, other)


@pytest.mark.parametrize("rows", [1, 5, 900])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_of_the_projection(
    fast: tuple[FlashInferOps, torch.dtype], rows: int, dim: int
) -> None:
    kernels, dtype = fast
    projection = noise(rows, (8 + 2 + 2) * dim, dtype=dtype)
    q, k, v = projection.view(rows, -1, dim).split((8, 2, 2), dim=1)
    before = v.clone()
    weight = noise(dim, dtype=dtype, seed=1)
    close(kernels.rms_norm(q, weight, 1e-6), ops.rms_norm(q.float(), weight.float(), 1e-6))
    table = noise(4096, dim, dtype=torch.float32, seed=2).clamp(-1, 1)
    cos, sin = table.chunk(2, dim=1)
    positions = torch.randint(0, 4096, (rows,), device=CUDA)
    want = ops.apply_rope(q.float(), k.float(), positions, cos, sin)
    for one, other in zip(kernels.apply_rope(q, k, positions, cos, sin), want, strict=True):
        close(one, other)
    assert v.equal(before), "what lies beside is left alone"


def test_heads_are_normed_rotated_and_stored() -> None:
    for seed, shape in enumerate(head_cases.shapes(60)):
        head_cases.check(shape, seed, CUDA)
        head_cases.check(
            replace(shape, tokens=min(64, head_cases.PAGES * shape.page_size)), seed, CUDA
        )


def test_experts_are_the_sums_of_plain_torch() -> None:
    for seed, shape in enumerate(expert_cases.shapes(60)):
        expert_cases.check(shape, seed, CUDA)


def test_states_are_those_of_plain_torch_in_any_cuts_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "_native", None)
    for seed, case in enumerate(recurrent_cases.delta_cases(60)):
        recurrent_cases.check_delta(case, seed, CUDA)
    for rows_decay in (False, True):
        recurrent_cases.check_against_transformers(rows_decay=rows_decay, device=CUDA)
    recurrent_cases.check_softplus(CUDA)


def test_states_are_copied_to_pages_and_back() -> None:
    for seed in range(30):
        recurrent_cases.check_copies(seed, CUDA)


@pytest.mark.parametrize("rows_decay", [False, True])
def test_rows_of_states_are_read_at_each_replay(rows_decay: bool) -> None:
    recurrent_cases.check_replays(rows_decay=rows_decay)


def test_products_with_quantized_matrices_are_those_of_their_numbers() -> None:
    for seed, shape in enumerate(coded_cases.shapes(120)):
        coded_cases.check(shape, seed, CUDA)
        wide = replace(shape, tokens=130, outputs=520, inputs=1030, offset=0)
        coded_cases.check(wide, seed, CUDA)


def test_quantized_product_in_a_graph() -> None:
    case = coded_cases.make_case(
        "fp8",
        256,
        torch.arange(512) // 128,
        has_zeros=False,
        generator=torch.Generator().manual_seed(1),
    )
    matrix = case.move("fp8", torch.bfloat16, CUDA)
    x = noise(4, 512, dtype=torch.bfloat16)
    recorded = record(lambda: matrix.multiply(x))
    x.copy_(noise(4, 512, dtype=torch.bfloat16, seed=9))
    assert recorded().equal(matrix.multiply(x)), "with other inputs than those it was recorded with"


@pytest.mark.parametrize("inner", [256, 3072, 14336])
def test_activation(fast: tuple[FlashInferOps, torch.dtype], inner: int) -> None:
    kernels, dtype = fast
    gate_up = noise(7, 2 * inner, dtype=dtype)
    close(kernels.silu_mul(gate_up), ops.silu_mul(gate_up.float()))


def test_all_of_them_in_a_graph(fast: tuple[FlashInferOps, torch.dtype]) -> None:
    kernels, dtype = fast
    x, weight = noise(4, 1024, dtype=dtype), noise(1024, dtype=dtype, seed=1)
    cos, sin = noise(64, 128, dtype=torch.float32, seed=2).chunk(2, dim=1)
    positions = torch.tensor([3, 9, 0, 63], device=CUDA)

    def work() -> Tensor:
        normed = kernels.rms_norm(x, weight, 1e-6)
        normed, _ = kernels.add_rms_norm(normed, x.clone(), weight, 1e-6)
        q, _ = kernels.apply_rope(
            normed.view(4, 8, 128), x.clone().view(4, 8, 128), positions, cos, sin
        )
        return kernels.silu_mul(q.reshape(4, 1024))

    recorded = record(work)
    x.copy_(noise(4, 1024, dtype=dtype, seed=9))
    positions.copy_(torch.tensor([1, 2, 3, 4]))
    assert recorded().equal(work()), "with other inputs than those it was recorded with"


def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def test_model_of_these_shapes_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    monkeypatch.setattr(ops, "_flashinfer", None)
    monkeypatch.setattr(ops, "_head_kernel", None)
    spec = load_model(shapes.make("tiny", tmp_path), load_format="dummy").spec
    ops.choose_cuda([spec.kernel_shapes], CUDA)
    assert ops._flashinfer is not None
    assert ops.head_kernel(torch.empty(0, device=CUDA)) is not None
