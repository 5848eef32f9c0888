"""Pages in the memory of a real GPU: moved, summed, and shared with another process, which may be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.layers.cuda.device_pages import CudaQueue, DevicePages, PageAccess, PeerPages
from baton.layers.cuda.ipc import CudaIpc, allocate_memory
from tests.support.kernels import page_cases
from tests.support.kernels.pages import bytes_of, ids, naive_sum

REPO = Path(__file__).parents[2]
PAGE = 64 << 10


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def pool(pages: int, gpu: torch.device, page_bytes: int = PAGE) -> tuple[torch.Tensor, DevicePages]:
    data = allocate_memory(pages * page_bytes, gpu)
    data.copy_(
        torch.from_numpy(
            np.random.default_rng(pages).integers(0, 256, data.numel(), dtype=np.uint8)
        )
    )
    torch.cuda.synchronize()
    rows = data.view(torch.bfloat16).view(pages, -1)
    return rows, DevicePages(rows, CudaQueue(gpu), CudaIpc(gpu))


def test_pool_is_zeroed_memory_of_its_own(gpu: torch.device) -> None:
    before = torch.cuda.memory_allocated()
    data = allocate_memory(1 << 20, gpu)
    assert data.device == gpu
    assert not data.any()
    data.fill_(3)
    assert int(data.sum(dtype=torch.int64)) == 3 << 20
    assert torch.cuda.memory_allocated() == before


def test_sums_are_those_of_host_memory(gpu: torch.device) -> None:
    rows, pages = pool(40, gpu, 4096)
    order = [7, 0, 39, 3, 3]
    want = [naive_sum(bytes_of(rows, page)) for page in order]
    assert np.frombuffer(pages.sums(ids(order)), np.uint64).tolist() == want


@pytest.mark.parametrize("words", page_cases.WORDS)
def test_kernels_copy_and_sum_as_plain_integers(words: int, gpu: torch.device) -> None:
    page_cases.check(words, words, gpu)


def test_pool_on_the_device_gets_the_kernels(gpu: torch.device) -> None:
    _, pages = pool(4, gpu)
    assert pages._pages._kernels is not None


def test_pages_go_to_host_memory_and_back_pinned_or_not(gpu: torch.device) -> None:
    rows, pages = pool(6, gpu)
    before = [bytes_of(rows, page) for page in range(6)]
    host = torch.empty(3 * PAGE, dtype=torch.uint8).numpy().data
    for pinned in (False, True):
        if pinned:
            pages.pin(host)
        pages.gather(ids([5, 0, 2]), host)
        assert bytes(host) == before[5] + before[0] + before[2]
        pages.scatter(host, ids([5, 0, 2]))
    pages.unpin(host)
    pages.scatter(host, ids([1, 3, 4]))
    assert [bytes_of(rows, page) for page in (1, 3, 4)] == [before[page] for page in (5, 0, 2)]


def test_slabs_on_the_device(gpu: torch.device) -> None:
    rows, pages = pool(5, gpu)
    slabs = pages.slabs(2, 3 * PAGE)
    slabs.gather(ids([4, 1]), 1)
    slabs.scatter(1, ids([0, 3]))
    assert (bytes_of(rows, 0), bytes_of(rows, 3)) == (bytes_of(rows, 4), bytes_of(rows, 1))


def test_copies_do_not_wait_for_the_models_stream(gpu: torch.device) -> None:
    _, pages = pool(64, gpu)
    pages.sums(ids(list(range(64))))  # whatever is done once
    started = time.monotonic()
    torch.cuda._sleep(4_000_000_000)  # about 2 s of a busy stream
    pages.sums(ids(list(range(64))))
    assert not torch.cuda.current_stream().query(), "the test's stream was not busy"
    assert time.monotonic() - started < 1
    torch.cuda.synchronize()


def test_memory_of_torchs_allocator_is_refused_or_whole(gpu: torch.device) -> None:
    """Why the pool is a block of its own: a handle is of the whole block around a tensor."""
    block = torch.zeros(4 << 20, dtype=torch.uint8, device=gpu)
    second = torch.zeros(4 << 20, dtype=torch.uint8, device=gpu)
    try:
        handles = {CudaIpc(gpu).handle(x)[:200] for x in (block, second)}
    except RuntimeError as err:
        print(f"refused: {err}")
        torch.cuda.synchronize()  # and the error is not found by the next kernel
        return
    print(f"{len(handles)} handles of two tensors")


def test_pages_are_a_view(gpu: torch.device) -> None:
    rows, _ = pool(4, gpu)
    assert PageAccess(rows, CudaQueue(gpu)).rows.data_ptr() == rows.data_ptr()


OWNER = """
import sys, time, torch
from tests.gpu.test_device_pages import pool
rows, pages = pool({pages}, torch.device("cuda", 0))
print(pages.handle().hex(), flush=True)
time.sleep(600)
"""


class Owner:
    """Another process with a pool on the same GPU."""

    def __init__(self, pages: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER.format(pages=pages)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPO,
        )
        assert self.process.stdout is not None
        self.handle = bytes.fromhex(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_pages_of_another_process_are_copied_until_they_are_closed(
    gpu: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, pages = pool(300, gpu)
    same, _ = pool(256, gpu)  # the owner's content: its generator has the same seed
    owner = Owner(256)
    try:
        opened = pages.open(owner.handle, 256)
        opened.copy(ids([3, 0, 255]), ids([299, 4, 1]))
        assert [bytes_of(ours, p) for p in (299, 4, 1)] == [bytes_of(same, p) for p in (3, 0, 255)]
        everything = ids(list(range(256)))
        opened.copy(everything, everything)
        started = time.monotonic()
        for _ in range(20):
            opened.copy(everything, everything)
        rate = 20 * 256 * PAGE / (time.monotonic() - started)
    finally:
        owner.kill()
    seen = after_death(opened)
    with capsys.disabled():
        print(
            f"\ncuda_ipc: {rate / 1e9:.1f} GB/s in copies of 16 MiB; after its owner's death an open block {seen}"
        )
    opened.close()
    opened.close()
    with pytest.raises(RuntimeError, match="closed: it is gone"):
        opened.copy(ids([3]), ids([1]))
    again = Owner(256)
    try:
        opened = pages.open(again.handle, 256)
        opened.copy(ids([7]), ids([7]))
        assert bytes_of(ours, 7) == bytes_of(same, 7)
        opened.close()
    finally:
        again.kill()


def after_death(opened: PeerPages) -> str:
    """Not documented by CUDA, hence said and not asserted: what an open block of a dead process does. If it is an error
    that ends this process's use of the GPU, as one in a kernel does, what follows fails: hence this test is the last.
    """
    try:
        opened.copy(ids([3]), ids([2]))
        return "can still be read"
    except RuntimeError as err:
        return f"is an error: {err}"
