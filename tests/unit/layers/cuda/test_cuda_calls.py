"""The CUDA half of device pages, as far as testable without a GPU: the order of calls, the waits, the errors."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from baton.layers.cuda import device_pages, ipc
from baton.layers.cuda.device_pages import CudaQueue
from baton.layers.cuda.ipc import CudaIpc
from baton.runtime.communicators.nccl import NcclCommunicator
from baton.runtime.runner.cuda_runner import DeviceRunner
from baton.runtime.runner.model_runner import ModelRunner
from tests.support.devices.late_stream import LateStream

GPU = torch.device("cuda", 0)


class FakeCuda:
    """Streams and events: an event has come when `reached` is set."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached.set()
        self.made = 0
        self.used: list[int] = []
        self.waits = 0

    def Stream(self, device: torch.device, priority: int = -1) -> int:
        assert (device, priority) == (GPU, -1)
        self.made += 1
        return self.made

    def stream(self, stream: int) -> Any:
        self.used.append(stream)
        return contextlib.nullcontext()

    def Event(self, blocking: bool = False) -> Any:
        fake = self

        class Event:
            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                assert blocking, "it would spin on a core"
                fake.waits += 1
                assert fake.reached.wait(60)

        return Event()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return fake


def stuck(why: str) -> NoReturn:
    raise AssertionError(why)


def test_call_returns_when_its_event_has_come_and_streams_are_used_again(cuda: FakeCuda) -> None:
    queue = CudaQueue(GPU, stuck)
    for _ in range(3):
        waited = cuda.waits
        with queue.run("copying"):
            pass
        assert cuda.waits - waited == 1
    with queue.run("one within another"), queue.run("copying"):
        pass
    with queue.run("copying"):
        pass
    assert cuda.made == 2, "torch keeps memory for each stream"
    assert cuda.used == [1, 1, 1, 1, 2, 1]


def test_work_queued_before_an_error_is_waited_for(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="no such page"), CudaQueue(GPU, stuck).run("copying"):
        raise ValueError("no such page")
    assert cuda.waits == 1


def test_device_that_hangs_is_given_up_and_never_reported_as_done(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pages, "STUCK_SECS", 0.01)
    monkeypatch.setattr(device_pages, "WATCH_SECS", 0.001)
    given_up: list[str] = []

    def end(why: str) -> None:
        assert cuda.waits == 1, "the call has not returned"
        given_up.append(why)
        cuda.reached.set()  # where the process would end

    cuda.reached.clear()
    with CudaQueue(GPU, end).run("copying a peer's pages"):
        pass
    assert given_up == ["cuda:0 is not through with copying a peer's pages after 0.01 s"]


def test_executor_ranks_step_has_ended_before_it_gets_the_next_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next order may be to announce the pages of that step."""
    monkeypatch.setattr(ModelRunner, "execute_remote", lambda self, order: None)
    for native, reached in ((object(), 1), (None, 0)):
        runner = object.__new__(DeviceRunner)
        runner._kv = SimpleNamespace(native=native)  # type: ignore[assignment]
        runner._stream = stream = LateStream()
        runner.execute_remote(b"")
        assert stream.reached == reached


class FakeRuntime:
    """libcudart, of one process; `codes`: what calls answer instead of success."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cudaIpcGetMemHandle" and name not in self.codes:
                args[0]._obj.reserved[:3] = (1, 2, 0)
            return self.codes.get(name, 0)

        return call

    def cudaGetErrorString(self, code: int) -> bytes:
        return f"text of {code}".encode()


class Properties:
    uuid = "GPU-1"


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(ipc, "runtime", lambda: fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    return fake


def test_handle_names_its_gpu_and_has_all_of_cudas_bytes(lib: FakeRuntime) -> None:
    handle = json.loads(CudaIpc(GPU).handle(torch.zeros(48, dtype=torch.uint8)))
    assert handle == {"gpu": "GPU-1", "handle": "010200" + "00" * 61, "bytes": 48}
    assert ctypes.sizeof(ipc.IpcHandle) == 64


def test_memory_of_another_gpu_is_refused_before_cuda_is_asked(lib: FakeRuntime) -> None:
    handle = {"gpu": "GPU-2", "handle": "00" * 64, "bytes": 48}
    with pytest.raises(
        RuntimeError, match="pages are on GPU GPU-2, ours on GPU-1; cuda_ipc is for one GPU"
    ):
        CudaIpc(GPU).open(json.dumps(handle).encode())
    assert lib.calls == []


def test_error_is_named_and_cleared_and_no_memory_is_torchs_error(lib: FakeRuntime) -> None:
    lib.codes["cudaIpcGetMemHandle"] = 1
    with pytest.raises(RuntimeError, match=r"cudaIpcGetMemHandle: text of 1 \(CUDA error 1\)"):
        CudaIpc(GPU).handle(torch.zeros(48, dtype=torch.uint8))
    assert lib.calls == ["cudaIpcGetMemHandle", "cudaGetLastError"]
    lib.codes["cudaMalloc"] = 2
    with pytest.raises(torch.OutOfMemoryError, match="cudaMalloc: text of 2"):
        ipc.call("cudaMalloc", None, 1 << 60)


def test_memory_that_cannot_be_page_locked_leaves_no_error_and_nothing_registered(
    lib: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib.codes["cudaHostRegister"] = 712
    with pytest.raises(RuntimeError, match=r"cudaHostRegister: text of 712 \(CUDA error 712\)"):
        CudaQueue(GPU, stuck).pin(torch.zeros(8, dtype=torch.uint8))
    assert lib.calls == ["cudaHostRegister", "cudaGetLastError"]
    lib.calls.clear()
    answers = iter((0, 712))
    monkeypatch.setattr(lib, "cudaHostRegister", lambda *_: next(answers), raising=False)
    slabs = [memoryview(bytearray(8)) for _ in range(2)]
    monkeypatch.setattr(torch, "empty_like", lambda x, device: x)
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        NcclCommunicator(object(), 1, GPU, slabs, 1.0)  # type: ignore[arg-type]
    assert lib.calls == ["cudaGetLastError", "cudaHostUnregister"], (
        "the first slab's memory is given back"
    )


def test_runtime_that_torch_loads_has_every_call() -> None:
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    lib = ipc.runtime()
    assert lib.cudaGetErrorString(2) == b"out of memory"
