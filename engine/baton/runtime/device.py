"""Device of an engine: --device as a torch device, checked at start.

A process has one device. All tensors live on it, but for those that are said to be on the host
(index arrays of a `ForwardBatch`, sampling).
"""

from __future__ import annotations

import logging
import warnings

import torch

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.layers import flashinfer_loader

log = logging.getLogger("baton.device")


def no_cuda() -> str | None:
    """Why there is no CUDA device here; None: there is one."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    with warnings.catch_warnings(
        record=True
    ) as driver_warnings:  # a driver that does not fit is reported as a warning, once
        warnings.simplefilter("always")
        is_there = torch.cuda.is_available()
    if is_there:
        return None
    reason = f" ({str(driver_warnings[0].message).split('. ')[0]})" if driver_warnings else ""
    return (
        f"torch {torch.__version__} finds no CUDA device{reason}; check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES"
    )


def resolve_device(config: EngineConfig, tp_rank: int = 0) -> torch.device:
    """The device of --device: tensor-parallel rank i computes on the i-th CUDA device. `auto` takes
    CUDA where there is one and nothing asked for is in its way.

    Raises ConfigError when the device is not there, or cannot do what the other flags ask.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    problem = no_cuda() or _beyond_cuda(config)
    if problem is None:
        if config.tp_size > 1:
            torch.cuda.set_device(tp_rank)
        return torch.device("cuda", torch.cuda.current_device())
    if config.device == "cuda":
        raise ConfigError(f"--device cuda: {problem}; or use --device cpu")
    if config.attention_backend == "flashinfer":
        raise ConfigError(
            f"--attention-backend flashinfer: it needs a CUDA device, but {problem}; or use auto"
        )
    log.warning("--device auto: %s; the CPU is used instead", problem)
    return torch.device("cpu")


def _beyond_cuda(config: EngineConfig) -> str | None:
    """First requested feature that works on CPUs only."""
    if config.disaggregation_mode != "null" and config.disaggregation_transfer_backend == "shm":
        return "--disaggregation-transfer-backend shm is for host memory; use auto or cuda_ipc"
    if config.dp_size > 1:
        return f"one rank per engine is served, not --dp-size {config.dp_size}"
    if config.tp_size > 1 and config.tp_size > torch.cuda.device_count():
        return (
            f"--tp-size {config.tp_size} needs as many CUDA devices, torch finds "
            f"{torch.cuda.device_count()}"
        )
    if config.attention_backend == "cpu":
        return "the kernels of --attention-backend cpu work in host memory; use auto"
    if config.attention_backend != "torch" and (missing := flashinfer_loader.find_obstacle()):
        return (
            f"flashinfer cannot be used: {missing}; or use --attention-backend "
            f"{flashinfer_loader.SLOWER}"
        )
    return None
