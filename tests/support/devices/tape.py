"""A CUDA graph on CPU tensors: operations on fixed memory, done again without any Python between them.

While work is recorded every tensor operation is noted with the very tensors it read and wrote. A replay fills all
memory that the work made for itself with garbage, then does the operations again in place. So whatever Python decided
or read while recording is frozen, and what the work did not compute itself or read from fixed memory is garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.devices import fake_flashinfer

FORBIDDEN = {
    "aten._local_scalar_dense": "reads a value from the device",
    "aten.nonzero": "makes a size of values",
    "aten.masked_select": "makes a size of values",
    "aten.lift_fresh": "copies from the host",
}


def garbage(x: Tensor) -> None:
    x.fill_(torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else 2**30)


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).rsplit(".", 1)[0]
        assert name not in FORBIDDEN, f"{name} {FORBIDDEN[name]}: it cannot be recorded"
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in ("aten.index", "aten.index_put", "aten.index_put_"):
            assert not any(
                x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, Tensor)
            ), "a mask"
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given}
        if func._schema.is_mutable:
            self.work.append(lambda: func(*args, **kwargs))
        elif any(x.untyped_storage().data_ptr() not in known for x in outs):
            assert all(x.untyped_storage().data_ptr() not in known for x in outs), (
                f"{name} makes and views"
            )
            self.made += outs
            if not name.startswith("aten.empty") and not name.startswith("aten.new_empty"):
                self.work.append(lambda: self._again(func, args, kwargs, outs))
        return out

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> None:
        new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for x, value in zip(outs, new, strict=True):
            x.copy_(value)

    def kernel(self, work: Callable[[], None]) -> None:
        with _disable_current_modes():
            work()
        self.work.append(work)


class TapeRecorder:
    """As capture.CudaRecorder. `replays` counts by the number of operations, of which only > 0 is to be relied on."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        recording = _Recording()
        fake_flashinfer.record_kernel = recording.kernel
        try:
            with recording:
                work()
        finally:
            fake_flashinfer.record_kernel = None

        def replay() -> None:
            self.replays += 1
            for x in recording.made:
                garbage(x)
            for again in recording.work:
                again()

        return replay
