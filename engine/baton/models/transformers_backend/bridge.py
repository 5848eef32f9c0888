"""The attention function that transformers' modules call in place of their own.

1. `register` tells transformers of an attention implementation called `baton`.
2. `probe` runs a module over one token, and notes what each layer hands to the function: heads,
   scale, window, soft cap, sinks. Masks are asked for during the probe alone: transformers makes a
   mask per kind of layer, and the one that a layer is given says its window.
3. In a step, `attend_with` names the backend, whose pages hold the keys and values of earlier
   tokens; the function writes those of the step and attends.

One process serves one model, so the state is the process's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.layers.attention.base import AttentionBackend
from baton.layers.spec import AttentionSpec

NAME = "baton"
_KNOWN = {
    "scaling", "softcap", "s_aux", "sliding_window",
    # Without effect on the result, or stated by this file.
    "dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "return_dict",
    "output_hidden_states", "output_router_logits", "logits_to_keep",
}  # fmt: skip
"""Arguments that modules hand to an attention function."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """In place of a mask that is not plainly causal: what transformers would make it of."""

    function: Callable[..., Any]
    size: int | None
    """Tokens of its window or chunk."""

    def find_window(self) -> int | None:
        """The window W if a token sees the last W tokens, itself included; None for other masks."""
        if not self.size:
            return None
        first = torch.tensor(0)
        last = torch.tensor(4 * self.size)
        expected = {0: True, self.size - 1: True, self.size: False, -1: False}
        for distance, is_seen in expected.items():
            if bool(self.function(first, first, last, last - distance)) != is_seen:
                return None
        return self.size


def refuse(architecture: str, problem: str) -> NoReturn:
    raise ConfigError(f"--model-impl transformers: {architecture} is not supported; {problem}")


class _Probe:
    """Attention of each layer, as the module's calls have it."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self.layers: dict[int, AttentionSpec] = {}

    def note(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, more: dict[str, Any]
    ) -> None:
        """Raises ConfigError for arithmetic that the attention backends do not have."""
        if layer in self.layers:
            refuse(self._architecture, f"layer {layer} attends more than once")
        # The pool has one shape for keys and values.
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            shapes = [list(x.shape[1:]) for x in (query, key, value)]
            refuse(self._architecture, f"heads of layer {layer} differ in size: {shapes}")
        # A mask that is no stand-in was made by the class itself: backends would compute without it.
        if mask is not None and not isinstance(mask, _Mask):
            refuse(self._architecture, f"layer {layer} makes a mask of its own")
        if more.get("is_causal") is False:
            refuse(self._architecture, f"layer {layer} attends in both directions")
        # An argument that nobody here knows may change the result.
        unknown = [name for name in more if name not in _KNOWN and more[name] is not None]
        if unknown:
            refuse(self._architecture, f"layer {layer} hands {', '.join(unknown)} to its attention")
        if more.get("s_aux") is not None:
            refuse(self._architecture, f"layer {layer} has attention sinks")
        window = mask.find_window() if isinstance(mask, _Mask) else 0
        if window is None:
            refuse(self._architecture, f"the mask of layer {layer} is no window of the last tokens")
        # The mask decides, because transformers' own functions go by it; a name that contradicts it
        # leaves open which of the two the model was trained with.
        named = more.get("sliding_window")
        if named is not None and window and named != window:
            refuse(
                self._architecture,
                f"the window of layer {layer} is {named} by its name, {window} by its mask",
            )
        heads = query.shape[1]
        dim = query.shape[-1]
        scale: Any = more.get("scaling")
        is_default = scale is None or abs(scale - dim**-0.5) < 1e-9
        self.layers[layer] = AttentionSpec(
            heads,
            key.shape[1],
            dim,
            window,
            factor=None if is_default else float(scale),
            soft_cap=float(more.get("softcap") or 0.0),
        )


_probe: _Probe | None = None
_backend: AttentionBackend | None = None


def register() -> None:
    """Make the attention implementation `baton` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


@contextmanager
def attend_with(backend: AttentionBackend) -> Iterator[None]:
    """Steps of modules within the context use `backend`, which has the step's plan."""
    global _backend
    _backend = backend
    try:
        yield
    finally:
        _backend = None


def probe(module: Any, architecture: str) -> tuple[tuple[AttentionSpec, ...], Tensor]:
    """Attention of each layer of `module`, seen from one token that passes it, and its logits.

    Raises ConfigError for a module that does not attend through its interface in every layer, or
    whose attention the backends do not have.
    """
    from transformers.masking_utils import AttentionMaskInterface

    global _probe
    noted = _Probe(architecture)
    _probe = noted
    AttentionMaskInterface.register(NAME, _describe_mask)
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, 1, dtype=torch.int64)
            output = module(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
    finally:
        _probe = None
        # Without the entry transformers makes no masks, which backends do not read.
        AttentionMaskInterface._global_mapping.pop(NAME, None)
    count = module.config.num_hidden_layers
    if sorted(noted.layers) != list(range(count)):
        refuse(
            architecture, f"{len(noted.layers)} of {count} layers attend through their interface"
        )
    return tuple(noted.layers[layer] for layer in range(count)), output.logits


def _describe_mask(*, mask_function: Any, local_size: int | None = None, **_: Any) -> _Mask | None:
    """Stand in for transformers' mask functions; None is the plain causal mask."""
    from transformers.masking_utils import causal_mask_function

    if local_size is None and mask_function is causal_mask_function:
        return None
    return _Mask(mask_function, local_size)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, Hq, T, D], key and value [1, Hk, T, D] in,
    [1, T, Hq, D] out."""
    layer = module.layer_idx
    if _probe is not None:
        _probe.note(layer, query, key, value, attention_mask, more)
        return torch.zeros_like(query).transpose(1, 2), None
    assert _backend is not None, "a step runs within `attend_with`"
    rows = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    attended = _backend.forward(layer, *rows)
    return attended.view(1, *rows[0].shape), None
