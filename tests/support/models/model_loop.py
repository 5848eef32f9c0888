"""The smallest engine: sequences, scattered pages and a Decoder, with no scheduler. What parity tests drive."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from baton.layers.attention import make_backend
from baton.layers.attention.base import AttentionBackend, ForwardBatch, PageTable
from baton.layers.kv_pool import make_pool
from baton.models.decoder import Decoder
from baton.runtime.runner.slot_states import SlotStates
from baton.runtime.runner.step_inputs import Growth, StepInputs
from tests.support.kernels.attention_batch import AttentionRow, build_batch

_SLOTS = 8


@dataclass
class Sequence:
    tokens: list[int]
    pages: list[int]
    further: list[list[int]] = field(default_factory=list)
    """Pages by table of the pool behind table 0; those left behind are another's by now."""
    slot: int = 0
    """Of its states, where layers have some."""
    computed: int = 0
    out: list[int] = field(default_factory=list)


def forward_all(decoder: Decoder, batch: ForwardBatch, attn: AttentionBackend) -> torch.Tensor:
    """Like `decoder.forward`, but logits of every token, [T, vocab]."""
    every = torch.arange(len(batch.token_ids), device=batch.token_ids.device)
    return decoder.forward(replace(batch, sample_index=every), attn)


def states_step(work: list[tuple[Sequence, int]]) -> StepInputs:
    """The part of a step that states need."""
    none = np.empty(0, np.int64)
    return StepInputs(
        number=0,
        num_decode=0,
        slots=np.array([seq.slot for seq, _ in work]),
        starts=np.array([seq.computed for seq, _ in work]),
        lengths=np.array([n for _, n in work]),
        samples=none,
        token_ids=none,
        prompt_rows=none,
        growth=[Growth(seq.slot, 0, array("i")) for seq, _ in work if not seq.computed],
        copies=(),
        new_pages=array("i"),
    )


class ModelLoop:
    """Computes sequences on pages drawn at random from a pool whose memory starts as NaN: reading a slot that was
    never written, or another sequence's, cannot go unnoticed."""

    def __init__(
        self, decoder: Decoder, backend: str, page_size: int, max_tokens: int = 1024
    ) -> None:
        self.decoder = decoder
        self.page_size = page_size
        spec = decoder.spec.kv_spec(page_size).divide(decoder.spec.attention)
        self._rules = [rule for rule in spec.rules for _ in range(rule.width)]
        """By table behind table 0."""
        num_pages = max_tokens // page_size * (1 + len(self._rules))
        self.kv = make_pool(spec, num_pages, native=False)
        self.kv.data.fill_(torch.nan)
        self.attn = make_backend(backend, decoder.spec.attention, self.kv)
        self._states: SlotStates | None = None
        if decoder.spec.states:
            self._states = SlotStates(tuple(decoder.spec.states.values()), self.kv, _SLOTS)
            for layer in self._states.buffers.layers:
                layer.conv.fill_(torch.nan)
                layer.matrix.fill_(torch.nan)
        self._free_slots = list(range(_SLOTS))
        self._free = list(range(self.kv.num_pages))
        random.Random(page_size).shuffle(self._free)

    def start(self, prompt: list[int], room: int) -> Sequence:
        """A sequence with pages for its prompt and `room` more tokens."""
        count = -(-(len(prompt) + room) // self.page_size)
        tables = [[self._free.pop() for _ in range(count)] for _ in range(1 + len(self._rules))]
        return Sequence(list(prompt), tables[0], tables[1:], self._free_slots.pop())

    def release(self, seq: Sequence) -> None:
        self._free_slots.append(seq.slot)
        self._leave_behind(seq, len(seq.pages))
        self._free.extend(seq.pages)

    def _advance(self, seq: Sequence, n: int) -> None:
        seq.computed += n
        for rule, table in zip(self._rules, seq.further, strict=True):
            self._leave_blocks(table, rule.first_visible(seq.computed) // self.page_size)

    def _leave_behind(self, seq: Sequence, blocks: int) -> None:
        for table in seq.further:
            self._leave_blocks(table, blocks)

    def _leave_blocks(self, table: list[int], blocks: int) -> None:
        """Give pages back that no later row reads. They become NaN, as those of any other owner may."""
        for block in range(blocks):
            if table[block] >= 0:
                self.kv.data[table[block]] = torch.nan
                self._free.insert(0, table[block])
                table[block] = -1

    def batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        """`work`: sequences and how many tokens of each to compute, single tokens first."""

        def row(seq: Sequence, n: int, pages: list[int]) -> AttentionRow:
            end = seq.computed + n
            return AttentionRow(
                seq.tokens[seq.computed : end],
                seq.computed,
                [max(page, 0) for page in pages],
                samples=end == len(seq.tokens),
            )

        batch = build_batch([row(seq, n, seq.pages) for seq, n in work], self.page_size)
        further = []
        for table in range(len(self._rules)):
            rows = [row(seq, n, seq.further[table]) for seq, n in work]
            same = build_batch(rows, self.page_size)
            further.append(PageTable(same.slot_mapping, same.page_indices))
        states = None
        if self._states is not None:
            states = self._states.begin_step(states_step(work))
        return replace(batch, further=tuple(further), states=states)

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute, and append the likeliest token to every sequence whose known tokens are all computed."""
        logits = self.decoder.forward(self.batch(work), self.attn)
        best = iter(logits.argmax(-1).tolist())
        for seq, n in work:
            self._advance(seq, n)
            if seq.computed == len(seq.tokens):
                seq.out.append(next(best))
                seq.tokens.append(seq.out[-1])

    def prompt_logits(self, prompt: list[int], chunk: int) -> torch.Tensor:
        """Logits at every prompt position, the prompt computed in pieces of `chunk` tokens."""
        seq = self.start(prompt, 0)
        pieces = []
        while seq.computed < len(prompt):
            n = min(chunk, len(prompt) - seq.computed)
            pieces.append(forward_all(self.decoder, self.batch([(seq, n)]), self.attn))
            self._advance(seq, n)
        self.release(seq)
        return torch.cat(pieces)

    def greedy(self, prompts: list[list[int]], steps: int, chunk: int) -> list[list[int]]:
        """`steps` tokens for each prompt, all in one batch: prompt i arrives at step 3 i, prefills in chunks of `chunk`
        while earlier ones decode, and leaves when it is done."""
        seqs = [self.start(p, steps) for p in prompts]
        now = 0
        while any(len(s.out) < steps for s in seqs):
            live = [s for i, s in enumerate(seqs) if now >= 3 * i and len(s.out) < steps]
            work = [(s, min(chunk, len(s.tokens) - s.computed)) for s in live]
            if work:
                self.step(sorted(work, key=lambda w: w[1] > 1))
            now += 1
        for seq in seqs:
            self.release(seq)
        return [s.out for s in seqs]
