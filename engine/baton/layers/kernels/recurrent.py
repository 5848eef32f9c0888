"""Layers with a state per sequence, in Triton: the short convolution, the gated delta rule, and
copies of states.

    copy_states    a program has some words of one slot: they go to pages of the pool, or come back
    causal_conv    a program has some channels of one row, and a tile of its tokens after another
    gated_delta    a program has some columns of one head's S of one row, in registers, and all
                   tokens of the row, one after the other

Columns of S do not depend on each other, and a token changes them by the same operations in a
prompt and alone: a row's state and results have the same bits wherever the row is cut. This is the
recurrent form, not the chunked one of products of matrices (docs/decisions/0025). Arithmetic
and rounding are those of plain torch (`layers.ops`), with sums in float32.

The host waits for nothing and nothing is allocated, so each can be part of a CUDA graph: rows are
read on the device. Tested on the CPU by Triton's interpreter
(tests/unit/layers/kernels/test_recurrent.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from baton.layers.recurrent_state import StateCopies, StateRows
    from baton.layers.spec import DeltaSpec

WORD_BYTES = 4
COPY_WORDS = 4096
COPY_WARPS = 8
CHANNELS = 128
TILE_TOKENS = 16
CONV_WARPS = 4
COLUMNS = 8
"""Columns of S that a program has: of 128 rows each, one warp keeps them in 32 registers, and sums
over rows stay inside the warp."""
RULE_WARPS = 1
LENGTH_EPS = tl.constexpr(1e-6)
"""Added to the square of a key's length before the root."""


def copy_states(
    states: Tensor, pages: Tensor, copies: StateCopies, part: range, *, to_pages: bool
) -> None:
    """As `layers.ops.copy_states`. `part`: of whole words, as the rows of both."""
    slots = states.view(torch.int32)
    rows = pages.view(torch.int32)
    words = len(part) // WORD_BYTES
    _copy_states[(len(copies.slots), triton.cdiv(words, COPY_WORDS))](
        slots, slots.stride(0), rows, rows.stride(0), copies.slots, copies.pages,
        copies.pages.stride(0), part.start // WORD_BYTES, part.stop // WORD_BYTES,
        TO_PAGES=to_pages, BLOCK=COPY_WORDS, num_warps=COPY_WARPS,
    )  # fmt: skip


