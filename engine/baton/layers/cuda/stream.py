"""Work on a CUDA device beside the host's: copies in both directions, and marks to wait for.

Work is queued on the current stream and done there in order. Host memory for copies is pinned and
comes from torch's
pool of it, which hands a block out again only when the copies that use it are done: any number of
steps may be in flight without staging buffers of our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(self, x: NDArray[np.generic]) -> Tensor:
        """A copy on the device; x may be changed at once."""
        here = torch.from_numpy(x)
        pinned = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
        return pinned.copy_(here).to(self._device, non_blocking=True)

    def put_all(self, arrays: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """The same for several one-dimensional arrays in one copy."""
        sizes = [len(x) for x in arrays]
        pinned = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
        np.concatenate(arrays, out=pinned.numpy())
        return list(pinned.to(self._device, non_blocking=True).split(sizes))

    def put_into(self, target: Tensor, x: NDArray[np.int64]) -> None:
        """Overwrite `target`, of x's length, when the work queued before is done with it; x may be
        changed at once."""
        pinned = torch.empty(len(x), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = x
        target.copy_(pinned, non_blocking=True)

    def fetch(self, x: Tensor) -> Tensor:
        """A copy on the host, to be read when a later mark has been waited for."""
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)

    def mark(self) -> CudaMark:
        return CudaMark(self._device)


class CudaMark:
    """A place in the order of work."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the device has got there. May be called from any thread."""
        self._event.synchronize()

    def seconds_since(self, earlier: CudaMark) -> float:
        """Device time from there to here; both were waited for."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3
