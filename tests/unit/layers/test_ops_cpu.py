"""The native CPU functions of ops_cpu against the torch ones of ops, and what they promise to keep exactly equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("baton._native", reason="the native module is not built")

from baton.layers import ops, ops_cpu
from baton.layers.spec import ClampedSilu, ExpertForm
from tests.support.processes.prepared_python import PreparedPython

DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture
def torch_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """baton.layers.ops without the kernels: the reference."""
    monkeypatch.setattr(ops, "_native", None)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    rtol, atol = (1e-5, 1e-5) if got.dtype == torch.float32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


SHAPES = [(1, 64, 64), (3, 100, 65), (7, 257, 130), (40, 896, 300), (300, 128, 96)]


@both_dtypes
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_linear_equals_torch(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    weight = noise(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    bias = noise(outputs, dtype=dtype, seed=2)
    wide = noise(rows, inputs + 9, dtype=dtype, seed=3)
    packed = ops_cpu.PackedWeight(weight)
    for x in (wide[:, :inputs], wide[:, :inputs].contiguous()):
        assert_close(packed.multiply(x), functional.linear(x, weight))
        assert_close(packed.multiply(x, bias), functional.linear(x, weight, bias))


@both_dtypes
def test_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    packed = ops_cpu.PackedWeight(noise(200, 600, dtype=dtype))
    x = noise(210, 600, dtype=dtype, seed=1)
    whole = packed.multiply(x)
    for start, end in ((0, 1), (5, 9), (17, 30), (64, 209)):
        assert torch.equal(packed.multiply(x[start:end]), whole[start:end]), (start, end)


@both_dtypes
def test_number_of_threads_does_not_change_a_bit(dtype: torch.dtype) -> None:
    weight, x = noise(700, 2000, dtype=dtype), noise(33, 2000, dtype=dtype, seed=1)
    alone = ops_cpu.PackedWeight(weight).multiply(x)
    ops_cpu.set_threads(3)
    try:
        assert torch.equal(ops_cpu.PackedWeight(weight).multiply(x), alone)
    finally:
        ops_cpu.set_threads(1)


@both_dtypes
def test_packed_rows_are_the_original_ones(dtype: torch.dtype) -> None:
    weight = noise(130, 77, dtype=dtype)
    ids = torch.tensor([129, 0, 64, 0])
    assert torch.equal(ops_cpu.PackedWeight(weight).gather_rows(ids), weight[ids])


@pytest.mark.usefixtures("torch_ops")
@both_dtypes
def test_norms_equal_torch(dtype: torch.dtype) -> None:
    for rows, n in ((1, 64), (5, 100), (300, 1024)):
        x, residual, w = (noise(rows, n, dtype=dtype, seed=s) for s in (1, 2, 3))
        assert_close(ops_cpu.rms_norm(x, w[0], 1e-6), ops.rms_norm(x, w[0], 1e-6))
        wanted = ops.add_rms_norm(x, residual, w[0], 1e-5)
        for got, want in zip(
            ops_cpu.add_rms_norm(x.clone(), residual.clone(), w[0], 1e-5), wanted, strict=True
        ):
            assert_close(got, want)


@pytest.mark.usefixtures("torch_ops")
@both_dtypes
def test_norm_of_heads_inside_a_projection(dtype: torch.dtype) -> None:
    heads = noise(7, 6, 80, dtype=dtype)[:, 1:4]
    weight = noise(80, dtype=dtype, seed=1)
    assert_close(ops_cpu.rms_norm(heads, weight, 1e-6), ops.rms_norm(heads, weight, 1e-6))


@pytest.mark.usefixtures("torch_ops")
@both_dtypes
def test_rope_turns_views_in_place_and_leaves_the_rest(dtype: torch.dtype) -> None:
    fused = noise(9, 8, 32, dtype=dtype)
    ours, reference = fused.clone(), fused.clone()
    angles = torch.arange(50).float()[:, None] * torch.linspace(1, 0.01, 16)
    positions = torch.tensor([49, 0, 1, 2, 30, 7, 7, 48, 9])
    for data, function in ((ours, ops_cpu.apply_rope), (reference, ops.apply_rope)):
        q, k, _ = data.split((5, 2, 1), dim=1)
        turned = function(q, k, positions, angles.cos(), angles.sin())
        assert turned[0].data_ptr() == q.data_ptr()
    assert torch.equal(ours, reference), "products are rounded one by one, as in torch"
    assert torch.equal(ours[:, 7], fused[:, 7])


@pytest.mark.usefixtures("torch_ops")
@both_dtypes
def test_rope_turns_neighbors_of_views_in_place(dtype: torch.dtype) -> None:
    """By complex numbers, as DeepSeek V2's class does."""
    fused = noise(9, 4, 32, dtype=dtype)
    ours, reference = fused.clone(), fused.clone()
    angles = torch.arange(50).float()[:, None] * torch.linspace(1, 0.01, 10)
    positions = torch.tensor([49, 0, 1, 2, 30, 7, 7, 48, 9])
    for data, function in ((ours, ops_cpu.apply_rope), (reference, ops.apply_rope)):
        q, k, _ = data[..., 12:].split((2, 1, 1), dim=1)
        function(q, k, positions, angles.cos(), angles.sin(), is_interleaved=True)
    assert torch.equal(ours, reference), "products are rounded one by one, as in torch"
    assert torch.equal(ours[..., :12], fused[..., :12])
    assert torch.equal(ours[:, 3], fused[:, 3])
    pairs = torch.view_as_complex(fused[:, :3, 12:].float().unflatten(-1, (10, 2)))
    turned = pairs * torch.polar(torch.ones(9, 10), angles[positions])[:, None]
    assert_close(ours[:, :3, 12:].contiguous(), torch.view_as_real(turned).flatten(-2).to(dtype))


