"""A device that is always behind, on CPU tensors: copies on the host are garbage until their mark is waited for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GARBAGE = 7


class LateMark:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream = stream
        self.number = number

    def wait(self) -> None:
        self._stream.reach(self.number)

    def seconds_since(self, earlier: LateMark) -> float:
        assert self.number <= self._stream.reached, "the mark was not waited for"
        return 0.001 * (self.number - earlier.number)


class LateStream:
    """As stream.CudaStream. `held_up`: how often the thread that launches asked to wait for the device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks = itertools.count(1)
        self._last = 0
        self.reached = 0
        self._copies: list[tuple[int, Tensor, Tensor]] = []
        self.held_up = 0

    def put(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x.copy())

    def put_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return list(torch.from_numpy(np.concatenate(arrays)).split([len(x) for x in arrays]))

    def put_into(self, target: Tensor, x: np.ndarray) -> None:
        assert target.shape == x.shape
        target.copy_(torch.from_numpy(x))

    def fetch(self, x: Tensor) -> Tensor:
        host = torch.full_like(x, GARBAGE)
        with self._lock:
            self._copies.append((self._last + 1, host, x.clone()))
        return host

    def mark(self) -> LateMark:
        with self._lock:
            self._last = next(self._marks)
            return LateMark(self, self._last)

    @torch.inference_mode()
    def reach(self, number: int) -> None:
        with self._lock:
            self.held_up += threading.current_thread().name == "device"
            self.reached = max(self.reached, number)
            for due, host, copy in self._copies:
                if due <= number:
                    host.copy_(copy)
            self._copies = [c for c in self._copies if c[0] > number]
