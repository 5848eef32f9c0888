"""Draw a token for each row of a step in one launch, by the definition of
`runtime.sampling.sampler`, in Triton.

One program per row: (1) its largest logit; (2) the smallest logit that top_k keeps, and then top_p,
each found by comparing all logits with 16 pivots at a time, 4 bits of the answer per pass; (3) the
mass of the kept tokens; (4) the first token, in order of id, at which their running sum passes u
times that. A row without filters takes three passes. A row with a NaN, or whose largest logit is
infinite, gets INVALID_TOKEN.

Sums are float64 and in a fixed order, so a row's token does not depend on the other rows. Nothing
is allocated and the host waits for nothing. Tested on the CPU by Triton's interpreter
(tests/unit/layers/kernels/test_draw.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.layers.kernels.draw_columns import DrawColumns
from baton.sched.types import plan

BLOCK = 1024
WARPS = 16
INVALID_TOKEN = tl.constexpr(plan.INVALID_TOKEN)
NO_TOKEN = tl.constexpr(2**31 - 1)
LOWEST_KEY = tl.constexpr(-(2**31))
PIVOTS = tl.constexpr(16)
PASSES = tl.constexpr(8)
"""Digits of 4 bits each: a key has 32."""
TEMPERATURE = tl.constexpr(DrawColumns._fields.index("temperature"))
U = tl.constexpr(DrawColumns._fields.index("u"))
TOP_K = tl.constexpr(DrawColumns._fields.index("top_k"))
TOP_P = tl.constexpr(DrawColumns._fields.index("top_p"))
MIN_P = tl.constexpr(DrawColumns._fields.index("min_p"))


def draw_rows(
    logits: Tensor, rows: Tensor, columns: Tensor, tokens: Tensor, block: int = BLOCK
) -> None:
    """Write the tokens of some rows.

    Args:
        logits: float32 [S, vocab], each row contiguous.
        rows: int64 [n]: which of them draw.
        columns: float64 [5, n], contiguous: a DrawColumns of each of those rows, one field per row
        of the tensor.
        tokens: int64 [S], of which the entries of `rows` are overwritten, unless they are negative
        already.
    """
    vocab = logits.shape[1]
    _draw_token[(len(rows),)](
        logits,
        logits.stride(0),
        vocab,
        rows,
        columns,
        len(rows),
        tokens,
        BLOCK=block,
        num_warps=WARPS,
    )


@triton.jit
def _load_scaled_logits(logits, start, vocab, temperature, BLOCK: tl.constexpr):
    """Ids and logits of a block; -inf behind the vocabulary. Adding 0 makes -0 equal to 0 as a key,
    too."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    return ids, tl.math.div_rn(x, temperature) + 0.0


