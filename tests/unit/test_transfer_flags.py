"""--disaggregation-transfer-backend: each value it takes has its transports, and is refused for the other memory."""

from __future__ import annotations

import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest

from baton import _native, config
from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.runtime.comm import nccl
from baton.server import up
from baton.server.transfer import ON_DEVICE, TRANSPORTS, start, transports, warn_of_reach


def choices(of: type, field: str) -> set[str]:
    (found,) = (f for f in dataclasses.fields(of) if f.name == field)
    return set(found.metadata["choices"])


def build(backend: str, device: str = "cpu") -> EngineConfig:
    return config.build({"disaggregation_transfer_backend": backend, "device": device})


def test_every_value_of_the_flag_names_transports() -> None:
    assert set(TRANSPORTS) | set(ON_DEVICE) == choices(EngineConfig, "disaggregation_transfer_backend")
    assert {*TRANSPORTS, *ON_DEVICE} - {"auto"} == choices(up.UpConfig, "transport")


def test_auto_on_a_gpu_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(nccl, "unusable", lambda: None)
    assert transports(build("auto", "cuda"), on_device=True) == ["cuda_ipc", "nccl", "tcp"]
    assert caplog.messages == ["KV pages are in GPU memory and travel by cuda_ipc, else nccl, else tcp"]
    caplog.clear()
    monkeypatch.setattr(nccl, "unusable", lambda: "there is no libnccl")
    assert transports(build("auto", "cuda"), on_device=True) == ["cuda_ipc", "tcp"]
    assert caplog.messages[0] == "KV pages do not travel by nccl: there is no libnccl"
    assert transports(build("auto"), on_device=False) == ["shm", "tcp"]


def test_a_transport_of_the_other_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="shm: the KV pages are in GPU memory with --device cuda; use auto, cuda_"):
        transports(build("shm", "cuda"), on_device=True)
    with pytest.raises(ConfigError, match="cuda_ipc: the KV pages are in host memory with --device cpu; use auto, shm"):
        transports(build("cuda_ipc"), on_device=False)


@pytest.mark.parametrize(
    ("values", "kv_host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "::1"}, "::1"),
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "10.0.0.1"}, "127.0.0.1"),
        ({"host": "0.0.0.0", "cluster_key": "k"}, "0.0.0.0"),
        ({"host": "10.0.0.1", "insecure_kv": True}, "10.0.0.1"),
    ],
)
def test_kv_stays_on_loopback_without_a_cluster_key(
    values: dict[str, object], kv_host: str, caplog: pytest.LogCaptureFixture
) -> None:
    c = config.build({"disaggregation_mode": "decode", **values})
    assert c.kv_host == kv_host
    warn_of_reach(c)
    warned = " ".join(caplog.messages)
    assert ("--cluster-key" in warned) == (c.kv_host != c.host or c.insecure_kv)


def test_prefill_node_that_no_decode_node_could_reach_is_refused() -> None:
    values = {"disaggregation_mode": "prefill", "host": "10.0.0.1"}
    with pytest.raises(ConfigError, match=r"--host 10\.0\.0\.1: without a cluster key KV"):
        config.build(values)
    with pytest.raises(ConfigError, match="--cluster-key is empty"):
        config.build({**values, "cluster_key": ""})
    assert config.build({**values, "host": "0.0.0.0"}).kv_host == "127.0.0.1"
    assert config.build({**values, "cluster_key": "k"}).kv_host == "10.0.0.1"


def test_slabs_on_a_gpu_are_few_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr(_native, "TransferNode", lambda pool, settings, backend: made.append(json.loads(settings)))
    for on_device in (False, True):
        start(build("tcp"), SimpleNamespace(on_device=on_device), {}, 0, 0, None)
    assert "slabs" not in made[0], "the crate's default: 4 of 4 MiB"
    assert (made[1]["slabs"], made[1]["slab_bytes"]) == (2, 16 << 20)
