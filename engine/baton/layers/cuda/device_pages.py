"""The pages of a pool in device memory, as the transfer runtime moves them: to host memory and
back, to slabs on the device, from a peer's pages; and their checksums. Called from the runtime's
own threads (crate kv_transfer, `pool::device`).

Everything runs on streams of its own. A call waits for its event in CUDA, without the GIL, and
returns when the device is through, never before: its caller gives the copy's memory to others. A
device that does not get through is the end of the process (`CudaQueue`).

Ordering with the model's steps. Pages are read here only after they were announced, and announced
only after the step that wrote them was committed; pages are written here only while the scheduler
has granted them, which it does not before the last step that used them was committed. Both rest on
one invariant: **when a step is committed, its kernels have ended** (runner.InFlight). The other way
round, a copy that was reported has ended, so that kernels launched later see it. Hence no stream
waits for another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.cuda import ipc
from baton.layers.flashinfer_loader import summarize_error

log = logging.getLogger("baton.pages")

SUM_BYTES = 8 << 20
"""Pages whose checksums plain torch takes in one go, which needs three times as much meanwhile; a
call queues any number."""
STUCK_SECS = 30.0
"""A copy of some MiB, behind whatever else the device has to do."""
WATCH_SECS = 1.0
"""Between two looks for waits longer than that."""


def make_checksum_weights(words: int) -> NDArray[np.int64]:
    """Checksum weights, one per 32-bit word: splitmix64 from state 0, made odd (kv_transfer,
    `pool::weighted`)."""
    z = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return odd.view(np.int64)


def page_kernels(rows: Tensor, checksum_weights: Tensor) -> ModuleType | None:
    """The module `kernels.pages`, its kernels compiled and run once on page 0; None where they
    cannot run."""
    if not rows.is_cuda:
        return None
    try:
        from baton.layers.kernels import pages

        words = rows.view(torch.int32)
        first_page = torch.zeros(1, dtype=torch.int64, device=rows.device)
        sums = torch.zeros_like(first_page)
        pages.sum_pages(words, first_page, checksum_weights, sums)
        pages.copy_pages(words, first_page, words, first_page, checksum_weights, sums)
        torch.cuda.synchronize(rows.device)
    except torch.OutOfMemoryError:
        raise
    except Exception as err:  # noqa: BLE001 - Triton's own, subprocess's, ImportError, OSError
        log.warning(
            "pages are copied and summed by plain torch, about ten times slower: %s",
            summarize_error(err),
        )
        return None
    return pages


class PageSums:
    """The pool as a matrix, a page per row, and the checksums of its rows."""

    def __init__(self, data: Tensor) -> None:
        self.rows = data.view(data.shape[0], -1).view(torch.int64)
        self.page_words = self.rows.shape[1]
        self._weights = torch.from_numpy(make_checksum_weights(2 * self.page_words)).to(data.device)
        self._kernels = page_kernels(self.rows, self._weights)

    def split_pages(self, pages: int) -> list[slice]:
        """Pages whose checksums are taken in one call."""
        at_once = max(1, SUM_BYTES // (8 * self.page_words))
        return [slice(start, start + at_once) for start in range(0, pages, at_once)]

    def sum_pages(self, pages: Tensor) -> Tensor:
        """Checksums of `pages`: int64 [n] each, both on the device."""
        sums = torch.zeros_like(pages)
        if self._kernels is not None:
            self._kernels.sum_pages(self.rows.view(torch.int32), pages, self._weights, sums)
            return sums
        for part in self.split_pages(len(pages)):
            sums[part] = self._sum_rows(self.rows.index_select(0, pages[part]))
        return sums

    def page_ids(self, pages: bytes) -> Tensor:
        """Page ids (int32, little endian) on the device; call it while queueing."""
        ids = torch.from_numpy(np.frombuffer(pages, np.int32).astype(np.int64))
        return ids.to(self.rows.device, non_blocking=True)

    def _sum_rows(self, rows: Tensor) -> Tensor:
        return (rows.view(torch.int32) * self._weights).sum(1)


class PageAccess(PageSums):
    """`PageSums`, and the queue that the work on the pages goes to."""

    def __init__(self, data: Tensor, queue: CudaQueue) -> None:
        super().__init__(data)
        self.queue = queue

    def queue_sums(self, pages: Tensor, to: Tensor) -> None:
        """Have the checksums of `pages` (int64, on the device) written to `to`, in host memory."""
        to.copy_(self.sum_pages(pages), non_blocking=True)

    def queue_copy(self, theirs: Tensor, source: Tensor, target: Tensor, to: Tensor) -> None:
        """Have the rows `source` of `theirs` copied to the pages `target`, and their checksums
        written to `to`."""
        if self._kernels is not None:
            sums = torch.zeros_like(source)
            self._kernels.copy_pages(
                theirs.view(torch.int32), source, self.rows.view(torch.int32), target, self._weights, sums
            )  # fmt: skip
            to.copy_(sums, non_blocking=True)
            return
        for part in self.split_pages(len(source)):
            content = theirs.index_select(0, source[part])
            self.rows.index_copy_(0, target[part], content)
            to[part].copy_(self._sum_rows(content), non_blocking=True)


class DevicePages:
    """Args: `data`: the pool, page-major and contiguous; a page is a multiple of 8 bytes."""

    def __init__(self, data: Tensor, queue: CudaQueue, sharing: ipc.CudaIpc) -> None:
        self._pages = PageAccess(data, queue)
        self._sharing = sharing

    def gather(self, pages: bytes, to: memoryview) -> None:
        host = torch.frombuffer(to, dtype=torch.int64)
        with self._pages.queue.run("gathering pages"):
            rows = self._pages.rows.index_select(0, self._pages.page_ids(pages))
            host.copy_(rows.view(-1), non_blocking=True)

    def scatter(self, source: memoryview, pages: bytes) -> None:
        host = torch.frombuffer(source, dtype=torch.int64).view(-1, self._pages.page_words)
        with self._pages.queue.run("scattering pages"):
            there = host.to(self._pages.rows.device, non_blocking=True)
            self._pages.rows.index_copy_(0, self._pages.page_ids(pages), there)

    def sums(self, pages: bytes) -> bytes:
        """uint64 each, little endian."""
        sums = self._pages.queue.host_memory(len(pages) // 4)
        with self._pages.queue.run("taking checksums"):
            self._pages.queue_sums(self._pages.page_ids(pages), sums)
        return sums.numpy().tobytes()

    def pin(self, memory: memoryview) -> None:
        """For copies that take their time: to other memory the caller would wait in the driver."""
        self._pages.queue.pin(torch.frombuffer(memory, dtype=torch.uint8))

    def unpin(self, memory: memoryview) -> None:
        self._pages.queue.unpin(torch.frombuffer(memory, dtype=torch.uint8))

    def slabs(self, count: int, nbytes: int) -> DeviceSlabs:
        return DeviceSlabs(self._pages, count, nbytes)

    def handle(self) -> bytes:
        """By which a process on this host opens these pages."""
        return self._sharing.handle(self._pages.rows.view(-1).view(torch.uint8))

    def open(self, handle: bytes, num_pages: int) -> PeerPages:
        """A peer's pages. Raises ValueError when they are others than it says."""
        opened = self._sharing.open(handle)
        nbytes = num_pages * self._pages.page_words * 8
        if opened.memory.numel() != nbytes:
            opened.close()
            raise ValueError(
                f"the peer's handle is of {opened.memory.numel()} bytes, its pages have {nbytes}"
            )
        return PeerPages(self._pages, opened)


