"""Attention backends behind one interface (`base.AttentionBackend`): `cpu` native kernels, `torch` reference."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.models.spec import ModelSpec
from baton.runtime.attention.base import AttentionBackend
from baton.runtime.kv_pool import KvTensors


def make_backend(name: str, spec: ModelSpec, kv: KvTensors) -> AttentionBackend:
    """The backend called `name` (--attention-backend). Raises ConfigError when this build lacks it."""
    if name == "torch":
        from baton.runtime.attention.torch import TorchAttention

        return TorchAttention(spec, kv)
    if name == "cpu":
        try:
            from baton.runtime.attention.cpu import CpuAttention
        except ImportError as err:
            hint = "build the native module with maturin, or use torch"
            raise ConfigError(f"--attention-backend cpu: {err}; {hint}") from err
        return CpuAttention(spec, kv)
    raise ConfigError(f"--attention-backend {name}: supported: cpu, torch")