# Parts of a state begin anywhere, and where a step's arrays lie in their one copy depends on its
# size: without alignment there is one variant to compile.
@triton.jit(
    do_not_specialize=["first", "end", "width"], do_not_specialize_on_alignment=["slots", "table"]
)
def _copy_states(
    states, slot_words, pages, page_words, slots, table, width, first, end,
    TO_PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(0)
    word = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < end
    page = tl.load(table + copy * width + word // page_words, mask=inside, other=0)
    in_page = pages + page.to(tl.int64) * page_words + word % page_words
    in_slot = states + tl.load(slots + copy).to(tl.int64) * slot_words + word
    if TO_PAGES:
        tl.store(in_page, tl.load(in_slot, mask=inside), mask=inside)
    else:
        tl.store(in_slot, tl.load(in_page, mask=inside), mask=inside)


def causal_conv(x: Tensor, weight: Tensor, *, state: Tensor, rows: StateRows, out: Tensor) -> None:
    """As `layers.ops.causal_conv`. Rows of x are contiguous, `out` and each state too."""
    taps, channels = weight.shape
    _convolve[(len(rows.slots), triton.cdiv(channels, CHANNELS))](
        x, x.stride(0), weight, state, state.stride(0), rows.starts, rows.ends, rows.slots, out,
        TAPS=taps, CHANNELS=channels, TOKENS=1 if rows.longest == 1 else TILE_TOKENS,
        BLOCK=CHANNELS, num_warps=CONV_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["starts", "ends", "slots"])
def _convolve(
    x, x_stride, weight, state, state_stride, starts, ends, slots, out,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    # A row that fills up a recorded step has no slot.
    if start >= end:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    own_state = state + tl.load(slots + row).to(tl.int64) * state_stride + channel
    own_x = x + channel
    dtype: tl.constexpr = x.dtype.element_ty
    for first in range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            source = token - (TAPS - 1 - tap)
            is_in_row = ((source >= start) & (token < end))[:, None] & is_channel[None, :]
            is_in_state = (source < start)[:, None] & is_channel[None, :]
            there = own_x[None, :] + source.to(tl.int64)[:, None] * x_stride
            before = own_state[None, :] + (source - start + TAPS - 1)[:, None] * CHANNELS
            value = tl.load(there, mask=is_in_row, other=0.0).to(tl.float32)
            value += tl.load(before, mask=is_in_state, other=0.0).to(tl.float32)
            factor = tl.load(weight + tap * CHANNELS + channel, mask=is_channel, other=0.0)
            total += value * factor[None, :]
        total = total.to(dtype).to(tl.float32)
        activated = total / (1.0 + tl.exp(-total))
        to = out + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(to, activated.to(dtype), mask=(token < end)[:, None] & is_channel[None, :])
    # Other threads of the program may still read the state that is overwritten now.
    tl.debug_barrier()
    for place in tl.static_range(TAPS - 1):
        source = end - (TAPS - 1) + place
        if source >= start:
            newest = tl.load(own_x + source.to(tl.int64) * x_stride, mask=is_channel, other=0.0)
        else:
            # A later place than the one that is written: in order, none is lost.
            later = own_state + (source - start + TAPS - 1) * CHANNELS
            newest = tl.load(later, mask=is_channel, other=0.0)
        tl.store(own_state + place * CHANNELS, newest, mask=is_channel)


def gated_delta(
    qkv: Tensor,
    strengths: Tensor,
    decays: Tensor,
    *,
    rate: Tensor,
    bias: Tensor,
    sizes: DeltaSpec,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
) -> None:
    """As `layers.ops.gated_delta`. qkv, `out` and each state are contiguous."""
    heads = sizes.value_heads
    _pass_tokens[(len(rows.slots), heads, triton.cdiv(sizes.value_dim, COLUMNS))](
        qkv, strengths, strengths.stride(0), decays, decays.stride(0), rate, bias,
        state, state.stride(0), rows.starts, rows.ends, rows.slots, out, sizes.key_dim**-0.5,
        KEY_HEADS=sizes.key_heads, VALUE_HEADS=heads, KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim, BY_ROW=bias.numel() > heads,
        ROWS=triton.next_power_of_2(sizes.key_dim), COLUMNS=COLUMNS, num_warps=RULE_WARPS,
    )  # fmt: skip


@triton.jit
def _softplus(x):
    """ln(1 + e^x): x itself above 20, as torch has it, and exact where 1 + e^x rounds."""
    e = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + e
    # ln(wide) / (wide - 1) is near 1 and hardly depends on what the sum has rounded off.
    near = tl.where(wide == 1.0, e, tl.log(wide) * (e / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def _scale_to(x, length):
    return x * tl.rsqrt(tl.sum(x * x, 0) + LENGTH_EPS) * length


@triton.jit
def _read_token(
    token, end, query_at, key_at, value_at, token_stride, strength_at, strength_stride,
    decay_at, decay_stride, bias, rate, query_length, is_key, is_value, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Query, key, value, strength and decay of a token; behind a row's end, of its last one."""
    place = tl.minimum(token, end - 1)
    before = place * token_stride
    query = tl.load(query_at + before, mask=is_key, other=0.0).to(tl.float32)
    key = tl.load(key_at + before, mask=is_key, other=0.0).to(tl.float32)
    value = tl.load(value_at + before, mask=is_value, other=0.0).to(tl.float32)
    b = tl.load(strength_at + place * strength_stride)
    if BY_ROW:
        a = tl.load(decay_at + place * decay_stride, mask=is_key, other=0.0)
    else:
        a = tl.load(decay_at + place * decay_stride)
    strength = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
    decay = tl.exp(-rate * _softplus(a.to(tl.float32) + bias))
    return _scale_to(query, query_length), _scale_to(key, 1.0), value, strength, decay


@triton.jit(do_not_specialize_on_alignment=["starts", "ends", "slots"])
def _pass_tokens(
    qkv, strengths, strength_stride, decays, decay_stride, rate, bias, state, state_stride,
    starts, ends, slots, out, query_length,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BY_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    # Tokens times the elements of each may exceed 32 bits.
    start = tl.load(starts + row).to(tl.int64)
    end = tl.load(ends + row).to(tl.int64)
    # A row that fills up a recorded step has no slot.
    if start >= end:
        return
    i = tl.arange(0, ROWS)
    is_key = i < KEY_DIM
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_value = column < VALUE_DIM
    is_inside = is_key[:, None] & is_value[None, :]
    own_matrix = state + tl.load(slots + row).to(tl.int64) * state_stride
    at = own_matrix + (head * KEY_DIM + i[:, None]) * VALUE_DIM + column[None, :]
    matrix = tl.load(at, mask=is_inside, other=0.0)

    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = VALUE_HEADS * VALUE_DIM
    TOKEN_SIZE: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    query_at = qkv + (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + i
    key_at = query_at + KEY_SIZE
    value_at = qkv + 2 * KEY_SIZE + head * VALUE_DIM + column
    strength_at = strengths + head
    own_rate = tl.exp(tl.load(rate + head))
    if BY_ROW:
        decay_at = decays + head * KEY_DIM + i
        own_bias = tl.load(bias + head * KEY_DIM + i, mask=is_key, other=0.0)
    else:
        decay_at = decays + head
        own_bias = tl.load(bias + head)
    query, key, value, strength, decay = _read_token(
        start, end, query_at, key_at, value_at, TOKEN_SIZE, strength_at, strength_stride,
        decay_at, decay_stride, own_bias, own_rate, query_length, is_key, is_value, BY_ROW,
    )  # fmt: skip
    for token in range(start, end):
        # The next token is read while this one is computed: else each waits for its memory.
        next_query, next_key, next_value, next_strength, next_decay = _read_token(
            token + 1, end, query_at, key_at, value_at, TOKEN_SIZE, strength_at, strength_stride,
            decay_at, decay_stride, own_bias, own_rate, query_length, is_key, is_value, BY_ROW,
        )  # fmt: skip
        if BY_ROW:
            matrix *= decay[:, None]
        else:
            matrix *= decay
        correction = (value - tl.sum(matrix * key[:, None], 0)) * strength
        matrix += key[:, None] * correction[None, :]
        result = tl.sum(matrix * query[:, None], 0)
        to = out + token * VALUE_SIZE + head * VALUE_DIM + column
        tl.store(to, result.to(out.dtype.element_ty), mask=is_value)
        query = next_query
        key = next_key
        value = next_value
        strength = next_strength
        decay = next_decay
    tl.store(at, matrix, mask=is_inside)
