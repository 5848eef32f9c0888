"""Pages on a device, with ordinary memory in the device's place: where they go, and their checksums."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from baton.layers.cuda import device_pages as gpu_pages
from baton.layers.cuda.device_pages import DevicePages, weights
from tests.support.devices.stand_in import StandIn
from tests.support.kernels.pages import bytes_of, ids, naive_sum

PAGE = 96


def pool(pages: int) -> tuple[torch.Tensor, DevicePages, StandIn]:
    stand_in = StandIn()
    data = stand_in.allocate(pages * PAGE)
    data.copy_(
        torch.from_numpy(
            np.random.default_rng(pages).integers(0, 256, pages * PAGE, dtype=np.uint8)
        )
    )
    rows = data.view(torch.bfloat16).view(pages, 2, PAGE // 4)
    return rows, DevicePages(rows, stand_in, stand_in), stand_in


def test_weights_are_those_of_the_crate() -> None:
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5, 0x06C45D188009454F]
    assert weights(3).view(np.uint64).tolist() == known


def test_sums_in_any_order_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, pages, _ = pool(11)
    monkeypatch.setattr(gpu_pages, "SUM_BYTES", 4 * PAGE + 1)
    order = [7, 0, 10, 3, 3, 9, 1, 2, 4]
    sums = np.frombuffer(pages.sums(ids(order)), np.uint64).tolist()
    assert sums == [naive_sum(bytes_of(rows, page)) for page in order]
    rows.view(torch.int16)[3, 0, 0] ^= 1
    assert np.frombuffer(pages.sums(ids([3])), np.uint64)[0] != sums[3]


def test_pages_go_to_host_memory_and_back() -> None:
    rows, pages, _ = pool(6)
    before = [bytes_of(rows, page) for page in range(6)]
    host = bytearray(3 * PAGE)
    pages.gather(ids([5, 0, 2]), memoryview(host))
    assert bytes(host) == before[5] + before[0] + before[2]
    pages.scatter(memoryview(host), ids([1, 3, 5]))
    after = [bytes_of(rows, page) for page in range(6)]
    assert after == [before[0], before[5], before[2], before[0], before[4], before[2]]


def test_slabs_take_as_many_pages_as_come() -> None:
    (ours, pages, _), (theirs, peer, _) = pool(5), pool(4)
    before = [bytes_of(ours, page) for page in range(5)]
    slabs, far = pages.slabs(2, 3 * PAGE), peer.slabs(2, 3 * PAGE)
    slabs.gather(ids([4, 1]), 1)
    far.tensors[0][: 2 * PAGE].copy_(slabs.tensors[1][: 2 * PAGE])  # what a communicator does
    far.scatter(0, ids([0, 3]))
    assert (bytes_of(theirs, 0), bytes_of(theirs, 3)) == (before[4], before[1])
    assert [bytes_of(ours, page) for page in range(5)] == before


def test_peers_pages_are_read_until_they_are_closed() -> None:
    (ours, pages, stand_in), (theirs, peer, _) = pool(5), pool(4)
    opened = pages.open(peer.handle(), 4)
    sums = np.frombuffer(opened.copy(ids([3, 0]), ids([1, 4])), np.uint64).tolist()
    assert sums == [naive_sum(bytes_of(theirs, page)) for page in (3, 0)]
    assert (bytes_of(ours, 1), bytes_of(ours, 4)) == (bytes_of(theirs, 3), bytes_of(theirs, 0))
    theirs.view(torch.int16)[3] = 7
    opened.copy(ids([3]), ids([1]))
    assert bytes_of(ours, 1) == bytes_of(theirs, 3), "the owner's writes are seen"
    opened.close()
    opened.close()
    assert stand_in.open_blocks == 0
    with pytest.raises(RuntimeError, match="closed: it is gone"):
        opened.copy(ids([3]), ids([1]))


def test_copy_of_many_parts_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pages, "SUM_BYTES", 2 * PAGE)
    (ours, pages, stand_in), (theirs, peer, _) = pool(9), pool(9)
    opened = pages.open(peer.handle(), 9)
    waits: list[str] = []
    run = stand_in.run

    def noted(what: str) -> AbstractContextManager[None]:
        waits.append(what)
        return run(what)

    monkeypatch.setattr(stand_in, "run", noted)
    sums = opened.copy(ids(list(range(9))), ids(list(range(8, -1, -1))))
    assert waits == ["copying a peer's pages"]
    assert [bytes_of(ours, 8 - page) for page in range(9)] == [
        bytes_of(theirs, page) for page in range(9)
    ]
    assert sums == peer.sums(ids(list(range(9))))


def test_handle_of_another_size_is_refused_and_closed() -> None:
    (_, pages, stand_in), (_, peer, _) = pool(5), pool(4)
    with pytest.raises(ValueError, match="384 bytes, its pages have 480"):
        pages.open(peer.handle(), 5)
    assert stand_in.open_blocks == 0


def test_gather_and_scatter_are_inverse_for_any_pages() -> None:
    rng = random.Random(4)
    for _ in range(20):
        count = rng.randrange(1, 40)
        rows, pages, _ = pool(count)
        before = [bytes_of(rows, page) for page in range(count)]
        src = rng.sample(range(count), rng.randrange(1, count + 1))
        dst = rng.sample(range(count), len(src))
        host = bytearray(len(src) * PAGE)
        pages.gather(ids(src), memoryview(host))
        pages.scatter(memoryview(host), ids(dst))
        want = dict(enumerate(before)) | {to: before[at] for at, to in zip(src, dst, strict=True)}
        assert [bytes_of(rows, page) for page in range(count)] == [
            want[page] for page in range(count)
        ]
