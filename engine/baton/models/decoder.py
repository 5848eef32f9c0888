"""The dense decoder: one class for Llama, Mistral, Qwen2 and Qwen3, distinguished by `ModelSpec` alone.

One forward pass: (1) embed the step's tokens; (2) per layer norm → q, k, v → rotate → attend over the pages → project,
then norm → gated MLP, each sum folded into the norm that follows it; (3) after the last layer's attention only the rows
that sample go on, since the others are not read: a long prompt's chunk pays neither the last MLP nor the output head.

Weights are plain tensors and layers plain function calls: at batch 1 a small model's time is call overhead.
With tensor parallelism each rank computes this with its share of the weights (`layers.shard`): partial sums meet after
the embedding, each attention and each MLP, and the shares of the logits at the first rank.

Invariant: a row's logits do not depend on the other rows of the batch, beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch, PagedAttention
from baton.layers.collectives import ALONE, Collectives
from baton.layers.model_spec import ModelSpec
from baton.layers.shard import WHOLE, Shard
from baton.models.rope import RopeTables


@dataclass(slots=True)
class LayerWeights:
    """Layer weights in compute dtype, contiguous. Matrices are [out, in]; see `models.weights` for the stacked ones."""

    input_norm: Tensor
    qkv: ops.Matrix
    o: ops.Matrix
    post_norm: Tensor
    gate_up: ops.Matrix
    down: ops.Matrix
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    embed: ops.Matrix
    """[vocab, hidden]"""
    layers: list[LayerWeights]
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
        """`spec`: of what is computed here (layers.shard.share_of), which is all of it unless `tp` has more ranks."""
        self.spec = spec
        self.weights = weights
        self._tp = tp
        self._vocab = shard.slice_of(spec.vocab_size)
        self._rope = RopeTables(spec.rope, spec.head_dim, spec.max_context)

    def to(self, device: torch.device) -> None:
        """Move weights and tables; before `pack`, which is for the CPU only."""
        w = self.weights
        tied = w.lm_head is w.embed
        holders: list[DecoderWeights | LayerWeights] = [w, *w.layers]
        for holder in holders:
            for f in fields(holder):
                value = getattr(holder, f.name)
                if isinstance(value, Tensor):
                    setattr(holder, f.name, value.to(device))
        if tied:
            w.lm_head = w.embed
        self._rope.to(device)

    def pack(self) -> None:
        """Re-order the matrices for the CPU kernels, one after the other: peak memory is the model and its largest one.

        The embedding is packed only as the output head it is tied to; else it is looked up, never multiplied.
        """
        w = self.weights
        for layer in w.layers:
            layer.qkv = ops.pack_weight(layer.qkv)
            layer.o = ops.pack_weight(layer.o)
            layer.gate_up = ops.pack_weight(layer.gate_up)
            layer.down = ops.pack_weight(layer.down)
        tied = w.lm_head is w.embed
        w.lm_head = ops.pack_weight(w.lm_head)
        if tied:
            w.embed = w.lm_head

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """Compute one step: float32 logits [S, vocab], one row per `batch.sample_index` (S may be 0).

        Calls `attn.plan(batch)` itself, then writes the KV of all T tokens through `attn`. Positions must be below
        the pool's and the model's limits; the scheduler checks both at admission.

        All tensor-parallel ranks must be given the same batch. The first one gets the logits, the others S = 0.
        """
        self.prepare(batch, attn)
        return self.compute(batch, attn).float()

    def prepare(self, batch: ForwardBatch, attn: AttentionBackend) -> None:
        """The host's part of `forward`."""
        attn.plan(batch)
        self.reserve(batch.max_kv_len)

    def reserve(self, positions: int) -> None:
        """Make the tables that positions below this need; `forward` does so itself."""
        self._rope.ensure_positions(positions)

    def compute(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """`forward` without `prepare`; the logits in compute type.

        On a CUDA device it queues work and waits for nothing, so it can be recorded (runtime.runner.capture).
        """
        return self.compute_logits(self.compute_hidden(batch, attn))

    def compute_hidden(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """The part of `compute` in front of the output head: [S, hidden]."""
        eps = self.spec.rms_eps
        last = len(self.weights.layers) - 1
        tp = self._tp
        x = self._embed_tokens(batch.token_ids)
        residual: Tensor | None = None
        for i, w in enumerate(self.weights.layers):
            if residual is None:
                normed = ops.rms_norm(x, w.input_norm, eps)
                residual = x
            else:
                normed, residual = ops.add_rms_norm(x, residual, w.input_norm, eps)
            attended = self._attend_layer(i, w, normed, batch, attn)
            if (
                i == last and len(batch.sample_index) == 0
            ):  # CUDA refuses to launch a kernel over no rows
                return x[:0]
            is_in_order = len(batch.sample_index) == len(attended) and not batch.num_prompt_rows
            if i == last and not is_in_order:
                attended = attended[batch.sample_index]
                residual = residual[batch.sample_index]
            x = tp.all_reduce(ops.linear(attended, w.o, w.o_bias))
            normed, residual = ops.add_rms_norm(x, residual, w.post_norm, eps)
            inner = ops.silu_mul(ops.linear(normed, w.gate_up, w.gate_up_bias))
            x = tp.all_reduce(ops.linear(inner, w.down, w.down_bias))
        assert residual is not None, "a spec has at least one layer"
        normed, _ = ops.add_rms_norm(x, residual, self.weights.norm, eps)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The output head: logits [n, vocab] of rows of `compute_hidden`, in compute type.

        All tensor-parallel ranks call it with as many rows; the first one gets the logits, the others none.
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

    def _attend_layer(
        self, layer: int, w: LayerWeights, x: Tensor, batch: ForwardBatch, attn: AttentionBackend
    ) -> Tensor:
        spec = self.spec
        heads = ops.linear(x, w.qkv, w.qkv_bias).view(len(x), -1, spec.head_dim)
        if (store_heads := ops.head_kernel(x)) is not None:
            norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
            paged = cast("PagedAttention", attn)
            tables = (self._rope.cos, self._rope.sin)
            pages = paged.pages(layer)
            store_heads(
                heads,
                spec.num_heads,
                norms,
                spec.rms_eps,
                batch.positions,
                tables,
                pages,
                batch.slot_mapping,
            )
            return paged.attend(layer, heads[:, : spec.num_heads])
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            q = ops.rms_norm(q, w.q_norm, spec.rms_eps)
            k = ops.rms_norm(k, w.k_norm, spec.rms_eps)
        q, k = ops.apply_rope(q, k, batch.positions, self._rope.cos, self._rope.sin)
        return attn.forward(layer, q, k, v)
