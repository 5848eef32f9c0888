"""A head that drafts: one layer that reads hidden states of the model that it drafts for. No torch
here.

The entry of position p is made of token p and the model's state behind token p - 1; the logits are
those of token p + 1. Two forms are published:

EAGLE-3 (arXiv 2503.01840): the states are those of the residual stream in front of three layers,
which `fc` makes one. Token and state stand side by side as input of q, k and v; the state alone is
the residual stream. The next draft reads the head's residual stream. Its output head is its own,
and may leave tokens out.

MTP (DeepSeek V3, arXiv 2412.19437): the state is the normed one behind the model's last layer. A
matrix makes one of token and state, which is the residual stream. The next draft reads the head's
normed state. Embedding and output head are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.models.spec.norm import NormSpec
from baton.models.spec.tensors import Param, make_param, whole_axis


class MtpNames(NamedTuple):
    """Of the modules beside an MTP layer, in the checkpoint."""

    join: str
    """The matrix that makes one of token and state."""
    token_norm: str
    state_norm: str
    norm: str
    """In front of the output head."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    layer_prefix: str
    """Of the layer's tensors in the checkpoint."""
    state_layers: tuple[int, ...]
    """Layers of the model in front of which its residual stream is read; their number stands for
    the normed state behind the last one."""
    state_size: int
    """Of the model's states in these places together."""
    draft_vocab_size: int
    """Tokens that may be drafted."""
    mtp: MtpNames | None = None
    """Of a layer for MTP; None: the head is one of EAGLE-3."""
    has_embedding: bool = False
    """Files hold an embedding of the head's own."""

    def params(self, norm: NormSpec, vocab_size: int, hidden_size: int) -> Iterator[Param]:
        """Tensors outside the layer."""
        hidden = whole_axis(hidden_size)
        if self.mtp is None:
            vocab = whole_axis(vocab_size)
            if self.has_embedding:
                yield make_param("embed", {"embed_tokens.weight": vocab}, hidden)
            yield make_param("join", {"fc.weight": hidden}, whole_axis(self.state_size))
            yield from norm.params("state_norm", f"{self.layer_prefix}hidden_norm", hidden)
            yield from norm.params("norm", "norm", hidden)
            drafted = whole_axis(self.draft_vocab_size)
            yield make_param("lm_head", {"lm_head.weight": drafted}, hidden)
        else:
            both = whole_axis(2 * hidden_size)
            yield make_param("join", {f"{self.mtp.join}.weight": hidden}, both)
            yield from norm.params("token_norm", self.mtp.token_norm, hidden)
            yield from norm.params("state_norm", self.mtp.state_norm, hidden)
            yield from norm.params("norm", self.mtp.norm, hidden)

    def is_ignorable(self, source: str) -> bool:
        """Tell tensors that are not read with the head's weights."""
        if self.mtp is None:
            # The tables between both vocabularies are read apart (`checkpoint.read_draft_tokens`).
            return source in ("d2t", "t2d")
        shared = (f"{self.layer_prefix}embed_tokens.", f"{self.layer_prefix}shared_head.head.")
        own = (self.layer_prefix, *(f"{name}." for name in self.mtp))
        return not source.startswith(own) or source.startswith(shared)
