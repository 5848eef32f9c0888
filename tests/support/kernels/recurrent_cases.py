"""The kernels of layers with states against plain torch and transformers: run in Triton's
interpreter by tests/unit/layers/kernels/test_recurrent.py, and by tests/gpu.

The interpreter is chosen when Triton is imported (TRITON_INTERPRET=1), so this is a process of its
own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from baton.layers import ops
from baton.layers.kernels import recurrent
from baton.layers.recurrent_state import StateBuffers, StateCopies, StateRows
from baton.layers.spec import DeltaSpec
from tests.support import effort
from tests.support.kernels.interpreted import prepare_interpreter

CPU = torch.device("cpu")
SLOTS = 5
NO_SLOT = 1 << 24
"""Far outside of all states."""


@dataclass(frozen=True)
class DeltaCase:
    sizes: DeltaSpec
    dtype: str
    rows_decay: bool
    lengths: tuple[int, ...]
    """Tokens of each row; 0: of a row that only fills up a step."""


def delta_cases(count: int) -> list[DeltaCase]:
    rng = random.Random(7)
    made = []
    for number in range(count):
        key_heads = rng.choice((1, 2))
        sizes = DeltaSpec(
            key_heads=key_heads,
            value_heads=key_heads * rng.choice((1, 2)),
            key_dim=rng.choice((4, 16, 20)),
            value_dim=rng.choice((8, 16, 12)),
            taps=rng.choice((2, 4, 8)),
        )
        lengths = [
            rng.choice((1, 1, 2, 5, recurrent.TILE_TOKENS + 2)) for _ in range(rng.choice((1, 3)))
        ]
        if number % 3 == 0:
            lengths = [1, 1, 0, 0]
        dtype = ("float32", "bfloat16")[number % 2]
        made.append(DeltaCase(sizes, dtype, rng.choice((True, False)), tuple(lengths)))
    return made


class DeltaInputs(NamedTuple):
    """Arguments of a layer's functions; rows lie in wider tensors, as behind a projection."""

    x: Tensor
    weight: Tensor
    strengths: Tensor
    decays: Tensor
    rate: Tensor
    bias: Tensor
    states: StateBuffers


