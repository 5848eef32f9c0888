"""The functions of `baton.layers.ops` by flashinfer's kernels: same names, float16 or bfloat16 on a
CUDA device.

One launch each where plain torch takes three to eight, and every one can be part of a CUDA graph:
no call waits for the device or allocates outside torch. Numbers differ from plain torch's in the
last bit only: the quotient of a norm is not rounded before its product with the weight, and silu
uses the fast exponential.

What the kernels take (flashinfer 0.6.8 to 0.6.18, csrc/norm.cu, csrc/rope.cu,
flashinfer/activation.cuh):

* norms: the last dimension contiguous, others with any strides; reading 16 bytes at once wants
sizes and strides that
  are multiples of 8 values;
* rotation: dimension i turns with i + D/2 (`is_neox`), in float32, rounded once, like ours; one
float32 table
  [positions, D] whose rows are [cos | sin], and positions as int64. Heads of 64, 128 or 256
  (others: another kernel);
* activation: contiguous rows [gate | up].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.layers import flashinfer_loader
from baton.layers.spec import KernelShapes

HEAD_DIMS = (64, 128, 256)
_AT_ONCE = 8
"""Values that one thread reads: 16 bytes."""


def find_obstacle(shapes: KernelShapes) -> str | None:
    """Reason that keeps these kernels from computing this model here, as the middle of a sentence;
    None: nothing."""
    if shapes.dtype not in ("float16", "bfloat16"):
        return f"they compute in float16 or bfloat16, the model in {shapes.dtype}"
    if shapes.heads is not None and shapes.heads.head_dim not in HEAD_DIMS:
        return f"they take heads of {', '.join(map(str, HEAD_DIMS))}, the model's have {shapes.heads.head_dim}"
    sizes = {"hidden_size": shapes.hidden_size} | shapes.inner_sizes
    if shapes.state is not None:
        sizes["linear_value_head_dim"] = shapes.state.value_dim
    for name, size in sizes.items():
        if size % _AT_ONCE:
            return f"they take multiples of {_AT_ONCE}, the model's {name} on one rank is {size}"
    return flashinfer_loader.find_obstacle()


def try_out(shapes: KernelShapes, device: torch.device) -> FlashInferOps:
    """The kernels, each run once: that compiles them. Raises what that raises, RuntimeError
    mostly."""
    kernels = FlashInferOps(flashinfer_loader.load_flashinfer())
    dtype = getattr(torch, shapes.dtype)
    x = torch.zeros(2, shapes.hidden_size, dtype=dtype, device=device)
    kernels.add_rms_norm(kernels.rms_norm(x, x[0], 1e-6), x, torch.ones_like(x[0]), 1e-6)
    if shapes.heads is not None:
        heads = torch.zeros(2, 3, shapes.heads.head_dim, dtype=dtype, device=device)
        kernels.rms_norm(heads[:, :2], heads[0, 2], 1e-6)
        table = torch.zeros(1, shapes.heads.head_dim, device=device)
        positions = torch.zeros(2, dtype=torch.int64, device=device)
        kernels.apply_rope(heads[:, :2], heads[:, 2:], positions, *table.chunk(2, dim=1))
    for size in shapes.inner_sizes.values():
        kernels.silu_mul(torch.zeros(2, 2 * size, dtype=dtype, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises the error of a failed launch
    return kernels


class FlashInferOps:
    """Args: `library`: the flashinfer module. Nothing else here knows CUDA."""

    def __init__(self, library: Any) -> None:
        self._rmsnorm = library.rmsnorm
        self._fused_add_rmsnorm = library.fused_add_rmsnorm
        self._rope = library.apply_rope_with_cos_sin_cache_inplace
        self._silu_and_mul = library.silu_and_mul

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, N], or [T, H, N] with any strides of T and H."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._rmsnorm(x, weight, eps, out=out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Overwrites both: x becomes the norm, residual the sum."""
        self._fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    def apply_rope(
        self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`cos` and `sin` must be the two halves of one table, as `models.blocks.rope` makes
        them."""
        self._rope(positions, q, k, q.shape[-1], _join_tables(cos, sin), is_neox=True)
        return q, k

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        product: Tensor = self._silu_and_mul(gate_up)
        return product


def _join_tables(cos: Tensor, sin: Tensor) -> Tensor:
    """The table [C, 2n] of which these are the left and the right half [C, n]. Raises ValueError
    when they are not."""
    rows, half = cos.shape
    strides = (2 * half, 1)
    if (
        cos.stride() != strides
        or sin.stride() != strides
        or sin.data_ptr() != cos[:, -1:].data_ptr() + 4
    ):
        raise ValueError(
            f"cos and sin with strides {cos.stride()} and {sin.stride()} are not halves of one table"
        )
    return cos.as_strided((rows, 2 * half), strides)