@both_dtypes
def test_products_by_head_equal_torch_and_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    weights = noise(3, 70, 24, dtype=dtype) / 5
    packed = ops_cpu.PackedHeads(weights)
    x = noise(200, 3, 40, dtype=dtype, seed=1)[..., 16:]
    fused = torch.zeros(200, 3, 80, dtype=dtype)
    packed.multiply(x, fused[..., :70])
    assert_close(fused[..., :70], torch.einsum("thk,hnk->thn", x, weights))
    assert not fused[..., 70:].any()
    for start, end in ((0, 1), (5, 9), (17, 199)):
        part = torch.empty(end - start, 3, 70, dtype=dtype)
        packed.multiply(x[start:end], part)
        assert torch.equal(part, fused[start:end, :, :70]), (start, end)
    with pytest.raises(ValueError, match=r"out is .*\[200, 3, 80\] on cpu, not .*\[200, 3, 70\]"):
        packed.multiply(x, fused)


@pytest.mark.usefixtures("torch_ops")
@both_dtypes
def test_silu_mul_equals_torch(dtype: torch.dtype) -> None:
    for rows, n in ((1, 64), (5, 50), (300, 1024)):
        gate_up = noise(rows, 2 * n + 3, dtype=dtype)[:, : 2 * n] * 9
        assert_close(ops_cpu.silu_mul(gate_up), ops.silu_mul(gate_up))


@pytest.mark.usefixtures("torch_ops")
@both_dtypes
def test_clamped_silu_mul_equals_torch_below_and_above_its_limits(dtype: torch.dtype) -> None:
    for rows, n in ((1, 64), (5, 50), (300, 1024)):
        gate_up = noise(rows, 2 * n + 3, dtype=dtype)[:, : 2 * n] * 4
        got = ops_cpu.clamped_silu_mul(gate_up, 1.702, 1.5)
        assert_close(got, ops.clamped_silu_mul(gate_up.float(), 1.702, 1.5).to(dtype))


