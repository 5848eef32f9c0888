"""The decoder: one loop over layers made of blocks, for every family.

One forward pass: (1) embed the step's tokens; (2) per layer the attention block, then the MLP or
mixture of experts (`models.blocks`), with norms before or behind them; each sum is folded into the
norm that follows it; (3) after the last layer's attention only the rows that sample go on, since
the others are not read: a long prompt's chunk pays neither the last MLP nor the output head.

Weights are plain tensors and layers plain function calls: at batch 1 a small model's time is call
overhead. With tensor parallelism each rank computes this with its share of the weights
(`layers.shard`): partial sums meet after the embedding, each attention and each MLP, and the shares
of the logits at the first rank.

Invariant: a row's logits do not depend on the other rows of the batch, beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.layers.collectives import ALONE, Collectives
from baton.layers.shard import WHOLE, Shard
from baton.models.blocks.attention import AttentionBlock
from baton.models.blocks.delta_net import DeltaBlock
from baton.models.blocks.mla import MlaBlock
from baton.models.blocks.mlp import MlpBlock
from baton.models.blocks.moe import MoeBlock
from baton.models.blocks.norm import NormBlock
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.delta_net import DeltaBlockSpec
from baton.models.spec.mla import MlaBlockSpec
from baton.models.spec.model import LayerSpec, ModelSpec
from baton.models.spec.moe import MoeSpec
from baton.models.spec.rope import RopeSpec


@dataclass(slots=True)
class DecoderLayer:
    """Blocks of a layer, and the norms around each."""

    attention: AttentionBlock | MlaBlock | DeltaBlock
    mlp: MlpBlock | MoeBlock
    before_attention_norm: NormBlock | None = None
    after_attention_norm: NormBlock | None = None
    before_mlp_norm: NormBlock | None = None
    after_mlp_norm: NormBlock | None = None

    @staticmethod
    def make(spec: LayerSpec, tensors: dict[str, Tensor], tp: Collectives = ALONE) -> DecoderLayer:
        """Args: `spec`: of this rank's share. `tensors`: by the names of `LayerSpec.params`."""
        left = dict(tensors)
        norms = {n: NormBlock.make(spec.norms.norm, n, left) for n in spec.norms.sources}
        attention: AttentionBlock | MlaBlock | DeltaBlock
        if isinstance(spec.attention, MlaBlockSpec):
            attention = MlaBlock.make(spec.attention, left)
        elif isinstance(spec.attention, DeltaBlockSpec):
            attention = DeltaBlock.make(spec.attention, left)
        else:
            attention = AttentionBlock.make(spec.attention, left, tp)
        if isinstance(spec.mlp, MoeSpec):
            return DecoderLayer(attention, MoeBlock.make(spec.mlp, left), **norms)
        return DecoderLayer(attention, MlpBlock.make(spec.mlp, left), **norms)

    def to(self, device: torch.device) -> None:
        for part in fields(self):
            block = getattr(self, part.name)
            if block is not None:
                block.to(device)

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()


@dataclass(slots=True)
class DecoderWeights:
    embed: ops.Matrix
    """[vocab, hidden]"""
    layers: list[DecoderLayer]
    norm: NormBlock
    lm_head: ops.Matrix
    """[vocab, hidden]; the very object `embed` when tied."""
    lm_head_bias: Tensor | None = None

    @staticmethod
    def make(
        spec: ModelSpec, tensors: dict[str, Tensor], layers: list[DecoderLayer]
    ) -> DecoderWeights:
        """Args: `tensors`: those outside the layers, by the names of `spec.model.plan_weights`."""
        left = dict(tensors)
        norm = NormBlock.make(spec.norm, "norm", left)
        left.setdefault("lm_head", left["embed"])
        return DecoderWeights(layers=layers, norm=norm, **left)


