"""Latent attention by flashinfer's paged kernel, for a pool in CUDA memory.

One wrapper computes every step, in the absorbed form: prompt parts and single tokens are rows of
one launch. `plan` divides the rows' work among thread blocks; a recorded step is planned anew
before each replay.

What is assumed of flashinfer 0.6 (flashinfer/mla, csrc/batch_mla_run.cu, scheduler.cuh's MLAPlan,
read in 0.6.18.post1):

* Latents and rotated keys may be views of one row [pages, page_size, L + R] in the page-major pool:
  strides of pages and slots are read from the tensors, and so are those of q's two parts.
* `kv_len_arr` are tokens in KV. With `causal`, the last query of a row is its last KV position.
* `plan` takes the row arrays on the host and copies them; page indices that are on the device
  already stay where they are, so a recorded launch finds those of later steps at the same place.
* How the work is divided lies in the integer workspace, at places that depend on nothing but the
  GPU; the number of thread blocks depends on the average queries of a row times heads, which
  recorded steps all have alike.
* `plan` stages its arrays in pinned memory that it uses again: the next one has to wait until they
  are copied. There is room for MAX_WORKS pieces of work, and nothing checks that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers import flashinfer_loader
from baton.layers.attention.base import ForwardBatch, GraphInputs
from baton.layers.attention.flashinfer import DTYPES, KERNELS, LEAST_WORKSPACE_BYTES
from baton.layers.attention.paged_indices import PagedRows, View
from baton.layers.flashinfer_loader import SLOWER
from baton.layers.kv_pool import KvTensors
from baton.layers.spec import EVERYTHING, LatentSpec

SIZES = (512, 64)
"""Elements of latents and of rotated keys that the kernel is tried with: DeepSeek's."""
MAX_WORKS = 16384
_TILE = 64
"""Queries times heads that a thread block computes at a time."""
_MOST_BLOCKS = 1024
"""More than any GPU runs at once."""


def find_obstacle(spec: LatentSpec, kv: KvTensors) -> str | None:
    """Reason that keeps flashinfer from serving this model and pool, as the middle of a sentence;
    None: nothing."""
    if kv.data.dtype not in DTYPES:
        kind = str(kv.data.dtype).removeprefix("torch.")
        return f"it computes in float16 or bfloat16, the model in {kind}"
    sizes = (spec.latent_dim, spec.key_dim)
    if sizes != SIZES:
        return (
            f"it is used with latents of {SIZES[0]} and keys of {SIZES[1]} elements, the model's "
            f"have {sizes[0]} and {sizes[1]}"
        )
    return None


class FlashInferLatentAttention:
    """Paged causal attention over latents, all layers alike.

    Args:
        library: the flashinfer module; None imports it. The rest of this class knows no CUDA.
    Raises:
        ConfigError: this model or pool is outside what the kernel takes, or flashinfer cannot run
        here.
    """

    def __init__(self, latents: LatentSpec, kv: KvTensors, library: Any = None) -> None:
        problem = find_obstacle(latents, kv)
        if problem is None and library is None:
            problem = flashinfer_loader.find_obstacle()
        if problem is not None:
            raise ConfigError(
                f"--attention-backend flashinfer: {problem}; use --attention-backend {SLOWER}"
            )
        library = library or flashinfer_loader.load_flashinfer()
        self._spec = latents
        self._kv = kv
        workspace = torch.zeros(LEAST_WORKSPACE_BYTES, dtype=torch.uint8, device=kv.data.device)
        self._wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=KERNELS)
        self._planned = torch.cuda.Event() if kv.data.is_cuda else None
        self._slots: tuple[Tensor, Tensor] | None = None
        """Page and offset of each of the step's tokens."""
        self.views = (View(0, EVERYTHING),)
        self._static: GraphInputs | None = None
        """Where recorded steps find their pages."""

    def plan(self, batch: ForwardBatch) -> None:
        self._set_slots(batch.slot_mapping.to(self._kv.data.device))
        arrays = (batch.qo_indptr, batch.page_indptr, batch.page_indices, batch.kv_lens)
        self._plan_rows(*(self._pinned(array) for array in arrays))

    def _set_slots(self, slots: Tensor) -> None:
        self._slots = (slots // self._kv.page_size, slots % self._kv.page_size)

    def _pinned(self, array: Tensor) -> Tensor:
        """Where `plan` can copy it from without waiting for the device."""
        return array.pin_memory() if self._kv.data.is_cuda else array

    def _plan_rows(
        self, qo_indptr: Tensor, page_indptr: Tensor, page_indices: Tensor, kv_lens: Tensor
    ) -> None:
        if self._planned is not None:
            self._planned.synchronize()
        spec = self._spec
        self._check_works(qo_indptr.diff() * spec.num_heads)
        dtype = self._kv.data.dtype
        self._wrapper.plan(
            qo_indptr,
            page_indptr,
            page_indices,
            kv_lens,
            spec.num_heads,
            spec.latent_dim,
            spec.key_dim,
            self._kv.page_size,
            True,
            spec.scale,
            dtype,
            dtype,
        )
        if self._planned is not None:
            self._planned.record()

    def _check_works(self, queries: Tensor) -> None:
        """Raise ConfigError where rows of so many queries, times heads, are more pieces of work
        than `plan` has room for: it would write behind its arrays."""
        tile = 2 * _TILE if queries.sum() // len(queries) > _TILE else _TILE
        # Rows are cut along KV at most once per thread block.
        works = int((-(-queries // tile)).sum()) + _MOST_BLOCKS
        if works > MAX_WORKS:
            raise ConfigError(
                f"a step of {int(queries.sum()) // self._spec.num_heads} tokens and "
                f"{self._spec.num_heads} heads is more than flashinfer's latent attention plans; "
                "lower --chunked-prefill-size"
            )

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert self._slots is not None, "plan() comes first"
        spec = self._spec
        parts = (spec.latent_dim, spec.key_dim)
        pages = self._kv.data[:, layer]
        latents, keys = pages.split(parts, dim=2)
        latents[self._slots] = k[:, 0]
        keys[self._slots] = v[:, 0]
        plain, rotated = q.split(parts, dim=2)
        out = torch.empty(plain.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(plain, rotated, latents, keys, out=out)
        return out.view(len(q), spec.result_size)

    def capture_bytes(self, largest: int) -> int:
        """Captures share the wrapper."""
        return 0

    def prepare_capture(self, size: int, static: GraphInputs) -> None:
        self._static = static

    def plan_replay(self, size: int, views: Sequence[PagedRows]) -> None:
        assert self._static is not None, "prepare_capture() comes first"
        (rows,) = views
        page_size = self._kv.page_size
        kv_lens = (np.diff(rows.kv_indptr) - 1) * page_size + rows.last_page_len
        self._plan_rows(
            self._pinned(torch.arange(size + 1, dtype=torch.int32)),
            self._pinned(torch.from_numpy(rows.kv_indptr)),
            self._static.views[0].page_indices,
            self._pinned(torch.from_numpy(kv_lens.astype(np.int32))),
        )

    def use_capture(self, size: int, slot_mappings: Sequence[Tensor]) -> None:
        self._set_slots(*slot_mappings)