def make_experts(
    dtype: torch.dtype, count: int = 5, hidden: int = 64, inner: int = 128
) -> tuple[list[ops_cpu.NativeMatrix], list[ops_cpu.NativeMatrix]]:
    """Packed gate_up and down of each expert; of every second one, quantized."""

    def make(outputs: int, inputs: int, seed: int) -> ops_cpu.NativeMatrix:
        if seed % 2:
            return ops_cpu.PackedWeight(noise(outputs, inputs, dtype=dtype, seed=seed))
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        return ops_cpu.QuantizedWeight(
            "int4", codes, scales=torch.rand(outputs, 1), zeros=8.0,
            column_group=torch.zeros(inputs, dtype=torch.int32), dtype=dtype,
        )  # fmt: skip

    gate_up = [make(2 * inner, hidden, 2 * number + number % 2) for number in range(count)]
    down = [make(hidden, inner, 2 * number + 1 - number % 2) for number in range(count)]
    return gate_up, down


def expert_of(
    gate_up: Sequence[ops.Matrix], down: Sequence[ops.Matrix]
) -> Callable[[int, Tensor], Tensor]:
    """Results of one expert, by products of its own."""

    def pass_expert(place: int, x: Tensor) -> Tensor:
        return ops.linear(ops.silu_mul(ops.linear(x, gate_up[place])), down[place])

    return pass_expert


