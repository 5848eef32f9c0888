"""The functions of `baton.layers.ops` by the native CPU kernels: same names and signatures, f32 or
bf16 on the CPU.

Shapes and layout are checked here and nowhere below: the kernels take addresses. Each call computes
without the GIL.

`PackedWeight` is a matrix re-ordered once at load; its product has the same bits for any number of
rows, so a prompt's chunks, single tokens and batches agree exactly.

Importing this module raises ImportError when the native module is absent or older than this file,
and ConfigError when BATON_CPU_ISA names no instruction level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from baton._native import ExpertRouter as _NativeRouter
from baton._native import ExpertWeights as _NativeExperts
from baton._native import PackedHeads as _NativeHeads
from baton._native import PackedWeight as _NativeWeight
from baton._native import QuantizedWeight as _NativeQuantized
from baton._native import causal_conv as _causal_conv
from baton._native import cpu_isa as _cpu_isa
from baton._native import gated_delta as _gated_delta
from baton._native import multiply_clamped as _multiply_clamped
from baton._native import multiply_gated as _multiply_gated
from baton._native import rms_norm as _rms_norm
from baton._native import rope as _rope
from baton._native import set_threads as set_threads
from baton._native import sigmoid as _sigmoid
from baton.errors import ConfigError
from baton.layers.spec import PLAIN_EXPERTS, ExpertForm

if TYPE_CHECKING:
    from baton.layers.recurrent_state import StateRows
    from baton.layers.spec import DeltaSpec

_BF16 = torch.bfloat16


try:
    ISA = _cpu_isa()
    """The instruction level in use: scalar, avx2, avx512 or avx512_bf16."""
except ValueError as err:
    raise ConfigError(str(err)) from err


class NativeMatrix:
    """A weight [outputs, inputs] in the kernels' order.

    Reading rows back costs some 32 times a plain row: good for the few tokens of a step (an embedding that is also the
    output head), not for whole matrices.
    """

    __slots__ = ("_native", "dtype", "shape")

    def __init__(self, native: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Args: `dtype`: of inputs, outputs and rows."""
        self._native = native
        self.shape = shape
        self.dtype = dtype

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] times the transpose, plus bias [outputs]: a new [T, outputs] in the
        weight's type."""
        outputs, inputs = self.shape
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != inputs or x.stride(1) != 1:
            expected_layout = f"{self.dtype} [T, {inputs}] with contiguous rows"
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}, not {expected_layout}"
            )
        bias_at = 0 if bias is None else checked_address("bias", bias, self.dtype, (outputs,))
        rows = x.shape[0]
        y = x.new_empty((rows, outputs))
        self._native.multiply(x.data_ptr(), x.stride(0), rows, bias_at, y.data_ptr())
        return y

    def gather_rows(self, ids: Tensor) -> Tensor:
        """Rows of the original matrix: [T, inputs] for int64 ids [T]. Raises ValueError for an id
        out of range."""
        out = torch.empty(len(ids), self.shape[1], dtype=self.dtype)
        self._native.rows(
            checked_address("ids", ids, torch.int64, ids.shape[:1]), len(ids), out.data_ptr()
        )
        return out


class PackedWeight(NativeMatrix):
    """Numbers: as large as the tensor it is made from, which it does not keep."""

    __slots__ = ()

    def __init__(self, weight: Tensor) -> None:
        """weight: contiguous [outputs, inputs], float32 or bfloat16, on the CPU. Raises ValueError
        otherwise."""
        has_known_dtype = weight.dtype in (torch.float32, _BF16)
        if (
            not has_known_dtype
            or weight.dim() != 2
            or not weight.is_contiguous()
            or not weight.is_cpu
        ):
            description = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
            raise ValueError(
                f"{description}: a contiguous float32 or bfloat16 matrix on the CPU is needed"
            )
        native = _NativeWeight(weight.dtype == _BF16, *weight.shape, weight.data_ptr())
        super().__init__(native, weight.shape, weight.dtype)


