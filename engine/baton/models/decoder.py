"""The decoder: one loop over layers made of blocks, for every family.

One forward pass: (1) embed the step's tokens; (2) per layer norm → attention block, then norm → MLP
or mixture of experts (`models.blocks`), each sum folded into the norm that follows it; (3) after
the last layer's attention only the
rows that sample go on, since the others are not read: a long prompt's chunk pays neither the last
MLP nor the output head.

Weights are plain tensors and layers plain function calls: at batch 1 a small model's time is call
overhead. With tensor parallelism each rank computes this with its share of the weights
(`layers.shard`): partial sums meet after the embedding, each attention and each MLP, and the shares
of the logits at the first rank.

Invariant: a row's logits do not depend on the other rows of the batch, beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.layers.collectives import ALONE, Collectives
from baton.layers.shard import WHOLE, Shard
from baton.models.blocks.attention import AttentionBlock
from baton.models.blocks.mlp import MlpBlock
from baton.models.blocks.moe import MoeBlock
from baton.models.blocks.rope import RopeTables
from baton.models.blocks.tensors import move_tensors
from baton.models.spec.model import LayerSpec, ModelSpec
from baton.models.spec.moe import MoeSpec
from baton.models.spec.rope import RopeSpec


@dataclass(slots=True)
class DecoderLayer:
    """Blocks of a layer and the norm in front of each."""

    input_norm: Tensor
    attention: AttentionBlock
    post_norm: Tensor
    mlp: MlpBlock | MoeBlock

    @staticmethod
    def make(spec: LayerSpec, eps: float, tensors: dict[str, Tensor]) -> DecoderLayer:
        """Args: `spec`: of this rank's share. `tensors`: by the names of `LayerSpec.params`."""
        left = dict(tensors)
        norms = {name: left.pop(name) for name in ("input_norm", "post_norm")}
        names = ("qkv", "o", "qkv_bias", "q_norm", "k_norm", "o_bias")
        of_attention = {name: left.pop(name) for name in names if name in left}
        attention = AttentionBlock(spec.attention, eps, **of_attention)
        mlp = MoeBlock.make(spec.mlp, left) if isinstance(spec.mlp, MoeSpec) else MlpBlock(**left)
        return DecoderLayer(attention=attention, mlp=mlp, **norms)

    def to(self, device: torch.device) -> None:
        move_tensors(self, device)
        self.attention.to(device)
        self.mlp.to(device)

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()


@dataclass(slots=True)
class DecoderWeights:
    embed: ops.Matrix
    """[vocab, hidden]"""
    layers: list[DecoderLayer]
    norm: Tensor
    lm_head: ops.Matrix
    """[vocab, hidden]; the very object `embed` when tied."""


class Decoder:
    """A loaded model. Holds no request state: the KV lives behind the attention backend."""

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
        self._ropes = [self._tables[layer.attention.rope] for layer in spec.layers]
        """The table of each layer."""

    def to(self, device: torch.device) -> None:
        """Move weights and tables; before `pack`, which is for the CPU only."""
        w = self.weights
        tied = w.lm_head is w.embed
        move_tensors(w, device)
        for layer in w.layers:
            layer.to(device)
        if tied:
            w.lm_head = w.embed
        for rope in self._tables.values():
            rope.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels, one after the other: peak memory is the model
        and its largest one.

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
        eps = self.spec.rms_eps
        last = len(self.weights.layers) - 1
        tp = self._tp
        x = self._embed_tokens(batch.token_ids)
        residual: Tensor | None = None
        for i, layer in enumerate(self.weights.layers):
            if residual is None:
                normed = ops.rms_norm(x, layer.input_norm, eps)
                residual = x
            else:
                normed, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            attended = layer.attention.attend(i, normed, batch, attn, self._ropes[i])
            if (
                i == last and len(batch.sample_index) == 0
            ):  # CUDA refuses to launch a kernel over no rows
                return x[:0]
            is_in_order = len(batch.sample_index) == len(attended) and not batch.num_prompt_rows
            if i == last and not is_in_order:
                attended = attended[batch.sample_index]
                residual = residual[batch.sample_index]
            x = tp.all_reduce(layer.attention.project(attended))
            normed, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = tp.all_reduce(layer.mlp.forward(normed))
        assert residual is not None, "a spec has at least one layer"
        normed, _ = ops.add_rms_norm(x, residual, self.weights.norm, eps)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The output head: logits [n, vocab] of rows of `compute_hidden`, in compute type.

        All tensor-parallel ranks call it with as many rows; the first one gets the logits, the
        others none.
        """
        if len(hidden) == 0:
            return torch.empty(0, self.spec.vocab_size, device=hidden.device)
        return self._tp.gather(ops.linear(hidden, self.weights.lm_head), self.spec.vocab_size)

    def _embed_tokens(self, ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return ops.embed_tokens(self.weights.embed, ids)
        share = self._vocab
        elsewhere = (ids < share.start) | (ids >= share.stop)
        rows = ops.embed_tokens(self.weights.embed, (ids - share.start).masked_fill_(elsewhere, 0))
        return self._tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


def _make_rope_tables(spec: ModelSpec) -> dict[RopeSpec, RopeTables]:
    """Make one table for all layers that turn alike."""
    tables: dict[RopeSpec, RopeTables] = {}
    for layer in spec.layers:
        rope = layer.attention.rope
        if rope not in tables:
            tables[rope] = RopeTables(rope, layer.attention.heads.head_dim, spec.max_context)
    return tables