def choices_of(tokens: int, slots: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token, and weights."""
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.rand(tokens, num_experts, generator=generator).argsort(dim=-1)[:, :slots]
    return experts, torch.rand(tokens, slots, generator=generator)


@both_dtypes
def test_experts_have_the_bits_of_single_products_summed_in_order(dtype: torch.dtype) -> None:
    gate_up, down = make_experts(dtype)
    kernel = ops_cpu.ExpertWeights(gate_up, down, first_expert=2)
    counts = torch.zeros(8, dtype=torch.int64)
    for tokens in (1, 2, 9, 70):
        x = noise(tokens, 80, dtype=dtype, seed=tokens)[:, 7:71]
        experts, weights = choices_of(tokens, 3, 8)
        want = ops.pass_experts(
            x, experts, weights, held=range(2, 7), pass_expert=expert_of(gate_up, down)
        )
        before = counts.clone()
        assert torch.equal(kernel.pass_tokens(x, experts, weights, counts), want), tokens
        assert torch.equal(counts - before, experts.flatten().bincount(minlength=8))


@both_dtypes
@pytest.mark.parametrize("family", ["gpt-oss", "llama4"])
def test_other_forms_of_experts_have_the_bits_of_single_products(
    dtype: torch.dtype, family: str
) -> None:
    gate_up, down = make_experts(dtype)
    inner = down[0].shape[1]
    gate_up_biases = [noise(2 * inner, dtype=dtype, seed=20 + n) for n in range(len(down))]
    down_biases = [noise(64, dtype=dtype, seed=40 + n) for n in range(len(down))]
    if family == "gpt-oss":
        form = ExpertForm(ClampedSilu(1.702, 0.5))
    else:
        form = ExpertForm(weighs_inputs=True)
        gate_up_biases.clear()
        down_biases.clear()
    kernel = ops.pack_experts(
        gate_up, down, 2, form=form, gate_up_biases=gate_up_biases, down_biases=down_biases
    )
    assert kernel is not None

    def pass_expert(place: int, x: Tensor) -> Tensor:
        if family == "llama4":
            return expert_of(gate_up, down)(place, x)
        both = ops.linear(x, gate_up[place], gate_up_biases[place])
        return ops.linear(ops.clamped_silu_mul(both, 1.702, 0.5), down[place], down_biases[place])

    for tokens in (1, 2, 9, 70):
        x = noise(tokens, 64, dtype=dtype, seed=tokens)
        experts, weights = choices_of(tokens, 3, 8)
        want = ops.pass_experts(
            x, experts, weights, held=range(2, 7), pass_expert=pass_expert,
            weighs_inputs=form.weighs_inputs,
        )  # fmt: skip
        counts = torch.zeros(8, dtype=torch.int64)
        assert torch.equal(kernel.pass_tokens(x, experts, weights, counts), want), tokens
        assert torch.equal(counts, experts.flatten().bincount(minlength=8))


@pytest.mark.usefixtures("torch_ops")
def test_experts_without_kernels_are_the_same_sum() -> None:
    """Against the formula in float64."""
    gate_up = [noise(24, 16, dtype=torch.float32, seed=number) for number in range(4)]
    down = [noise(16, 12, dtype=torch.float32, seed=9 + number) for number in range(4)]
    experts, weights = choices_of(11, 2, 6)
    x = noise(11, 16, dtype=torch.float32)
    got = ops.pass_experts(
        x, experts, weights, held=range(1, 5), pass_expert=expert_of(gate_up, down)
    )
    for token in range(11):
        want = torch.zeros(16, dtype=torch.float64)
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            if 1 <= expert < 5:
                gate, up = (gate_up[expert - 1].double() @ x[token].double()).chunk(2)
                want += weight * (down[expert - 1].double() @ (functional.silu(gate) * up))
        torch.testing.assert_close(got[token].double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["packed", "int4"])
def test_decode_step_reads_the_chosen_experts_only(kind: str) -> None:
    gate_up, down = make_experts(torch.bfloat16, 8, 256, 384)
    first = 1 if kind == "packed" else 0
    kernel = ops_cpu.ExpertWeights(gate_up[first::2], down[first::2], first_expert=0)
    for token in range(3):
        experts, weights = choices_of(token + 1, 2, 4)
        before = kernel.visited_bytes
        counts = torch.zeros(4, dtype=torch.int64)
        x = noise(1, 256, dtype=torch.bfloat16)
        kernel.pass_tokens(x, experts[-1:], weights[-1:], counts)
        chosen = sum(kernel.expert_bytes(place) for place in experts[-1].tolist())
        assert chosen <= kernel.visited_bytes - before <= 1.15 * chosen


def test_choice_of_no_expert_and_foreign_tensors_are_refused() -> None:
    gate_up, down = make_experts(torch.float32, 2)
    kernel = ops_cpu.ExpertWeights(gate_up, down, first_expert=0)
    x = torch.zeros(1, 64)
    weights = torch.ones(1, 1)
    counts = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="token 0 chose expert 2 of 2"):
        kernel.pass_tokens(x, torch.tensor([[2]]), weights, counts)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[1, 63\] .* \[1, 64\]"):
        kernel.pass_tokens(x[:, 1:], torch.tensor([[1]]), weights, counts)
    with pytest.raises(ValueError, match=r"counts is torch.int32"):
        kernel.pass_tokens(x, torch.tensor([[1]]), weights, counts.int())
    with pytest.raises(ValueError, match="expert 0: gate_up is F32"):
        ops_cpu.ExpertWeights(down, gate_up, first_expert=0)
    with pytest.raises(ValueError, match=r"down_biases is torch.float32 \[63\]"):
        ops_cpu.ExpertWeights(gate_up, down, 0, down_biases=[torch.zeros(63)] * 2)


def test_wrong_tensors_are_refused_with_both_sides_named() -> None:
    x, w = torch.zeros(2, 8), torch.ones(8)
    packed = ops_cpu.PackedWeight(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 .* not torch.float32 \[T, 8\]"):
        packed.multiply(x.bfloat16())
    with pytest.raises(ValueError, match=r"bias is .* not a contiguous torch.float32 \[4\]"):
        packed.multiply(x, w)
    with pytest.raises(ValueError, match="row 4 is outside a matrix of 4"):
        packed.gather_rows(torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="float32 or bfloat16 matrix"):
        ops_cpu.PackedWeight(torch.zeros(4, 8).half())
    with pytest.raises(ValueError, match="weight is"):
        ops_cpu.rms_norm(x, w[:4], 1e-6)
    with pytest.raises(ValueError, match="position 3 is outside the rope table of 3 rows"):
        ops_cpu.apply_rope(
            x[:, None], x[:, None].clone(), torch.tensor([0, 3]), torch.ones(3, 4), torch.ones(3, 4)
        )


def test_unknown_instruction_level_ends_the_start_with_a_sentence(
    torch_process: PreparedPython,
) -> None:
    done = torch_process.run("-c", "import baton.layers.ops", BATON_CPU_ISA="sse9")
    assert done.returncode != 0
    assert "ConfigError: BATON_CPU_ISA=sse9: use scalar, avx2" in done.stderr