class PackedHeads:
    """Weights of heads [heads, outputs, inputs] in the kernels' order, as large as the tensor they
    are made from."""

    __slots__ = ("_native", "dtype", "shape")

    def __init__(self, weights: Tensor) -> None:
        """weights: contiguous, float32 or bfloat16, on the CPU. Raises ValueError otherwise."""
        if weights.dtype not in (torch.float32, _BF16) or weights.dim() != 3:
            description = f"{weights.dtype} {list(weights.shape)}"
            raise ValueError(f"{description}: float32 or bfloat16 [heads, N, K] is needed")
        self.dtype = weights.dtype
        self.shape = weights.shape
        address = checked_address("weights", weights, self.dtype, self.shape)
        self._native = _NativeHeads(self.dtype == _BF16, *self.shape, address)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write x [T, heads, inputs] times the transposes into out [T, heads, outputs]."""
        heads, outputs, inputs = self.shape
        for name, vectors, size in (("x", x, inputs), ("out", out, outputs)):
            expected = (len(x), heads, size)
            if vectors.dtype != self.dtype or vectors.shape != expected or not vectors.is_cpu:
                description = f"{vectors.dtype} {list(vectors.shape)} on {vectors.device}"
                raise ValueError(
                    f"{name} is {description}, not {self.dtype} {list(expected)} on cpu"
                )
        self._native.multiply(_vector_layout("x", x), _vector_layout("out", out))


class QuantizedWeight(NativeMatrix):
    """Codes of 4 or 8 bits, which stay so in memory.

    Where the columns of a group lie side by side, a product adds (code - zero) * x over them, exact
    before it is multiplied, and multiplies the sum by the scale. Where groups change every few
    columns, it has the bits of a `PackedWeight` of (code - zero) * scale, computed in float32 and
    rounded to `dtype`. `gather_rows` returns such numbers in either case.
    """

    __slots__ = ()

    def __init__(
        self,
        code_type: Literal["int4", "int8", "fp8", "fp4"],
        codes: Tensor,
        *,
        scales: Tensor,
        zeros: Tensor | float,
        column_group: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Keeps none of its arguments.

        Args:
            codes: uint8 [outputs, inputs], a byte each.
            scales: float32 [outputs, groups]; of fp4 powers of two.
            zeros: as scales, or one for all: whole numbers in [0, 256) for integers, 0 for floats.
            column_group: int32 [inputs], in [0, groups).
            dtype: float32 or bfloat16, of the product.
        Raises:
            ValueError: a shape, a type, a group or a zero is another.
        """
        shape = tuple(codes.shape)
        outputs, inputs = shape
        places = (outputs, scales.shape[1])
        zeros_at = 0
        if isinstance(zeros, Tensor):
            zeros_at = checked_address("zeros", zeros, torch.float32, places)
        native = _NativeQuantized(
            dtype == _BF16,
            outputs,
            inputs,
            code_type,
            checked_address("codes", codes, torch.uint8, shape),
            places[1],
            checked_address("scales", scales, torch.float32, places),
            zeros_at,
            0.0 if isinstance(zeros, Tensor) else zeros,
            checked_address("column_group", column_group, torch.int32, (inputs,)),
        )
        super().__init__(native, shape, dtype)

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        size: int = self._native.nbytes
        return size


