"""The handful of tensor functions a decoder layer is made of, besides attention.

Each public function first offers the call to the native CPU kernels (`ops_cpu`, same names and
signatures), on a CUDA device to flashinfer's (`ops_cuda`), and else runs the plain torch version
written here, which is also what the kernels are tested against. Which is in use is decided once and
logged: for the CPU at import, for CUDA by `choose_cuda`. There a kernel of our own (`head_kernel`)
does in one launch what lies between a layer's projection and its attention.

Shapes: T tokens, H heads, D head size, N features; all tensors on one device, last dimension
contiguous.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from baton.errors import ConfigError
from baton.layers import flashinfer_loader
from baton.layers import kernels as triton_kernels
from baton.layers.ops_cuda import HEAD_DIMS
from baton.layers.spec import PLAIN_EXPERTS, ExpertForm

if TYPE_CHECKING:
    from baton.layers.kernels.coded import CodedMatrix
    from baton.layers.ops_cpu import (
        ExpertRouter,
        NativeMatrix,
        PackedHeads,
        PackedWeight,
        QuantizedWeight,
    )
    from baton.layers.ops_cuda import FlashInferOps
    from baton.layers.recurrent_state import StateCopies, StateRows
    from baton.layers.spec import DeltaSpec, KernelShapes

log = logging.getLogger("baton.ops")

QuantizedMatrix: TypeAlias = "QuantizedWeight | CodedMatrix"
"""A weight that stays quantized in memory, on the CPU and on a GPU."""

Matrix: TypeAlias = "Tensor | NativeMatrix | CodedMatrix"
"""A weight [N, K] as `linear` takes it: a tensor, what `pack_weight` made of one, or codes that
stay quantized (`quantized_kernel`)."""

HeadMatrices: TypeAlias = "Tensor | PackedHeads"
"""Weights [heads, N, K] as `linear_by_head` takes them: a tensor, or what `pack_heads` made of
one."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The compute types, by the names flags and specs use."""


_native: ModuleType | None = None
try:
    from baton.layers import ops_cpu as _native
except ImportError as err:
    log.warning(
        "native CPU kernels are not in use (%s); plain torch does their work, more slowly", err
    )
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_flashinfer: FlashInferOps | None = None
_head_kernel: Callable[..., None] | None = None


def choose_cuda(
    shapes: Sequence[KernelShapes], device: torch.device, *, required: bool = False
) -> None:
    """Decide for this process which kernels compute the functions of its models on `device`, and
    compile them.

    Plain torch takes the place of those that cannot be used; the reason is logged.

    Raises:
        ConfigError: with `required`, kernels that take these models cannot be compiled here.
    """
    _choose_triton(shapes, device, required=required)
    _choose_flashinfer(shapes, device, required=required)


def _first_problem(found: Iterable[str | None]) -> str | None:
    """Models of one process have the same kernels: those that all of them can have."""
    return next((problem for problem in found if problem is not None), None)


def _choose_triton(shapes: Sequence[KernelShapes], device: torch.device, *, required: bool) -> None:
    global _head_kernel
    _head_kernel = None
    problem = _first_problem(triton_kernels.find_obstacle(each, device) for each in shapes)
    has_experts = any(each.experts for each in shapes)
    if problem is None:
        from baton.layers.kernels.heads import store_heads

        _head_kernel = store_heads
        log.info("norm, rotation and store of heads, and the sampler: Triton")
    elif has_experts or any(each.is_quantized or each.state is not None for each in shapes):
        parts = "experts" if has_experts else "quantized weights"
        if any(each.state is not None for each in shapes):
            parts = "states of sequences"
        raise ConfigError(
            f"Triton's kernels cannot run here ({problem}), and {parts} have no others on a GPU; "
            f"{triton_kernels.REMEDY}, or use --device cpu"
        )
    elif required:
        raise ConfigError(
            f"Triton's kernels cannot run here ({problem}); {triton_kernels.REMEDY}, or use --attention-backend "
            f"{flashinfer_loader.SLOWER}"
        )
    else:
        log.warning(
            "heads are stored in several launches and tokens drawn on the host; Triton's kernels: %s",
            problem,
        )


