"""flashinfer's paged wrappers as far as the backend uses them, on any device: strict about arguments, naive inside.

It states what we believe the library to take (argument names and order, dtypes, strides, what plan fixes), so that the
backend's calls are checked where there is no GPU. Whether the belief is right only a GPU can say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
record_kernel: Callable[[Callable[[], None]], None] | None = None
"""Set while work is recorded (tests.support.devices.tape): takes what a kernel does, for now and for each replay."""


class _Paged:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.is_contiguous()
        assert (kv_layout, backend) == ("NHD", "fa2")
        self.device = float_workspace_buffer.device
        self.workspace_bytes = float_workspace_buffer.numel()
        self.plans = 0
        self.planned: dict[str, Any] | None = None

    def _keep(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        causal: bool,
        **fixed: Any,
    ) -> None:
        rows = len(last_page_len)
        for x in (qo_indptr, indptr, indices, last_page_len):
            assert x.dtype == torch.int32
            assert x.is_contiguous()
        assert rows >= 1
        assert indptr.shape == qo_indptr.shape == (rows + 1,)
        assert indptr[0] == qo_indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert last_page_len.min() >= 1
        assert last_page_len.max() <= fixed["page_size"]
        assert fixed["num_qo_heads"] % fixed["num_kv_heads"] == 0
        assert fixed["head_dim"] in HEAD_DIMS
        assert fixed["q_data_type"] in HALF
        assert fixed["kv_data_type"] in (fixed["q_data_type"], torch.float8_e4m3fn)
        assert fixed["window_left"] >= -1
        # Copies: the caller may use its arrays again as soon as plan has returned.
        self.arrays = [x.clone().tolist() for x in (qo_indptr, indptr, indices, last_page_len)]
        self.planned = fixed | {"causal": causal}
        self.plans += 1

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor,
        lse: Tensor | None = None, return_lse: bool = False,
        k_scale: float | None = None, v_scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        assert record_kernel is None, (
            "recorded, this wrapper would read arrays that the next plan replaces"
        )
        assert return_lse == (lse is not None)
        self._kernel(q, paged_kv_cache, (out, lse), (k_scale, v_scale), *self.arrays)
        return out

    def _kernel(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor | None],
        scales: tuple[float | None, float | None],
        qo_indptr: list[int], indptr: list[int], indices: list[int], last_page_len: list[int],
    ) -> None:  # fmt: skip
        assert self.planned is not None, "run before plan"
        fixed = self.planned
        keys, values = paged_kv_cache
        out, lse = results
        if lse is not None:
            assert lse.dtype == torch.float32
            assert lse.shape == out.shape[:2]
        shape = (fixed["page_size"], fixed["num_kv_heads"], fixed["head_dim"])
        assert keys.shape == values.shape
        assert keys.shape[1:] == shape
        assert keys.stride() == values.stride()
        assert keys.dtype == values.dtype == fixed["kv_data_type"]
        assert q.shape == out.shape == (qo_indptr[-1], fixed["num_qo_heads"], fixed["head_dim"])
        assert q.dtype == out.dtype == fixed["q_data_type"]
        assert q.stride(-1) == keys.stride(-1) == out.stride(-1) == 1
        assert q.device == keys.device == out.device == self.device
        has_codes = keys.dtype == torch.float8_e4m3fn
        assert all((scale is not None) == has_codes for scale in scales)
        k_scale, v_scale = (1.0 if scale is None else scale for scale in scales)
        for r, fill in enumerate(last_page_len):
            pages = indices[indptr[r] : indptr[r + 1]]
            kv_len = (len(pages) - 1) * fixed["page_size"] + fill
            k, v = (x[pages].flatten(0, 1)[:kv_len].float() for x in (keys, values))
            rows = slice(qo_indptr[r], qo_indptr[r + 1])
            results_of_row, sums = self._attend(q[rows].float(), k * k_scale, v)
            out[rows] = results_of_row.to(out.dtype) * v_scale
            if lse is not None:
                lse[rows] = sums

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Results, and base-2 logarithms of the sums of exp(score)."""
        assert self.planned is not None
        fixed = self.planned
        group = fixed["num_qo_heads"] // fixed["num_kv_heads"]
        logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * fixed["sm_scale"]
        if cap := fixed["logits_soft_cap"]:
            logits = cap * torch.tanh(logits / cap)
        query = torch.arange(len(k) - len(q), len(k))[:, None]
        key = torch.arange(len(k))[None, :]
        hidden = key > query if fixed["causal"] else torch.zeros(len(q), len(k), dtype=torch.bool)
        if fixed["window_left"] >= 0:
            hidden = hidden | (key < query - fixed["window_left"])
        logits = logits.masked_fill(hidden, -torch.inf)
        heads = v.repeat_interleave(group, 1)
        results = torch.einsum("hqk,khd->qhd", logits.softmax(-1), heads)
        return results, logits.logsumexp(-1).T / math.log(2)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """In CUDA-graph mode a kernel reads the index arrays from the buffers and the division of work, for which the rows'
    lengths stand here, from the integer workspace, when it runs: what was planned for other rows is noticed."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None, *,
        backend: str,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.use_tensor_cores = use_tensor_cores
        self.buffers: tuple[Tensor, Tensor, Tensor] | None = None
        self.lengths = torch.zeros(4096, dtype=torch.int32)
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            assert all(x.dtype == torch.int32 and x.is_contiguous() for x in self.buffers)
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.lengths = int_workspace_buffer.view(torch.int32)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, window_left: int, logits_soft_cap: float, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 4, 8)
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(
            one_each, indptr, indices, last_page_len, causal=False, num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        if self.buffers is not None:
            assert len(last_page_len) == len(self.buffers[2]), "the batch size is fixed"
            for buffer, given in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(given)].copy_(given)
            self._divide(indptr, last_page_len)

    def _divide(self, indptr: Tensor, last_page_len: Tensor) -> None:
        assert self.planned is not None
        lengths = (indptr.diff() - 1) * self.planned["page_size"] + last_page_len
        self.lengths[: len(lengths)] = lengths

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor,
        lse: Tensor | None = None, return_lse: bool = False,
        k_scale: float | None = None, v_scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        assert return_lse == (lse is not None)
        if self.buffers is None:
            return super().run(
                q, paged_kv_cache, out=out, lse=lse, return_lse=return_lse, k_scale=k_scale,
                v_scale=v_scale,
            )  # fmt: skip

        def kernel() -> None:
            assert self.buffers is not None
            assert self.planned is not None
            indptr, indices, last_page_len = (x.tolist() for x in self.buffers)
            fills = (indptr[i + 1] - indptr[i] - 1 for i in range(len(last_page_len)))
            lengths = [
                n * self.planned["page_size"] + fill
                for n, fill in zip(fills, last_page_len, strict=True)
            ]
            assert self.lengths[: len(lengths)].tolist() == lengths, "planned for other rows"
            one_each = list(range(len(indptr)))
            scales = (k_scale, v_scale)
            rows = (one_each, indptr, indices, last_page_len)
            self._kernel(q, paged_kv_cache, (out, lse), scales, *rows)

        kernel() if record_kernel is None else record_kernel(kernel)
        return out


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", *,
    window_left: int, logits_soft_cap: float, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
) -> None:  # fmt: skip
    assert self.buffers is not None
    assert self.planned is not None, "it takes the kernels that plan has chosen"
    assert len(last_page_len) == len(self.buffers[2]), "the batch size is fixed"
    assert len(indices) <= len(self.buffers[1])
    assert all(x.device.type == "cpu" for x in (indptr, last_page_len)), (
        "it would wait for the device"
    )
    given = {
        "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size,
        "window_left": window_left, "logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale,
        "q_data_type": q_data_type, "kv_data_type": kv_data_type, "causal": False,
    }  # fmt: skip
    assert given == self.planned
    self._divide(indptr, last_page_len)


class BatchMLAPagedAttentionWrapper:
    """A recorded launch reads page indices where they lay when it was recorded, and the division of
    work, for which the rows' lengths stand here, as it was planned last."""

    def __init__(self, float_workspace_buffer: Tensor, *, backend: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert backend == "fa2"
        self.plans = 0
        self.fixed: tuple[Any, ...] = ()
        self.division: list[list[int]] = []

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        rows = len(kv_len_arr)
        for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert x.dtype == torch.int32
            assert x.is_contiguous()
        assert rows >= 1
        assert kv_indptr.shape == qo_indptr.shape == (rows + 1,)
        assert kv_indptr[0] == qo_indptr[0] == 0
        assert kv_indptr[-1] <= len(kv_indices)
        pages = kv_indptr.diff()
        assert ((pages - 1) * page_size < kv_len_arr).all()
        assert (kv_len_arr <= pages * page_size).all()
        assert q_data_type == kv_data_type
        assert q_data_type in HALF
        assert causal
        self.fixed = (num_heads, head_dim_ckv, head_dim_kpe, page_size, sm_scale, q_data_type)
        self.there = kv_indices
        # Copies: the caller may use its arrays again as soon as plan has returned.
        self.copied = kv_indices.clone()
        self.division = [x.clone().tolist() for x in (qo_indptr, kv_indptr, kv_len_arr)]
        self.plans += 1

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, out: Tensor
    ) -> Tensor:
        heads, latent_dim, key_dim, page_size, scale, dtype = self.fixed
        indices = self.copied if record_kernel is None else self.there
        assert ckv_cache.shape[1:] == (page_size, latent_dim)
        assert kpe_cache.shape[1:] == (page_size, key_dim)
        assert q_nope.shape == out.shape == (len(q_pe), heads, latent_dim)
        assert q_pe.shape == (len(q_nope), heads, key_dim)
        for x in (q_nope, q_pe, ckv_cache, kpe_cache, out):
            assert x.dtype == dtype
            assert x.stride(-1) == 1

        def kernel() -> None:
            qo_indptr, kv_indptr, kv_lens = self.division
            assert qo_indptr[-1] == len(q_nope), "planned for other rows"
            for r, kv_len in enumerate(kv_lens):
                pages = indices[kv_indptr[r] : kv_indptr[r + 1]].tolist()
                latents, keys = (
                    x[pages].flatten(0, 1)[:kv_len].float() for x in (ckv_cache, kpe_cache)
                )
                rows = slice(qo_indptr[r], qo_indptr[r + 1])
                scores = torch.einsum("qhd,kd->hqk", q_nope[rows].float(), latents)
                scores = scores + torch.einsum("qhd,kd->hqk", q_pe[rows].float(), keys)
                query = torch.arange(kv_len - (rows.stop - rows.start), kv_len)[:, None]
                hidden = torch.arange(kv_len)[None, :] > query
                weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
                out[rows] = torch.einsum("hqk,kd->qhd", weights, latents).to(out.dtype)

        kernel() if record_kernel is None else record_kernel(kernel)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, window_left: int,
        logits_soft_cap: float, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        self._keep(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, causal=causal,
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim_qk, page_size=page_size,
            window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )  # fmt: skip
        group = num_qo_heads // num_kv_heads
        queries = [n * group for n in qo_indptr.diff().tolist()]
        needed = split_bytes(
            queries,
            paged_kv_indptr.diff().tolist(),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
        )
        assert needed <= self.workspace_bytes, (
            f"Buffer overflow: a workspace of {needed} bytes is needed"
        )


