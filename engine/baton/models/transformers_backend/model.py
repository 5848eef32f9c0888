"""A family without blocks of our own: transformers' module, computed step by step over our pages.

1. `load_module` loads the checkpoint into transformers' class, strictly: a tensor that is missing,
   unexpected or of another shape ends the start. Code of a checkpoint is never executed.
2. The module is probed for what its attention needs (`bridge.probe`); that makes its spec.
3. A step passes all its tokens as one row with their positions; attention alone tells requests
   apart, through the pages. Then the rows that sample pass the module's own head.

Cost, beside blocks of our own: no packed weights, no tensor parallelism, no CUDA graphs; and equal
to rounding only, because torch's products depend on the number of rows of a step.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baton.errors import ConfigError
from baton.layers.attention.base import AttentionBackend, ForwardBatch
from baton.layers.kv_spec import FP8, KvScales, KVSpec, describe_attention
from baton.layers.ops import TORCH_DTYPES
from baton.layers.spec import AttentionSpec, DeltaSpec, common_heads
from baton.models.config_file import read_model_config
from baton.models.quantized.kv_scales import read_kv_scales
from baton.models.spec_reader import (
    checkpoint_dtype,
    compute_dtype,
    hash_model,
    read_max_context,
)
from baton.models.transformers_backend import bridge

log = logging.getLogger("baton.load")

_DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """Description of a module, as far as the engine needs it (`models.served.ServedSpec`)."""

    architecture: str
    vocab_size: int
    attention: tuple[AttentionSpec, ...]
    """Attention of each layer, for a backend."""
    max_context: int
    dtype: str
    model_hash: str
    """That of the checkpoint and of this implementation, whose KV differs by rounding."""
    num_parameters: int
    kv_scales: tuple[KvScales, ...] = ()
    """By layer, for a KV cache of FP8 codes; empty: it is kept in the compute type."""

    states: Mapping[int, DeltaSpec] = field(default_factory=dict)
    """No layer keeps a state per sequence: modules that have some are refused
    (`transformers_backend.choice`)."""

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    def kv_spec(self, page_size: int) -> KVSpec:
        """The page groups of a pool with `page_size` tokens a page."""
        dtype = FP8 if self.kv_scales else self.dtype
        group = describe_attention(self.attention, dtype, page_size, self.kv_scales)
        return KVSpec((group,), self.dtype)


class TransformersModel:
    """A module of transformers behind the interface of `models.decoder.Decoder`."""

    def __init__(self, module: Any, spec: ForeignSpec) -> None:
        self.spec = spec
        self._base: Any = getattr(module, module.base_model_prefix)
        self._hidden = _HiddenStates()
        self._head = _with_base(module, self._hidden)

    def pack(self) -> None:
        """Leave the weights as they are: torch multiplies by them."""

    def expert_counts(self) -> list[Tensor]:
        """Empty: transformers' modules do not tell which experts they chose."""
        return []

    def prepare(self, batch: ForwardBatch, attn: AttentionBackend) -> None:
        """The host's part of a step."""
        attn.plan(batch)

    def reserve(self, positions: int) -> None:
        """Modules compute their angles anew in each step."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """Compute one step: float32 logits [S, vocab], one row per `batch.sample_index`."""
        self.prepare(batch, attn)
        return self.compute(batch, attn).float()

    def compute(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """`forward` without `prepare`; the logits in compute type."""
        return self.compute_logits(self.compute_hidden(batch, attn))

    def compute_hidden(self, batch: ForwardBatch, attn: AttentionBackend) -> Tensor:
        """The part of a step in front of the output head: [S, hidden]."""
        with bridge.attend_with(attn):
            output = self._base(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                return_dict=True,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden[batch.sample_index]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The output head, with what the module's class does to logits: [n, vocab] of n rows."""
        if len(hidden) == 0:
            return torch.empty(0, self.spec.vocab_size)
        self._hidden.rows = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64)
        logits: Tensor = self._head(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0]


