"""Kernels of our own, in Triton, which comes with torch's CUDA builds: `draw` and `masks` for the
sampler, `heads`, `experts`, `coded` and `recurrent` for a layer.

Triton compiles a kernel at its first launch, and the launcher with a C compiler: `find_obstacle`
does both at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.layers.flashinfer_loader import summarize_error

if TYPE_CHECKING:
    from baton.layers.spec import DeltaSpec, KernelShapes

usable = True
"""False once `find_obstacle` has found one: the sampler then draws on the host, which waits for the
device."""
REMEDY = "install triton and a C compiler (gcc, or what CC names) with Python's headers"


def find_obstacle(shapes: KernelShapes, device: torch.device) -> str | None:
    """The reason why the kernels cannot run this model here, as the middle of a sentence; None:
    they can.

    Runs each once. Raises torch.OutOfMemoryError.
    """
    global usable
    usable = False
    try:
        _try_out(shapes, device)
        usable = True
    except torch.OutOfMemoryError:
        raise
    except Exception as err:  # noqa: BLE001 - Triton's own, subprocess's, ImportError, OSError
        return summarize_error(err)
    return None


def _try_out(shapes: KernelShapes, device: torch.device) -> None:
    from baton.layers.kernels.coded import CodedMatrix, CodeType
    from baton.layers.kernels.draw import draw_rows
    from baton.layers.kernels.draw_columns import DrawColumns
    from baton.layers.kernels.experts import MANY_ROWS, StackedExperts
    from baton.layers.kernels.heads import store_heads
    from baton.layers.kernels.masks import mask_rows

    integers = torch.zeros(2, dtype=torch.int64, device=device)
    of_row = DrawColumns(temperature=1.0, u=0.5, top_k=1, top_p=0.9, min_p=0.0)
    columns = torch.tensor(of_row, dtype=torch.float64, device=device)[:, None]
    logits = torch.zeros(1, shapes.vocab_size, device=device)
    words = -(-shapes.vocab_size // 32)
    mask_rows(logits, integers[:1], torch.full((1, words), -1, dtype=torch.int32, device=device))
    draw_rows(logits, integers[:1], columns, integers[1:])
    dtype = getattr(torch, shapes.dtype)
    if (spec := shapes.heads) is not None:
        kv_heads = spec.num_kv_heads
        dim = spec.head_dim
        heads = torch.zeros(1, spec.num_heads + 2 * kv_heads, dim, dtype=dtype, device=device)
        pages = torch.zeros(2, 1, 1, kv_heads, dim, dtype=dtype, device=device)
        cos, sin = torch.zeros(1, dim, device=device).chunk(2, dim=1)
        for norms in (None, (heads[0, 0], heads[0, 0])):
            store_heads(
                heads,
                spec.num_heads,
                norms,
                1e-6,
                integers[:1],
                (cos, sin),
                (pages[0], pages[1]),
                integers[:1],
            )
    for mixture in shapes.experts:
        gate_up = torch.zeros(
            2 * mixture.inner_size, shapes.hidden_size, dtype=dtype, device=device
        )
        down = torch.zeros(shapes.hidden_size, mixture.inner_size, dtype=dtype, device=device)
        one = StackedExperts(CodedMatrix.stack([gate_up]), CodedMatrix.stack([down]), 0)
        # Small tiles, and large ones.
        for tokens in (1, MANY_ROWS):
            x = torch.zeros(tokens, shapes.hidden_size, dtype=dtype, device=device)
            places = (tokens, mixture.experts_per_token)
            chosen = torch.zeros(places, dtype=torch.int64, device=device)
            one.pass_tokens(x, chosen, torch.zeros(places, device=device), integers[:1])
    if shapes.state is not None:
        _try_states(shapes.state, dtype, device)
    if shapes.is_quantized:
        x = torch.zeros(1, shapes.hidden_size, dtype=dtype, device=device)
        for code_type in get_args(CodeType):
            matrix = CodedMatrix.make(
                code_type,
                torch.zeros(1, shapes.hidden_size, dtype=torch.uint8),
                scales=torch.ones(1, 1),
                zeros=0.0,
                column_group=torch.zeros(shapes.hidden_size, dtype=torch.int32),
                dtype=dtype,
                device=device,
            )
            assert matrix is not None, "one group is in order"
            matrix.multiply(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises the error of a failed launch


def _try_states(delta: DeltaSpec, dtype: torch.dtype, device: torch.device) -> None:
    """A row of one token, and one of two, with each form of decays."""
    from baton.layers.kernels import recurrent
    from baton.layers.recurrent_state import StateBuffers, StateCopies, StateRows

    def put(x: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(x).to(device)

    states = StateBuffers((delta,), dtype, 1, device)
    copies = StateCopies.make([(0, np.zeros(1, np.int32))], put)
    whole = range(states.slot_bytes)
    recurrent.copy_states(states.data, states.data.clone(), copies, whole, to_pages=True)
    heads = delta.value_heads
    for tokens in (1, 2):
        rows = StateRows.make([(0, tokens, 0)], put)
        qkv = torch.zeros(tokens, delta.channels, dtype=dtype, device=device)
        weight = torch.zeros(delta.taps, delta.channels, device=device)
        state = states.layers[0]
        recurrent.causal_conv(qkv, weight, state=state.conv, rows=rows, out=torch.empty_like(qkv))
        for decays in (heads, heads * delta.key_dim):
            recurrent.gated_delta(
                qkv,
                torch.zeros(tokens, heads, dtype=dtype, device=device),
                torch.zeros(tokens, decays, dtype=dtype, device=device),
                rate=torch.zeros(heads, device=device),
                bias=torch.zeros(decays, device=device),
                sizes=delta,
                state=state.matrix,
                rows=rows,
                out=torch.empty(tokens, delta.value_size, dtype=dtype, device=device),
            )
