"""What the engine asks of a model, whoever computes it: blocks of our own or transformers'
module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.layers.kv_spec import KVSpec
from baton.layers.spec import DeltaSpec, LayerAttention


class ServedSpec(Protocol):
    """Description of a model, on one rank."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int:
        """Longest prompt + answer the model was made for [tokens]."""

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        """Attention of each layer that has pages, for a backend."""

    @property
    def states(self) -> Mapping[int, DeltaSpec]:
        """Of each layer that keeps a state per sequence, by its number in the whole model."""

    @property
    def dtype(self) -> str:
        """Compute type."""

    def kv_spec(self, page_size: int) -> KVSpec:
        """The page groups of a pool with `page_size` tokens a page."""

    @property
    def model_hash(self) -> str:
        """Equal on nodes that may exchange KV pages."""

    @property
    def num_parameters(self) -> int: ...


class ServedModel(Protocol):
    """A loaded model. Holds no request state: the KV lives behind the attention backend, and states
    come with a step."""

    @property
    def spec(self) -> ServedSpec: ...

    def pack(self) -> None:
        """Bring the weights into the form that the device's kernels take."""

    def expert_counts(self) -> list[Tensor]:
        """How many tokens chose each expert so far, by layer that has experts: int64 [experts].
        Empty where nothing counts them."""

    def prepare(self, batch: ForwardBatch, attn: AttentionBackend) -> None:
        """The host's part of a step."""

    def reserve(self, positions: int) -> None:
        """Make what positions below this need; `prepare` does so itself."""

    def compute(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """A prepared step: logits [S, vocab] in compute type."""

    def compute_hidden(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """The part of `compute` in front of the output head: [S, hidden]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The output head: logits [n, vocab] of rows of `compute_hidden`, in compute type."""
