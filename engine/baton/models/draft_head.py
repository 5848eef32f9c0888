"""A head that drafts: one layer over token and hidden state (models.spec.head)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.layers import ops
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.models.blocks.norm import NormBlock
from baton.models.blocks.tensors import move_tensors
from baton.models.checkpoint import read_draft_tokens
from baton.models.decoder import Decoder, DecoderLayer, DecoderWeights
from baton.models.load import load_tensors
from baton.models.spec.model import OUTSIDE, ModelSpec

_CPU = torch.device("cpu")


@dataclass(slots=True)
class JoinWeights:
    """What makes the layer's input of a token and a state."""

    matrix: ops.Matrix
    """EAGLE-3: [hidden, states], of the model's states. MTP: [hidden, 2 * hidden], of token and
    state."""
    state_norm: NormBlock
    token_norm: NormBlock | None
    """None in EAGLE-3, whose layer norms the token."""


class DraftHead(Decoder):
    """Computes entries of tokens and the states in front of them; positions are as in models."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, join: JoinWeights, tokens: Tensor
    ) -> None:
        """
        Args:
            tokens: int64, the token of each row of the output head.
        """
        super().__init__(spec, weights)
        assert spec.head is not None, "a model has no states to read"
        self._is_eagle3 = spec.head.mtp is None
        self._join = join
        self._tokens = tokens

    def to(self, device: torch.device) -> None:
        super().to(device)
        move_tensors(self._join, device)
        self._join.state_norm.to(device)
        if self._join.token_norm is not None:
            self._join.token_norm.to(device)
        self._tokens = self._tokens.to(device)

    def pack(self) -> None:
        super().pack()
        self._join.matrix = ops.pack_weight(self._join.matrix)

    def reduce_states(self, states: Tensor) -> Tensor:
        """The model's states [T, state_size] as a state that an entry is made of [T, hidden]."""
        return ops.linear(states, self._join.matrix) if self._is_eagle3 else states

    def store(self, batch: ForwardBatch, attn: AttentionBackend, states: Tensor) -> None:
        """Write K and V of entries into the pages.

        Args:
            states: [T, hidden].
        """
        self.prepare(batch, attn)
        self._attend(batch, attn, states)

    def draft(
        self, batch: ForwardBatch, attn: AttentionBackend, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`store`, and what follows from each entry: logits [T, draft_vocab_size], and the state
        [T, hidden] that stands for the model's in the next entry."""
        self.prepare(batch, attn)
        attended, residual = self._attend(batch, attn, states)
        x, residual = self._finish_layer(self.weights.layers[0], attended, residual, batch)
        normed, total = self.weights.norm.add(x, residual)
        return self.compute_logits(normed), total if self._is_eagle3 else normed

    def choose_tokens(self, rows: Tensor) -> Tensor:
        """Token ids of rows of the output head; negative ones stay."""
        return torch.where(rows < 0, rows, self._tokens[rows.clamp_min(0)])

    def _attend(
        self, batch: ForwardBatch, attn: AttentionBackend, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The heads' results, and the residual stream that they are added to."""
        layer = self.weights.layers[0]
        embedded = self._embed_tokens(batch.token_ids)
        normed_states = self._join.state_norm.apply(states)
        if self._is_eagle3:
            assert layer.before_attention_norm is not None, "layers of Llama have one"
            residual = states
            x = torch.cat((layer.before_attention_norm.apply(embedded), normed_states), dim=-1)
        else:
            assert self._join.token_norm is not None, "EAGLE-3 alone has none"
            both = torch.cat((self._join.token_norm.apply(embedded), normed_states), dim=-1)
            residual = ops.linear(both, self._join.matrix)
            norm = layer.before_attention_norm
            x = residual if norm is None else norm.apply(residual)
        return layer.attention.attend(0, x, batch, attn, self._ropes[0]), residual


def load_head(
    spec: ModelSpec,
    path: Path,
    target: Decoder,
    load_format: str = "auto",
    seed: int = 0,
    device: torch.device = _CPU,
) -> DraftHead:
    """Load a head; what it shares with the model `target`, which is packed, is the same object.

    Args:
        device: that of the model.
    Raises ConfigError for missing or malformed files.
    """
    loaded = load_tensors(spec, path, load_format, seed, device=device)
    layer = DecoderLayer.make(spec.layers[0], loaded[0])
    left = loaded[OUTSIDE]
    token_norm = None
    if "token_norm" in left:
        token_norm = NormBlock.make(spec.norm, "token_norm", left)
    join = JoinWeights(left["join"], NormBlock.make(spec.norm, "state_norm", left), token_norm)
    weights = DecoderWeights(
        embed=left.get("embed", target.weights.embed),
        layers=[layer],
        norm=NormBlock.make(spec.norm, "norm", left),
        lm_head=left.get("lm_head", target.weights.lm_head),
        lm_head_bias=target.weights.lm_head_bias if spec.stream.has_head_bias else None,
    )
    tokens = torch.tensor(read_draft_tokens(path, spec, load_format), dtype=torch.int64)
    head = DraftHead(spec, weights, join, tokens)
    head.to(device)
    return head