class _HiddenStates(nn.Module):
    """In place of a module's base: gives out rows that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.rows)


def _with_base(module: Any, base: nn.Module) -> Any:
    """A second view of `module` with the same weights, and `base` in place of its base model."""
    view = copy.copy(module)
    view.__dict__["_modules"] = dict(module._modules)
    view._modules[module.base_model_prefix] = base
    return view


def load_module(
    path: str | Path,
    dtype: str,
    load_format: str,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    kv_cache_dtype: str = "auto",
) -> TransformersModel:
    """The model at `path` in transformers' class. Args: as of `models.load.load_weights`, and
    `kv_cache_dtype` as of `models.spec_reader.read_spec`.

    Raises ConfigError for weights that do not fit, and for modules that cannot be served.
    """
    started = time.monotonic()
    root = Path(path)
    config = read_model_config(root)
    name = compute_dtype(dtype, checkpoint_dtype(config, root), on_cpu=True)
    bridge.register()
    on_progress(0, 1)
    module = _make_module(root, TORCH_DTYPES[name], load_format, seed)
    architecture = type(module).__name__
    attention = _probe_module(module, architecture)
    spec = ForeignSpec(
        architecture=architecture,
        vocab_size=module.config.vocab_size,
        attention=attention,
        max_context=read_max_context(config),
        dtype=name,
        model_hash=_hash_impl(hash_model(root, load_format, seed)),
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        kv_scales=read_kv_scales(config, root, len(attention), load_format)
        if kv_cache_dtype == FP8
        else (),
    )
    on_progress(spec.num_parameters, spec.num_parameters)
    log.info(
        "loaded %s of transformers from %s: %d parameters as %s, in %.2f s; no packed weights, "
        "one process, equal to rounding",
        architecture, path, spec.num_parameters, name, time.monotonic() - started,
    )  # fmt: skip
    return TransformersModel(module, spec)


def _make_module(root: Path, dtype: torch.dtype, load_format: str, seed: int) -> Any:
    import transformers

    classes: Any = transformers.AutoModelForCausalLM
    model_type = read_model_config(root).get("model_type")
    try:
        config = transformers.AutoConfig.from_pretrained(
            root, trust_remote_code=False, local_files_only=True
        )
        if load_format == "dummy":
            module = classes.from_config(
                config, dtype=dtype, attn_implementation=bridge.NAME, trust_remote_code=False
            )
            return _fill_noise(module.eval(), seed)
        module, report = classes.from_pretrained(
            root,
            config=config,
            dtype=dtype,
            attn_implementation=bridge.NAME,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported below, all at once
            output_loading_info=True,
        )
    except KeyError as err:
        # A table of attention classes instead of the interface.
        raise ConfigError(
            f"--model-impl transformers: {model_type} is not supported; its class knows no "
            f"attention implementation {err}"
        ) from err
    except Exception as err:  # of transformers: a field that its class refuses, a damaged file
        raise ConfigError(f"--model-impl transformers: {root}: {err}") from err
    problems = [
        *(f"missing tensor {name}" for name in sorted(report["missing_keys"])),
        *(f"unexpected tensor {name}" for name in sorted(report["unexpected_keys"])),
        *(
            f"{name} is {list(stored)}, config.json implies {list(implied)}"
            for name, stored, implied in sorted(report["mismatched_keys"])
        ),
    ]
    if problems:
        shown = problems[:8] + ([f"… and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise ConfigError("\n  ".join([f"{root}: the weights do not fit its config.json:", *shown]))
    return module.eval()


def _fill_noise(module: Any, seed: int) -> Any:
    """Weights of `seed`, on every node alike: matrices are noise, the rest as the class starts
    it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                noise = torch.empty(parameter.shape).normal_(0, _DUMMY_STD, generator=generator)
                parameter.copy_(noise)
    return module


def _probe_module(module: Any, architecture: str) -> tuple[AttentionSpec, ...]:
    """Attention of each layer. Raises ConfigError where the module cannot be served in parts."""
    if not getattr(type(module), "_supports_attention_backend", False):
        bridge.refuse(architecture, "its attention has no interface for another implementation")
    hidden: list[Tensor] = []
    base = getattr(module, module.base_model_prefix)
    hook = base.register_forward_hook(lambda _, __, out: hidden.append(out.last_hidden_state))
    try:
        attention, logits = bridge.probe(module, architecture)
        common_heads(attention)
        _check_head(module, architecture, hidden[0], logits)
    except ConfigError:
        raise
    except ValueError as err:
        bridge.refuse(architecture, f"{err}, and all layers share one pool")
    except Exception as err:  # noqa: BLE001 - of the module: its class does as it likes
        bridge.refuse(architecture, f"a step of one token fails in it: {type(err).__name__}: {err}")
    finally:
        hook.remove()
    return attention


def _check_head(module: Any, architecture: str, hidden: Tensor, logits: Tensor) -> None:
    """Raise ConfigError unless the head alone makes the module's logits of its hidden state.

    A step computes the head apart, because only rows that sample pass it.
    """
    given = _HiddenStates()
    given.rows = hidden
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        alone = _with_base(module, given)(input_ids=ids, use_cache=False, return_dict=True).logits
    if alone.shape != logits.shape or not torch.allclose(alone, logits, equal_nan=True):
        bridge.refuse(architecture, "its head needs more than the last hidden state")


def _hash_impl(model_hash: str) -> str:
    return hashlib.sha256(f"{model_hash}:transformers".encode()).hexdigest()[:32]