def split_bytes(
    queries: list[int],
    pages: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    multiprocessors: int = 132,
) -> int:
    """Partial results of rows whose KV is split, in bytes, as flashinfer 0.6's scheduler.cuh has it (PrefillPlan).

    Args: `queries`: of each row, times the heads that share a KV head.
    """
    most_blocks, mean = 2 * multiprocessors // kv_heads, sum(queries) // len(queries)
    tile = 128 if mean > 64 and dim < 256 else 64 if mean > 16 else 16

    def blocks(chunk: int) -> int:
        return sum(-(-q // tile) * -(-n // chunk) for q, n in zip(queries, pages, strict=True))

    low, high = max(128 // page_size, 1), max(pages)
    while low < high:
        chunk = (low + high) // 2
        low, high = (chunk + 1, high) if blocks(chunk) > most_blocks else (low, chunk)
    return heads * blocks(low) * tile * (dim + 1) * 4 if low < max(pages) else 0


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(input) if out is None else out
    assert input.dtype == out.dtype == weight.dtype
    assert input.dtype in HALF
    assert input.dim() in (2, 3)
    assert input.shape == out.shape
    assert weight.shape == input.shape[-1:]
    _launches(input)
    _reads_16_bytes_at_once(input, out, weight)
    wide = input.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())
    return out


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    assert input.dtype == residual.dtype == weight.dtype
    assert input.dtype in HALF
    assert input.dim() == 2
    assert input.shape == residual.shape
    assert weight.shape == input.shape[-1:]
    assert input.data_ptr() != residual.data_ptr()
    _launches(input)
    _reads_16_bytes_at_once(input, residual, weight)
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float())


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    assert positions.is_contiguous()
    assert positions.dtype in (torch.int32, torch.int64)
    assert query.dtype == key.dtype
    assert query.dtype in HALF
    assert cos_sin_cache.dim() == 2
    assert cos_sin_cache.shape[1] == head_size
    assert head_size in (64, 128, 256), "another kernel, which is untested"
    _launches(query)
    assert positions.max() < len(cos_sin_cache)
    assert is_neox
    _reads_16_bytes_at_once(query, key)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        assert len(x) == len(positions)
        left, right = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    assert input.dtype in HALF
    assert input.is_contiguous(), "the kernel knows no strides"
    _launches(input)
    half = input.shape[-1] // 2
    assert half * 2 * input.element_size() % 16 == 0
    assert half * input.element_size() % 16 == 0, "up is read in pieces of 16 bytes too"
    gate, up = input.float().chunk(2, dim=-1)
    made = (gate / (1 + torch.exp(-gate)) * up).to(input.dtype)
    return made if out is None else out.copy_(made)


def _launches(x: Tensor) -> None:
    assert x.shape[0], "a grid of no blocks is an error in CUDA"


def _reads_16_bytes_at_once(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert all(n % 8 == 0 for n in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0