def _choose_flashinfer(
    shapes: Sequence[KernelShapes], device: torch.device, *, required: bool
) -> None:
    from baton.layers import ops_cuda

    global _flashinfer
    _flashinfer = None
    problem = _first_problem(map(ops_cuda.find_obstacle, shapes))
    if problem is None:
        log.info(
            "flashinfer compiles its kernels at the first start, which takes minutes; later starts load them"
        )
        try:
            found = [ops_cuda.try_out(each, device) for each in shapes]
            _flashinfer = found[0]
            log.info("norms, rotation and activation: flashinfer")
            return
        except torch.OutOfMemoryError:
            raise
        except Exception as err:
            problem = flashinfer_loader.summarize_error(err)
            if required:
                raise ConfigError(
                    f"flashinfer's norms cannot run here ({problem}); they need the headers of cuBLAS and cuRAND "
                    f"beside nvcc: install a whole CUDA toolkit, or use --attention-backend {flashinfer_loader.SLOWER}"
                ) from err
    log.warning(
        "norms, rotation and activation: plain torch, in several launches each; flashinfer's: %s",
        problem,
    )


class FusedOps(Protocol):
    """Functions below of the same names, in one launch each."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def apply_rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...


NO_EXPERT = -1
"""A choice that adds nothing: of the rows that fill up a recorded step, on a GPU."""


class ExpertKernel(Protocol):
    """The routed experts of a layer that this process has, computed together."""

    def pass_tokens(self, x: Tensor, experts: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """`pass_experts`, and choices are added to `counts`, int64 [experts of all ranks]."""


def _kernels_for(x: Tensor) -> FusedOps | None:
    return _native_for(x) if x.is_cpu else _flashinfer


def head_kernel(x: Tensor) -> Callable[..., None] | None:
    """`layers.kernels.heads.store_heads` for heads on x's device; None: norm, rotate and store by the
    functions of this module."""
    return None if x.is_cpu else _head_kernel


def choice_kernel(logits: Tensor) -> Callable[..., ExpertRouter] | None:
    """The class that chooses experts by logits like these in one call; None: plain torch does."""
    native = _native_for(logits)
    return None if native is None else native.ExpertRouter


def _native_for(x: Tensor) -> Any:
    """The module `ops_cpu`, or None."""
    return _native if _native is not None and x.is_cpu and x.dtype in _NATIVE_DTYPES else None


def _state_kernels_for(x: Tensor) -> Any:
    """The module that advances states by inputs like these; None: plain torch does."""
    if x.is_cpu:
        return _native_for(x)
    from baton.layers.kernels import recurrent

    return recurrent


def set_threads(n: int) -> None:
    """Compute threads of this process, in torch and in the native kernels."""
    torch.set_num_threads(n)
    if _native is not None:
        _native.set_threads(n)


def pack_weight(weight: Matrix) -> Matrix:
    """The weight re-ordered for the native kernels: as large, independent of it. Without them
    `weight`.

    A packed weight is returned as it is.

    A packed product gives a row the same bits alone and in any batch.
    """
    if not isinstance(weight, Tensor) or (native := _native_for(weight)) is None:
        return weight
    packed: PackedWeight = native.PackedWeight(weight)
    return packed


def pack_heads(weights: HeadMatrices) -> HeadMatrices:
    """The same for weights of heads [heads, N, K]."""
    if not isinstance(weights, Tensor) or (native := _native_for(weights)) is None:
        return weights
    packed: PackedHeads = native.PackedHeads(weights)
    return packed


def pack_experts(
    gate_up: list[Matrix],
    down: list[Matrix],
    first_expert: int,
    *,
    form: ExpertForm = PLAIN_EXPERTS,
    gate_up_biases: Sequence[Tensor] = (),
    down_biases: Sequence[Tensor] = (),
) -> ExpertKernel | None:
    """One kernel for the experts of a layer; None: `pass_experts` computes them.

    On the CPU it takes matrices that `pack_weight` has packed, or that stay quantized, and shares
    their memory. On a GPU it has copies of them, side by side, and both lists are emptied.

    Args:
        gate_up: [2 * inner, hidden] of each expert: gate rows, then up rows.
        down: [hidden, inner] of each.
        first_expert: number of the first one.
        gate_up_biases, down_biases: of each expert, in the compute dtype, or none.
    Raises:
        ConfigError: experts on a GPU are quantized in different forms.
    """
    kernel: ExpertKernel
    matrices = gate_up + down
    if _native is not None and all(isinstance(each, _native.NativeMatrix) for each in matrices):
        kernel = _native.ExpertWeights(
            gate_up,
            down,
            first_expert,
            form=form,
            gate_up_biases=gate_up_biases,
            down_biases=down_biases,
        )
        return kernel
    if any(isinstance(each, Tensor) and each.is_cpu for each in matrices):
        return None
    from baton.layers.kernels.coded import CodedMatrix
    from baton.layers.kernels.experts import StackedExperts

    del matrices
    # One list after the other, so that a copy exists of one at a time.
    stacked_gate_up = CodedMatrix.stack(cast("list[Tensor | CodedMatrix]", gate_up))
    gate_up.clear()
    stacked_down = CodedMatrix.stack(cast("list[Tensor | CodedMatrix]", down))
    down.clear()
    kernel = StackedExperts(
        stacked_gate_up,
        stacked_down,
        first_expert,
        form=form,
        gate_up_biases=torch.stack(list(gate_up_biases)) if gate_up_biases else None,
        down_biases=torch.stack(list(down_biases)) if down_biases else None,
    )
    return kernel


def quantized_kernel(
    dtype: torch.dtype, device: torch.device
) -> Callable[..., QuantizedMatrix | None] | None:
    """A function that makes weights which stay quantized in memory, for products in `dtype`, and
    returns None for an order of groups that it does not take.

    None: there is no kernel, and weights must be dequantized.
    """
    if device.type != "cpu":
        from baton.layers.kernels.coded import CodedMatrix

        return functools.partial(CodedMatrix.make, dtype=dtype, device=device)
    if _native is None or dtype not in _NATIVE_DTYPES:
        return None
    return functools.partial(_native.QuantizedWeight, dtype=dtype)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N] in x's dtype."""
    if not isinstance(weight, Tensor):
        return weight.multiply(x, bias)
    return functional.linear(x, weight, bias)


