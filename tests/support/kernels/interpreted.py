"""Triton's interpreter with the arithmetic of a GPU, for processes that run kernels on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from baton.layers import ops

_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


def prepare_interpreter() -> None:
    """Round as a GPU does; `ops` then computes by its definitions, not by the CPU's kernels."""
    ops._native = None
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _multiply


def _convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Triton 3.9's interpreter cuts bfloat16 off where a GPU rounds to the nearest."""
    if source == tl.float32 and target == tl.bfloat16:
        return torch.from_numpy(np.array(x)).bfloat16().view(torch.uint16).numpy()
    return _convert_float(x, source, target, rounding)


def _multiply(builder: Any, left: Any, right: Any, *others: Any) -> Any:
    """Triton 3.9's interpreter multiplies the bits of bfloat16 numbers as integers."""
    if left.dtype == tl.bfloat16:
        left, right = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            for x in (left, right)
        )
    return _create_dot(builder, left, right, *others)
