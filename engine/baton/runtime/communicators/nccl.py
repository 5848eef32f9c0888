"""`nccl`: libnccl from the wheel that torch brings, two ranks per communicator, through ctypes.

Slabs of a pool on the device are on it too, and NCCL sends from one into the other: page → slab →
NCCL → slab → page. Pages in host memory cross the bus twice: page → pinned host slab → device slab
→ NCCL → device slab → pinned host slab → page. All memory is allocated at open; copies and NCCL's
kernels go to a private stream; nothing here waits for the device but by looking at an event until a
deadline, so that a peer that never comes cannot hold the thread (a synchronization would).

Demands of NCCL, and the answers to them:
* an init that blocks waits for an absent peer for ever: communicators are non-blocking, and polled;
* a send waits on the device until it is met, on as many SMs as it has channels, of which one
  carries some 20 GB/s: --nccl-max-ctas bounds them. Both ranks must have the same bound, so the
  host's travels behind the unique id;
* only an abort ends it, from another thread, and that may hang: the transfer runtime gives it up
  then. The pointer is taken from this object before the abort, so that nothing polls a communicator
  that is being freed;
* two ranks on one GPU are refused unless NCCL >= 2.30 finds NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from baton.layers.cuda import ipc
from baton.runtime.device import no_cuda

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
UINT8 = 1
SUCCESS = 0
IN_PROGRESS = 7
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 21700
"""NCCL 2.17, whose config ends with the network's name: a later library takes its own defaults for
what came after.
"""
UNDEFINED = -(2**31)
FIRST_POLL_SECS = 0.00005
LONGEST_POLL_SECS = 0.001
"""Each look takes the GIL: the pauses between them double up to this."""
DEFAULT_CTAS = 8
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


Slabs: TypeAlias = "Sequence[memoryview | Tensor]"
"""Staging memory, on the host or on the device."""


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )


def make_config(max_ctas: int) -> Config:
    return Config(
        ctypes.sizeof(Config), CONFIG_MAGIC, CONFIG_VERSION, 0, UNDEFINED, 1, max_ctas, None
    )


def default_ctas() -> int:
    """Thread blocks per communicator: one if both ranks share a GPU, whose SMs the other engine
    needs.
    """
    return 1 if os.environ.get(SHARED_GPU) == "1" else DEFAULT_CTAS


def library_path() -> Path | None:
    """libnccl of the wheel nvidia-nccl, which torch depends on."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia and nvidia.submodule_search_locations) or ()
    return next(
        (path for folder in folders if (path := Path(folder) / "nccl" / "lib" / LIBRARY).exists()),
        None,
    )


def find_obstacle() -> str | None:
    """Why nccl cannot work here; None: it can."""
    if (reason := no_cuda()) is not None:
        return f"it needs a GPU, but {reason}"
    return (
        None
        if library_path()
        else f"{LIBRARY} is not there; install the nvidia-nccl wheel of torch's CUDA version"
    )


def load_library() -> Any:
    """The library with the calls used here declared."""
    lib = ctypes.CDLL(str(library_path() or LIBRARY))
    pointer = ctypes.c_void_p
    stream = ctypes.c_void_p
    calls: dict[str, list[Any]] = {
        "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
        "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "ncclCommInitRankConfig": [
            ctypes.POINTER(pointer), ctypes.c_int, UniqueId, ctypes.c_int, ctypes.POINTER(Config),
        ],
        "ncclCommGetAsyncError": [pointer, ctypes.POINTER(ctypes.c_int)],
        "ncclCommAbort": [pointer],
        "ncclSend": [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, stream],
        "ncclRecv": [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, stream],
    }  # fmt: skip
    return ipc.declare_calls(lib, calls, lib.ncclGetErrorString)