def linear_by_head(x: Tensor, weights: HeadMatrices, out: Tensor) -> None:
    """Multiply each head of x [T, heads, K] by the transpose of its weight of [heads, N, K].

    Args: x, out [T, heads, N]: views with any strides but of the last dimension.
    """
    if not isinstance(weights, Tensor):
        weights.multiply(x, out)
        return
    out.copy_(torch.einsum("thk,hnk->thn", x, weights))


def pass_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    held: range,
    pass_expert: Callable[[int, Tensor], Tensor],
    weighs_inputs: bool = False,
) -> Tensor:
    """Weighted sums of the results of each token's experts: [T, hidden] in x's type.

    A result is rounded to x's type; the sum is taken in float32, in the order of the slots.

    Args:
        x: [T, hidden].
        experts: int64 [T, slots].
        weights: [T, slots].
        held: numbers of the experts that are here; others add nothing.
        pass_expert: results [n, hidden] of the expert at a place of `held`, for rows [n, hidden].
        weighs_inputs: a weight multiplies what enters an expert, and not its result.
    """
    slots = experts.shape[1]
    by_expert = experts.flatten().argsort(stable=True)
    rows = x[by_expert // slots]
    if weighs_inputs:
        rows = rows * weights.flatten()[by_expert, None].to(x.dtype)
    results = torch.zeros_like(rows)
    first = 0
    for number, count in enumerate(experts.flatten().bincount().tolist()):
        chosen = slice(first, first + count)
        first += count
        # The matrices of an expert that no token chose are not read; another rank adds the results
        # of experts that it has.
        if count and number in held:
            results[chosen] = pass_expert(number - held.start, rows[chosen])
    in_order = torch.empty_like(results)
    in_order[by_expert] = results
    by_slot = in_order.view(*experts.shape, -1)
    total = torch.zeros(x.shape, device=x.device)
    for slot in range(slots):
        result = by_slot[:, slot].float()
        total += result if weighs_inputs else result * weights[:, slot, None].float()
    return total.to(x.dtype)


def embed_tokens(weight: Matrix, ids: Tensor) -> Tensor:
    """Rows ids (int64 [T]) of weight [N, K]: a new [T, K]."""
    if isinstance(weight, Tensor):
        return weight[ids]
    # An embedding is never quantized, and only the CPU packs it.
    return cast("NativeMatrix", weight).gather_rows(ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, times weight [N]. Any leading shape; a new tensor in x's
    dtype.

    The mean is taken in float32 and the quotient rounded to x's dtype before the product, as
    transformers' classes do that keep the weight in that type. The product with a float32 weight is
    rounded once, as others of them do; CPUs alone have a kernel for it.
    """
    is_rounded_once = weight.dtype != x.dtype
    if (x.is_cpu or not is_rounded_once) and (fast := _kernels_for(x)):
        return fast.rms_norm(x, weight, eps)
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * unit).to(x.dtype) if is_rounded_once else weight * unit.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x, residual [T, N]; either input may be
    overwritten."""
    if (x.is_cpu or weight.dtype == x.dtype) and (fast := _kernels_for(x)):
        return fast.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / deviation over the last dimension, times weight [N], plus bias [N]."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    is_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hk, D] by their positions, in place, and return them.

    Args:
        q, k: may be views into one fused projection: strides of dimensions 0 and 1 are free.
        positions: int64 [T], each below len(cos).
        cos, sin: float32 [C, D/2] tables (`models.blocks.rope`).
        is_interleaved: dimension 2i turns with 2i + 1; else i with i + D/2, the layout of most HF
        checkpoints. CPUs alone have a kernel for it, and for sizes that flashinfer lacks.
    """
    if is_interleaved:
        if native := _native_for(q):
            turned: tuple[Tensor, Tensor] = native.apply_rope(
                q, k, positions, cos, sin, is_interleaved=True
            )
            return turned
    elif (q.is_cpu or q.shape[-1] in HEAD_DIMS) and (fast := _kernels_for(q)):
        return fast.apply_rope(q, k, positions, cos, sin)
    c = cos[positions].unsqueeze(1)
    s = sin[positions].unsqueeze(1)
    for x in (q, k):
        wide = x.float()
        if is_interleaved:
            first = wide[..., ::2]
            second = wide[..., 1::2]
        else:
            first, second = wide.chunk(2, dim=-1)
        turned_pairs = (first * c - second * s, second * c + first * s)
        if is_interleaved:
            x.copy_(torch.stack(turned_pairs, dim=-1).flatten(-2))
        else:
            x.copy_(torch.cat(turned_pairs, dim=-1))
    return q, k


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2N] = [gate | up]: a new [T, N]."""
    if fast := _kernels_for(gate_up):
        return fast.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up in its tanh form, for gate_up [T, 2N] = [gate | up]: a new [T, N]. CPUs alone
    have a kernel for it."""
    if native := _native_for(gate_up):
        product: Tensor = native.gelu_mul(gate_up)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) for x [T, N]. On CPUs a row has the same bits in any batch: torch's own
    function rounds the last elements of a tensor in another way than those before them."""
    if native := _native_for(x):
        values: Tensor = native.sigmoid(x)
        return values
    return x.sigmoid()


def clamped_silu_mul(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    """gate * sigmoid(gain * gate) * (up + 1) for gate_up [T, 2N] = [gate | up]: a new [T, N]. The
    gate is at most `limit`, up at most as far from 0. CPUs alone have a kernel for it."""
    if native := _native_for(gate_up):
        product: Tensor = native.clamped_silu_mul(gate_up, gain, limit)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * (gate * gain).sigmoid() * (up.clamp(-limit, limit) + 1)


def copy_states(
    states: Tensor, pages: Tensor, copies: StateCopies, part: range, *, to_pages: bool
) -> None:
    """Copy bytes of slots to their pages, or back.

    Args:
        states: uint8 [slots, slot_bytes].
        pages: uint8 [pages of the pool, bytes of a page], rows contiguous.
        part: bytes of each slot that are copied.
    """
    if not states.is_cpu:
        from baton.layers.kernels import recurrent

        recurrent.copy_states(states, pages, copies, part, to_pages=to_pages)
        return
    size = pages.shape[1]
    places = range(part.start // size, -(-part.stop // size))
    for slot, own_pages in zip(copies.slots.tolist(), copies.pages.tolist(), strict=True):
        for place in places:
            first = place * size
            inside = range(max(part.start, first), min(part.stop, first + size))
            state = states[slot, inside.start : inside.stop]
            copy = pages[own_pages[place], inside.start - first : inside.stop - first]
            target, source = (copy, state) if to_pages else (state, copy)
            target.copy_(source)


def causal_conv(x: Tensor, weight: Tensor, *, state: Tensor, rows: StateRows, out: Tensor) -> None:
    """Write silu(sum of the last inputs times their weights) for x [T, C], each channel by itself.
    The states of the rows become their last inputs.

    Args:
        weight: float32 [taps, C]; the last row is that of the newest input.
        state: [slots, taps - 1, C].
        out: [T, C], of which the tokens of the rows are written.
    """
    if kernels := _state_kernels_for(x):
        kernels.causal_conv(x, weight, state=state, rows=rows, out=out)
        return
    for start, end, slot in rows.in_order():
        inputs = torch.cat((state[slot], x[start:end]))
        count = end - start
        products = [inputs[i : i + count].float() * weight[i] for i in range(len(weight))]
        out[start:end] = functional.silu(sum(products, torch.zeros(())).to(x.dtype))
        state[slot] = inputs[count:]


_LENGTH_EPS = 1e-6
"""Added to the square of a key's length before the root."""


def gated_delta(
    qkv: Tensor,
    strengths: Tensor,
    decays: Tensor,
    *,
    rate: Tensor,
    bias: Tensor,
    sizes: DeltaSpec,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
) -> None:
    """Write the results of the gated delta rule (arXiv 2412.06464), token after token.

    Args:
        qkv: [T, channels], queries and keys of key heads, then values.
        strengths: [T, value_heads], of corrections, in rows.
        decays: [T, value_heads * n], in rows: a head's matrix decays as a whole (n = 1), or each
        of its rows by itself (n = key_dim; Kimi delta attention, arXiv 2510.26692).
        rate: float32 [value_heads], of decays; logarithms.
        bias: float32 [value_heads * n], of decays.
        state: float32 [slots, value_heads, key_dim, value_dim], written in place.
        out: [T, value_heads * value_dim] in the type of qkv, of which the tokens of the rows are
            written.
    """
    if kernels := _state_kernels_for(qkv):
        kernels.gated_delta(
            qkv,
            strengths,
            decays,
            rate=rate,
            bias=bias,
            sizes=sizes,
            state=state,
            rows=rows,
            out=out,
        )
        return
    parts = (sizes.key_size, sizes.key_size, sizes.value_size)
    query, key, value = qkv.float().split(parts, dim=1)
    value = value.unflatten(1, (sizes.value_heads, sizes.value_dim))

    def set_length_to_one(x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(1, (sizes.key_heads, sizes.key_dim))
        unit = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _LENGTH_EPS)
        return unit.repeat_interleave(sizes.value_heads // sizes.key_heads, dim=1)

    query = set_length_to_one(query) * sizes.key_dim**-0.5
    key = set_length_to_one(key)
    strength = strengths.sigmoid().float()[..., None]
    steps = functional.softplus(decays.float() + bias).unflatten(1, (sizes.value_heads, -1))
    decay = (-rate.exp()[:, None] * steps).exp()[..., None]
    for start, end, slot in rows.in_order():
        matrix = state[slot]
        for token in range(start, end):
            k = key[token][..., None]
            matrix *= decay[token]
            correction = (value[token] - (matrix * k).sum(1)) * strength[token]
            matrix += k * correction[:, None]
            out[token] = (matrix * query[token][..., None]).sum(1).flatten()