class ExpertRouter:
    """Chooses experts and their weights by a router's logits. A row's choice depends on that row
    alone; of equal scores the lowest number wins."""

    __slots__ = ("_chosen", "_experts", "_native")

    def __init__(
        self,
        experts: int,
        chosen: int,
        *,
        scoring: str,
        least_sum: float | None,
        factor: float,
        rounds_weights: bool,
        groups: tuple[int, int, bool],
    ) -> None:
        """The rule is that of `models.spec.moe.RouterSpec`.

        Args:
            least_sum: added to the sum by which weights are divided; None: they are not.
            groups: their number, that of the kept ones, and whether the best score ranks a group
                instead of the sum of two.
        Raises:
            ValueError: for scores or numbers that the kernel does not take.
        """
        self._native = _NativeRouter(
            experts, chosen, scoring, least_sum, factor, rounds_weights, groups
        )
        self._experts = experts
        self._chosen = chosen

    def choose(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Experts int64 [T, chosen], the highest ranked first, and their weights float32.

        Args:
            logits: [T, experts].
            bias: float32 [experts], added to the scores for the choice alone.
        """
        rows = logits.contiguous()
        tokens = len(rows)
        bias_at = 0
        if bias is not None:
            bias_at = checked_address("bias", bias, torch.float32, (self._experts,))
        experts = torch.empty(tokens, self._chosen, dtype=torch.int64)
        weights = torch.empty(tokens, self._chosen, dtype=torch.float32)
        self._native.choose(
            rows.dtype == _BF16,
            checked_address("logits", rows, rows.dtype, (tokens, self._experts)),
            tokens,
            bias_at,
            experts.data_ptr(),
            weights.data_ptr(),
        )
        return experts, weights


class ExpertWeights:
    """The routed experts of a layer that this process has, as one kernel passes tokens through
    them."""

    __slots__ = ("_dtype", "_first", "_hidden", "_native", "visited_bytes")

    def __init__(
        self,
        gate_up: list[NativeMatrix],
        down: list[NativeMatrix],
        first_expert: int,
        *,
        form: ExpertForm = PLAIN_EXPERTS,
        gate_up_biases: Sequence[Tensor] = (),
        down_biases: Sequence[Tensor] = (),
    ) -> None:
        """Shares the memory of the matrices, and copies biases.

        Args:
            gate_up: [2 * inner, hidden] of each expert: gate rows, then up rows.
            down: [hidden, inner] of each.
            first_expert: number of the first one.
            gate_up_biases, down_biases: of each expert, in the matrices' dtype, or none.
        Raises:
            ValueError: shapes or types differ.
        """

        def biases(name: str, vectors: Sequence[Tensor], of: NativeMatrix) -> list[tuple[int, int]]:
            size = tuple(of.shape[:1])
            return [(checked_address(name, each, of.dtype, size), each.nbytes) for each in vectors]

        self._native = _NativeExperts(
            [matrix._native for matrix in gate_up],
            [matrix._native for matrix in down],
            None if form.clamped is None else (form.clamped.gain, form.clamped.limit),
            form.weighs_inputs,
            biases("gate_up_biases", gate_up_biases, gate_up[0]),
            biases("down_biases", down_biases, down[0]),
        )
        self._first = first_expert
        self._hidden = down[0].shape[0]
        self._dtype = down[0].dtype
        self.visited_bytes = 0
        """Bytes of weights that all calls have read."""

    def expert_bytes(self, place: int) -> int:
        """Bytes of the matrices of the expert at `place` among the held ones, as they are read."""
        size: int = self._native.expert_bytes(place)
        return size

    def pass_tokens(self, x: Tensor, experts: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Weighted sums of the chosen experts' results: a new [T, hidden] in x's type. Experts that
        are not held add nothing.

        Args:
            x: [T, hidden].
            experts: int64 [T, slots].
            weights: [T, slots].
            counts: int64 [experts of all ranks], to which the choices are added.
        Raises:
            ValueError: a choice is no expert.
        """
        tokens, slots = experts.shape
        if x.dtype != self._dtype or x.shape != (tokens, self._hidden) or x.stride(1) != 1:
            needed = f"{self._dtype} [{tokens}, {self._hidden}] with contiguous rows"
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}, not {needed}"
            )
        y = x.new_empty(x.shape)
        # Weights in x's type are rounded already: no float32 changes their value.
        wide = weights.float().contiguous()
        chosen = experts.contiguous()
        self.visited_bytes += self._native.pass_tokens(
            self._first,
            tokens,
            slots,
            x.data_ptr(),
            x.stride(0),
            checked_address("experts", chosen, torch.int64, (tokens, slots)),
            checked_address("weights", wide, torch.float32, (tokens, slots)),
            len(counts),
            checked_address("counts", counts, torch.int64, (len(counts),)),
            y.data_ptr(),
        )
        return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Leading dimensions: one or two, with any strides."""
    weight_at, is_f32 = _norm_weight(x, weight)
    out = x.new_empty(x.shape)
    _rms_norm(x.dtype == _BF16, _vector_layout("x", x), 0, weight_at, is_f32, eps, out.data_ptr())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Overwrites both: x becomes the norm, residual the sum."""
    weight_at, is_f32 = _norm_weight(x, weight)
    x_at = checked_address("x", x, x.dtype, x.shape)
    residual_at = checked_address("residual", residual, x.dtype, x.shape)
    layout = _vector_layout("x", x)
    _rms_norm(x.dtype == _BF16, layout, residual_at, weight_at, is_f32, eps, x_at)
    return x, residual


def _norm_weight(x: Tensor, weight: Tensor) -> tuple[int, bool]:
    """Where the weight of a norm of x begins, and whether it is float32 instead of x's type."""
    is_f32 = weight.dtype is torch.float32
    dtype = torch.float32 if is_f32 else x.dtype
    return checked_address("weight", weight, dtype, x.shape[-1:]), is_f32


