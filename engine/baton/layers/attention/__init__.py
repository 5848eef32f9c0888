"""Attention backends behind one interface (`base.AttentionBackend`).

`cpu` native kernels, `flashinfer` on CUDA devices, `torch` the reference on any device; `auto`
chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.errors import ConfigError
from baton.layers.attention.base import AttentionBackend
from baton.layers.attention.reference import TorchAttention, TorchLatentAttention
from baton.layers.kv_pool import KvTensors
from baton.layers.spec import AttentionSpec, LayerAttention, common_latents

log = logging.getLogger("baton.attention")


def make_backend(name: str, layers: Sequence[LayerAttention], kv: KvTensors) -> AttentionBackend:
    """The backend called `name` (--attention-backend). Raises ConfigError when it cannot serve this
    pool here."""
    if name == "auto":
        return _choose_backend(layers, kv)
    if name == "torch":
        return _create_torch_backend(layers, kv)
    if name == "cpu":
        return _create_cpu_backend(layers, kv)
    if name == "flashinfer":
        from baton.layers.attention.flashinfer import FlashInferAttention
        from baton.layers.attention.flashinfer_latent import FlashInferLatentAttention

        latents = common_latents(layers)
        if latents is not None:
            return FlashInferLatentAttention(latents, kv)

        return FlashInferAttention(_with_heads(layers), kv)
    raise ConfigError(f"--attention-backend {name}: supported: auto, cpu, torch, flashinfer")


def _choose_backend(layers: Sequence[LayerAttention], kv: KvTensors) -> AttentionBackend:
    """The fastest that can serve this pool; says which one and why. On a GPU it is flashinfer or
    none."""
    device = kv.data.device.type
    if device == "cuda":
        gpu_backend = make_backend("flashinfer", layers, kv)
        log.info("attention: flashinfer")
        return gpu_backend
    try:
        backend = _create_cpu_backend(layers, kv)
    except ConfigError as err:
        log.warning(
            "--attention-backend auto: the native CPU kernels cannot be used (%s); the slow torch reference is used "
            "instead", err.message,
        )  # fmt: skip
        return _create_torch_backend(layers, kv)
    log.info(
        "attention: native CPU kernels (flashinfer needs a CUDA device, the KV pool is on %s)",
        device,
    )
    return backend


def _create_torch_backend(layers: Sequence[LayerAttention], kv: KvTensors) -> AttentionBackend:
    latents = common_latents(layers)
    if latents is not None:
        return TorchLatentAttention(latents, kv)
    return TorchAttention(_with_heads(layers), kv)


def _create_cpu_backend(layers: Sequence[LayerAttention], kv: KvTensors) -> AttentionBackend:
    try:
        from baton.layers.attention.cpu import CpuAttention, CpuLatentAttention
    except ImportError as err:
        hint = "build the native module with maturin, or use torch"
        raise ConfigError(f"--attention-backend cpu: {err}; {hint}") from err
    latents = common_latents(layers)
    if latents is not None:
        return CpuLatentAttention(latents, len(layers), kv)
    return CpuAttention(_with_heads(layers), kv)


def _with_heads(layers: Sequence[LayerAttention]) -> list[AttentionSpec]:
    return [layer for layer in layers if isinstance(layer, AttentionSpec)]