class Decoder:
    """A loaded model. Holds no request state: the KV lives behind the attention backend, and states
    come with a step."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        shard: Shard = WHOLE,
        tp: Collectives = ALONE,
    ) -> None:
        """`spec`: of what is computed here (spec.model.share_of), which is all of it unless `tp`
        has more ranks."""
        self.spec = spec
        self.weights = weights
        self._tp = tp
        self._vocab = shard.slice_of(spec.vocab_size)
        self._tables = _make_rope_tables(spec)
        ropes = [layer.attention.rope for layer in spec.layers]
        self._ropes = [None if rope is None else self._tables[rope] for rope in ropes]
        """The table of each layer; None where nothing turns."""
        self._places = _number_by_kind(spec)
        factor = spec.stream.embedding_factor
        if spec.stream.rounds_embedding_factor:
            factor = float(torch.tensor(factor, dtype=ops.TORCH_DTYPES[spec.dtype]))
        self._embedding_factor = factor

    def to(self, device: torch.device) -> None:
        """Move weights and tables; before `pack`."""
        w = self.weights
        tied = w.lm_head is w.embed
        move_tensors(w, device)
        w.norm.to(device)
        for layer in w.layers:
            layer.to(device)
        if tied:
            w.lm_head = w.embed
        for rope in self._tables.values():
            rope.to(device)

    def expert_counts(self) -> list[Tensor]:
        """How many tokens chose each expert so far, by layer that has experts: int64 [experts]."""
        mlps = (layer.mlp for layer in self.weights.layers)
        return [mlp.token_counts for mlp in mlps if isinstance(mlp, MoeBlock)]

    def pack(self) -> None:
        """Bring the matrices into the order of the device's kernels, one after the other: peak
        memory is the model and its largest one; on a GPU, and the experts of a layer.

        The embedding is packed only as the output head it is tied to; else it is looked up, never
        multiplied.
        """
        w = self.weights
        for layer in w.layers:
            layer.pack()
        tied = w.lm_head is w.embed
        w.lm_head = ops.pack_weight(w.lm_head)
        if tied:
            w.embed = w.lm_head

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """Compute one step: float32 logits [S, vocab], one row per `batch.sample_index` (S may be
        0).

        Calls `attn.plan(batch)` itself, then writes the KV of all T tokens through `attn`. Positions must be below
        the pool's and the model's limits; the scheduler checks both at admission.

        All tensor-parallel ranks must be given the same batch. The first one gets the logits, the
        others S = 0.
        """
        self.prepare(batch, attn)
        return self.compute(batch, attn).float()

    def prepare(self, batch: ForwardBatch, attn: AttentionBackend) -> None:
        """The host's part of `forward`."""
        attn.plan(batch)
        self.reserve(batch.max_kv_len)

    def reserve(self, positions: int) -> None:
        """Make the tables that positions below this need; `forward` does so itself."""
        for rope in self._tables.values():
            rope.ensure_positions(positions)

    def compute(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """`forward` without `prepare`; the logits in compute type.

        On a CUDA device it queues work and waits for nothing, so it can be recorded
        (runtime.runner.capture).
        """
        return self.compute_logits(self.compute_hidden(batch, attn))

    def compute_hidden(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """The part of `compute` in front of the output head: [S, hidden]."""
        return self._run_layers(batch, attn, (), [])

    def compute_states(
        self, batch: ForwardBatch, attn: AttentionBackend, places: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`compute_hidden`, and hidden states of all tokens, side by side: [T, places * hidden].

        Args:
            places: rising numbers of layers, for the residual stream in front of them; the number
                of layers for the normed one behind the last.
        """
        states: list[Tensor] = []
        hidden = self._run_layers(batch, attn, places, states)
        return hidden, torch.cat(states, dim=-1)

    def _run_layers(
        self,
        batch: ForwardBatch,
        attn: AttentionBackend,
        places: tuple[int, ...],
        states: list[Tensor],
    ) -> Tensor:
        """Args: `states`: gets the hidden states at `places`."""
        last = len(self.weights.layers) - 1
        needs_all_rows = last + 1 in places
        x = self._embed_tokens(batch.token_ids)
        residual: Tensor | None = None
        for i, layer in enumerate(self.weights.layers):
            normed, residual = _enter_block(layer.before_attention_norm, x, residual)
            if i in places:
                # The next sum may be made in its place.
                states.append(residual.clone())
            attended = layer.attention.attend(self._places[i], normed, batch, attn, self._ropes[i])
            if i == last and not needs_all_rows:
                # CUDA refuses to launch a kernel over no rows.
                if len(batch.sample_index) == 0:
                    return x[:0]
                is_in_order = len(batch.sample_index) == len(attended) and not batch.num_prompt_rows
                if not is_in_order:
                    attended = attended[batch.sample_index]
                    residual = residual[batch.sample_index]
            x, residual = self._finish_layer(layer, attended, residual, batch)
        assert residual is not None, "a spec has at least one layer"
        normed, _ = self.weights.norm.add(x, residual)
        if not needs_all_rows:
            return normed
        states.append(normed)
        return normed[batch.sample_index]

    def _finish_layer(
        self, layer: DecoderLayer, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """What follows attention in a layer: its result [T, hidden] and the residual stream that it
        is yet to be added to."""
        tp = self._tp
        x = tp.all_reduce(layer.attention.project(attended))
        x = self._leave_block(layer.after_attention_norm, x)
        normed, residual = _enter_block(layer.before_mlp_norm, x, residual)
        x = tp.all_reduce(_feed_forward(layer.mlp, normed, batch))
        return self._leave_block(layer.after_mlp_norm, x), residual

    def _leave_block(self, norm: NormBlock | None, x: Tensor) -> Tensor:
        """A block's result x [T, hidden] as it is added to the residual stream."""
        if norm is not None:
            x = norm.apply(x)
        factor = self.spec.stream.block_factor
        return x if factor == 1.0 else x * factor

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The output head: logits [n, vocab] of rows of `compute_hidden`, in compute type.

        All tensor-parallel ranks call it with as many rows; the first one gets the logits, the
        others none.
        """
        if len(hidden) == 0:
            return torch.empty(0, self.spec.vocab_size, device=hidden.device)
        products = ops.linear(hidden, self.weights.lm_head, self.weights.lm_head_bias)
        logits = self._tp.gather(products, self.spec.vocab_size)
        stream = self.spec.stream
        if stream.logits_divisor != 1.0:
            logits = logits / stream.logits_divisor
        if cap := stream.logits_soft_cap:
            logits = (logits / cap).tanh() * cap
        return logits

    def _embed_tokens(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        factor = self._embedding_factor
        return rows if factor == 1.0 else rows * factor

    def _look_up(self, ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return ops.embed_tokens(self.weights.embed, ids)
        share = self._vocab
        elsewhere = (ids < share.start) | (ids >= share.stop)
        rows = ops.embed_tokens(self.weights.embed, (ids - share.start).masked_fill_(elsewhere, 0))
        return self._tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


def _feed_forward(mlp: MlpBlock | MoeBlock, x: Tensor, batch: ForwardBatch) -> Tensor:
    """This rank's part of the result [T, hidden]."""
    # Padding would make a recorded step read the weights of experts that no token chose.
    return mlp.forward(x, batch.is_padding) if isinstance(mlp, MoeBlock) else mlp.forward(x)


def _enter_block(
    norm: NormBlock | None, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a block computes from, and the residual stream with x [T, hidden] added.

    Args: `residual`: None in front of the first block, where x is the stream.
    """
    if residual is None:
        return x if norm is None else norm.apply(x), x
    if norm is None:
        total = x + residual
        return total, total
    return norm.add(x, residual)


def _number_by_kind(spec: ModelSpec) -> list[int]:
    """Number of each layer among those with pages, or among those with a state."""
    numbers = []
    counts = {False: 0, True: 0}
    for layer in spec.layers:
        has_state = isinstance(layer.attention, DeltaBlockSpec)
        numbers.append(counts[has_state])
        counts[has_state] += 1
    return numbers


def _make_rope_tables(spec: ModelSpec) -> dict[RopeSpec, RopeTables]:
    """Make one table for all layers that turn alike."""
    tables: dict[RopeSpec, RopeTables] = {}
    for layer in spec.layers:
        if isinstance(layer.attention, DeltaBlockSpec):
            continue
        rope = layer.attention.rope
        if rope is not None and rope not in tables:
            tables[rope] = RopeTables(rope, layer.attention.rotated_dim, spec.max_context)
    return tables