class DeviceSlabs:
    """Staging memory on the device, for communicators that work there."""

    def __init__(self, pages: PageAccess, count: int, nbytes: int) -> None:
        self._pages = pages
        self.tensors = [
            torch.empty(nbytes, dtype=torch.uint8, device=pages.rows.device) for _ in range(count)
        ]

    def _rows(self, slab: int, pages: bytes) -> Tensor:
        count = len(pages) // 4
        words = self._pages.page_words
        return self.tensors[slab].view(torch.int64)[: count * words].view(count, words)

    def gather(self, pages: bytes, slab: int) -> None:
        rows = self._rows(slab, pages)
        with self._pages.queue.run("gathering pages into a slab"):
            torch.index_select(self._pages.rows, 0, self._pages.page_ids(pages), out=rows)

    def scatter(self, slab: int, pages: bytes) -> None:
        rows = self._rows(slab, pages)
        with self._pages.queue.run("scattering pages from a slab"):
            self._pages.rows.index_copy_(0, self._pages.page_ids(pages), rows)


class PeerPages:
    """A peer's pages, of the same size as ours. They are only ever read."""

    def __init__(self, ours: PageAccess, opened: ipc.OpenedBlock) -> None:
        self._ours = ours
        self._opened: ipc.OpenedBlock | None = opened
        self._lock = threading.Lock()
        """Held while the peer's memory is read."""

    def copy(self, src: bytes, dst: bytes) -> bytes:
        """Returns the checksums of what arrived, as `DevicePages.sums` does. Waits once for all of
        it."""
        ours = self._ours
        sums = ours.queue.host_memory(len(src) // 4)
        with self._lock:
            if self._opened is None:
                raise RuntimeError("the peer's pages are closed: it is gone")
            theirs = self._opened.memory.view(torch.int64).view(-1, ours.page_words)
            with ours.queue.run("copying a peer's pages"):
                ours.queue_copy(theirs, ours.page_ids(src), ours.page_ids(dst), sums)
        return sums.numpy().tobytes()

    def close(self) -> None:
        with self._lock:
            opened = self._opened
            self._opened = None
            if opened is not None:
                opened.close()


def end_process(reason: str) -> NoReturn:
    """Copies that were asked for may still write to memory that must not be used before: it cannot
    be given back."""
    log.critical("%s; the process ends", reason)
    logging.shutdown()
    os._exit(1)


class CudaQueue:
    """Streams of its own: torch's of high priority, which the model's kernels do not use. Called
    from any thread.

    Args:
        stuck: what to do when the device is not through within STUCK_SECS; called by a thread that
        watches.
    """

    def __init__(self, device: torch.device, stuck: Callable[[str], object] = end_process) -> None:
        self._device = device
        self._stuck = stuck
        self._waits: dict[int, tuple[float, str]] = {}
        """By thread: since when it waits, and for what."""
        self._idle: list[torch.cuda.Stream] = []
        """The last one used is the next: torch keeps freed memory for the stream it was used on."""
        threading.Thread(target=self._look_for_stuck, name="kv-device-watch", daemon=True).start()

    @contextlib.contextmanager
    def run(self, purpose: str) -> Iterator[None]:
        """Have the device do what is queued inside the block, which ends when it is through."""
        with torch.cuda.device(self._device):
            try:
                stream = self._idle.pop()
            except IndexError:
                stream = torch.cuda.Stream(self._device, priority=-1)
            with torch.cuda.stream(stream):
                try:
                    yield
                finally:  # also what was queued before an error must end before its memory is freed
                    event = torch.cuda.Event(
                        blocking=True
                    )  # the waiting thread sleeps instead of spinning
                    event.record()
                    self._wait_for_event(purpose, event)
            self._idle.append(stream)

    def _wait_for_event(self, purpose: str, event: torch.cuda.Event) -> None:
        self._waits[threading.get_ident()] = (time.monotonic(), purpose)
        try:
            event.synchronize()
        finally:
            del self._waits[threading.get_ident()]

    def _look_for_stuck(self) -> None:
        while True:
            time.sleep(WATCH_SECS)
            for since, purpose in list(self._waits.values()):
                if time.monotonic() > since + STUCK_SECS:
                    self._stuck(
                        f"{self._device} is not through with {purpose} after {STUCK_SECS:g} s"
                    )
                    return

    def host_memory(self, count: int) -> Tensor:
        """`count` int64 in host memory that the device copies to without anybody waiting."""
        with torch.cuda.device(self._device):
            return torch.empty(count, dtype=torch.int64, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device):
            ipc.register_memory(memory)

    def unpin(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device):
            ipc.unregister_memory(memory)
