"""Host memory behind a KV pool: whole pages there and back, and what their checksums notice."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from baton.cache.host import CopyRun
from baton.layers import host_pool
from baton.layers.cuda import ipc
from baton.layers.host_pool import HostPool, make_host_memory
from baton.layers.kv_pool import KvTensors, make_pool
from tests.unit.layers.test_kv_pool import spec_of

SPEC = spec_of(3, 3, 16, page_tokens=4)


def run_of(to_host: bool, pages: list[int], slots: list[int]) -> CopyRun:
    return CopyRun(to_host, array("i", pages), array("i", slots))


@pytest.fixture(params=["native", "torch"])
def kv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KvTensors:
    """A pool of random pages, copied by the native module or by torch."""
    if request.param == "torch":
        monkeypatch.setattr(host_pool, "copy_native_pages", None)
    elif host_pool.copy_native_pages is None:
        pytest.skip("the native module is not built")
    kv = make_pool(SPEC, 12, native=False)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(0)))
    return kv


def test_pages_come_back_as_they_left_wherever_they_go(kv: KvTensors) -> None:
    before = kv.data.clone()
    pool = HostPool(kv, 6)
    left = run_of(True, [2, 3, 4, 9], [5, 0, 1, 3])
    assert pool.carry_out([left]) is None, "none came back"
    assert torch.equal(pool.memory[[5, 0, 1, 3]], before[[2, 3, 4, 9]])
    kv.data.zero_()
    is_damaged = pool.carry_out([run_of(False, [7, 8, 1, 0], [3, 0, 1, 5])])
    assert is_damaged is not None
    assert is_damaged.tolist() == [False] * 4
    assert torch.equal(kv.data[[7, 8, 1, 0]], before[[9, 3, 4, 2]])
    assert kv.data.count_nonzero() == before[[9, 3, 4, 2]].count_nonzero()


@pytest.mark.parametrize("bit", [0, 7, 8 * 1001 + 3, 8 * SPEC.page_bytes - 1])
def test_flipped_bit_is_noticed_on_the_way_back(kv: KvTensors, bit: int) -> None:
    pool = HostPool(kv, 6)
    pool.carry_out([run_of(True, [0, 1, 2], [0, 1, 2])])
    pool.memory.view(torch.uint8).view(6, -1)[1, bit // 8] ^= 1 << (bit % 8)
    returned = [run_of(False, [5], [2]), run_of(True, [5], [4]), run_of(False, [6, 7], [1, 0])]
    is_damaged = pool.carry_out(returned)
    assert is_damaged is not None
    assert is_damaged.tolist() == [False, True, False]


def test_slot_is_compared_with_the_last_page_that_went_there(kv: KvTensors) -> None:
    pool = HostPool(kv, 2)
    pool.carry_out([run_of(True, [0, 1], [0, 1]), run_of(True, [2], [0])])
    is_damaged = pool.carry_out([run_of(False, [8, 9], [0, 1])])
    assert is_damaged is not None
    assert is_damaged.tolist() == [False, False]
    assert torch.equal(kv.data[8], kv.data[2])


def test_page_damaged_on_one_tensor_parallel_rank_is_damaged_on_all(kv: KvTensors) -> None:
    class OtherRankFoundTheSecondPage:
        size = 2

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([0, 1], dtype=x.dtype)

    pool = HostPool(kv, 2, OtherRankFoundTheSecondPage())  # type: ignore[arg-type]
    pool.carry_out([run_of(True, [0, 1], [0, 1])])
    is_damaged = pool.carry_out([run_of(False, [8, 9], [0, 1])])
    assert is_damaged is not None
    assert is_damaged.tolist() == [False, True]


def test_host_memory_for_a_gpu_is_registered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would round pinned memory up to a power of two: 3 pages of 2304 bytes would take 8192."""
    registered: list[int] = []
    monkeypatch.setattr(ipc, "register_memory", lambda memory: registered.append(memory.nbytes))
    on_cpu = make_pool(SPEC, 5, native=False)
    data = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, shape=on_cpu.data.shape
    )
    on_cuda = SimpleNamespace(page_bytes=on_cpu.page_bytes, data=data)
    host = make_host_memory(on_cuda, 3)  # type: ignore[arg-type]
    assert (host.shape, host.is_pinned()) == ((3, 3, 2, 4, 3, 16), False)
    assert registered == [3 * on_cpu.page_bytes]
    assert make_host_memory(on_cpu, 3).shape == host.shape
    assert len(registered) == 1, "a pool in host memory needs no registration"
