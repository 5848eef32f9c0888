"""A GPU that is not there: pools "in device memory" and memory shared by "CUDA IPC", in ordinary memory of the host.

Everything above (layers.cuda.device_pages, the transfer runtime, the engine) is the product's. The stand-in is stricter
than a GPU: an opened block whose owner has died holds rubbish from then on, a closed one is not mapped any more
(touching it ends the process by SIGSEGV), and memory that was pinned must be unpinned.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baton.disagg.calls import PublishCall, TransferCall
from baton.layers.cuda.device_pages import DevicePages
from baton.layers.kv_pool import KvTensors
from baton.layers.kv_spec import KVSpec
from baton.layers.ops import TORCH_DTYPES
from baton.runtime import build
from baton.runtime.runner.cuda_runner import DeviceRunner, InFlight
from baton.runtime.runner.model_runner import ModelRunner
from baton.sched.types.plan import StepPlan
from tests.support.devices.late_stream import LateMark, LateStream

RUBBISH = 0xDB


class StandIn:
    """As device_pages.CudaQueue and ipc.CudaIpc, of one process's pool."""

    def __init__(self, slow_secs: float = 0.0, *, late: bool = False) -> None:
        """`slow_secs`: how long each copy takes, half of it before and half after.

        `late`: steps are launched ahead, and pages may be announced when the steps that wrote them were waited for.
        """
        self.slow_secs = slow_secs
        self.stream = LateStream() if late else None
        self._written: dict[int, int] = {}
        """The mark after the last step that wrote a page."""
        self.announced = 0
        self.broken: str | None = None
        """Error that every further call of the queue raises."""
        self.runs: list[str] = []
        self.pinned: set[int] = set()
        self.open_blocks = 0
        self.opened = 0
        self._blocks: list[tuple[int, mmap.mmap]] = []

    # ---- memory

    def allocate(self, nbytes: int) -> Tensor:
        fd = os.memfd_create("stand-in")
        os.ftruncate(fd, nbytes)
        block = mmap.mmap(fd, nbytes)
        self._blocks.append((fd, block))
        return torch.frombuffer(block, dtype=torch.uint8)

    def make_pool(
        self,
        spec: KVSpec,
        num_pages: int,
        *,
        native: bool | None = None,
        device: Any = None,
        dummy_page: bool = False,
    ) -> KvTensors:
        """In place of kv_pool.make_pool."""
        from baton._native import KvPool

        assert native, "only a pool that travels is stood in for"
        assert not dummy_page, "nothing is recorded without a GPU"
        group = spec.full_group
        page_bytes = group.page_bytes
        shape = (num_pages, *group.shape)
        data = self.allocate(num_pages * page_bytes).view(TORCH_DTYPES[group.dtype]).view(shape)
        return KvTensors(spec, data, KvPool(num_pages, page_bytes, DevicePages(data, self, self)))

    def make_runner(self, *args: Any, **more: Any) -> ModelRunner:
        """In place of gpu.runner.make_runner."""
        if self.stream is None:
            return ModelRunner(*args, **more)
        stand_in = self

        class Watched(DeviceRunner):
            def execute(self, plan: StepPlan) -> InFlight:
                launched = super().execute(plan)
                assert isinstance(launched.ended, LateMark)
                ended = launched.ended.number
                page_size = self._kv.page_size
                for copy in plan.states:
                    if copy.kind != "load":
                        stand_in._written.update(dict.fromkeys(copy.pages, ended))
                for row in plan.rows:
                    first, last = row.start // page_size, (row.start + row.n - 1) // page_size
                    for page in self._page_table[row.slot, first : last + 1].tolist():
                        stand_in._written[page] = ended
                return launched

        return Watched(*args, stream=self.stream, **more)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Pools and runners made meanwhile are the stand-in's."""
        with (
            mock.patch.object(build, "make_pool", self.make_pool),
            mock.patch.object(build, "make_runner", self.make_runner),
        ):
            yield

    def watched(self, node: Any) -> Any:
        """Wrap a transfer node: pages may be announced only after their step has ended."""
        stand_in = self

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(node, name)

            def call(self, call: TransferCall) -> None:
                if isinstance(call, PublishCall):
                    assert stand_in.stream is not None
                    for page in array("i", call.pages):
                        assert stand_in._written[page] <= stand_in.stream.reached, (
                            f"page {page} is still being written"
                        )
                        stand_in.announced += 1
                node.call(call)

        return node if self.stream is None else Watched()

    # ---- the queue

    @contextmanager
    def run(self, what: str) -> Iterator[None]:
        if self.broken is not None:
            raise RuntimeError(self.broken)
        self.runs.append(what)
        time.sleep(self.slow_secs / 2)
        yield
        time.sleep(self.slow_secs / 2)

    def host_memory(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64)

    def pin(self, memory: Tensor) -> None:
        assert memory.data_ptr() not in self.pinned, "CUDA refuses to pin memory twice"
        self.pinned.add(memory.data_ptr())

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())

    # ---- sharing

    def handle(self, memory: Tensor) -> bytes:
        (fd, _) = next(pair for pair in self._blocks if len(pair[1]) == memory.numel())
        return json.dumps({"pid": os.getpid(), "fd": fd, "bytes": memory.numel()}).encode()

    def open(self, handle: bytes) -> OpenedBlock:
        block = OpenedBlock(self, **json.loads(handle))
        self.open_blocks += 1
        self.opened += 1
        return block


class OpenedBlock:
    def __init__(self, owner: StandIn, pid: int, fd: int, bytes: int) -> None:
        self._stand_in = owner
        self._peer = os.pidfd_open(pid)
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        # Private: what we write stays ours. Until then it shows what the owner writes.
        self._block = mmap.mmap(theirs, bytes, flags=mmap.MAP_PRIVATE)
        os.close(theirs)
        self._woken, self._wake = os.pipe()
        self.memory = torch.frombuffer(self._block, dtype=torch.uint8)
        self._watch = threading.Thread(target=self._until_it_dies, daemon=True)
        self._watch.start()

    def _until_it_dies(self) -> None:
        ready, _, _ = select.select([self._peer, self._woken], [], [])
        if self._peer in ready:
            self._block[:] = bytes([RUBBISH]) * len(self._block)

    def close(self) -> None:
        os.write(self._wake, b"x")
        self._watch.join()
        for fd in (self._peer, self._woken, self._wake):
            os.close(fd)
        self._block.close()
        self._stand_in.open_blocks -= 1