def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    is_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Raises ValueError when a position has no row in the tables."""
    positions_at = checked_address("positions", positions, torch.int64, q.shape[:1])
    table = (len(cos), q.shape[-1] // 2)
    cos_at = checked_address("cos", cos, torch.float32, table)
    sin_at = checked_address("sin", sin, torch.float32, table)
    if k.dtype != q.dtype or k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"q is {q.dtype} {list(q.shape)} but k is {k.dtype} {list(k.shape)}")
    _rope(
        q.dtype == _BF16,
        is_interleaved,
        _vector_layout("q", q),
        _vector_layout("k", k),
        positions_at,
        cos_at,
        sin_at,
        len(cos),
    )
    return q, k


def silu_mul(gate_up: Tensor) -> Tensor:
    return _gated_product(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _gated_product(gate_up, gelu=True)


def sigmoid(x: Tensor) -> Tensor:
    rows = x.contiguous()
    out = torch.empty_like(rows)
    _sigmoid(x.dtype == _BF16, rows.data_ptr(), *rows.shape, out.data_ptr())
    return out


def clamped_silu_mul(gate_up: Tensor, gain: float, limit: float) -> Tensor:
    out = _gated_output(gate_up)
    layout = (gate_up.data_ptr(), gate_up.stride(0), *out.shape, out.data_ptr())
    _multiply_clamped(gate_up.dtype == _BF16, gain, limit, *layout)
    return out


def causal_conv(x: Tensor, weight: Tensor, *, state: Tensor, rows: StateRows, out: Tensor) -> None:
    taps, channels = weight.shape
    tokens = len(x)
    _causal_conv(
        x.dtype == _BF16,
        taps,
        channels,
        *_rows_at("x", x, x.dtype, (tokens, channels)),
        checked_address("weight", weight, torch.float32, (taps, channels)),
        *_state_layout(state, x.dtype, (taps - 1, channels)),
        _rows_layout(rows, tokens, len(state)),
        checked_address("out", out, x.dtype, (tokens, channels)),
    )


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
    tokens = len(qkv)
    heads = sizes.value_heads
    num_decays = bias.numel() // heads
    if num_decays not in (1, sizes.key_dim):
        raise ValueError(f"a head has {num_decays} decays, not 1 or {sizes.key_dim}")
    _gated_delta(
        qkv.dtype == _BF16,
        (sizes.key_heads, heads, sizes.key_dim, sizes.value_dim, num_decays),
        checked_address("qkv", qkv, qkv.dtype, (tokens, sizes.channels)),
        _rows_at("strengths", strengths, qkv.dtype, (tokens, heads)),
        _rows_at("decays", decays, qkv.dtype, (tokens, heads * num_decays)),
        checked_address("rate", rate, torch.float32, (heads,)),
        checked_address("bias", bias, torch.float32, (heads * num_decays,)),
        *_state_layout(state, torch.float32, sizes.matrix_shape),
        _rows_layout(rows, tokens, len(state)),
        checked_address("out", out, qkv.dtype, (tokens, sizes.value_size)),
    )


def _rows_at(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> tuple[int, int]:
    """Where contiguous rows begin, and the elements from one to the next. Raises ValueError for
    another type or layout."""
    if x.dtype != dtype or x.shape != shape or x.stride(1) != 1 or not x.is_cpu:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}, not "
            f"{dtype} {list(shape)} in rows on cpu"
        )
    return x.data_ptr(), x.stride(0)


def _state_layout(state: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """Where states [slots, *shape] begin, and the elements from one to the next."""
    return checked_address("state", state[0], dtype, shape), state.stride(0)


def _rows_layout(rows: StateRows, tokens: int, slots: int) -> tuple[int, int, int, int, int, int]:
    count = len(rows.slots)
    return (
        checked_address("starts", rows.starts, torch.int32, (count,)),
        checked_address("ends", rows.ends, torch.int32, (count,)),
        checked_address("slots", rows.slots, torch.int32, (count,)),
        count,
        tokens,
        slots,
    )


def _gated_product(gate_up: Tensor, *, gelu: bool) -> Tensor:
    out = _gated_output(gate_up)
    layout = (gate_up.data_ptr(), gate_up.stride(0), *out.shape, out.data_ptr())
    _multiply_gated(gate_up.dtype == _BF16, gelu, *layout)
    return out


def _gated_output(gate_up: Tensor) -> Tensor:
    """Where the product of gate_up's halves goes."""
    rows, both = gate_up.shape
    if gate_up.stride(1) != 1 or both % 2:
        raise ValueError(
            f"gate_up is {list(gate_up.shape)} with strides {gate_up.stride()}, not [T, 2N] in rows"
        )
    return gate_up.new_empty((rows, both // 2))


def _vector_layout(name: str, x: Tensor) -> tuple[int, int, int, int, int, int]:
    """x [A, n] or [A, B, n] as (address, A, B, strides of A and B, n)."""
    shape = x.shape
    strides = x.stride()
    if strides[-1] == 1 or shape[-1] == 1:
        if len(shape) == 3:
            return x.data_ptr(), shape[0], shape[1], strides[0], strides[1], shape[2]
        if len(shape) == 2:
            return x.data_ptr(), shape[0], 1, strides[0], 0, shape[1]
    raise ValueError(
        f"{name} is {list(shape)} with strides {strides}: 2 or 3 dimensions, the last contiguous, are needed"
    )


def checked_address(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Where x begins. Raises ValueError unless it is contiguous, on the CPU, and of this type and
    shape."""
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        description = f"{x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
        raise ValueError(f"{name} is {description}, not a contiguous {dtype} {list(shape)} on cpu")
    return x.data_ptr()