def make_inputs(case: DeltaCase, seed: int, device: torch.device) -> DeltaInputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = case.sizes
    dtype = getattr(torch, case.dtype)
    tokens = sum(case.lengths) + case.lengths.count(0)
    heads = sizes.value_heads
    decays = heads * (sizes.key_dim if case.rows_decay else 1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    states = StateBuffers((sizes,), dtype, SLOTS, device)
    layer = states.layers[0]
    layer.conv.copy_(noise(*layer.conv.shape))
    layer.matrix.copy_(noise(*layer.matrix.shape))
    return DeltaInputs(
        noise(tokens, sizes.channels + 8).to(dtype)[:, : sizes.channels],
        noise(sizes.taps, sizes.channels),
        noise(tokens, heads + 3).to(dtype)[:, 3:],
        3 * noise(tokens, decays + 3).to(dtype)[:, :decays],
        noise(heads),
        noise(decays),
        states,
    )


def make_rows(lengths: Sequence[int], device: torch.device) -> StateRows:
    """Rows one after the other, with slots in any order; one that fills up has a token and no
    slot."""
    slots = random.Random(len(lengths)).sample(range(SLOTS), len(lengths))
    rows = []
    first = 0
    for length, slot in zip(lengths, slots, strict=True):
        rows.append((first, first + length, slot if length else NO_SLOT))
        first += max(length, 1)
    return StateRows.make(rows, lambda x: torch.from_numpy(x).to(device))


class Computed(NamedTuple):
    conv: Tensor
    """Results of the convolution."""
    results: Tensor
    states: Tensor


def compute(inputs: DeltaInputs, sizes: DeltaSpec, rows: StateRows, *, kernels: bool) -> Computed:
    """Both functions of a layer, on copies of its states."""
    before = inputs.states.data.clone()
    layer = inputs.states.layers[0]
    functions = recurrent if kernels else ops
    x = inputs.x
    conv = torch.full((len(x), sizes.channels), 7.0, dtype=x.dtype, device=x.device)
    results = torch.full((len(x), sizes.value_size), 7.0, dtype=x.dtype, device=x.device)
    functions.causal_conv(x, inputs.weight, state=layer.conv, rows=rows, out=conv)
    functions.gated_delta(
        conv,
        inputs.strengths,
        inputs.decays,
        rate=inputs.rate,
        bias=inputs.bias,
        sizes=sizes,
        state=layer.matrix,
        rows=rows,
        out=results,
    )
    made = Computed(conv, results, inputs.states.data.clone())
    inputs.states.data.copy_(before)
    return made


def check_delta(case: DeltaCase, seed: int, device: torch.device = CPU) -> None:
    """The kernels compute what plain torch does, and the same bits in any cuts of rows."""
    inputs = make_inputs(case, seed, device)
    rows = make_rows(case.lengths, device)
    got = compute(inputs, case.sizes, rows, kernels=True)
    host = DeltaInputs(*(x.cpu() for x in inputs[:-1]), make_inputs(case, seed, CPU).states)
    want = compute(host, case.sizes, make_rows(case.lengths, CPU), kernels=False)
    close = 1e-4 if case.dtype == "float32" else 3e-2
    for name, one, other in zip(("conv", "results"), got[:2], want[:2], strict=True):
        torch.testing.assert_close(
            one.cpu(), other, rtol=close, atol=close, msg=lambda m, n=name: f"{n} of {case}: {m}"
        )
    by_layer = [StateBuffers((case.sizes,), inputs.x.dtype, SLOTS) for _ in range(2)]
    for states, data in zip(by_layer, (got.states, want.states), strict=True):
        states.data.copy_(data)
    for one, other in zip(by_layer[0].layers[0], by_layer[1].layers[0], strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close, msg=f"states of {case}")

    pieces = cut_rows(case, seed, device)
    conv = torch.full_like(got.conv, 7.0)
    results = torch.full_like(got.results, 7.0)
    for piece in pieces:
        part = compute(inputs, case.sizes, piece, kernels=True)
        inputs.states.data.copy_(part.states)
        for start, end, _ in piece.in_order():
            conv[start:end] = part.conv[start:end]
            results[start:end] = part.results[start:end]
    assert torch.equal(inputs.states.data, got.states), f"states of {case} in pieces"
    assert torch.equal(conv, got.conv), f"convolution of {case} in pieces"
    assert torch.equal(results, got.results), f"results of {case} in pieces"


def cut_rows(case: DeltaCase, seed: int, device: torch.device) -> list[StateRows]:
    """The rows of a case, cut at any tokens, in as many steps as the most pieces of a row."""
    rng = random.Random(seed)
    steps: list[list[tuple[int, int, int]]] = []
    for start, end, slot in make_rows(case.lengths, CPU).in_order():
        inside = range(start + 1, end)
        cuts = sorted(rng.sample(inside, min(len(inside), rng.randint(0, 3))))
        for step, (first, last) in enumerate(itertools.pairwise((start, *cuts, end))):
            if first == last:
                continue
            while len(steps) <= step:
                steps.append([])
            steps[step].append((first, last, slot))
    return [StateRows.make(step, lambda x: torch.from_numpy(x).to(device)) for step in steps]


def check_against_transformers(*, rows_decay: bool, device: torch.device = CPU) -> None:
    """One row of 70 tokens: two chunks of transformers' form for prompts, and its form for single
    tokens."""
    sizes = DeltaSpec(
        key_heads=2, value_heads=2 if rows_decay else 4, key_dim=16, value_dim=8, taps=4
    )
    case = DeltaCase(sizes, "float32", rows_decay, (70,))
    inputs = make_inputs(case, 1, device)
    got = compute(inputs, sizes, make_rows(case.lengths, device), kernels=True)
    ((_, _, slot),) = make_rows(case.lengths, CPU).in_order()
    layer = inputs.states.layers[0]
    padded = torch.cat((layer.conv[slot], inputs.x)).cpu().t()[None]
    kernel = inputs.weight.cpu().t()[:, None]
    conv = functional.silu(functional.conv1d(padded, kernel, groups=sizes.channels))[0].t()
    torch.testing.assert_close(got.conv.cpu(), conv, rtol=1e-5, atol=1e-5)
    parts = (sizes.key_size, sizes.key_size, sizes.value_size)
    query, key, value = conv.split(parts, dim=1)
    steps = functional.softplus(inputs.decays.cpu() + inputs.bias.cpu())
    decays = -inputs.rate.cpu().exp()[:, None] * steps.unflatten(1, (sizes.value_heads, -1))
    if rows_decay:
        from transformers.models.kimi_linear.modeling_kimi_linear import (
            chunk_kimi_delta_attention as chunked,
        )
        from transformers.models.kimi_linear.modeling_kimi_linear import (
            recurrent_kimi_delta_attention as one_by_one,
        )
    else:
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_chunk_gated_delta_rule as chunked,
        )
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_recurrent_gated_delta_rule as one_by_one,
        )

        decays = decays[..., 0]
    for function in (chunked, one_by_one):
        results, matrix = function(
            query.unflatten(1, (sizes.key_heads, -1))[None],
            key.unflatten(1, (sizes.key_heads, -1))[None],
            value.unflatten(1, (sizes.value_heads, -1))[None],
            g=decays[None],
            beta=inputs.strengths.cpu().sigmoid()[None],
            initial_state=layer.matrix[slot].cpu()[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(got.results.cpu(), results[0].flatten(1), rtol=1e-4, atol=1e-4)
        states = StateBuffers((sizes,), torch.float32, SLOTS)
        states.data.copy_(got.states)
        torch.testing.assert_close(states.layers[0].matrix[slot], matrix[0], rtol=1e-4, atol=1e-4)


def check_replays(*, rows_decay: bool) -> None:
    """A recorded step of one row and one that fills it up computes the rows that its buffers have
    when it is replayed."""
    device = torch.device("cuda")
    sizes = DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16, taps=4)
    inputs = make_inputs(DeltaCase(sizes, "bfloat16", rows_decay, (1, 1)), 0, device)
    rows = StateRows.make([(0, 1, 0), (1, 1, NO_SLOT)], lambda x: torch.from_numpy(x).to(device))
    layer = inputs.states.layers[0]
    before = inputs.states.data.clone()
    conv = torch.zeros(2, sizes.channels, dtype=torch.bfloat16, device=device)
    results = torch.zeros(2, sizes.value_size, dtype=torch.bfloat16, device=device)

    def launch() -> None:
        recurrent.causal_conv(inputs.x, inputs.weight, state=layer.conv, rows=rows, out=conv)
        recurrent.gated_delta(
            conv,
            inputs.strengths,
            inputs.decays,
            rate=inputs.rate,
            bias=inputs.bias,
            sizes=sizes,
            state=layer.matrix,
            rows=rows,
            out=results,
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for slot in (3, 1):
        rows.slots[0] = slot
        inputs.states.data.copy_(before)
        graph.replay()
        replayed = (inputs.states.data.clone(), results[:1].clone())
        inputs.states.data.copy_(before)
        launch()
        assert torch.equal(inputs.states.data, replayed[0])
        assert torch.equal(results[:1], replayed[1])
        changed = (inputs.states.data != before).any(1)
        assert changed.nonzero().flatten().tolist() == [slot]


def check_copies(seed: int, device: torch.device = CPU) -> None:
    """Parts of slots to pages and back, as plain torch copies them."""
    rng = random.Random(seed)
    page_bytes = rng.choice((20, 64, 4 * recurrent.COPY_WORDS + 4))
    slot_bytes = rng.choice((64, 192, 5 * 4096))
    width = -(-slot_bytes // page_bytes)
    generator = torch.Generator().manual_seed(seed)

    def bytes_of(rows: int, size: int) -> Tensor:
        return torch.randint(0, 256, (rows, size), generator=generator, dtype=torch.uint8)

    states = bytes_of(SLOTS, slot_bytes)
    pages = bytes_of(4 * width, page_bytes)
    chosen = rng.sample(range(4 * width), 3 * width)
    copies = [
        (slot, np.array(chosen[place * width : (place + 1) * width], np.int32))
        for place, slot in enumerate(rng.sample(range(SLOTS), 3))
    ]
    first, end = sorted(4 * word for word in rng.sample(range(slot_bytes // 4 + 1), 2))
    for to_pages in (True, False):
        ours = states.to(device, copy=True)
        there = pages.to(device, copy=True)
        placed = StateCopies.make(copies, lambda x: torch.from_numpy(x).to(device))
        recurrent.copy_states(ours, there, placed, range(first, end), to_pages=to_pages)
        on_host = StateCopies.make(copies, torch.from_numpy)
        ops.copy_states(states, pages, on_host, range(first, end), to_pages=to_pages)
        assert torch.equal(ours.cpu(), states)
        assert torch.equal(there.cpu(), pages)


def check_softplus(device: torch.device = CPU) -> None:
    """Small steps keep their digits: a state that hardly decays sees thousands of them."""
    sizes = DeltaSpec(key_heads=1, value_heads=1, key_dim=4, value_dim=4, taps=2)
    case = DeltaCase(sizes, "float32", rows_decay=False, lengths=(1,))
    for decay in (-30.0, -15.0, -9.0, -1.0, 0.0, 19.9, 21.0):
        inputs = make_inputs(case, 0, device)._replace(
            decays=torch.full((1, 1), decay, device=device),
            strengths=torch.full((1, 1), -1e30, device=device),
            bias=torch.zeros(1, device=device),
            rate=torch.full((1,), 3.0 if decay < -5 else -3.0, device=device),
        )
        before = inputs.states.layers[0].matrix.clone()
        rows = StateRows.make([(0, 1, 0)], lambda x: torch.from_numpy(x).to(device))
        states = StateBuffers((sizes,), torch.float32, SLOTS, device)
        states.data.copy_(compute(inputs, sizes, rows, kernels=True).states)
        step = functional.softplus(torch.tensor(decay, dtype=torch.float64))
        want = before[0].double().cpu() * (-inputs.rate.double().cpu().exp() * step).exp()
        got = states.layers[0].matrix[0].double().cpu()
        # Where 1 + e^x is rounded before the logarithm, small steps are wrong by more than 1e-6.
        close = 4e-7 if device.type == "cpu" else 8e-7
        torch.testing.assert_close(got, want, rtol=close, atol=0.0, msg=f"decay {decay}")


def main() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
    made = delta_cases(24 if effort.EVERY else 5)
    for seed, case in enumerate(made):
        check_delta(case, seed)
    # Importing transformers takes seconds; plain torch is compared with it in tests/parity.
    if effort.EVERY:
        for rows_decay in (False, True):
            check_against_transformers(rows_decay=rows_decay)
    for seed in range(6):
        check_copies(seed)
    check_softplus()
    print(f"{len(made)} cases")


if __name__ == "__main__":
    main()