class Handle:
    """An ncclComm_t: its calls, its asynchronous state, and its one abort."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = ctypes.c_void_p()

    def _check_code(self, operation: str, code: int) -> int:
        if code not in (SUCCESS, IN_PROGRESS):
            raise RuntimeError(
                f"{operation}: {self._lib.ncclGetErrorString(code).decode()} (NCCL error {code})"
            )
        return code

    def _call_comm(self, operation: str, call: Callable[[ctypes.c_void_p], int]) -> int:
        with self._lock:
            # NCCL would read freed memory: an abort frees the communicator while other threads poll
            # it.
            if self._comm is None:
                raise RuntimeError(f"{operation}: the communicator was aborted")
            return self._check_code(operation, call(self._comm))

    def init(self, unique_id: bytes, rank: int, timeout_secs: float) -> None:
        """Args: `unique_id`: as from `NcclBackend.unique_id`."""
        uid = UniqueId.from_buffer_copy(unique_id)
        settings = make_config(unique_id[UNIQUE_ID_BYTES])
        self._call_comm(
            "ncclCommInitRankConfig",
            lambda comm: self._lib.ncclCommInitRankConfig(
                ctypes.byref(comm), 2, uid, rank, ctypes.byref(settings)
            ),
        )
        self.await_call("ncclCommInitRankConfig", timeout_secs)

    def state(self, operation: str) -> int:
        """SUCCESS or IN_PROGRESS; raises for anything else."""
        code = ctypes.c_int()
        self._call_comm(
            operation, lambda comm: self._lib.ncclCommGetAsyncError(comm, ctypes.byref(code))
        )
        return self._check_code(operation, code.value)

    def await_call(self, operation: str, timeout_secs: float) -> None:
        """Wait until the last call has been taken up."""
        self.wait_until(operation, timeout_secs, lambda: self.state(operation) == SUCCESS)

    def wait_until(self, operation: str, timeout_secs: float, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_secs
        pause = FIRST_POLL_SECS
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{operation}: not done within {timeout_secs:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECS)

    def enqueue(
        self, name: str, pointer: int, nbytes: int, peer: int, stream: int, timeout_secs: float
    ) -> None:
        """ncclSend or ncclRecv."""
        call = getattr(self._lib, name)
        self._call_comm(name, lambda comm: call(pointer, nbytes, UINT8, peer, comm, stream))
        self.await_call(name, timeout_secs)

    def abort(self) -> None:
        with self._lock:
            comm = self._comm
            self._comm = None
        # A second abort finds no pointer; before the init has returned one there is nothing to
        # abort.
        if comm is not None and comm.value:
            self._check_code("ncclCommAbort", self._lib.ncclCommAbort(comm))


class NcclBackend:
    name = "nccl"
    works_on_device = True

    def __init__(self, max_ctas: int | None = None) -> None:
        """`max_ctas`: None takes `default_ctas`."""
        self._lib = load_library()
        self._max_ctas = max_ctas or default_ctas()
        self._device = torch.device("cuda", torch.cuda.current_device())

    def unique_id(self) -> bytes:
        uid = UniqueId()
        code = self._lib.ncclGetUniqueId(ctypes.byref(uid))
        if code != SUCCESS:
            raise RuntimeError(f"ncclGetUniqueId: {self._lib.ncclGetErrorString(code).decode()}")
        return bytes(uid) + bytes([self._max_ctas])

    def open(
        self,
        unique_id: bytes,
        rank: int,
        slabs: Slabs,
        open_timeout_secs: float,
        op_timeout_secs: float,
    ) -> NcclCommunicator:
        handle = Handle(self._lib)
        with torch.cuda.device(self._device):
            try:
                handle.init(unique_id, rank, open_timeout_secs)
                return NcclCommunicator(handle, 1 - rank, self._device, slabs, op_timeout_secs)
            except Exception:
                handle.abort()
                raise


class NcclCommunicator:
    def __init__(
        self, handle: Handle, peer: int, device: torch.device, slabs: Slabs, op_timeout_secs: float
    ) -> None:
        self._handle = handle
        self._peer = peer
        self._timeout_secs = op_timeout_secs
        self._host: list[Tensor] = []
        """Slabs in host memory; empty when they are on the device."""
        self._device_slabs: list[Tensor] = []
        for slab in slabs:
            if isinstance(slab, Tensor):
                self._device_slabs.append(slab)
            else:
                self._host.append(torch.frombuffer(slab, dtype=torch.uint8))
                self._device_slabs.append(torch.empty_like(self._host[-1], device=device))
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()
        # A copy to or from memory that is not pinned would wait for the stream, and the stream may
        # wait for the peer.
        with (
            contextlib.ExitStack() as undo
        ):  # slabs of which one cannot be registered are given back
            for slab in self._host:
                ipc.register_memory(slab)
                undo.callback(ipc.unregister_memory, slab)
            undo.pop_all()

    def _enqueue_transfer(self, name: str, slab: int, nbytes: int) -> None:
        pointer = self._device_slabs[slab].data_ptr()
        stream = self._stream.cuda_stream
        self._handle.enqueue(name, pointer, nbytes, self._peer, stream, self._timeout_secs)

    def _wait_for_stream(self, operation: str) -> None:
        """Until the stream is through, with an eye on errors NCCL reports meanwhile (the peer's
        death, an abort).
        """
        self._event.record(self._stream)

        def is_done() -> bool:
            self._handle.state(operation)
            return bool(self._event.query())

        self._handle.wait_until(operation, self._timeout_secs, is_done)

    def send(self, slab: int, nbytes: int) -> None:
        if self._host:
            with torch.cuda.stream(self._stream):
                self._device_slabs[slab][:nbytes].copy_(
                    self._host[slab][:nbytes], non_blocking=True
                )
        self._enqueue_transfer("ncclSend", slab, nbytes)
        self._wait_for_stream("ncclSend")

    def recv(self, slab: int, nbytes: int) -> None:
        self._enqueue_transfer("ncclRecv", slab, nbytes)
        if self._host:
            with torch.cuda.stream(self._stream):
                self._host[slab][:nbytes].copy_(
                    self._device_slabs[slab][:nbytes], non_blocking=True
                )
        self._wait_for_stream("ncclRecv")

    def abort(self) -> None:
        self._handle.abort()
        self._event.synchronize()  # its last kernel has ended: the slabs may be freed
        for slab in self._host:
            ipc.unregister_memory(slab)
