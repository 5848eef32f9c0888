"""Memory of a GPU that two processes of one host share: CUDA IPC, through the CUDA runtime that
torch has loaded.

The memory is one block of cudaMalloc, whole and by itself. Blocks of torch's allocator lie within
larger ones, and with its `expandable_segments` they cannot be shared in this way at all.

What CUDA leaves to us: an opened block can be written as well as read (we never do), and what
becomes of it when its owner dies is not said. In practice it stays until the last process closes
it; here it is closed as soon as the owner is known to be gone, and what was read before counts only
with its checksum. Only processes on the same GPU open each other's blocks: another's memory goes
over NCCL.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

import torch
from torch import Tensor

SUCCESS = 0
OUT_OF_MEMORY = 2
LAZY_PEER_ACCESS = 1
HANDLE_BYTES = 64


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t"""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


@functools.cache
def load_runtime() -> Any:
    """libcudart as torch has loaded it, with the calls used here declared."""
    lib = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}")
    pointer = ctypes.c_void_p
    calls: dict[str, list[Any]] = {
        "cudaMalloc": [ctypes.POINTER(pointer), ctypes.c_size_t],
        "cudaIpcGetMemHandle": [ctypes.POINTER(IpcHandle), pointer],
        "cudaIpcOpenMemHandle": [ctypes.POINTER(pointer), IpcHandle, ctypes.c_uint],
        "cudaIpcCloseMemHandle": [pointer],
        "cudaHostRegister": [pointer, ctypes.c_size_t, ctypes.c_uint],
        "cudaHostUnregister": [pointer],
        "cudaGetLastError": [],
    }
    return declare_calls(lib, calls, lib.cudaGetErrorString)


def declare_calls(lib: Any, calls: dict[str, list[Any]], error_string: Any) -> Any:
    """The library; its calls take the arguments named here and return a code that `error_string`
    explains."""
    for name, arguments in calls.items():
        call = getattr(lib, name)
        call.argtypes = arguments
        call.restype = ctypes.c_int
    error_string.argtypes = [ctypes.c_int]
    error_string.restype = ctypes.c_char_p
    return lib


def call_runtime(name: str, *args: object) -> None:
    lib = load_runtime()
    code = getattr(lib, name)(*args)
    if code == SUCCESS:
        return
    lib.cudaGetLastError()  # else torch's next launch would find it, and take it for its own
    text = f"{name}: {lib.cudaGetErrorString(code).decode()} (CUDA error {code})"
    raise torch.OutOfMemoryError(text) if code == OUT_OF_MEMORY else RuntimeError(text)


def register_memory(memory: Tensor) -> None:
    """Page-lock host memory, so that copies from and to it are asynchronous. Takes all of it at
    once."""
    call_runtime("cudaHostRegister", memory.data_ptr(), memory.nbytes, 0)


def unregister_memory(memory: Tensor) -> None:
    call_runtime("cudaHostUnregister", memory.data_ptr())


class Block:
    """Device memory as __cuda_array_interface__ has it: torch takes it as it is, and keeps this
    object."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def allocate_memory(nbytes: int, device: torch.device) -> Tensor:
    """A zeroed block of its own, for as long as the process lives. Raises
    torch.OutOfMemoryError."""
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch has made its context
        torch.cuda.empty_cache()
        call_runtime("cudaMalloc", ctypes.byref(pointer), nbytes)
        memory = torch.as_tensor(Block(pointer.value or 0, nbytes), device=device).zero_()
        torch.cuda.current_stream().synchronize()
        return memory


class CudaIpc:
    """How another process of this host gets at the memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _gpu_uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def handle(self, memory: Tensor) -> bytes:
        ipc_handle = IpcHandle()
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcGetMemHandle", ctypes.byref(ipc_handle), memory.data_ptr())
        described = {
            "gpu": self._gpu_uuid(),
            "handle": bytes(ipc_handle).hex(),
            "bytes": memory.numel(),
        }
        return json.dumps(described).encode()

    def open(self, handle: bytes) -> OpenedBlock:
        described = json.loads(handle)
        if described["gpu"] != self._gpu_uuid():
            raise RuntimeError(
                f"the peer's pages are on GPU {described['gpu']}, ours on {self._gpu_uuid()}; cuda_ipc is for one GPU"
            )
        pointer = ctypes.c_void_p()
        theirs = IpcHandle.from_buffer_copy(bytes.fromhex(described["handle"]))
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcOpenMemHandle", ctypes.byref(pointer), theirs, LAZY_PEER_ACCESS)
            return OpenedBlock(pointer.value or 0, described["bytes"], self._device)


class OpenedBlock:
    """A peer's memory in this process."""

    def __init__(self, pointer: int, nbytes: int, device: torch.device) -> None:
        self._pointer = pointer
        self._device = device
        self.memory = torch.as_tensor(Block(pointer, nbytes), device=device)
        """Bytes of the block."""

    def close(self) -> None:
        """Once, when nothing reads it any more."""
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcCloseMemHandle", self._pointer)