@triton.jit
def _ordered_keys(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _find_threshold(
    logits, vocab, temperature, largest, least_weight, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest key that many tokens (COUNT), or tokens of so much mass exp(x - largest), have or
    exceed."""
    base = tl.zeros((), tl.int64)
    step = tl.full((), 1 << 28, tl.int64)
    for _ in range(PASSES):
        pivots = (base + step * tl.arange(0, PIVOTS).to(tl.int64) - 2147483648).to(tl.int32)
        reached = tl.zeros((PIVOTS,), tl.float64)
        for start in range(0, vocab, BLOCK):
            ids, x = _load_scaled_logits(logits, start, vocab, temperature, BLOCK)
            if COUNT:
                weights = tl.where(ids < vocab, 1.0, 0.0).to(tl.float64)
            else:
                weights = tl.exp(x - largest).to(tl.float64)
            is_above = _ordered_keys(x)[:, None] >= pivots[None, :]
            reached += tl.sum(tl.where(is_above, weights[:, None], 0.0), 0)
        base += step * tl.maximum(tl.sum((reached >= least_weight).to(tl.int64), 0) - 1, 0)
        step = step // PIVOTS
    return (base - 2147483648).to(tl.int32)


@triton.jit
def _sum_above(logits, vocab, temperature, largest, key, BLOCK: tl.constexpr):
    """How many tokens have a higher key, their mass, and the mass of one with this key."""
    count = tl.zeros((), tl.int64)
    mass = tl.zeros((), tl.float64)
    each = tl.zeros((), tl.float64)
    for start in range(0, vocab, BLOCK):
        _, x = _load_scaled_logits(logits, start, vocab, temperature, BLOCK)
        keys = _ordered_keys(x)
        weights = tl.exp(x - largest).to(tl.float64)
        count += tl.sum((keys > key).to(tl.int64), 0)
        mass += tl.sum(tl.where(keys > key, weights, 0.0), 0)
        each = tl.maximum(each, tl.max(tl.where(keys == key, weights, 0.0), 0))
    return count, mass, each


@triton.jit
def _filter_weights(x, largest, min_p, k_key, k_left, p_key, p_left):
    """Mass of the block's tokens that the filters keep, 0 for the others, and how many equal the
    two thresholds.

    `k_left`, `p_left`: so many of the next tokens equal to a threshold are kept, lowest id first.
    """
    keys = _ordered_keys(x)
    weights = tl.exp(x - largest).to(tl.float64)
    k_equal = (keys == k_key).to(tl.int64)
    p_equal = (keys == p_key).to(tl.int64)
    by_k = (keys > k_key) | ((k_equal > 0) & (tl.cumsum(k_equal, 0) <= k_left))
    by_p = (keys > p_key) | ((p_equal > 0) & (tl.cumsum(p_equal, 0) <= p_left))
    weights = tl.where(by_k & by_p & (weights >= min_p), weights, 0.0)
    return weights, tl.sum(k_equal, 0), tl.sum(p_equal, 0)


@triton.jit(do_not_specialize=["count"])  # one variant to compile, whatever the number of rows
def _draw_token(logits, stride, vocab, rows, columns, count, tokens, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(rows + place)
    logits += row * stride
    temperature = tl.load(columns + TEMPERATURE * count + place).to(tl.float32)
    u = tl.load(columns + U * count + place)
    top_k = tl.load(columns + TOP_K * count + place).to(tl.int64)
    top_p = tl.load(columns + TOP_P * count + place)
    min_p = tl.load(columns + MIN_P * count + place)

    largest = tl.full((), float("-inf"), tl.float32)
    nans = tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        _, x = _load_scaled_logits(logits, start, vocab, temperature, BLOCK)
        largest = tl.maximum(largest, tl.max(x, 0))
        nans += tl.sum((x != x).to(tl.int32), 0)
    is_bad = (nans > 0) | (largest - largest != 0) | (tl.load(tokens + row) < 0)

    k_key = tl.full((), LOWEST_KEY, tl.int32)
    k_left = tl.zeros((), tl.int64)
    p_key = tl.full((), LOWEST_KEY, tl.int32)
    p_left = tl.zeros((), tl.int64)
    mass = tl.zeros((), tl.float64)
    if top_k > 0:
        k_key = _find_threshold(logits, vocab, temperature, largest, top_k, True, BLOCK)
        higher, mass, each = _sum_above(logits, vocab, temperature, largest, k_key, BLOCK)
        k_left = top_k - higher
        mass += k_left * each
    elif top_p < 1:
        _, mass, _ = _sum_above(logits, vocab, temperature, largest, LOWEST_KEY, BLOCK)
    if top_p < 1:
        wanted_mass = top_p * mass
        p_key = _find_threshold(logits, vocab, temperature, largest, wanted_mass, False, BLOCK)
        _, higher_mass, each = _sum_above(logits, vocab, temperature, largest, p_key, BLOCK)
        p_left = tl.where(each > 0, tl.ceil((wanted_mass - higher_mass) / each), 0.0).to(tl.int64)

    total = tl.zeros((), tl.float64)
    k_some = k_left
    p_some = p_left
    for start in range(0, vocab, BLOCK):
        _, x = _load_scaled_logits(logits, start, vocab, temperature, BLOCK)
        weights, k_used, p_used = _filter_weights(x, largest, min_p, k_key, k_some, p_key, p_some)
        total += tl.sum(weights, 0)
        k_some -= k_used
        p_some -= p_used

    running = tl.zeros((), tl.float64)
    token = tl.full((), NO_TOKEN, tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        ids, x = _load_scaled_logits(logits, start, vocab, temperature, BLOCK)
        weights, k_used, p_used = _filter_weights(x, largest, min_p, k_key, k_left, p_key, p_left)
        passed = (running + tl.cumsum(weights, 0) > u * total) & (weights > 0)
        token = tl.minimum(token, tl.min(tl.where(passed, ids, NO_TOKEN), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        running += tl.sum(weights, 0)
        k_left -= k_used
        p_left -= p_used
    # Where rounding keeps the sum from passing u * total, the last token with probability is drawn.
    token = tl.where(token == NO_TOKEN, last, token)
    tl.store(tokens + row, tl.where(is_bad, INVALID_TOKEN, token).to(tl.int64))
