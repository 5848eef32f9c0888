"""libnccl between two ranks of one process, for slabs that are "on the device": ordinary memory here.

It has NCCL's manners: calls return at once and are looked after, a send is through when its receive has taken it, the
k-th meets the k-th, both of one size; memory that is no slab of the device is an error, a call after an abort a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baton.runtime.communicators import nccl

INVALID_ARGUMENT, INVALID_USAGE = 4, 5


@dataclass
class Op:
    pointer: int
    nbytes: int
    is_done: bool = False


@dataclass
class Clique:
    """State that two ranks share."""

    joined: set[int] = field(default_factory=set)
    sends: list[Op] = field(default_factory=list)
    receives: list[Op] = field(default_factory=list)


class Stream:
    _numbers = itertools.count(1)

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = next(self._numbers)


class FakeNccl:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cliques: dict[bytes, Clique] = {}
        self._comms: dict[int, tuple[Clique, int]] = {}
        self._numbers = itertools.count(1000)
        self.streams: dict[int, list[Op]] = {}
        self.slabs: list[Tensor] = []
        self.sent = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Backends made meanwhile use this, and torch's streams and events are this one's."""
        lib = self

        class Event:
            def __init__(self) -> None:
                self._ops: list[Op] = []

            def record(self, stream: Stream) -> None:
                self._ops = list(lib.streams.get(stream.cuda_stream, ()))

            def query(self) -> bool:
                return all(op.is_done for op in self._ops)

            def synchronize(self) -> None:
                """After an abort: what was not met is given up."""

        with (
            mock.patch.object(nccl, "load", return_value=self),
            mock.patch.object(nccl, "unusable", return_value=None),
            mock.patch.multiple(
                torch.cuda,
                Stream=Stream,
                Event=Event,
                current_device=lambda: 0,
                device=contextlib.nullcontext,
            ),
        ):
            yield

    def ncclGetUniqueId(self, uid: Any) -> int:
        ctypes.memmove(ctypes.addressof(uid._obj), next(self._numbers).to_bytes(8, "little"), 8)
        return nccl.SUCCESS

    def ncclCommInitRankConfig(
        self, comm: Any, size: int, uid: nccl.UniqueId, rank: int, config: Any
    ) -> int:
        with self._lock:
            clique = self._cliques.setdefault(bytes(uid), Clique())
            clique.joined.add(rank)
            comm._obj.value = next(self._numbers)
            self._comms[comm._obj.value] = (clique, rank)
        return nccl.IN_PROGRESS

    def ncclCommGetAsyncError(self, comm: ctypes.c_void_p, code: Any) -> int:
        with self._lock:
            clique, _ = self._comms[comm.value or 0]
            code._obj.value = nccl.SUCCESS if len(clique.joined) == 2 else nccl.IN_PROGRESS
        return nccl.SUCCESS

    def _post(
        self, to: str, pointer: int, nbytes: int, peer: int, comm: ctypes.c_void_p, stream: int
    ) -> int:
        with self._lock:
            clique, rank = self._comms[comm.value or 0]
            if peer != 1 - rank:
                return INVALID_ARGUMENT
            if not any(
                s.data_ptr() <= pointer and pointer + nbytes <= s.data_ptr() + s.numel()
                for s in self.slabs
            ):
                return INVALID_USAGE
            op = Op(pointer, nbytes)
            getattr(clique, to).append(op)
            self.streams.setdefault(stream, []).append(op)
            while clique.sends and clique.receives:
                send, receive = clique.sends.pop(0), clique.receives.pop(0)
                assert send.nbytes == receive.nbytes, "NCCL would hang, or write past the end"
                ctypes.memmove(receive.pointer, send.pointer, send.nbytes)
                send.is_done = receive.is_done = True
                self.sent += send.nbytes
        return nccl.SUCCESS

    def ncclSend(
        self, pointer: int, nbytes: int, _type: int, peer: int, comm: ctypes.c_void_p, stream: int
    ) -> int:
        return self._post("sends", pointer, nbytes, peer, comm, stream)

    def ncclRecv(
        self, pointer: int, nbytes: int, _type: int, peer: int, comm: ctypes.c_void_p, stream: int
    ) -> int:
        return self._post("receives", pointer, nbytes, peer, comm, stream)

    def ncclCommAbort(self, comm: ctypes.c_void_p) -> int:
        with self._lock:
            clique, rank = self._comms.pop(comm.value or 0)
            clique.joined.add(rank)
            (clique.receives if rank else clique.sends).clear()
        return nccl.SUCCESS

    def ncclGetErrorString(self, code: int) -> bytes:
        return {INVALID_ARGUMENT: b"invalid argument", INVALID_USAGE: b"no memory of the device"}[
            code
        ]
