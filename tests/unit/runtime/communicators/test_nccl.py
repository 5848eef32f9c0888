"""`nccl` as far as testable without a GPU: the library's symbols, the config's layout, the handling of its states."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from baton.config import build_config
from baton.errors import ConfigError
from baton.runtime.communicators import make_backend, nccl
from baton.runtime.device import no_cuda


class FakeNccl:
    """Answers like the library; `states` are what ncclCommGetAsyncError says, the last one for ever."""

    def __init__(self, states: list[int], init: int = nccl.IN_PROGRESS) -> None:
        self.states = states
        self.init = init
        self.calls: list[str] = []
        self.uid = b""
        self.max_ctas = 0

    def ncclCommInitRankConfig(
        self, comm: Any, size: int, uid: nccl.UniqueId, rank: int, config: Any
    ) -> int:
        comm._obj.value = 77
        self.uid, self.max_ctas = bytes(uid), config._obj.max_ctas
        self.calls.append(f"init {rank} of {size}")
        return self.init

    def ncclCommGetAsyncError(self, comm: ctypes.c_void_p, code: Any) -> int:
        assert comm.value == 77
        code._obj.value = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return nccl.SUCCESS

    def ncclSend(self, *args: Any) -> int:
        self.calls.append(f"send {args[:4]}")
        return nccl.IN_PROGRESS

    def ncclCommAbort(self, comm: ctypes.c_void_p) -> int:
        self.calls.append(f"abort {comm.value}")
        return nccl.SUCCESS

    def ncclGetUniqueId(self, uid: Any) -> int:
        return nccl.SUCCESS

    def ncclGetErrorString(self, code: int) -> bytes:
        return f"error of code {code}".encode()


UID = bytes([*range(128), 8])
"""With 8 thread blocks."""


def test_nccl_without_a_gpu_is_refused_in_one_sentence() -> None:
    if no_cuda() is None:
        pytest.skip("this machine has a GPU")
    config = build_config(
        {
            "model_path": "demo",
            "disaggregation_mode": "decode",
            "disaggregation_transfer_backend": "nccl",
        }
    )
    with pytest.raises(
        ConfigError, match=r"backend nccl: it needs a GPU, but .*; use auto, or gloo"
    ):
        make_backend(config, "127.0.0.1", ["nccl", "tcp"])


def test_library_that_torch_brings_has_every_call_and_takes_our_config() -> None:
    if nccl.library_path() is None:
        pytest.skip("this torch brings no libnccl")
    lib = nccl.load_library()
    version = ctypes.c_int()
    assert lib.ncclGetVersion(ctypes.byref(version)) == nccl.SUCCESS
    assert version.value >= nccl.CONFIG_VERSION, "an older library reads fields that are not there"


def test_config_has_the_layout_of_the_header() -> None:
    made = nccl.make_config(1)
    assert (made.size, ctypes.sizeof(nccl.Config), nccl.Config.net_name.offset) == (40, 40, 32)
    assert (made.magic, made.blocking, made.max_ctas, made.cga_cluster_size) == (
        0xCAFEBEEF,
        0,
        1,
        -(2**31),
    )
    assert ctypes.sizeof(nccl.UniqueId) == 128


def test_init_and_send_wait_until_nccl_has_taken_them_up() -> None:
    lib = FakeNccl([nccl.IN_PROGRESS, nccl.IN_PROGRESS, nccl.SUCCESS])
    handle = nccl.Handle(lib)
    handle.init(UID, 1, 5)
    assert lib.uid == UID[:128]
    assert lib.max_ctas == 8
    lib.states = [nccl.IN_PROGRESS, nccl.SUCCESS]
    handle.enqueue("ncclSend", 4096, 64, 0, 9, 5)
    assert lib.calls == ["init 1 of 2", f"send {(4096, 64, nccl.UINT8, 0)}"]


def test_peer_that_never_comes_is_a_timeout_and_an_error_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ncclCommInitRankConfig: not done within 0\.01 s"):
        nccl.Handle(FakeNccl([nccl.IN_PROGRESS])).init(UID, 0, 0.01)
    with pytest.raises(RuntimeError, match=r"error of code 6 \(NCCL error 6\)"):
        nccl.Handle(FakeNccl([6])).init(UID, 0, 5)
    with pytest.raises(RuntimeError, match="error of code 4"):
        nccl.Handle(FakeNccl([nccl.SUCCESS], init=4)).init(UID, 0, 5)


def test_abort_happens_once_and_ends_every_poll() -> None:
    lib = FakeNccl([nccl.SUCCESS])
    handle = nccl.Handle(lib)
    handle.init(UID, 0, 5)
    failed: list[BaseException] = []

    def poll() -> None:
        try:
            handle.wait_until("ncclRecv", 20, lambda: handle.state("ncclRecv") != nccl.SUCCESS)
        except RuntimeError as err:
            failed.append(err)

    thread = threading.Thread(target=poll)
    thread.start()
    handle.abort()
    handle.abort()
    thread.join(10)
    assert not thread.is_alive()
    assert "ncclRecv" in str(failed[0])
    assert "aborted" in str(failed[0])
    assert lib.calls.count("abort 77") == 1


def test_both_ranks_of_a_pair_take_the_hosts_number_of_thread_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for flag, is_shared, expected in ((None, "0", 8), (None, "1", 1), (4, "1", 4), (32, "0", 32)):
        monkeypatch.setenv(nccl.SHARED_GPU, is_shared)
        lib = FakeNccl([nccl.SUCCESS])
        monkeypatch.setattr(nccl, "load_library", lambda lib=lib: lib)
        uid = nccl.NcclBackend(flag).unique_id()
        for rank in (0, 1):  # D may have another flag, or environment
            nccl.Handle(lib).init(uid, rank, 5)
            assert lib.max_ctas == expected
    for wrong in (0, 33):
        with pytest.raises(ConfigError, match=f"--nccl-max-ctas {wrong}: give 1 to 32"):
            build_config({"model_path": "demo", "nccl_max_ctas": wrong})
